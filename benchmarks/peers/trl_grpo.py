"""GRPO steps by TRL, timed; its own Python runs this file, so it imports nothing of mrl.

python trl_grpo.py WORK.json: the work as `benchmarks.peers.trainers.trl_work` says it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Notes the wall clock and TRL's own step_time of each update, and the tokens so far."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.own: list[float] = []
        self.tokens: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note an optimizer step."""
        self.ends.append(time.perf_counter())

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Note TRL's own figures of an optimizer step."""
        if "step_time" in logs:
            self.own.append(float(logs["step_time"]))
        if "num_tokens" in logs:  # in the first update after a generation
            self.tokens.append(float(logs["num_tokens"]))


def reward_from(path: str) -> Any:
    """Load `compute_score` of a file as a reward of TRL's form."""
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def score(completions: Any, data_source: Any, truth: Any, **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        rows = zip(data_source, texts, truth, strict=True)
        return [float(module.compute_score(*row)) for row in rows]

    return score


def main(path: str) -> None:
    """Train; writes the seconds and tokens of each step."""
    work = json.loads(Path(path).read_text())
    on_gpu, folder = work["on_gpu"], Path(work["out"]).parent
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": work["engine_memory"],
    }
    arguments = GRPOConfig(
        output_dir=str(folder / "run"),
        **work["settings"],
        **(engine if on_gpu else {"use_cpu": True}),
        bf16=on_gpu,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [
        {
            "prompt": row["prompt"],
            "data_source": row["data_source"],
            "truth": row["reward_model"]["ground_truth"],
        }
        for row in work["rows"]
    ]
    clock = Clock()
    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=reward_from(work["reward"]),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    trainer.train()
    updates = work["updates"]
    steps = range(len(clock.own) // updates)
    tokens = [0.0, *clock.tokens]
    found = {
        "step_s": [clock.ends[(i + 1) * updates] - clock.ends[i * updates] for i in steps],
        "own_step_s": [sum(clock.own[i * updates : (i + 1) * updates]) for i in steps],
        "tokens": [tokens[i + 1] - tokens[i] for i in steps],
    }
    Path(work["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
