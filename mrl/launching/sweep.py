"""Sweeps: one run a line of a file, or every combination of some values.

`python -m mrl.launching.sweep FILE INDEX` prints the overrides of one line, each ended by NUL.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

_NAME_KEY = "trainer.experiment_name"
_FOLDER_KEY = "trainer.default_local_dir"


def combinations(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Combine `key=a|b` axes into the overrides of each run, the last axis fastest.

    Raises ValueError for an axis without values, or a key given twice.
    """
    choices: list[list[str]] = []
    keys: set[str] = set()
    for axis in axes:
        key, equals, values = axis.partition("=")
        if not equals or not key or "" in values.split("|"):
            raise ValueError(f"--sweep {axis!r}: expected key=a|b|c")
        if key in keys:
            raise ValueError(f"--sweep gives {key} twice: write all its values in one")
        keys.add(key)
        choices.append([f"{key}={value}" for value in values.split("|")])
    return list(product(*choices))


def overrides_of(file: Path, index: int) -> list[str]:
    """Read the overrides of run `index` (from 0) of a sweep file, quoted as for a shell.

    A run that names no folder gets a name of its own, so that runs never share checkpoints.
    Raises ValueError for a line that is not there or is not made of key=value.
    """
    lines = [
        line for line in file.read_text().splitlines() if line.strip() and line.strip()[0] != "#"
    ]
    if not 0 <= index < len(lines):
        raise ValueError(
            f"{file} has {len(lines)} runs, this is run {index}: submit --array=0-{len(lines) - 1}"
        )
    words = shlex.split(lines[index])
    for word in words:
        if "=" not in word:
            raise ValueError(f"{file}, run {index}: {word!r} is no key=value")
    keys = {word.partition("=")[0] for word in words}
    if not keys & {_NAME_KEY, _FOLDER_KEY}:
        words.append(f"{_NAME_KEY}={file.stem}-{index}")
    return words


def _main() -> None:
    try:
        words = overrides_of(Path(sys.argv[1]), int(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    sys.stdout.write("".join(f"{word}\0" for word in words))


if __name__ == "__main__":
    _main()
