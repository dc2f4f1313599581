"""Slurm's host lists without scontrol: `python -m mrl.launching.nodes "$SLURM_JOB_NODELIST"`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import product

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NAME = re.compile(r"[A-Za-z0-9._-]*")
_EXAMPLE = "expected as a[1-3,7],b01"


def parse_nodelist(text: str) -> tuple[str, ...]:
    """Name the hosts of a Slurm host list in its order: `a[1-2,07],b` gives a1, a2, a07, b.

    Numbers keep the width of a range's start; of several brackets in a name the last runs fastest.
    Raises ValueError for a list that Slurm would not have written.
    """
    hosts = [host for item in _items(text) for host in _expand(item, text)]
    twice = sorted({host for host in hosts if hosts.count(host) > 1}) if _repeats(hosts) else []
    if twice:
        raise ValueError(f"node list {text!r} names {twice[0]} twice")
    return tuple(hosts)


def _repeats(hosts: list[str]) -> bool:
    return len(set(hosts)) < len(hosts)


def _items(text: str) -> list[str]:
    """Cut at the commas outside of brackets."""
    items, depth = [""], 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(
                f"node list {text!r} has a wrong {character!r} at character {position}: {_EXAMPLE}"
            )
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    if depth:
        raise ValueError(f"node list {text!r} has a bracket that is not closed: {_EXAMPLE}")
    if "" in items:
        raise ValueError(f"node list {text!r} has an empty name: {_EXAMPLE}")
    return items


def _expand(item: str, text: str) -> Iterator[str]:
    parts = re.split(r"\[(.*?)\]", item)  # text, bracket, text, bracket, ..., text
    for part in parts[::2]:
        if not _NAME.fullmatch(part):
            raise ValueError(f"node list {text!r}: {part!r} is no part of a host name: {_EXAMPLE}")
    choices = [
        list(_numbers(part, text)) if index % 2 else [part] for index, part in enumerate(parts)
    ]
    yield from ("".join(chosen) for chosen in product(*choices))


def _numbers(bracket: str, text: str) -> Iterator[str]:
    for piece in bracket.split(","):
        found = _RANGE.fullmatch(piece)
        first, last = found.groups() if found else ("1", "0")
        if last is not None and int(last) < int(first):
            raise ValueError(f"node list {text!r}: [{piece}] is no range of numbers: {_EXAMPLE}")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


if __name__ == "__main__":
    try:
        print(*parse_nodelist(sys.argv[1]), sep="\n")
    except ValueError as error:
        sys.exit(str(error))
