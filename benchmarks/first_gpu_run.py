"""Does the laptop's trainer run a real 0.5B shape on a GPU, and is its memory flat?

Random-init Qwen2.5-0.5B shape, bfloat16, Transformer Engine where installed, vLLM in the same
process, asleep at level 2 while the actor trains. Prompts are random token ids; the reward is the
share of even tokens, so that groups differ and gradients flow.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mrl.config import load_config
from mrl.trainer import RayPPOTrainer

FOLDER = Path(tempfile.gettempdir()) / f"mrl_first_gpu_run_{os.getuid()}"
STEPS = 5
_VOCAB = 151936
_REWARD = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    tokens = re.findall(r"t([0-9]+)", solution_str)
    return sum(int(token) % 2 == 0 for token in tokens) / max(len(tokens), 1)
"""
_SHOWN = (
    "training/rollout_log_probs_diff_mean",
    "training/rollout_log_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "perf/memory_after_sleep_gb",
    "perf/throughput",
    "perf/mfu/actor",
    "reshard/seconds",
    "actor/grad_norm",
    "actor/ppo_kl",
    "critic/score/mean",
    "response_length/mean",
)


def _make_model(path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCAB, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
        rope_theta=1e6, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
        pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(_VOCAB)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="t0", pad_token="t0", unk_token="t1"
    ).save_pretrained(path)


def _make_data(path: Path, rows: int, prompt_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, _VOCAB, (rows, prompt_tokens), generator=generator).tolist()
    pq.write_table(
        pa.Table.from_pylist(
            [
                {
                    "prompt": " ".join(f"t{i}" for i in prompt),
                    "data_source": "even_tokens",
                    "reward_model": {"style": "rule", "ground_truth": ""},
                    "extra_info": {"index": index},
                }
                for index, prompt in enumerate(prompts)
            ]
        ),
        path,
    )


def run(args: Sequence[str]) -> dict[str, Any]:
    """Run the steps; `args` are config overrides."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    _make_model(FOLDER / "model")
    _make_data(FOLDER / "train.parquet", rows=320, prompt_tokens=256)
    (FOLDER / "reward.py").write_text(_REWARD)
    config = load_config("configs/grpo/qwen2.5_0.5b_1gpu.yaml", [
        f"model.path={FOLDER / 'model'}",
        f"data.train_files=[{FOLDER / 'train.parquet'}]",
        "data.val_files=[]",
        f"reward.custom_reward_function.path={FOLDER / 'reward.py'}",
        f"trainer.default_local_dir={FOLDER / 'run'}",
        f"trainer.total_training_steps={STEPS}",
        *args,
    ])  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "model")
    RayPPOTrainer(config, tokenizer).fit()
    lines = (FOLDER / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["step"] > 0]
    shown = {name: [row[name] for row in steps if name in row] for name in _SHOWN}
    timings = {
        name: [round(row[name], 4) for row in steps]
        for name in steps[0]
        if name.startswith("timing_s/")
    }
    memory = shown["perf/memory_after_sleep_gb"][1:]
    return {
        "config": {
            "prompts": config.data.train_batch_size,
            "n": config.rollout.n,
            "prompt_tokens": 256,
            "max_response_tokens": config.data.max_response_length,
            "overrides": list(args),
        },
        "steps": shown,
        "timings": timings,
        "memory_after_sleep_spread_from_step_2": (
            (max(memory) - min(memory)) / statistics.mean(memory) if memory else None
        ),
    }
