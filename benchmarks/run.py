"""List the benchmarks, run one, compare two runs, or draw all: `mrl bench`.

mrl bench                      the list, with the question that each one answers
mrl bench NAME [ARG ...]       run one (its options: mrl bench NAME --help)
mrl bench compare ...          two records, or one and the committed one of its name
mrl bench table                benchmarks/RESULTS.md and its pictures
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record

FOLDER = Path(__file__).resolve().parent
COMMANDS = ("compare", "table")
_OWN_OPTIONS = {"faults", "soak"}  # there --folder is another one


def questions() -> dict[str, str]:
    """Map each benchmark to the first line of its docstring, without importing it.

    A benchmark is a file with a function `run`; its docstring begins with the question.
    """
    found = {}
    for path in sorted([*FOLDER.glob("*.py"), FOLDER / "peers" / "__init__.py"]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        first = (ast.get_docstring(tree) or "").split("\n")[0]
        if "run" in names and first.endswith("?"):
            found[path.stem if path.stem != "__init__" else path.parent.name] = first
    return found


def main(argv: Sequence[str]) -> int:
    """Do what is asked; gives the exit status. Raises ValueError for wrong input."""
    known = questions()
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nBenchmarks:")
        for name, question in known.items():
            print(f"  {name:<14} {question}")
        return 0
    name, *args = argv
    if name in COMMANDS:
        status: int = importlib.import_module(f"benchmarks.{name}").main(args)
        return status
    if name not in known:
        names = ", ".join([*known, *COMMANDS])
        print(f"unknown benchmark {name!r}; known: {names}", file=sys.stderr)
        return 2
    # ranks and other processes of a benchmark import this package, wherever they start
    paths = [str(record.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    result = importlib.import_module(f"benchmarks.{name}").run(args)
    path = _output(name, args).write(result)
    print(f"written to {path}")
    return 0


def _output(name: str, args: Sequence[str]) -> record.Output:
    """Read the options that benchmarks share; the rest was the benchmark's."""
    if name in _OWN_OPTIONS:
        return record.Output(name, record.RESULTS)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--name")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--smoke", action="store_true")
    return record.output_of(name, parser.parse_known_args(list(args))[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
