"""How long is a whole step of GRPO or PPO, by phase and law of lengths, and as `mrl plan` said?

The real trainer runs the recipes of benchmarks/recipes.py. Memory is the driver's own count,
sampled while each phase runs. The first step warms up and is left out. Saves after every run.
On one H200, then on two:
mrl bench rl_step --name rl_step_h200 --runs 0.5b_grpo 1.5b_grpo 1.5b_ppo
mrl bench rl_step --name rl_step_2x_h200 --runs 7b_grpo
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mrl.trainer
from benchmarks.recipes import LAWS, Case, cases, configured
from benchmarks.record import environment, output_of, parser_of
from benchmarks.roofline import device_name, gpu_key, ideal_step
from mrl.planning.hardware import GB, Machine
from mrl.planning.plan import plan_job
from mrl.tracking.jsonl import read_metrics
from mrl.tracking.timers import Timers

NAME = "rl_step"
_STEPS = 6  # the first one warms up
_SAMPLED_S = 0.01  # seconds between two looks at the devices
_PLANNED_FOR = "h200"  # where the machine's own GPU is not known to the planner
# The plan's name of a phase's memory, by the trainer's name of the phase.
_MEMORY = {
    "gen": "rollout", "old_log_prob": "log-prob", "ref": "ref", "values": "values",
    "update_critic": "update critic", "update_actor": "update actor",
}  # fmt: skip
_REST = {"rest": ("reward", "adv", "rest")}  # phases of the trainer that are one in the plan
_SHOWN = (
    "training/rollout_log_probs_diff_mean", "training/rollout_log_probs_diff_max",
    "perf/memory_after_sleep_gb", "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb",
    "perf/cpu_memory_used_gb", "perf/throughput", "perf/mfu/actor", "reshard/seconds",
    "actor/grad_norm", "critic/score/mean", "response_length/mean", "prompt_length/mean",
)  # fmt: skip
_Marks = list[dict[str, tuple[float, float]]]  # when each phase of each step ran


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


@contextmanager
def _marked(marks: _Marks) -> Iterator[None]:
    """Note when each phase of each step runs."""
    step, phase = mrl.trainer._Run.step, Timers.__call__

    def marked_step(self: Any, number: int) -> None:
        marks.append({})
        step(self, number)

    @contextmanager
    def marked_phase(self: Timers, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with phase(self, name):
            yield
        if marks:
            marks[-1][name] = (start, time.perf_counter())

    with ExitStack() as stack:
        stack.enter_context(patch.object(mrl.trainer._Run, "step", marked_step))
        stack.enter_context(patch.object(Timers, "__call__", marked_phase))
        yield


def measure(case: Case, steps: int, folder: Path, gpu: str) -> dict[str, Any]:
    """Run a case and set it beside its plan; the first step, which warms up, is left out."""
    from transformers import AutoTokenizer

    config = configured(case, folder, steps)
    devices, marks = Devices(), _Marks()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    no_save = patch.object(mrl.trainer._Run, "_save", lambda *_: None)  # no part of a plan
    with _marked(marks), no_save, devices.watched():
        mrl.trainer.RayPPOTrainer(config, tokenizer).fit()
    rows = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if row["step"] > 0]
    mean = case.mean_response
    plan = plan_job(config, Machine.named(gpu, None, [f"response={mean}"]))
    json_plan = plan.to_json()
    timings = {
        name: [round(row[name], 4) for row in rows]
        for name in rows[0]
        if name.startswith("timing_s/")
    }
    ideal = ideal_step(config, device_name(environment()), mean)
    return {
        "config": {
            "recipe": case.recipe,
            "law": case.law,
            "samples": plan.job.plan.samples,
            "prompt_tokens": case.prompt,
            "response_tokens": case.response,
            "gpus": plan.job.plan.world_size,
        },
        "memory_gb": _memory(json_plan["memory"]["groups"], marks, devices),
        "seconds": beside(json_plan["seconds"], timings),
        "metrics": {name: [row[name] for row in rows if name in row] for name in _SHOWN},
        "timings": timings,
        "roofline": None if ideal is None else {
            "step": ideal.total,
            "tokens_per_s_per_gpu": ideal.throughput,
            **{phase.name: phase.total for phase in ideal.phases if phase.total},
        },
    }  # fmt: skip


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
    """Run the cases by each law; `args` as of the command line."""
    parser = parser_of(NAME, __doc__)
    known = sorted({*cases(False), *cases(True)})
    parser.add_argument("--runs", nargs="+", default=[], help=f"of {', '.join(known)}")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--steps", type=int, default=_STEPS, help="of each run, the first warms up")
    options = parser.parse_args(list(args))
    output, known_cases = output_of(NAME, options), cases(options.smoke)
    if unknown := set(options.runs) - set(known_cases):
        raise ValueError(f"--runs {sorted(unknown)}: expected {', '.join(known_cases)}")
    gpu = gpu_key(device_name(environment())) or _PLANNED_FOR
    result: dict[str, Any] = {"smoke": options.smoke, "warmups": 1}
    for name in options.runs or known_cases:
        for law in options.laws:
            case, key = replace(known_cases[name], law=law), f"{name}/{law}"
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                result[key] = measure(case, options.steps, Path(folder), gpu)
                result[key]["wall_s"] = time.perf_counter() - start
            _show(key, result[key])
            output.write(result)
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
