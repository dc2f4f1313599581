from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from mrl.report.svg import BARS, Line, Stack, line_chart, number, spark, stacked_chart, thinned


def line(values: list[float | None], name: str = "a") -> Line:
    return Line(name, range(1, len(values) + 1), values, 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (64.0, "64"),
        (4362240.0, "4,362,240"),
        (0.123456, "0.1235"),
        (1234.5, "1,234"),
        (-3e-7, "-3e-07"),
        (1e20, "100,000,000,000,000,000,000"),
        (None, "not finite"),
    ],
)
def test_numbers_have_four_digits_that_count(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_long_series_keeps_its_spikes_gaps_and_ends() -> None:
    values: list[float | None] = [1.0] * 10_000
    values[1234], values[5678], values[7000] = 99.0, -99.0, None
    points = thinned(range(10_000), values)
    assert len(points) <= 1000
    assert {(1234, 99.0), (5678, -99.0), (7000, None)} <= set(points)
    assert points[0][0] == 0 and points[-1][0] == 9_999
    assert points == sorted(points, key=lambda point: point[0])
    assert thinned([1, 2], [0.5, None]) == [(1, 0.5), (2, None)]


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [0.0, 0.0],
        [None, 2.0, None],
        [1e-12, 1e12],
        [-5.0, 5.0],
        [1.0, 1.0000002, 1.0000001],
        [3.0] * 200,
        [None] * 100 + [1.0],
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_a_chart_is_well_formed_and_inside_its_box(values: list[float | None], log: bool) -> None:
    root = ET.fromstring(str(line_chart([line(values)], log)))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for path in root.iter("path"):
        numbers = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.attrib["d"])
        assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in numbers)
    labels = [text.text for text in root.iter("text") if text.attrib["class"] == "y"]
    assert labels and len(set(labels)) == len(labels)


def test_nothing_known_draws_nothing() -> None:
    assert line_chart([line([None, None])]) == "" == stacked_chart([], []) == spark([None, 1.0])


def test_names_are_escaped() -> None:
    ET.fromstring(str(line_chart([line([1.0, 2.0], '<b a="1">&')])))
    ET.fromstring(str(stacked_chart([1, 2], [Stack("<&>", [1.0, 2.0], 0)])))


def test_bars_of_many_steps_are_means_that_keep_the_total() -> None:
    steps = list(range(1, 6 * BARS + 1))
    root = ET.fromstring(str(stacked_chart(steps, [Stack("gen", [float(s) for s in steps], 0)])))
    (bars,) = [path for path in root.iter("path") if "bar" in path.attrib["class"]]
    means = [
        float(point.split(":")[1].replace(",", "")) for point in bars.attrib["data-points"].split()
    ]
    assert len(means) == BARS
    assert sum(means) * 6 == pytest.approx(sum(steps))
