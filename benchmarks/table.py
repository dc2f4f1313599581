"""Draw all records: benchmarks/RESULTS.md and two pictures beside the JSON files.

mrl bench table [--folder FOLDER] [--out FILE.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.figures import FLOP_CONVENTION, Figure, Record
from benchmarks.pictures import save_phases, save_roofline
from benchmarks.record import RESULTS
from benchmarks.run import questions

PAGE = RESULTS.parent / "RESULTS.md"
_INTRODUCTION = f"""# Results

Written by `mrl bench table` from the JSON files in [results](results): change nothing here.
The value is the median of the repeats, with their least and most. FLOPs are {FLOP_CONVENTION}.
The roofline is what the hardware allows: products at the peak of the data sheet, memory and links
at the rate that large copies reach, a host that costs nothing. A CPU has none here.
"""


def read_all(folder: Path) -> list[Record]:
    """Read every record of a folder by name. Raises ValueError for a file that is none."""
    return [Record.read(path) for path in sorted(folder.glob("*.json"))]


def page(records: Sequence[Record], pictures: Sequence[str]) -> str:
    """Write the records as Markdown."""
    lines = [_INTRODUCTION]
    lines += [f"![{Path(name).stem}]({name})\n" for name in pictures]
    for record in records:
        lines += _section(record)
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(record: Record) -> Iterator[str]:
    yield f"## {record.name}\n"
    asked = [kind for kind in questions() if record.name.startswith(kind)]
    if asked:
        yield f"{questions()[max(asked, key=len)]}\n"
    known = record.environment
    versions = ", ".join(f"{k} {v}" for k, v in known["versions"].items())
    dirty = " with changes" if known["dirty"] else ""
    yield f"{record.hardware}; commit {str(known['commit'])[:9]}{dirty}; {known['date'][:10]}; "
    yield f"{versions}.\n"
    if not record.figures:
        yield "No figures: this one is judged by what it lists.\n"
        return
    yield "| figure | value | unit | least to most | repeats | roofline | share of it |"
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: |"
    yield from map(_row, record.figures)
    yield ""


def _row(figure: Figure) -> str:
    spread = f"{_number(figure.min)} to {_number(figure.max)}" if figure.repeats > 1 else ""
    roofline = "" if figure.roofline is None else _number(figure.roofline)
    share = "" if figure.attained is None else f"{100 * figure.attained:.0f} %"
    cells = (
        figure.name.replace("|", "\\|"), _number(figure.value), figure.unit, spread,
        str(figure.repeats), roofline, share,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(args: Sequence[str]) -> int:
    """Write page and pictures. Raises ValueError for a folder without records."""
    parser = argparse.ArgumentParser(prog="mrl bench table", description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the JSON files")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    options = parser.parse_args(list(args))
    records = read_all(options.folder)
    if not records:
        raise ValueError(f"no JSON file in {options.folder}: run a benchmark first")
    pictures = {"roofline.png": save_roofline, "phases.png": save_phases}
    drawn = [
        (options.folder / name).absolute()
        for name, save in pictures.items()
        if save(records, options.folder / name)
    ]
    root = options.out.absolute().parent
    named = [path.relative_to(root, walk_up=True).as_posix() for path in drawn]
    options.out.write_text(page(records, named), encoding="utf-8")
    print(f"written: {options.out}, {', '.join(str(path) for path in drawn) or 'no picture'}")
    return 0
