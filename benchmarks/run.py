"""List the benchmarks, or run one: `python -m benchmarks.run [NAME [ARG ...]]`."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record

FOLDER = Path(__file__).resolve().parent
NOT_BENCHMARKS = {
    "__init__", "cases", "jobs", "precision", "ranks", "record", "run", "sides", "workload",
}  # fmt: skip


def questions() -> dict[str, str]:
    """Map each benchmark to the first line of its docstring, without importing it."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem not in NOT_BENCHMARKS:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found[path.stem] = text.split("\n")[0]
    return found


def main(argv: Sequence[str]) -> int:
    """Run the named benchmark and write its JSON; without a name, list them."""
    known = questions()
    if not argv:
        print("Benchmarks (python -m benchmarks.run NAME [ARG ...]):")
        for name, question in known.items():
            print(f"  {name:<20} {question}")
        return 0
    name, *args = argv
    if name not in known:
        print(f"unknown benchmark {name!r}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    result = importlib.import_module(f"benchmarks.{name}").run(args)
    path = record.write(name, result)
    print(json.dumps(result, indent=2))
    print(f"written to {path.relative_to(record.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
