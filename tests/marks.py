"""Cases of a parametrised test of which only some are fast."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark all cases as slow but the `fast` ones, their siblings."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]
