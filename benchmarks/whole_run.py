"""Does a whole run take the memory and the time that `mrl plan` said it would?

Recipes as they are, with random weights of the real shapes and prompts of random tokens, so that
every response has the longest length. The reward is the share of even tokens: groups differ and
gradients flow. Memory is the driver's own count, sampled while each phase runs. Saves after every
run: python -m benchmarks.whole_run [--runs ...] [--steps N] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mrl.trainer
from benchmarks import record
from mrl.config import Config, load_config
from mrl.planning.hardware import GB, Machine
from mrl.planning.plan import plan_job
from mrl.tracking.timers import Timers

NAME = "whole_run"
_SAMPLED_S = 0.01  # seconds between two looks at the devices
# The plan's name of a phase's memory, by the trainer's name of the phase.
_MEMORY = {
    "gen": "rollout", "old_log_prob": "log-prob", "ref": "ref", "values": "values",
    "update_critic": "update critic", "update_actor": "update actor",
}  # fmt: skip
_REST = {"rest": ("reward", "adv", "rest")}  # phases of the trainer that are one in the plan
_REWARD = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    tokens = re.findall(r"t([0-9]+)", solution_str)
    return sum(int(token) % 2 == 0 for token in tokens) / max(len(tokens), 1)
"""
_SHOWN = (
    "training/rollout_log_probs_diff_mean", "training/rollout_log_probs_diff_max",
    "perf/memory_after_sleep_gb", "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb",
    "perf/cpu_memory_used_gb", "perf/throughput", "perf/mfu/actor", "reshard/seconds",
    "actor/grad_norm", "critic/score/mean", "response_length/mean", "prompt_length/mean",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A recipe with rows of one length."""

    recipe: str  # in configs/
    model: str  # in configs/models/
    prompt: int  # tokens
    response: int  # tokens
    overrides: tuple[str, ...] = ()
    shape: Mapping[str, int] | None = None  # in place of the model's own


REAL = {
    "0.5b_grpo": Case("grpo/qwen2.5_0.5b_1gpu.yaml", "Qwen2.5-0.5B", 256, 512),
    "1.5b_grpo": Case(
        "grpo/qwen2.5_1.5b_1gpu.yaml", "Qwen2.5-1.5B", 256, 1024, ("rollout.max_num_seqs=256",)
    ),
    "1.5b_ppo": Case(
        "ppo/qwen2.5_1.5b_1gpu.yaml", "Qwen2.5-1.5B", 512, 512,
        ("critic.model.path={folder}/model",),
    ),
    "7b_grpo": Case("grpo/qwen2.5_7b_2gpu.yaml", "Qwen2.5-7B", 256, 512),
}  # fmt: skip
SMOKE = {
    "tiny_grpo": Case(
        "grpo/qwen2.5_0.5b_1gpu.yaml", "Qwen2.5-0.5B", 8, 8,
        ("rollout.name=hf", "trainer.device=cpu", "data.train_batch_size=4", "rollout.n=2",
         "actor.ppo_mini_batch_size=4"),
        {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2},
    )
}  # fmt: skip


def _word(token: int) -> str:
    return f"t{token:06}"  # of one width: no word is the start of another


def _write_model(case: Case, folder: Path) -> None:
    """Write random weights and a tokenizer whose words are numbers; needs a process of its own.

    The device memory that drawing takes goes with the process.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(record.ROOT / "configs" / "models" / case.model)
    for name, value in (case.shape or {}).items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.eos_token_id = config.pad_token_id = 0
    config.bos_token_id = None
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    vocabulary = {_word(i): i for i in range(config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=_word(1)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=_word(0), pad_token=_word(0), unk_token=_word(1)
    ).save_pretrained(folder)


def _write_data(case: Case, path: Path, rows: int) -> None:
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(1)
    words = (case.shape or {"vocab_size": 150_000})["vocab_size"]
    table = [
        {
            "prompt": " ".join(_word(draw.randrange(2, words)) for _ in range(case.prompt)),
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
    """Write model, data and reward into a folder; gives the recipe that uses them."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(_write_model, case, folder / "model").result()
    (folder / "reward.py").write_text(_REWARD)
    recipe = record.ROOT / "configs" / case.recipe
    config = load_config(recipe, settings(case, folder, steps))
    _write_data(case, folder / "train.parquet", steps * config.data.train_batch_size)
    return config


class Devices:
    """Memory in use on every device over time, above what was in use at the start."""

    def __init__(self) -> None:
        """Look once; without a driver there are no devices."""
        self.seen: list[tuple[float, tuple[int, ...]]] = []
        self._handles: list[Any] = []
        try:
            from vllm.third_party import pynvml  # NVIDIA's own module
        except ImportError:
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        indices = range(pynvml.nvmlDeviceGetCount())
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in indices]
        self._before = self._used()

    def _used(self) -> tuple[int, ...]:
        return tuple(self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look every few milliseconds."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_SAMPLED_S):
                pairs = zip(self._used(), self._before, strict=True)
                used = tuple(now - before for now, before in pairs)
                self.seen.append((time.perf_counter(), used))

        thread = threading.Thread(target=watch, daemon=True)
        if self._handles:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self._handles:
                thread.join()

    def peak(self, start: float, end: float) -> float | None:
        """Give the most GB that any device had in use between two times."""
        found = [max(used) for at, used in self.seen if start <= at <= end]
        return max(found) / GB if found else None


class _Marked(Timers):
    """Timers that also say when each phase ran."""

    marks: list[dict[str, tuple[float, float]]]  # of every step, set by `measure`

    def __init__(self) -> None:
        super().__init__()
        self.marks.append({})

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with super().__call__(phase):
            yield
        self.marks[-1][phase] = (start, time.perf_counter())


def measure(case: Case, steps: int, folder: Path, gpu: str) -> dict[str, Any]:
    """Run a case and set it beside its plan; the first step, which warms up, is left out."""
    from transformers import PreTrainedTokenizerFast

    config = configured(case, folder, steps)
    devices, marks = Devices(), list[dict[str, tuple[float, float]]]()
    timers = type("Marked", (_Marked,), {"marks": marks})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    no_save = patch.object(mrl.trainer._Run, "_save", lambda *_: None)  # no part of a plan
    with patch.object(mrl.trainer, "Timers", timers), no_save, devices.watched():
        mrl.trainer.RayPPOTrainer(config, tokenizer).fit()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    plan = plan_job(config, Machine.named(gpu))
    json_plan = plan.to_json()
    timings = {
        name: [round(row[name], 4) for row in rows] for name in rows[0] if "timing_s" in name
    }
    return {
        "config": {
            "recipe": case.recipe,
            "samples": plan.job.plan.samples,
            "prompt_tokens": case.prompt,
            "response_tokens": case.response,
            "gpus": plan.job.plan.world_size,
        },
        "memory_gb": _memory(json_plan["memory"]["groups"], marks, devices),
        "seconds": beside(json_plan["seconds"], timings),
        "metrics": {name: [row[name] for row in rows if name in row] for name in _SHOWN},
        "timings": timings,
    }


def _beside(planned: float, measured: float) -> dict[str, float]:
    return {"planned": planned, "measured": measured, "ratio": planned / measured}


def _memory(
    groups: Sequence[Mapping[str, Any]],
    marks: Sequence[Mapping[str, tuple[float, float]]],
    devices: Devices,
) -> dict[str, dict[str, float]]:
    found = {}
    for phase, name in _MEMORY.items():
        times = [step[phase] for step in marks[1:] if phase in step]
        peaks = [peak for at in times if (peak := devices.peak(*at)) is not None]
        planned = [g["phases"][name]["total"] / GB for g in groups if name in g["phases"]]
        if peaks and planned:
            found[name] = _beside(max(planned), max(peaks))
    if found:
        both = list(found.values())
        found["peak"] = _beside(*(max(row[k] for row in both) for k in ("planned", "measured")))
    return found


def beside(
    plan: Mapping[str, Any], timings: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, float]]:
    """Set the plan's seconds beside the medians of all steps but the first."""
    planned = {name: parts["total"] for name, parts in plan["timing_s"].items()}
    real = {
        phase: [
            sum(parts)
            for parts in zip(
                *(timings[f"timing_s/{name}"] for name in _REST.get(phase, (phase,))), strict=True
            )
        ]
        for phase in planned
    }
    real["step"] = [sum(parts) for parts in zip(*real.values(), strict=True)]
    planned["step"] = plan["step"]
    return {
        phase: _beside(planned[phase], statistics.median(each[1:])) for phase, each in real.items()
    }


def run(args: Sequence[str]) -> dict[str, Any]:
    """Run the cases; `args` as of the command line."""
    options = _parse(args)
    cases, result = SMOKE if options.smoke else REAL, {}
    for name in options.runs or cases:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            result[name] = measure(cases[name], options.steps, Path(folder), options.gpu)
            result[name]["wall_s"] = time.perf_counter() - start
        _show(name, result[name])
        record.write(options.name, result, options.folder)
    return result


def _show(name: str, found: Mapping[str, Any]) -> None:
    print(f"{name}, {found['wall_s']:.0f} s in all")
    for unit in ("memory_gb", "seconds"):
        for phase, row in found[unit].items():
            planned, measured, ratio = row["planned"], row["measured"], row["ratio"]
            print(
                f"  {unit:10} {phase:14} {planned:9.2f} planned {measured:9.2f} real {ratio:6.2f}"
            )
    sys.stdout.flush()


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.whole_run")
    parser.add_argument("--runs", nargs="+", default=[], help="names of cases (default: all)")
    parser.add_argument("--steps", type=int, default=4, help="of each run, the first to warm up")
    parser.add_argument("--gpu", default="h200", help="that the plan is made for")
    parser.add_argument("--name", default=NAME, help="of the JSON file")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="of the JSON file")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args(list(args))


if __name__ == "__main__":
    run(sys.argv[1:])
