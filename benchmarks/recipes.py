"""Recipes with random weights of real shapes, prompts of random characters and a law of lengths.

The reward is the share of even tokens: groups differ and gradients flow. Responses end by the
sampling itself, so that every trainer that reads the model folder draws by the same law: uniform
ones almost never meet the one token that ends them; skewed ones meet one of so many that their
lengths are geometric, a quarter of the longest on average (1.8 % reach it).
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks import record
from mrl.config import Config, load_config

LAWS = ("uniform", "skewed")
_ENDS = 4.0  # expected ends within the longest response, of the skewed law
_END = "<eos>"
_CHATML = ("Ċ", "<|im_end|>")  # a newline and the end of a turn: verl wants them of a Qwen2
_CHARACTERS = string.ascii_lowercase + string.digits  # that prompts are made of
_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_REWARD = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    tokens = re.findall(r"t([0-9]{6})", solution_str)
    return sum(int(token) % 2 == 0 for token in tokens) / max(len(tokens), 1)
"""


@dataclass(frozen=True)
class Case:
    """A recipe with prompts of one length and responses by a law."""

    recipe: str  # in configs/
    model: str  # in configs/models/
    prompt: int  # tokens
    response: int  # tokens, at most
    overrides: tuple[str, ...] = ()
    shape: Mapping[str, int] | None = None  # in place of the model's own
    law: str = "uniform"

    @property
    def mean_response(self) -> float:
        """Give the expected response as a part of the longest."""
        return 1.0 if self.law == "uniform" else (1 - math.exp(-_ENDS)) / _ENDS

    def ends(self, vocab_size: int) -> int:
        """Count the tokens that end a response: ids from 0."""
        share = _ENDS / self.response
        return 1 if self.law == "uniform" else max(1, round(share * vocab_size))


_TINY = {  # heads of 32: vLLM's CPU attention knows no smaller ones
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_ON_CPU = (
    "rollout.name=hf", "trainer.device=cpu", "data.train_batch_size=4", "rollout.n=2",
    "actor.ppo_mini_batch_size=4",
)  # fmt: skip
_CRITIC = "critic.model.path={folder}/model"
REAL = {
    "0.5b_grpo": Case("grpo/qwen2.5_0.5b_1gpu.yaml", "Qwen2.5-0.5B", 256, 512),
    "1.5b_grpo": Case("grpo/qwen2.5_1.5b_1gpu.yaml", "Qwen2.5-1.5B", 256, 1024),
    "1.5b_ppo": Case("ppo/qwen2.5_1.5b_1gpu.yaml", "Qwen2.5-1.5B", 512, 512, (_CRITIC,)),
    "7b_grpo": Case("grpo/qwen2.5_7b_2gpu.yaml", "Qwen2.5-7B", 256, 512),
}
SMOKE = {
    "tiny_grpo": Case("grpo/qwen2.5_0.5b_1gpu.yaml", "Qwen2.5-0.5B", 8, 8, _ON_CPU, _TINY),
    "tiny_ppo": Case(
        "ppo/qwen2.5_1.5b_1gpu.yaml", "Qwen2.5-0.5B", 8, 8, (*_ON_CPU, _CRITIC), _TINY
    ),
}


def cases(smoke: bool) -> Mapping[str, Case]:
    """Give the recipes of a run."""
    return SMOKE if smoke else REAL


def _write_model(case: Case, folder: Path) -> None:
    """Write random weights and a tokenizer whose words are numbers; needs a process of its own.

    The device memory that drawing takes goes with the process.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(record.ROOT / "configs" / "models" / case.model)
    for name, value in (case.shape or {}).items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.eos_token_id = config.pad_token_id = 0
    config.bos_token_id = None
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ends = case.ends(config.vocab_size)
    model.generation_config.eos_token_id = list(range(ends)) if ends > 1 else 0
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    # Qwen2's own class, which a Qwen2 folder is loaded with: without merges a character is a token.
    known = [_END, *_CHARACTERS, *_CHATML]
    tokens = known + [f"t{i:06}" for i in range(len(known), config.vocab_size)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=None,
        pad_token=_END,
        eos_token=_END,
    )
    tokenizer.chat_template = _CHAT  # for trainers that want chats
    tokenizer.save_pretrained(folder)


def _write_data(case: Case, path: Path, rows: int) -> None:
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(1)
    table = [
        {
            "prompt": "".join(draw.choices(_CHARACTERS, k=case.prompt)),
            "data_source": "even_tokens",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)


def settings(case: Case, folder: Path, steps: int) -> list[str]:
    """Give the overrides of a case whose model, data and reward are in a folder."""
    return [
        f"model.path={folder / 'model'}",
        f"data.train_files=[{folder / 'train.parquet'}]",
        "data.val_files=[]",
        f"data.max_prompt_length={case.prompt}",
        f"data.max_response_length={case.response}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"trainer.default_local_dir={folder / 'run'}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.logger=[]",
        *(text.format(folder=folder) for text in case.overrides),
    ]


def configured(case: Case, folder: Path, steps: int) -> Config:
    """Write model, data and reward into a folder; gives the recipe that uses them.

    A model that is there, of an earlier case of the same model and law, is kept.
    """
    if not (folder / "model").exists():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            process.submit(_write_model, case, folder / "draft").result()
        (folder / "draft").rename(folder / "model")
    (folder / "reward.py").write_text(_REWARD)
    recipe = record.ROOT / "configs" / case.recipe
    config = load_config(recipe, settings(case, folder, steps))
    _write_data(case, folder / "train.parquet", steps * config.data.train_batch_size)
    return config
