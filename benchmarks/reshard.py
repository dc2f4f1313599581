"""How fast do a trainer's weights reach the engine, against all-gather and the engine's loader?

Shapes of real models, bfloat16, random weights, on as many GPUs as a case has ranks (by default
two). The trainer's side is placed as Megatron places it; the engine's side is plain tensors placed
as vLLM places them (`--engine tensors`), or a live vLLM engine whose CUDA graphs were captured
before the first sync (`--engine vllm`).
Every measurement is the slowest rank's, host time with the device synchronised at both ends.
Starts its ranks itself and saves after every group of cases. On two H200:
mrl bench reshard --name reshard_h200 [--engine tensors vllm] [--cases ...]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import ROOT, output_of, parser_of
from benchmarks.sides import LiveEngine, Side, Weights, allocate, tensors_side
from benchmarks.transfers import MODELS, OF_WORLD, TWO, Case, shape_of
from mrl.resharding import ModelShape, ReshardPlan, plan
from mrl.resharding.gather import GatherSync
from mrl.resharding.planner import DEFAULT_BUCKET_BYTES
from mrl.resharding.sync import Resharder, SyncStats
from mrl.resharding.transports import Distributed
from mrl.resharding.verify import compare_ends, same_bits

CASES: Mapping[str, Case] = {k: case for own in OF_WORLD.values() for k, case in own.items()}
NAME = "reshard"
ENGINES = ("tensors", "vllm")
_RANK_TIMEOUT = timedelta(seconds=90)
_SECTION_LIMIT_S = 420.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure."""

    smoke: bool
    warmups: int
    repeats: int
    bucket_bytes: int

    def shape(self, model: str) -> ModelShape:
        """Give a model's sizes."""
        return shape_of(model, self.smoke)

    @property
    def device(self) -> torch.device:
        """Give this rank's device."""
        return torch.device("cpu") if self.smoke else torch.device("cuda", dist.get_rank())


REAL = Settings(smoke=False, warmups=3, repeats=20, bucket_bytes=DEFAULT_BUCKET_BYTES)
SMOKE = Settings(smoke=True, warmups=1, repeats=2, bucket_bytes=16384)


@torch.no_grad()
def measure(move: Callable[[], SyncStats], settings: Settings) -> tuple[dict[str, Any], SyncStats]:
    """Time `move` on the slowest rank, ms."""
    device, seconds = settings.device, []
    for turn in range(settings.warmups + settings.repeats):
        _wait(device)
        start = time.perf_counter()
        stats = move()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if turn >= settings.warmups:
            seconds.append(1e3 * float(slowest))
    return {
        "median_ms": statistics.median(seconds),
        "min_ms": min(seconds),
        "max_ms": max(seconds),
        "repeats": len(seconds),
    }, stats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def _memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _with_peak(settings: Settings, build: Callable[[], Any]) -> dict[str, Any]:
    """Build what moves weights and measure it; the peak is memory above the parameters'."""
    device = settings.device
    gc.collect()
    before = _memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    mover = build()
    found, stats = measure(mover.run, settings)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    every = Distributed().gather((max(peak, mover.staging_bytes), stats))
    found["peak_extra_bytes"] = max(peak for peak, _ in every)
    found["received_bytes"] = [stats.bytes_moved for _, stats in every]
    found["local_bytes"] = [stats.local_bytes for _, stats in every]
    busiest = max(stats.bytes_moved + stats.local_bytes for _, stats in every)
    found["gb_per_s"] = busiest / found["median_ms"] / 1e6
    return found


def run_case(case: Case, settings: Settings, engine: LiveEngine | None = None) -> dict[str, Any]:
    """Measure the direct way, the bucketed all-gather and the tensor-by-tensor one."""
    rank, device = dist.get_rank(), settings.device
    shape = settings.shape(case.model)
    src, placed = case.source(shape).layout(), case.target(shape)
    side = tensors_side(placed, device) if engine is None else engine.side(src.tensors)
    params = allocate(src, rank, device)
    weights = Weights(src.tensors, device)
    weights.fill(src, rank, params)
    start = time.perf_counter()
    steps = plan(src, side.layout, settings.bucket_bytes)
    result: dict[str, Any] = {"case": asdict(case), "plan_s": time.perf_counter() - start}
    result["buckets"] = steps.num_buckets
    result["floor_bytes"] = [steps.floor_bytes(r) for r in range(case.world)]

    def direct() -> Resharder:
        return Resharder(steps, rank, params, side.params, Distributed())

    def gather(bucket_bytes: int) -> GatherSync:
        load = side.load if rank in side.layout.ranks else None
        return GatherSync(steps, rank, params, load, Distributed(), bucket_bytes)

    ways: Mapping[str, Callable[[], Any]] = {
        "gather": lambda: gather(settings.bucket_bytes),
        "per_tensor": lambda: gather(1),
        "direct": direct,  # last: what it leaves is checked
    }
    for way, build in ways.items():
        _forget(side.params)
        result[way] = _with_peak(settings, build)
        result[way]["bit_equal"] = _everywhere(not weights.wrong(side.layout, rank, side.params))
    _compare_ends(result, steps, params, side)
    if engine is not None:
        result |= _against_loader(engine, side, weights)
    for other in ("gather", "per_tensor"):
        result[f"times_faster_than_{other}"] = (
            result[other]["median_ms"] / result["direct"]["median_ms"]
        )
    return result


def _compare_ends(
    result: dict[str, Any], steps: ReshardPlan, params: Mapping[str, Tensor], side: Side
) -> None:
    """Time what `resharding.verify` adds."""
    for _ in range(2):
        start = time.perf_counter()
        compare_ends(steps, dist.get_rank(), params, side.params, Distributed())
        result["verify_ms"] = 1e3 * (time.perf_counter() - start)


@torch.no_grad()
def _against_loader(engine: LiveEngine, side: Side, weights: Weights) -> dict[str, Any]:
    """Compare what the direct way left with the engine's own loader: bits and log-probs."""
    after_sync = engine.log_probs()
    synced = {name: param.clone() for name, param in side.params.items()}
    _forget(side.params)
    side.load((name, weights.make(name)) for name in weights.tensors)
    wrong = [name for name, param in side.params.items() if not same_bits(param, synced[name])]
    after_load = engine.log_probs()
    return {
        "equals_own_loader": _everywhere(not wrong),
        "log_probs_equal": _everywhere(after_sync == after_load),
        "mean_log_prob": statistics.mean(p for row in after_sync for p in row),
    }


@torch.no_grad()
def _forget(params: Mapping[str, Tensor]) -> None:
    for param in params.values():
        param.fill_(float("nan"))


def _everywhere(yes: bool) -> bool:
    return all(Distributed().gather(yes))


def rank_main(args: argparse.Namespace) -> None:
    """Run one section's cases on this rank; the first rank saves after each."""
    settings = SMOKE if args.smoke else REAL
    if not settings.smoke:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "gloo" if settings.smoke else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=_RANK_TIMEOUT)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        live = args.engine == ["vllm"]
        tp = CASES[args.cases[0]].engine_tp
        engine = LiveEngine(tp, Path(folder)) if live else None
        for name in args.cases:
            results[name] = run_case(CASES[name], settings, engine)
            if dist.get_rank() == 0:
                Path(args.out).write_text(json.dumps(results))
        _wait(settings.device)
    sys.stdout.flush()
    os._exit(0)  # engine and NCCL threads would keep the process for minutes


def run_section(engine: str, names: Sequence[str], smoke: bool) -> dict[str, Any]:
    """Run cases of one size in ranks of their own; after a failing one, new ranks take the rest."""
    results: dict[str, Any] = {}
    rest = list(names)
    while rest:
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder) / "out.json", Path(folder) / "log"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={CASES[rest[0]].world}", "-m", "benchmarks.reshard"]
            command += ["--engine", engine, "--out", str(out), "--cases", *rest]
            environment = os.environ | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles for two minutes at first
                "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # NVLink multicast, which not all hosts allow
            }
            with log.open("w") as stream:
                code = _call([*command, *(["--smoke"] if smoke else [])], stream, environment)
            done = json.loads(out.read_text()) if out.exists() else {}
            results |= done
            rest = [name for name in rest if name not in done]
            if rest:
                text = log.read_text(errors="replace")
                cause = text.find("Traceback (most recent call last)")
                text = text[cause : cause + 12000] if cause >= 0 else text[-4000:]
                results[rest[0]] = {"failed": code, "log": text}
                print(f"{engine} {rest[0]} failed ({code}):\n{text}", file=sys.stderr)
                rest = rest[1:]
    return results


def _call(command: Sequence[str], stream: Any, environment: Mapping[str, str]) -> str:
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=dict(environment)
    )
    try:
        return f"exit {process.wait(_SECTION_LIMIT_S)}"
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        process.wait(60)
        return f"killed after {_SECTION_LIMIT_S:.0f} s"


def _sections(engines: Sequence[str], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group cases by the engine that they share: it is started once."""
    sections = []
    if "tensors" in engines:
        for world in OF_WORLD:
            own = [name for name in names if CASES[name].world == world]
            sections += [("tensors", own)] if own else []
    if "vllm" in engines:
        live = [name for name in names if CASES[name].live]
        for tp in sorted({CASES[name].engine_tp for name in live}, reverse=True):
            sections.append(("vllm", [name for name in live if CASES[name].engine_tp == tp]))
    return sections


def run(args: Sequence[str]) -> dict[str, Any]:
    """Run all sections, saving what there is after each."""
    options = _parse(args)
    settings, output = SMOKE if options.smoke else REAL, output_of(NAME, options)
    result: dict[str, Any] = {
        "smoke": options.smoke,
        "models": {name: folder for name, (folder, _) in MODELS.items()},
        "warmups": settings.warmups,
        "bucket_bytes": settings.bucket_bytes,
        "engines": {engine: {} for engine in options.engine},
    }
    for engine, names in _sections(options.engine, options.cases):
        result["engines"][engine] |= run_section(engine, names, options.smoke)
        output.write(result)
    print(table(result))
    return result


def table(result: Mapping[str, Any]) -> str:
    """Draw the medians as Markdown."""
    lines = [
        "| engine | case | direct ms | gather ms | per tensor ms | times faster | received GB "
        "| local GB | GB/s | extra MB | same bits |",
        "|" + " --- |" * 11,
    ]
    for engine, cases in result["engines"].items():
        for name, found in cases.items():
            if "failed" in found:
                lines.append(f"| {engine} | {name} | {found['failed']} |" + " |" * 8)
                continue
            ours = found["direct"]
            same = ours["bit_equal"] and found.get("equals_own_loader", True)
            numbers = [
                *(found[way]["median_ms"] for way in ("direct", "gather", "per_tensor")),
                found["times_faster_than_gather"],
                max(ours["received_bytes"]) / 1e9,
                max(ours["local_bytes"]) / 1e9,
                ours["gb_per_s"],
                ours["peak_extra_bytes"] / 1e6,
            ]
            shown = " | ".join(f"{number:.2f}" for number in numbers)
            lines.append(f"| {engine} | {name} | {shown} | {same} |")
    return "\n".join(lines)


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(TWO))
    parser.add_argument("--out", help="of one rank's section; set by the launcher")
    return parser.parse_args(list(args))


if __name__ == "__main__":
    rank_main(_parse(sys.argv[1:]))
