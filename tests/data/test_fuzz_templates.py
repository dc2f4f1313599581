"""Chat templates are programs of strangers: they render text, or are refused by row; they end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.data import render
from mrl.data.limits import limited
from mrl.data.render import PromptRenderer

TokenizerWith = Callable[..., PreTrainedTokenizerFast]
FEW, MANY = 150, 8000
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
REFUSED = {
    "syntax": "{% for %}",
    "an unknown name": "{{ nothing.at_all }}",
    "a division by zero": "{{ 1 // 0 }}",
    "a float beyond all": "{{ 2.0 ** 100000 }}",
    "a range beyond all": "{% for i in range(10 ** 9) %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "another file": "{% include '/etc/passwd' %}",
    "the inside of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].system('true') }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "its own refusal": "{{ raise_exception('no') }}",
    "half a character": "{{ '\\ud800' }}",
}
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
}


def rendered(template: str, tokenizer_with: TokenizerWith) -> str:
    return PromptRenderer(tokenizer_with(template), {}).text(CHAT, "a.jsonl row 3")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_template_that_cannot_render_is_refused_by_row(
    kind: str, tokenizer_with: TokenizerWith
) -> None:
    with pytest.raises(ValueError, match=r"a\.jsonl row 3"):
        rendered(REFUSED[kind], tokenizer_with)


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_that_does_not_end_is_refused(
    kind: str, tokenizer_with: TokenizerWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "_TEMPLATE_S", 0.2)
    with pytest.raises(ValueError, match=r"a\.jsonl row 3: .* does it end"):
        rendered(ENDLESS[kind], tokenizer_with)


def test_what_comes_after_a_limit_is_not_interrupted() -> None:
    with pytest.raises(TimeoutError), limited(0.01):
        while True:
            pass
    with limited(0.01):
        pass
    end = time.monotonic() + 1.2  # more than a round of the watch
    while time.monotonic() < end:
        pass


def test_a_template_without_a_generation_prompt_renders_the_messages_alone(
    tokenizer_with: TokenizerWith,
) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert rendered(plain, tokenizer_with) == "su"


PARTS = (
    *("{{ messages }}", "{{ messages[9].content }}", "{% if messages %}", "{% endif %}"),
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.role }}",
        "{{ m['content'] }}",
        "{{ m.x.y }}",
    ),
    *("{% set a = 1 %}", "{{ a + '1' }}", "{{ a / 0 }}", "{{ a | tojson }}", "{{ a | nothing }}"),
    *(
        "{% generation %}",
        "{% endgeneration %}",
        "{% macro f(x) %}",
        "{% endmacro %}",
        "{{ f(1) }}",
    ),
    *(
        "{{ messages.__class__ }}",
        "{{ cycler }}",
        "{{ namespace(a=1) }}",
        "{% break %}",
        "{{",
        "}}",
    ),
    *("{{ '%s%s' % (1,) }}", "{{ '{0.__class__}'.format(a) }}", "{{ lipsum(n=1) }}", "text", "{#"),
    *("{{ [] * 3 }}", "{{ 9 ** 99 }}", "{{ messages | sort }}", "{{ messages | map('upper') }}"),
    *("{{ strftime_now(1) }}", "{{ messages[0:'a'] }}", "{{ -messages }}", "{% raw %}", "\n"),
)


def fuzz(seed: int, count: int, tokenizer_with: TokenizerWith) -> int:
    rng, fine = random.Random(seed), 0
    for _ in range(count):
        template = "".join(rng.choice(PARTS) for _ in range(rng.randint(1, 6)))
        try:
            rendered(template, tokenizer_with)
            fine += 1
        except ValueError as error:
            assert "a.jsonl row 3" in str(error), (template, error)
    return fine


def test_any_template_renders_or_is_refused_by_row(tokenizer_with: TokenizerWith) -> None:
    assert 0 < fuzz(0, FEW, tokenizer_with) < FEW


@pytest.mark.slow
def test_many_templates_render_or_are_refused_by_row(tokenizer_with: TokenizerWith) -> None:
    assert 0 < fuzz(1, MANY, tokenizer_with) < MANY
