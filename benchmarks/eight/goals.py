"""What must hold of the entries, and the tables that a person reads; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Entries = Mapping[str, Mapping[str, Any]]


def goals(
    parts: Mapping[str, Entries],
    scaling: Mapping[str, Mapping[str, Mapping[str, float]]],
    wanted: Mapping[str, Any],
    smoke: bool,
) -> list[dict[str, Any]]:
    """Judge what there is: {goal, wanted, found, held}; `held` is None where nothing can be said.

    `wanted` gives the least scaling of each model (`goal`). CPU ranks share the cores, so that
    their speed says nothing.
    """
    found = [
        _all("layouts within the stated bounds", parts.get("layouts", {}), "ok"),
        _all("received bytes equal the floor", parts.get("reshard", {}), "floor"),
        _all("the engine has the trainer's bits", parts.get("reshard", {}), "bits"),
    ]
    for case, row in scaling.items():
        goal, counts = wanted[case.partition("/")[0]].goal, sorted(map(int, row))
        share, enough = row[str(counts[-1])]["efficiency"], len(counts) > 1
        found.append(
            {
                "goal": f"{case}: tokens/s/GPU on {counts[-1]} over those on {counts[0]} GPUs",
                "wanted": goal,
                "found": share,
                "held": share >= goal if enough and not smoke else None,
            }
        )
    return found


_HOLDS = {
    "ok": lambda found: found["ok"],
    "floor": lambda found: found["direct"]["received_bytes"] == found["floor_bytes"],
    "bits": lambda found: found["direct"]["bit_equal"],
}


def _all(goal: str, entries: Entries, kind: str) -> dict[str, Any]:
    judged = {name: found for name, found in entries.items() if "left_out" not in found}
    good = [name for name, found in judged.items() if "failed" not in found]
    held = [name for name in good if _HOLDS[kind](judged[name])]
    return {
        "goal": goal,
        "wanted": len(judged),
        "found": len(held),
        "held": len(held) == len(judged) if judged else None,
        "broken": [name for name in judged if name not in held],
    }


def shown(result: Mapping[str, Any]) -> Iterator[str]:
    """Draw the tables as Markdown lines."""
    parts = result["parts"]
    for part, draw in _DRAWN.items():
        if part in parts:
            yield from ("", *draw(parts[part]))
            yield from (
                f"{name} {state.replace('_', ' ')}: {found[state][-300:]}"
                for name, found in parts[part].items()
                for state in ("left_out", "failed")
                if state in found
            )
    if result["scaling"]:
        yield from ("", *_scaling(result["scaling"]))
    if "plan" in parts:
        yield from ("", *_plan(parts["plan"]))
    rows = [
        (goal["goal"], goal["wanted"], goal["found"], _word(goal["held"]))
        for goal in result["goals"]
    ]
    yield from ("", *_table(("goal", "wanted", "found", "held"), rows))


def _word(held: bool | None) -> str:
    return {None: "not judged", True: "yes", False: "NO"}[held]


def _done(entries: Entries) -> list[tuple[str, Mapping[str, Any]]]:
    return [(n, e) for n, e in entries.items() if "left_out" not in e and "failed" not in e]


def _layouts(entries: Entries) -> Iterator[str]:
    rows = []
    for name, found in _done(entries):
        largest = {d["name"]: d["found"] for d in found["differences"]}
        actor, update = found["actor"][0], found["update"]
        rows.append(
            (
                name, actor["actor/pg_loss"], actor["actor/grad_norm"],
                largest.get("log-probs", "reference"), update["memory_gb"]["peak_allocated"],
                update["tflops_per_gpu"], "yes" if found["ok"] else "NO",
            )
        )  # fmt: skip
    heads = ("layout", "loss", "grad norm", "max log-prob diff", "peak GB", "TFLOP/s/GPU", "ok")
    yield from _table(heads, rows)


def _reshard(entries: Entries) -> Iterator[str]:
    rows = [
        (
            name, found["direct"]["median_ms"], found["gather"]["median_ms"],
            max(found["direct"]["received_bytes"]) / 1e9, max(found["floor_bytes"]) / 1e9,
            "yes" if found["direct"]["bit_equal"] else "NO",
        )
        for name, found in _done(entries)
    ]  # fmt: skip
    heads = ("transfer", "direct ms", "gather ms", "received GB", "floor GB", "same bits")
    yield from _table(heads, rows)


def _steps(entries: Entries) -> Iterator[str]:
    rows = [
        (name, found["seconds"]["step"]["measured"], found["seconds"]["gen"]["measured"],
         found["seconds"]["update_actor"]["measured"], found["seconds"]["reshard"]["measured"])
        for name, found in _done(entries)
    ]  # fmt: skip
    yield from _table(("step", "s", "gen s", "update_actor s", "reshard s"), rows)


def _long(entries: Entries) -> Iterator[str]:
    rows = [
        (name, found["tokens"], found["median_s"], found["tokens_per_s_per_gpu"],
         found["memory_gb"]["peak_allocated"])
        for name, found in _done(entries)
    ]  # fmt: skip
    yield from _table(("row", "tokens", "update s", "tokens/s/GPU", "peak GB"), rows)


_DRAWN = {
    "layouts": _layouts, "reshard": _reshard, "grpo": _steps, "ppo": _steps, "long_context": _long,
}  # fmt: skip


def _scaling(scaling: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    rows = [
        (f"{case}/{gpus}", found["tokens_per_s_per_gpu"], found["efficiency"])
        for case, row in scaling.items()
        for gpus, found in row.items()
    ]
    yield from _table(("GRPO on GPUs", "tokens/s/GPU", "efficiency"), rows)


def _plan(plan: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> Iterator[str]:
    rows = [
        (f"{part} {name}", quantity, row["planned"], row["measured"], row["ratio"])
        for part, entries in plan.items()
        for name, quantities in entries.items()
        for quantity, row in quantities.items()
        if row["measured"] is not None
    ]
    yield from _table(("plan of", "quantity", "planned", "measured", "ratio"), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    for row in rows:
        yield f"| {' | '.join(_cell(value) for value in row)} |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
