"""One batch on several parallel layouts of a model: the same numbers, or it says where not."""

from mrl.check_layout.compare import Bounds, Comparison, Difference, bounds_of, compare
from mrl.check_layout.layouts import NamedLayout, auto_layouts, parse_layout
from mrl.check_layout.report import CheckReport, LayoutResult
from mrl.check_layout.round import Round, run_round
from mrl.check_layout.run import check_layouts
from mrl.check_layout.show import print_check

__all__ = [
    "Bounds",
    "CheckReport",
    "Comparison",
    "Difference",
    "LayoutResult",
    "NamedLayout",
    "Round",
    "auto_layouts",
    "bounds_of",
    "check_layouts",
    "compare",
    "parse_layout",
    "print_check",
    "run_round",
]
