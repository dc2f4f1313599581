"""The command: what it reads, what it prints, and its exit status."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mrl.check_layout.model import real_prompts, require_weights, write_random_model
from mrl.check_layout.report import LayoutResult
from mrl.check_layout.run import check_layouts
from mrl.check_layout.show import print_check
from mrl.config import Config

_MOST_PROMPTS = 256  # that are read from the data


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for beside the config."""

    layouts: Sequence[str]
    reference: str
    rows: int | None
    ranks: int | None
    json: bool
    random_weights: bool


def run(config: Config, options: Options) -> int:
    """Check layouts and print the result; gives 1 when a layout failed, else 0."""
    with ExitStack() as stack:
        path = config.model.path
        if options.random_weights:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mrl-random-")))
            source = write_random_model(config, folder)
            config = replace(config, model=replace(config.model, path=str(source)))
        require_weights(config.model.path)
        report = check_layouts(
            config,
            options.layouts,
            options.reference,
            options.rows,
            options.ranks,
            real_prompts(config, options.rows or _MOST_PROMPTS),
            _tell,
        )
    report = replace(report, model_path=path)
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print_check(report)
    return 0 if report.ok else 1


def _tell(result: LayoutResult) -> None:
    """Say on the error stream how far it is."""
    state = "not possible" if not result.possible else "failed" if result.failed else "done"
    print(f"{result.name}: {state} after {result.seconds:.0f} s", file=sys.stderr, flush=True)
