"""Figures from results, by benchmark: also from files that were written before they were listed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Figure
from benchmarks.roofline import gpu_of, peak_of, transfer_seconds

Environment = Mapping[str, Any]
Entry = Mapping[str, Any]
_TERA = 1e12


def declare(name: str, result: Mapping[str, Any], environment: Environment) -> tuple[Figure, ...]:
    """List the figures of a result; `name` begins with the benchmark's.

    Those of an unknown benchmark are not known: none.
    """
    known = [kind for kind in DECLARED if name == kind or name.startswith(f"{kind}_")]
    if not known:
        return ()
    return tuple(DECLARED[max(known, key=len)](result, environment))


# Training: an entry is {median_s, min_s, max_s, repeats, ...}, a failed one {failed, log}.


@dataclass(frozen=True, slots=True)
class _Passes:
    """Passes over rows, as rates."""

    environment: Environment

    def figures(self, name: str, entry: Entry) -> Iterator[Figure]:
        """Give tokens/s where they are known, else seconds, and the peak of the memory."""
        if "median_s" not in entry:
            return
        if "tokens_per_s_per_gpu" in entry:
            yield self._rate(name, entry)
        else:
            yield _seconds(name, entry)
        if peak := entry.get("memory_gb", {}).get("peak_allocated"):
            yield Figure(f"{name} memory", peak, "GB", "lower", peak, peak, entry["repeats"])

    def _rate(self, name: str, entry: Entry) -> Figure:
        rate, middle = entry["tokens_per_s_per_gpu"], entry["median_s"]
        peak = peak_of(self.environment)
        return Figure(
            name,
            rate,
            "tokens/s/GPU",
            "higher",
            rate * middle / entry["max_s"],
            rate * middle / entry["min_s"],
            entry["repeats"],
            rate * peak / _TERA / entry["tflops_per_gpu"] if peak else None,
        )


def _seconds(name: str, entry: Entry) -> Figure:
    low, high, repeats = entry["min_s"], entry["max_s"], entry["repeats"]
    return Figure(name, entry["median_s"], "s", "lower", low, high, repeats)


def _training(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    passes, parts = _Passes(environment), result["parts"]
    for part in ("update", "logprob", "long"):
        for case, entries in parts.get(part, {}).items():
            if "median_s" in entries:  # of one setting
                yield from passes.figures(f"{part} {case}", entries)
                continue
            for setting, entry in entries.items():
                if isinstance(entry, Mapping):
                    yield from passes.figures(f"{part} {case}/{setting}", entry)
    for setting, entry in parts.get("head", {}).items():
        for kind in ("update", "logprob"):
            if kind in entry:
                yield from passes.figures(f"head {setting} {kind}", entry[kind])
    for case, entry in parts.get("offload", {}).items():
        for way in ("out", "back"):
            if way in entry:
                yield _seconds(f"offload {case} {way}", entry[way])
    for case, entry in parts.get("growth", {}).items():
        if "steps" in entry:
            grown = entry["spread_from_step_2_gb"]["allocated"]
            count = len(entry["steps"])
            yield Figure(f"growth {case}", grown, "GB", "lower", grown, grown, count)
    for kind, layouts in parts.get("precision", {}).items():
        judged = [entry for entry in layouts.values() if "broken" in entry]
        if judged:
            bad = float(sum(entry["broken"] != "none" for entry in judged))
            name = f"precision {kind}: layouts out of bounds"
            yield Figure(name, bad, "layouts", "lower", bad, bad, len(judged))


def _reshard(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    gpu = gpu_of(environment)
    for engine, cases in result["engines"].items():
        for case, found in cases.items():
            if "failed" in found:
                continue
            for way in ("direct", "gather", "per_tensor"):
                entry = found[way]
                floor = None
                if gpu is not None:
                    direct = found["direct"]
                    received, local = (max(direct[f"{k}_bytes"]) for k in ("received", "local"))
                    floor = 1e3 * transfer_seconds(gpu, local, received)
                name, low, high = f"{engine} {case} {way}", entry["min_ms"], entry["max_ms"]
                middle, repeats = entry["median_ms"], entry["repeats"]
                yield Figure(name, middle, "ms", "lower", low, high, repeats, floor)
            for way in ("gather", "per_tensor"):
                name = f"{engine} {case} times faster than {way}"
                yield _ratio(name, found[way], found["direct"])


def _ratio(name: str, slow: Entry, fast: Entry) -> Figure:
    """Set two measurements beside each other; the spread is that of their extremes."""
    return Figure(
        name,
        slow["median_ms"] / fast["median_ms"],
        "times",
        "higher",
        slow["min_ms"] / fast["max_ms"],
        slow["max_ms"] / fast["min_ms"],
        min(slow["repeats"], fast["repeats"]),
    )


def _rl_step(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    for case, found in result.items():
        if not isinstance(found, Mapping) or "timings" not in found:
            continue
        ideal = found.get("roofline") or {}
        steps = found["timings"]["timing_s/step"][1:]  # the first one warms up
        rates = found["metrics"]["perf/throughput"][1:]
        yield Figure.of(case, rates, "tokens/s/GPU", "higher", ideal.get("tokens_per_s_per_gpu"))
        if mfu := found["metrics"].get("perf/mfu/actor", [])[1:]:
            yield Figure.of(f"{case} MFU of the update", mfu, "of the peak", "higher", 1.0)
        yield Figure.of(f"{case} step", steps, "s", "lower", ideal.get("step"))
        for phase in found["seconds"]:
            values = found["timings"].get(f"timing_s/{phase}", [])[1:]
            if phase not in ("step", "rest") and values:
                yield Figure.of(f"{case} {phase}", values, "s", "lower", ideal.get(phase))
        if "peak" in found["memory_gb"]:
            peak = found["memory_gb"]["peak"]["measured"]
            yield Figure(f"{case} memory", peak, "GB", "lower", peak, peak, len(steps))


def _whole_run(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    """Read what was measured before `rl_step` had length laws: its responses were all longest."""
    return _rl_step({f"{case}/uniform": found for case, found in result.items()}, environment)


def _decode(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    for case, found in result["cases"].items():
        if "failed" in found:
            continue
        rates = found["tokens_per_s_per_gpu"]
        for side, values in rates.items():
            yield Figure.of(f"{case} {side}", values, "tokens/s/GPU", "higher", found["roofline"])
        for side in rates:
            if side != "mrl":
                pairs = zip(rates["mrl"], rates[side], strict=True)
                ratios = [ours / theirs for ours, theirs in pairs]
                yield Figure.of(f"{case} mrl over {side}", ratios, "times", "higher")


def _startup(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    for case, found in result["cases"].items():
        if "failed" in found:
            continue
        for part, seconds in found["seconds"].items():
            yield Figure.of(f"{case} {part}", seconds, "s", "lower")
    for recipe, seconds in result.get("plan_s", {}).items():
        yield Figure.of(f"mrl plan {recipe}", seconds, "s", "lower")


def _controller(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    batches = {"smoke": result} if "ranks" in result else result
    for batch, found in batches.items():
        for ranks, entry in found["ranks"].items() if "ranks" in found else ():
            name, steps = f"{batch} on {ranks} ranks", entry["step_s_of_each"]
            yield Figure.of(name, steps, "CPU s", "lower")
            sent = entry["sent_bytes"]["mean"] / 1e6
            yield Figure(f"{name} sent to one", sent, "MB", "lower", sent, sent, len(steps))


def _soak(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    units = {"seconds_a_step": "s", "controller_gb": "GB", "ranks_gb": "GB", "others_gb": "GB"}
    for name, found in result.items():
        if isinstance(found, Mapping) and "medians" in found:  # of ten parts of the time
            yield Figure.of(name, found["medians"], units.get(name, "count"), "lower")
            if found["growth"] is not None:
                yield Figure.of(f"{name} growth", [found["growth"]], "times", "lower")


def _faults(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    longest: dict[str, list[float]] = {}
    others = 0
    for row in result["table"]:
        longest.setdefault(f"{row['launcher']} {row['kind']}", []).append(row["longest_s"])
        others += row["injected"] - row["ended_as_wanted"]
    for kind, seconds in longest.items():  # the longest of each phase
        yield Figure.of(f"{kind} to the end", seconds, "s", "lower")
    yield Figure.of("ended otherwise", [float(others)], "faults", "lower")


def _peers(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    for work, found in result["peers"].items():
        if "failed" in found:
            continue
        sides: Mapping[str, Mapping[str, Sequence[float]]] = found["sides"]
        for side, measured in sides.items():
            yield Figure.of(f"{work}: {side} step", measured["step_s"], "s", "lower")
            rates = measured["tokens_per_s"]
            yield Figure.of(f"{work}: {side}", rates, "tokens/s/device", "higher")
        ours, theirs = (measured["tokens_per_s"] for measured in sides.values())  # mrl is first
        value = statistics.median(ours) / statistics.median(theirs)
        low, high = min(ours) / max(theirs), max(ours) / min(theirs)
        repeats = min(len(ours), len(theirs))
        yield Figure(f"{work}: mrl over the peer", value, "times", "higher", low, high, repeats)


def _eight_gpus(result: Mapping[str, Any], environment: Environment) -> Iterator[Figure]:
    passes, parts = _Passes(environment), result["parts"]
    for name, found in parts.get("layouts", {}).items():
        yield from passes.figures(f"layouts {name}", found.get("update", {}))
    moved = {name: found for name, found in parts.get("reshard", {}).items() if "direct" in found}
    yield from _reshard({"engines": {"reshard": moved}}, environment)
    for part in ("grpo", "ppo"):
        runs = {f"{part} {name}": found for name, found in parts.get(part, {}).items()}
        yield from _rl_step(runs, environment)
    for name, found in parts.get("long_context", {}).items():
        yield from passes.figures(f"long {name}", found)
    for case, row in result["scaling"].items():
        for gpus, found in list(row.items())[1:]:  # the first are the fewest
            share = [found["efficiency"]]
            yield Figure.of(f"scaling {case}/{gpus}", share, "of the fewest GPUs'", "higher", 1.0)


Declaration = Callable[[Mapping[str, Any], Environment], Iterator[Figure]]
DECLARED: Mapping[str, Declaration] = {
    "train_step": _training,
    "logprob": _training,
    "long_context": _training,
    "reshard": _reshard,
    "rl_step": _rl_step,
    "whole_run": _whole_run,
    "decode": _decode,
    "startup": _startup,
    "controller": _controller,
    "peers": _peers,
    "soak": _soak,
    "faults": _faults,
    "eight_gpus": _eight_gpus,
}
