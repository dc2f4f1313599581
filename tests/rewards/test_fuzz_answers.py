"""Answers of any shape: scored 0 or 1 in bounded time, or refused for their ground truth alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mrl.config.schema import CustomRewardConfig
from mrl.rewards import gsm8k
from mrl.rewards.answers import final_answer
from mrl.rewards.registry import ScoreItem
from mrl.rewards.runner import RewardRunner
from mrl.types import Score

FEW, MANY = 60, 3000
TRUTHS = ("1/3", "5", r"\frac{1}{2}", "(1,2]", "x^2+1", r"\sqrt{2}", "72", "-0.5")
PARTS = (
    *"0123456789+-*/^_(){}[]=,.:;|<>!%$&#~ xyzneX\\\n'",
    *("\\frac", "\\sqrt", "\\boxed{", "\\fbox {", "\\text{", "\\left(", "\\right)", "\\pi", "\\in"),
    *("\\begin{matrix}", "\\end{matrix}", "\\begin{cases}", "\\\\", "\\infty", "\\cup", "\\pm"),
    *("\\sum_{i=1}^{", "\\int", "\\log", "\\binom{", "\\lim", "\\mod", "\\circ", "\\overline{"),
    *("9" * 30, "10^{", "9^{9^{", "!!", "#### ", "$$", "\\(", "\\)", "answer is ", "</think>"),
    *("\u0665", "\u00bd", "\ud800", "\0", "\\%", "\\not", "1e9", "0x1f", "\u2212", "\\mathbb{R}"),
)
NESTS = (
    *(("(", ")"), ("{", "}"), ("\\frac{", "}{2}"), ("\\sqrt{", "}"), ("\\boxed{", "}")),
    *(("-", ""), ("x^{", "}"), ("2^", ""), ("|", "|"), ("\\boxed{", ""), ("\\left(", "\\right)")),
)


def any_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.08:
        opened, closed = rng.choice(NESTS)
        depth = rng.choice([20, 200, 5000])
        return f"{opened * depth}1{closed * depth}"
    if kind < 0.14:
        return rng.choice("123456789") * rng.choice([30, 400, 4400, 20000])
    return "".join(rng.choice(PARTS) for _ in range(rng.choice([1, 3, 8, 20, 60])))


def any_item(rng: random.Random) -> ScoreItem:
    text = any_text(rng)
    forms = (text, rf"so \boxed{{{text}}}", f"the answer is {text}.", f"#### {text}")
    truth = rng.choice(TRUTHS) if rng.random() < 0.7 else any_text(rng)
    source = rng.choice(["math", "math", "gsm8k"])
    extra = {"method": rng.choice(["strict", "flexible"])}
    return ScoreItem(source, rng.choice(forms), truth, extra)


def assert_scored(items: list[ScoreItem], scores: tuple[Score, ...]) -> Counter[str]:
    for item, score in zip(items, scores, strict=True):
        if score.status == "ok":
            assert score.value in (0.0, 1.0), item
        elif score.status == "error":
            assert "ground truth" in score.detail, (item, score)
        else:
            assert score.status == "timeout", (item, score)
    return Counter(score.status for score in scores)


def fuzz(seed: int, count: int) -> Counter[str]:
    rng = random.Random(seed)
    items = [any_item(rng) for _ in range(count)]
    with RewardRunner(CustomRewardConfig(), num_workers=2, timeout_s=20.0) as runner:
        return assert_scored(items, runner.score(items))


@pytest.mark.multiprocess
def test_any_answer_gets_a_score_or_a_reason() -> None:
    assert fuzz(0, FEW)["ok"] > FEW // 2


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
def test_many_answers_get_a_score_or_a_reason() -> None:
    assert fuzz(1, MANY)["ok"] > MANY // 2


def test_the_answer_of_any_response_is_found_or_there_is_none() -> None:
    rng = random.Random(2)
    for _ in range(20 * FEW):
        answer = final_answer(any_text(rng))
        assert answer is None or 0 < len(answer) <= 1000


@pytest.mark.parametrize("response", ["\\boxed{" * 20000, "\\boxed{" * 5000 + "1" + "}" * 5000])
def test_a_response_that_repeats_its_box_has_an_answer_or_none(response: str) -> None:
    """It took a pass of the whole response for each box, and a call within a call."""
    assert final_answer(response) == ("1" if response.endswith("}") else None)


def test_the_last_box_within_the_last_box_is_the_answer() -> None:
    nested = r"\boxed{0} \boxed{a \boxed{1} b \boxed{c \boxed{\frac{1}{2}}} d}"
    assert final_answer(nested) == r"\frac{1}{2}"
    assert final_answer(r"\boxed{\text{a } \} }") == r"\text{a } \}"


def test_any_text_is_a_number_of_gsm8k_or_none() -> None:
    rng = random.Random(3)
    for _ in range(20 * FEW):
        text = any_text(rng)
        for method in ("strict", "flexible"):
            found = gsm8k.extract(f"{text} #### {text}", method)
            assert found is None or set(found) <= set("-0123456789.,")
