"""The weight transfers to measure: trainer layout, engine layout, model; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.resharding import MegatronLayout, ModelShape
from mrl.resharding.vllm_layout import VLLMLayout
from mrl.resharding.vocab import padded_vocab

_FOLDERS = Path(__file__).resolve().parent.parent / "configs" / "models"
# Models by name: their folder, and what a tiny stand-in changes.
_DENSE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip
_EXPERTS = {
    **_DENSE, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "7b": ("Qwen2.5-7B", _DENSE),
    "8b": ("Llama-3.1-8B", _DENSE),
    "30b_a3b": ("Qwen3-30B-A3B", _EXPERTS),
}


def shape_of(model: str, tiny: bool) -> ModelShape:
    """Read a model's sizes, or those of its tiny stand-in."""
    folder, changes = MODELS[model]
    config = json.loads((_FOLDERS / folder / "config.json").read_text())
    return ModelShape.from_hf({**config, **(changes if tiny else {})})


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer's layout and an engine's."""

    tp: int
    pp: int
    dp: int
    engine_tp: int
    replicas: int
    engine_first_rank: int = 0
    ep: int = 1
    model: str = "7b"

    @property
    def world(self) -> int:
        """Count the ranks of both sides."""
        engine = self.engine_first_rank + self.engine_tp * self.replicas
        return max(self.tp * self.pp * self.dp, engine)

    @property
    def live(self) -> bool:
        """Tell whether a live vLLM can be the engine here: of the 7B, one on each of two ranks."""
        return self.engine_tp * self.replicas == self.world == 2

    def source(self, shape: ModelShape) -> MegatronLayout:
        """Place the trainer as Megatron does."""
        return MegatronLayout(
            shape,
            self.tp,
            self.pp,
            self.dp,
            padded_vocab=padded_vocab(shape.vocab_size, self.tp),
            transformer_impl="transformer_engine",
            dtype="bfloat16",
            ep=self.ep,
            etp=None if self.ep == 1 else 1,
            grouped_experts=bool(shape.moe),
        )

    def target(self, shape: ModelShape) -> VLLMLayout:
        """Place the engine as vLLM does."""
        return VLLMLayout(shape, self.engine_tp, self.replicas, first_rank=self.engine_first_rank)


TWO: Mapping[str, Case] = {
    "tp2_to_tp2": Case(2, 1, 1, 2, 1),
    "tp2_to_2xtp1": Case(2, 1, 1, 1, 2),
    "pp2_to_tp2": Case(1, 2, 1, 2, 1),
    "pp2_to_2xtp1": Case(1, 2, 1, 1, 2),
    "dp2_to_tp2": Case(1, 1, 2, 2, 1),
    "1_and_1": Case(1, 1, 1, 1, 1, engine_first_rank=1),
}
# `and`: trainer and engine on ranks of their own. 28 heads do not go by 8, so tp8 is of the 8B.
FOUR: Mapping[str, Case] = {
    "tp2pp2_to_2xtp2": Case(2, 2, 1, 2, 2),
    "pp2dp2_to_tp4": Case(1, 2, 2, 4, 1),
    "tp4_to_4xtp1": Case(4, 1, 1, 1, 4),
    "ep4_to_2xtp2": Case(1, 1, 4, 2, 2, ep=4, model="30b_a3b"),
    "tp2_and_tp2": Case(2, 1, 1, 2, 1, engine_first_rank=2),
}
EIGHT: Mapping[str, Case] = {
    "tp4pp2_to_4xtp2": Case(4, 2, 1, 2, 4),
    "tp2pp2dp2_to_2xtp4": Case(2, 2, 2, 4, 2),
    "tp8_to_8xtp1": Case(8, 1, 1, 1, 8, model="8b"),
    "ep8_to_2xtp4": Case(1, 1, 8, 4, 2, ep=8, model="30b_a3b"),
    "tp2pp2_and_tp4": Case(2, 2, 1, 4, 1, engine_first_rank=4),
}
OF_WORLD: Mapping[int, Mapping[str, Case]] = {2: TWO, 4: FOUR, 8: EIGHT}
