"""The final answer of a response as text, and what its text says that a parser would lose.

A parser of mathematics makes an expression of nearly anything, and two expressions of one value
are equal to it. What told them apart is in the text: brackets, units, a base, a relation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"(?<!\\)[{}]")
_ANY_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_JOINT = re.compile(r"[\s$]*(?:\\text\{)?\s*(?:,|or|and|,\s*and|,\s*or)\s*\}?[\s$]*")
_ANCHOR = re.compile(r"\banswer\b[\s*]*(?:is|:|=)[\s*:]*([^\n]+)", re.IGNORECASE)
_HOPE = re.compile(r"[.\s]*I hope (?:it|this) is correct.*$", re.IGNORECASE)
_MATH = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_LONGEST = 1000  # characters of an answer
_LONGEST_BARE = 100  # of a response that is nothing but its answer
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|operatorname)\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MATH_WORDS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "inf", "frac"]
)

_SPACING = re.compile(r"\\[,!;:> ]|\\q?quad\b|~|\\left\b|\\right\b|\\displaystyle\b")
_THOUSANDS = re.compile(r"[^\d(\[{]*[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?[^\d,)\]}]*(?:\{?[^,]*)?")
_UNIT = re.compile(
    r"[\d}]\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*([A-Za-z][^{}]*?)\s*\}|\s([A-Za-z]{1,12}))"
    r"(?:\^\{?(\d)\}?)?$"
)
_BASE = re.compile(r"[(\s]*[0-9A-F]+[)\s]*_\s*(?:\{\s*)?(\d+|\\text\{\w+\})\s*\}?")
_RATIO = re.compile(r"\d\s*:\s*\d")
_SPREAD = re.compile(
    r"\\(?:pm|mp|cup|in|leq?|geq?|lt|gt|neq?|begin)\b|[<>\u00b1\u222a\u2264\u2265]"
)
_LOOSE = re.compile(
    r"\\(?:approx|sim|simeq|cong|neq?|[lc]?dots|p?mod|bmod)\b|\\not|[\u2248\u2260~\u2026]|!=|\.\.\."
)
_MAGNITUDES = ("dozen", "hundred", "thousand", "million", "billion", "trillion")
_NO_UNITS = ("or", "and", "to", "if", "when", "at", *_MAGNITUDES)
# What may stand behind a formula that is the answer: a unit, or the end of the sentence.
_ENDS = re.compile(r"\s*([A-Za-z]*)\s*(?:[.!;*]+(?:\s.*)?)?")
_LETTERS = re.compile(r"[A-Z]{2,}")
_MARKED = re.compile(r"\\(?:text|mathrm|mbox|angle|triangle|overline|overrightarrow)\b|[{}\s]")
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_NAME_COMMANDS = re.compile(
    r"\\(?:text|mathrm|angle|overline|triangle|operatorname|[a-zA-Z]*(?:alpha|beta|gamma|delta|"
    r"theta|lambda|mu|phi|omega|sigma|ell))\b"
)


def final_answer(response: str) -> str | None:
    """Find the answer that a response commits to; None if it does not.

    It is the last box (boxes joined by a comma, "and" or "or" are one answer), or else what stands
    after the last "answer is" or "answer:", or else the response itself if it holds no words: the
    last number of a text is never taken for its answer. What stands before `</think>` is no answer.
    """
    text = response.rpartition("</think>")[2]
    if _ANY_BOX.search(text):
        answer = _boxed(text)
    elif anchors := _ANCHOR.findall(text):
        answer = _after_anchor(anchors[-1])
    else:
        answer = _bare(text)
    if answer is None or not answer.strip() or len(answer) > _LONGEST:
        return None
    return answer.strip()


def _boxed(text: str) -> str | None:
    boxes = list(_boxes(text))
    last_mark = [match.start() for match in _ANY_BOX.finditer(text)][-1]
    if not boxes or boxes[-1][1] < last_mark:
        return None  # the last box is not closed: the response was cut in its answer
    contents = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in reversed(list(pairwise(boxes))):
        if not _JOINT.fullmatch(text[end:start]):
            break
        contents.insert(0, content)
    return ", ".join(dict.fromkeys(contents))


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, content) of each closed box that is in no other; it may hold others.

    The content is that of the last box in it, and so on. One pass: a response may be all boxes.
    """
    opened: list[int] = []
    closes: dict[int, int] = {}  # by where it opens
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closes[opened.pop()] = brace.start()
    marks = [m for m in _BOX.finditer(text) if m.end() in closes]
    marks.sort(key=lambda m: closes[m.end()])
    starts = [m.start() for m in marks]
    found: list[tuple[int, int, str]] = []
    last = len(marks) - 1
    while last >= 0:
        outer, inmost = last, last
        while inmost and starts[inmost - 1] > starts[inmost]:
            inmost -= 1  # the last box in it is closed just before it
        mark = marks[inmost]
        content = text[mark.end() + 1 : closes[mark.end()]]
        found.append((starts[outer], closes[marks[outer].end()] + 1, content))
        last = inmost - 1
        while last >= 0 and starts[last] > starts[outer]:
            last -= 1
    yield from reversed(found)


def _after_anchor(line: str) -> str | None:
    line = _HOPE.sub("", line).strip().strip("*").strip()
    if math := _MATH.match(line):
        rest = line[math.end() :]
        end = _ENDS.fullmatch(rest)
        is_more = end is None or end[1].lower() in _NO_UNITS or _MATH.search(rest)
        return None if is_more else next(filter(None, math.groups()))
    line = line.rstrip(".")
    if re.fullmatch(r"[A-Za-z]+|\(?[A-Z]\)?", line):
        return line
    if re.fullmatch(r"\$?-?\d[\d,./]*\s*%?", line):
        return line
    unit = re.fullmatch(r"(\$?-?\d[\d,./]*)\s+([A-Za-z]+)", line)
    if unit and unit[2].lower() not in _NO_UNITS:
        return line
    return _bare(line)


def _bare(text: str) -> str | None:
    text = text.strip()
    if "\n" in text or len(text) > _LONGEST_BARE or "#" in text:
        return None
    if math := _MATH.fullmatch(text):
        return next(filter(None, math.groups()))
    words = set(_WORD.findall(_TEXT.sub("", text)))
    return None if words - _MATH_WORDS and not re.fullmatch(r"[A-Za-z]+", text) else text


def clean(text: str) -> str:
    """Bring an answer's text to one spelling: no spacing commands, no thousands' commas."""
    text = text.strip()
    if math := _MATH.fullmatch(text):
        text = next(filter(None, math.groups())).strip()
    text = text.replace("{,}", ",").replace(",\\!", ",")
    text = _SPACING.sub(lambda m: " " if m[0] in ("~", "\\ ") or "quad" in m[0] else "", text)
    text = re.sub(r"\\[dt]frac\b", r"\\frac", text).strip()
    text = re.sub(r"(?<=[\w)\]}])\s*\.$", "", text)
    text = re.sub(r"\\text\s*\{\s*,?\s*(?:or|and)\s*\}|,?\s+(?:or|and)\s+", ", ", text)
    if _THOUSANDS.fullmatch(text):
        text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return text


def is_whole(text: str) -> bool:
    """Tell whether every bracket of a text has its other half; `(0,1]` counts as a pair."""
    plain = re.sub(r"\\[{}]", "", text)
    braces = [c for c in plain if c in "{}"]
    depths = list(accumulate(1 if c == "{" else -1 for c in braces))
    return (
        min(depths, default=0) >= 0
        and sum(c in "([" or -(c in ")]") for c in plain) == 0
        and (not depths or depths[-1] == 0)
    )


def same_text(gold: str, answer: str) -> bool:
    """Tell whether two cleaned texts differ in nothing but spaces beside marks."""
    one, other = (re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text) for text in (gold, answer))
    return one == other != ""


@dataclass(frozen=True, slots=True)
class Form:
    """What the text of an answer says beside its value."""

    brackets: str  # of a tuple, interval or set: "()", "[)", ..; "{}" also for a bare list; or ""
    is_spread: bool  # several values without a comma: +-, a relation, a union, a matrix
    unit: str
    base: str
    ratio: str
    is_loose: bool  # approximately, up to a multiple, or with more to come: not equal
    primes: int  # of the value: x' is not x


def form(text: str) -> Form:
    """Read the form of a cleaned text."""
    unit = _UNIT.search(text)
    base = _BASE.fullmatch(text)
    value = split(text, "=")[-1]
    return Form(
        _brackets(text),
        bool(_SPREAD.search(text)),
        ("dollar^1" if "\\$" in text else "")
        if unit is None
        else f"{(unit[1] or unit[2]).lower().rstrip('s')}^{unit[3] or 1}",
        "" if base is None else base[1],
        re.sub(r"\s", "", text) if _RATIO.search(text) else "",
        bool(_LOOSE.search(text)),
        value.count("'") + value.count("\\prime"),
    )


def contradict(gold: Form, answer: Form) -> bool:
    """Tell whether two answers differ whatever their values are."""
    one_is_spread = (gold.is_spread and not gold.brackets) or (
        answer.is_spread and not answer.brackets
    )
    units = {gold.unit, answer.unit}
    scales = any(unit.startswith(_MAGNITUDES) for unit in units)
    return (
        (gold.brackets != answer.brackets and not one_is_spread)
        or (len(units) == 2 and (scales or "" not in units))
        or gold.primes != answer.primes
        or gold.base != answer.base
        or gold.ratio != answer.ratio
        or (answer.is_loose and not gold.is_loose)
    )


def letters(text: str) -> str | None:
    """Give the letters of a name such as `\\angle ABC`, which are no factors; None of others."""
    plain = _MARKED.sub("", text)
    return plain if _LETTERS.fullmatch(plain) else None


def differ_in_case(gold: str, answer: str) -> bool:
    """Tell whether texts without words differ in case alone: n is not N, but monday is Monday."""
    return gold.casefold() == answer.casefold() and not _WORD.search(gold)


def split_equation(text: str) -> list[str]:
    """Give the sides of an equation that must have the answer's value; a name on its left is none.

    `x = 2 + 3 = 5` gives `2 + 3` and `5`; `2x = 10` gives both sides; others the text itself.
    """
    if len(split(text, ",")) > 1 or _SPREAD.search(text):
        return [text]
    sides = [side.strip() for side in split(text, "=")]
    if len(sides) > 1 and _is_name(sides[0]):
        return sides[1:]
    return sides


def _is_name(text: str) -> bool:
    text = _NAME_COMMANDS.sub("a", text)
    return bool(re.fullmatch(r"[(|{]*[A-Za-z][\w(){}|,' ]*", text))


def split(text: str, mark: str) -> list[str]:
    """Cut a text at a mark outside all brackets; `\\{` counts as one."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == mark and depth <= 0 and text[place - 1 : place] not in ("<", ">", "!"):
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _brackets(text: str) -> str:
    if len(split(text, ",")) > 1 or len(split(text, ";")) > 1:
        return "{}"
    value = split(text, "=")[-1].strip().replace("\\{", "{").replace("\\}", "}")
    if value.startswith("\\langle") and value.endswith("\\rangle"):
        return "<>"
    if len(value) < 2 or value[0] not in _CLOSES or value[-1] not in ")]}":
        return ""
    depth = 0
    for place, character in enumerate(value):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and place < len(value) - 1:
            return ""  # the first bracket is closed before the end
    inside = value[1:-1]
    has_several = len(split(inside, ",")) > 1 or (value[0] == "{" and text.startswith("\\{"))
    return value[0] + value[-1] if has_several else ""
