"""The two sides of a weight transfer, for benchmarks: known values, a trainer's and an engine's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.resharding import Layout, Piece, TensorInfo
from mrl.resharding.coverage import view_of
from mrl.resharding.layout import join
from mrl.resharding.transports import Distributed
from mrl.resharding.verify import same_bits
from mrl.resharding.vllm_layout import VLLMLayout

QWEN2_7B: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
TINY = {
    **QWEN2_7B,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


class Weights:
    """The model's logical values: any rank makes any tensor, the same everywhere."""

    def __init__(
        self, tensors: Mapping[str, TensorInfo], device: torch.device, std: float = 0.02
    ) -> None:
        self.tensors, self.device, self.std = tensors, device, std
        self._seeds = {name: seed for seed, name in enumerate(sorted(tensors))}

    def make(self, name: str) -> Tensor:
        """Make a whole tensor: norms near 1, the rest near 0."""
        info = self.tensors[name]
        generator = torch.Generator(self.device).manual_seed(self._seeds[name])
        dtype = getattr(torch, info.dtype)
        value = torch.empty(info.shape, dtype=dtype, device=self.device)
        value.normal_(1.0 if "norm" in name else 0.0, self.std, generator=generator)
        return value

    def fill(self, layout: Layout, rank: int, params: Mapping[str, Tensor]) -> None:
        """Write a rank's pieces."""
        for name, pieces in _by_tensor(layout, rank).items():
            whole = self.make(name)
            for piece in pieces:
                view_of(params[piece.param], piece.local).copy_(view_of(whole, piece.box))

    def wrong(self, layout: Layout, rank: int, params: Mapping[str, Tensor]) -> list[str]:
        """List the tensors that a rank does not hold bit for bit."""
        wrong = []
        for name, pieces in _by_tensor(layout, rank).items():
            whole = self.make(name)
            wrong += [
                name
                for p in pieces
                if not same_bits(view_of(params[p.param], p.local), view_of(whole, p.box))
            ]
        return wrong


def _by_tensor(layout: Layout, rank: int) -> dict[str, list[Piece]]:
    pieces: dict[str, list[Piece]] = {}
    for piece in layout.pieces_of(rank):
        pieces.setdefault(piece.tensor, []).append(piece)
    return pieces


def allocate(layout: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Make a rank's parameters, as large as their pieces reach."""
    ends: dict[str, list[int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for piece in layout.pieces_of(rank):
        dtypes[piece.param] = getattr(torch, layout.tensors[piece.tensor].dtype)
        known = ends.setdefault(piece.param, [0] * len(piece.local))
        ends[piece.param] = [max(a, b) for a, (_, b) in zip(known, piece.local, strict=True)]
    return {
        name: torch.empty(shape, dtype=dtypes[name], device=device) for name, shape in ends.items()
    }


@dataclass(frozen=True)
class Side:
    """The engine's side of a rank."""

    layout: Layout  # of all ranks
    params: Mapping[str, Tensor]
    load: Callable[[Iterable[tuple[str, Tensor]]], object]


def tensors_side(placed: VLLMLayout, device: torch.device) -> Side:
    """Stand for an engine: parameters placed as vLLM does, and a loader that cuts and copies."""
    rank, layout = dist.get_rank(), placed.layout()
    params = allocate(layout, rank, device)
    pieces = _by_tensor(layout, rank)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, whole in weights:
            for piece in pieces.get(name, ()):
                view_of(params[piece.param], piece.local).copy_(view_of(whole, piece.box))

    return Side(layout, params, load)


class LiveEngine:
    """A vLLM engine of this process, its CUDA graphs captured with dummy weights."""

    def __init__(self, tp: int, folder: Path) -> None:
        """Start it; all ranks together."""
        import vllm

        (folder / "config.json").write_text(json.dumps(dict(QWEN2_7B)))
        self.llm = vllm.LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=tp,
            load_format="dummy",
            dtype="bfloat16",
            seed=0,
            max_model_len=512,
            max_num_seqs=8,
            gpu_memory_utilization=0.35,
            enable_prefix_caching=False,
            # CUDA graphs of the plain model: compiled, vLLM fuses all-reduces over NVLink
            # multicast, which not all hosts allow
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            },
            disable_custom_all_reduce=True,
        )
        self.model = self.llm.apply_model(lambda model: model)[0]

    def side(self, tensors: Mapping[str, TensorInfo]) -> Side:
        """Trace where the live parameters hold the logical tensors."""
        from mrl.resharding.vllm import engine_layout, live_params

        mine = engine_layout(self.model, tensors, dist.get_rank())
        layout = join(Distributed().gather(mine), {})
        return Side(layout, live_params(self.model), self.model.load_weights)

    def log_probs(self) -> list[list[float]]:
        """Generate greedily from fixed prompts; gives the log-probs of the chosen tokens."""
        import vllm
        from vllm.inputs import TokensPrompt

        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(1, QWEN2_7B["vocab_size"], (4, 64), generator=generator).tolist()
        greedy = vllm.SamplingParams(
            temperature=0.0, max_tokens=32, logprobs=0, ignore_eos=True, detokenize=False
        )
        prompts = [TokensPrompt(prompt_token_ids=row) for row in rows]
        outputs = self.llm.generate(prompts, greedy, use_tqdm=False)
        return [
            [entry[token].logprob for token, entry in zip(o.token_ids, o.logprobs, strict=True)]
            for o in (output.outputs[0] for output in outputs)
        ]
