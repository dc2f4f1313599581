"""`python -m mrl.main_ppo key=value ...`: `mrl train` under the name that verl's scripts call."""

from __future__ import annotations

import sys

from mrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
