"""docs/verl.md, written from the table of keys and from the example scripts.

`python -m tests.config.verl_docs` writes it anew.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

from mrl.config.explain import OUTCOMES, Explained, explain
from mrl.config.verl_docs import render

FILE = Path(__file__).resolve().parents[2] / "docs" / "verl.md"
_SCRIPTS = Path(__file__).with_name("verl_scripts.json")
_HEAD = """# Coming from verl: what becomes of each key

A run script of verl's Megatron engine needs one change: `verl.trainer.main_ppo` becomes
`mrl.main_ppo` (which is `mrl train`). Its `--config-path` and `--config-name` are understood;
without a config file verl's defaults are below its arguments (last table). `model.path` is a
folder here: download the model first.

`mrl plan ARGUMENTS --explain` says of each key what it comes to; every command that takes a config
says in short, on stderr, what is not as it was given:

- **same**: the same key (without `actor_rollout_ref.`), or a value that is how things are here
- **renamed**: another name for the same thing
- **translated**: means the settings shown
- **ignored**: changes nothing here, for the reason shown; a key that is off (`null`) is *same*
- **refused**: asks for what is not here; the run does not start, and the message says what to do

An unknown key is refused with the nearest known one. `+` and `++` before a key, `True` and `null`,
quoted lists and `${oc.select:...}` are read as verl reads them.

## Example scripts

Keys of public scripts (as of the commits in the links), each key once, with the values of the first
branch that sets it. Where an expert parallel size is refused, the script leaves the expert tensor
parallel size to follow TP, which Megatron-Core refuses as well on so few GPUs.

"""


@cache
def scripts() -> dict[str, list[str]]:
    """Read the arguments of verl's public Megatron scripts, by address."""
    found: dict[str, list[str]] = json.loads(_SCRIPTS.read_text(encoding="utf-8"))
    return found


@cache
def explained(address: str) -> list[Explained]:
    """Explain the arguments of a script as they stand."""
    return explain(None, scripts()[address])


def text() -> str:
    """Write the whole page."""
    return "\n".join((_HEAD + "\n".join(_script_table()), "", "## Keys", "", render()))


def _script_table() -> list[str]:
    names = tuple(reversed(OUTCOMES))
    lines = [f"| script | {' | '.join(names)} | refused keys |", "|---|" + "--:|" * 5 + "---|"]
    for address in scripts():
        rows = explained(address)
        counts = Counter(row.outcome for row in rows)
        name = address.split("/blob/")[1].partition("/")[2]
        refused = ", ".join(
            f"`{row.given.removeprefix('actor_rollout_ref.')}`"
            for row in rows
            if row.outcome == "refused"
        )
        numbers = " | ".join(str(counts[outcome]) for outcome in names)
        lines.append(f"| [{name}]({address}) | {numbers} | {refused or '-'} |")
    return lines


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
