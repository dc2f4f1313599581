"""Line charts and stacked bars as inline SVG; colours and text follow the page's theme.

Classes instead of colours: `c0` to `c9` are a hue, `c10` and `c11` greys, `d0` to `d3` a dash. A
curve of many steps is thinned out to the lowest and highest point of each part, so that spikes
stay, with a running mean over it; `data-points` has what a script on the page reads out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

HUES, DASHES = 10, 4
GREY = HUES  # and GREY + 1, a lighter one
_PARTS = 150  # of a long series, two points each
BARS = 60
_SMOOTH = 80  # points from which on a running mean is drawn over them
WIDTH, WIDE, HEIGHT = 460, 660, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 10, 24

Point = tuple[int, float | None]  # step, value


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: its points by step and how it looks."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    hue: int
    dash: int = 0


@dataclass(frozen=True, slots=True)
class Stack:
    """One layer of stacked bars."""

    name: str
    values: Sequence[float]  # a step each
    hue: int


def number(value: float | None) -> str:
    """Write a number as the report does: four digits that count, whole numbers as they are."""
    if value is None:
        return "not finite"
    whole = float(value).is_integer() and abs(value) < 1e15
    return f"{value:,.0f}" if whole or abs(value) >= 1e3 else f"{value:.4g}"


def thinned(
    steps: Sequence[int], values: Sequence[float | None], parts: int = _PARTS
) -> list[Point]:
    """Keep the ends, gaps and the lowest and highest point of each part of a long series."""
    total = len(values)
    if total <= 2 * parts:
        return list(zip(steps, values, strict=True))
    kept = {0, total - 1}
    for part in range(parts):
        start = total * part // parts
        span = values[start : total * (part + 1) // parts]
        known = [value for value in span if value is not None]
        if len(known) < len(span):
            kept.add(start + span.index(None))
        if known:
            kept |= {start + span.index(min(known)), start + span.index(max(known))}
    return [(steps[i], values[i]) for i in sorted(kept)]


def line_chart(lines: Sequence[Line], log: bool = False) -> Markup:
    """Draw curves over steps; `log`: a logarithmic axis, where every value allows one."""
    known = [v for line in lines for v in line.values if v is not None]
    steps = [s for line in lines for s in (line.steps[0], line.steps[-1]) if line.steps]
    if not known:
        return Markup("")
    log = log and 0 < 2 * min(known) < max(known)
    low, high = (
        (math.log10(min(known)), math.log10(max(known))) if log else (min(known), max(known))
    )
    y_axis = _Axis.around(low, high, HEIGHT - _BOTTOM, _TOP)
    x_axis = _Axis(min(steps), max(max(steps), min(steps) + 1), _LEFT, WIDTH - _RIGHT)
    body = [*_grid(x_axis, y_axis, log)]
    for line in lines:
        body += _curve(line, x_axis, y_axis, log)
    return _svg(body, x_axis, "lines", ", ".join(line.name for line in lines))


def stacked_chart(steps: Sequence[int], stacks: Sequence[Stack]) -> Markup:
    """Draw the layers of each step on top of one another; of many steps, means of neighbours."""
    if not steps:
        return Markup("")
    bars = min(len(steps), BARS)
    spans = [range(len(steps) * b // bars, len(steps) * (b + 1) // bars) for b in range(bars)]
    layers = [[sum(s.values[i] for i in span) / len(span) for span in spans] for s in stacks]
    highest = max(sum(column) for column in zip(*layers, strict=True)) or 1.0
    y_axis = _Axis.around(0.0, highest, HEIGHT - _BOTTOM, _TOP)
    x_axis = _Axis(steps[0] - 0.5, steps[-1] + 0.5, _LEFT, WIDE - _RIGHT)
    width = (WIDE - _RIGHT - _LEFT) / bars
    body, base = [*_grid(x_axis, y_axis, False)], [0.0] * bars
    for stack, layer in zip(stacks, layers, strict=True):
        boxes = ""
        for bar, value in enumerate(layer):
            top, bottom = y_axis(base[bar] + value), y_axis(base[bar])
            base[bar] += value
            if bottom - top >= 0.05:
                left = _LEFT + width * bar + 0.08 * width
                boxes += f"M{left:.1f} {bottom:.1f}V{top:.1f}h{0.84 * width:.1f}V{bottom:.1f}z"
        points = [(steps[span[0]], value) for span, value in zip(spans, layer, strict=True)]
        body.append(
            Markup('<path class="bar c{}" d="{}" data-name="{}" data-points="{}"/>').format(
                stack.hue, boxes, stack.name, _data(points)
            )
        )
    return _svg(body, x_axis, "bars", "seconds of each phase, step by step")


def spark(values: Sequence[float | None]) -> Markup:
    """Draw a curve the size of a word."""
    points = thinned(range(len(values)), values, parts=40)
    known = [v for _, v in points if v is not None]
    if len(known) < 2:
        return Markup("")
    y_axis = _Axis.around(min(known), max(known), 18, 2)
    x_axis = _Axis(0, max(len(values) - 1, 1), 1, 99)
    path = _path(points, x_axis, y_axis, False)
    return Markup('<svg class="spark" viewBox="0 0 100 20"><path d="{}"/></svg>').format(path)


@dataclass(frozen=True, slots=True)
class _Axis:
    """A linear map from values to places."""

    low: float
    high: float
    start: float
    stop: float

    @staticmethod
    def around(low: float, high: float, start: float, stop: float) -> _Axis:
        """Leave room around the values."""
        room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        floor = 0.0 if 0 <= low <= 0.5 * high else low - room
        return _Axis(floor, high + room, start, stop)

    def __call__(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.stop - self.start)

    def ticks(self, most: int, whole: bool = False) -> list[float]:
        """Give round values inside, at most so many."""
        raw = (self.high - self.low) / most
        size = 10.0 ** math.floor(math.log10(raw))
        size = next(size * m for m in (1, 2, 5, 10) if size * m >= raw * 0.999)
        size = max(size, 1.0) if whole else size
        first, last = math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9)
        return [round(i * size, 12) for i in range(first, last + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis, log: bool) -> Iterator[Markup]:
    ticks = y_axis.ticks(5, whole=log)
    if log and len(ticks) < 2:  # all within a power of ten
        ticks = y_axis.ticks(4)
    for value in ticks:
        y = y_axis(value)
        yield Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(_LEFT, y, x_axis.stop)
        text = _short(10**value) if log else _tick(value, ticks)
        yield Markup('<text class="y" x="{}" y="{:.1f}">{}</text>').format(_LEFT - 6, y + 4, text)
    for value in x_axis.ticks(6, whole=True):
        yield Markup('<text class="x" x="{:.1f}" y="{}">{}</text>').format(
            x_axis(value), HEIGHT - 6, f"{value:,.0f}"
        )


def _tick(value: float, ticks: Sequence[float]) -> str:
    apart = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
    if apart and apart < 1e-4 * abs(ticks[0]):  # 1, 1+2e-7, ...
        return f"{ticks[0]:.4g}" if value == ticks[0] else f"+{_short(value - ticks[0])}"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return _short(value)


def _short(value: float) -> str:
    if 1e-3 <= abs(value) < 1e4 or not value:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _curve(line: Line, x_axis: _Axis, y_axis: _Axis, log: bool) -> Iterator[Markup]:
    points = thinned(line.steps, line.values)
    noisy = len(line.values) >= _SMOOTH
    shape = f"c{line.hue} d{line.dash}"
    if len(points) == 1:
        step, value = points[0]
        at = y_axis((math.log10(value) if log else value) if value is not None else 0.0)
        yield Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(
            shape, x_axis(step), at
        )
    yield Markup('<path class="line {}{}" d="{}" data-name="{}" data-points="{}"/>').format(
        shape, " raw" if noisy else "", _path(points, x_axis, y_axis, log), line.name, _data(points)
    )
    if noisy:
        means = thinned(line.steps, _running_means(line.values, max(len(line.values) // 40, 5)))
        path = _path(means, x_axis, y_axis, log)
        yield Markup('<path class="line {}" d="{}"/>').format(shape, path)


def _running_means(values: Sequence[float | None], width: int) -> list[float | None]:
    """Average each value with those before it."""
    means: list[float | None] = []
    window: deque[float] = deque(maxlen=width)
    for value in values:
        if value is not None:
            window.append(value)
        # summed anew: of a sum that once held a spike, the small numbers are gone
        means.append(None if value is None else sum(window) / len(window))
    return means


def _path(points: Sequence[Point], x_axis: _Axis, y_axis: _Axis, log: bool) -> str:
    words, pen = [], "M"
    for step, value in points:
        if value is None:  # a gap
            pen = "M"
            continue
        y = y_axis(math.log10(value) if log else value)
        words.append(f"{pen}{x_axis(step):.1f} {y:.1f}")
        pen = "L"
    return "".join(words)


def _data(points: Sequence[Point]) -> str:
    return " ".join(f"{step}:{'' if value is None else number(value)}" for step, value in points)


def _svg(body: Sequence[Markup], x_axis: _Axis, kind: str, label: str) -> Markup:
    head = Markup(
        '<svg class="chart {}" viewBox="0 0 {} {}" role="img" aria-label="{}" data-x="{} {} {} {}">'
    ).format(
        kind,
        x_axis.stop + _RIGHT,
        HEIGHT,
        label,
        x_axis.low,
        x_axis.high,
        x_axis.start,
        x_axis.stop,
    )
    cross = Markup('<path class="cross" d=""/>')
    return head + Markup("").join(body) + cross + Markup("</svg>")
