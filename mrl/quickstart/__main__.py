"""`python -m mrl.quickstart FOLDER [--seed N]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrl.quickstart.make import make


def main() -> None:
    """Make the quickstart folder and say what lies in it."""
    parser = argparse.ArgumentParser(prog="python -m mrl.quickstart", description=make.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the tasks")
    arguments = parser.parse_args()
    try:
        make(arguments.folder, arguments.seed)
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
