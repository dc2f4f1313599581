"""Makes the quickstart folder: `model/`, `sft.parquet`, `train.parquet`, `heldout.parquet`.

The tasks are reasoning-gym's `chain_sum` (sums and differences of three digits) with its own
verifier. The prompt is the bare expression (`8+3-5`) instead of the English question, which keeps
sequences short enough for two CPU cores; the entry itself travels in `extra_info` for the verifier.
The three files share no expression: of the 4,000 there are, they hold 3,840.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import reasoning_gym

from mrl.quickstart.model import save_model

TASK = "chain_sum"
SFT_ROWS = 1536
TRAIN_ROWS = 1792
HELDOUT_ROWS = 512
_ROW_GROUP = 1024
_MARK = "quickstart.json"  # the seed; written first, so that two seeds never mix


def _entries(seed: int) -> Iterator[dict[str, Any]]:
    """Generate entries of different expressions without end."""
    source = reasoning_gym.create_dataset(
        TASK, min_terms=3, max_terms=3, min_digits=1, max_digits=1, seed=seed, size=1 << 30
    )
    seen: set[str] = set()
    index = 0
    while True:
        entry = source[index]
        index += 1
        expression = entry["metadata"]["expression"]
        if expression not in seen:
            seen.add(expression)
            yield entry


def _prompt(entry: dict[str, Any]) -> list[dict[str, str]]:
    expression = entry["metadata"]["expression"].replace(" ", "")
    return [{"role": "user", "content": expression}]


def _rl_row(entry: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    return {
        "data_source": f"reasoning_gym/{TASK}",
        "prompt": _prompt(entry),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"index": index, "split": split, "task": TASK, "entry": json.dumps(entry)},
    }


def _sft_row(entry: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": _prompt(entry), "response": entry["answer"]}


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial, row_group_size=_ROW_GROUP)
    os.replace(partial, path)
    print(f"{path}: {len(rows)} rows", flush=True)


def _check_mark(folder: Path, seed: int) -> None:
    """Refuse a folder that was made with another seed; mark a new one."""
    mark = folder / _MARK
    if not mark.exists():
        mark.write_text(json.dumps({"seed": seed}) + "\n")
        return
    found = json.loads(mark.read_text())["seed"]
    if found != seed:
        raise ValueError(
            f"{folder} was made with seed {found}, not {seed}: use seed {found}, another folder, "
            "or remove this one"
        )


def make(folder: Path, seed: int = 1) -> None:
    """Make a small tokenizer and model, and reasoning-gym tasks; what is there already stays.

    Args:
        folder: where; made if it is not there.
        seed: of the initial weights and of the tasks.

    Raises:
        ValueError: if the folder was made with another seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_mark(folder, seed)
    model = folder / "model"
    if not model.exists():
        partial = folder / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        parameters = save_model(partial, seed)
        os.replace(partial, model)
        print(f"{model}: {parameters / 1e6:.2f}M parameters, random", flush=True)
    names = ("heldout", "sft", "train")
    if all((folder / f"{name}.parquet").exists() for name in names):
        return
    entries = _entries(seed)
    heldout = [_rl_row(next(entries), i, "heldout") for i in range(HELDOUT_ROWS)]
    sft = [_sft_row(next(entries)) for _ in range(SFT_ROWS)]
    train = [_rl_row(next(entries), i, "train") for i in range(TRAIN_ROWS)]
    for name, rows in zip(names, (heldout, sft, train), strict=True):
        if not (folder / f"{name}.parquet").exists():
            _write_rows(folder / f"{name}.parquet", rows)
