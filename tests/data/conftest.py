"""Tiny real tokenizers (one token a character) and files."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '[' + c.name + c.arguments | tojson + ']' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def build_tokenizer(template: str | None = TEMPLATE, bos: bool = False) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<s>", "<u>", "<a>", "<t>"]
    vocabulary = {token: i for i, token in enumerate([*special, *string.printable])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(special)
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<s>" if bos else None,
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """No template: a string prompt has as many tokens as characters."""
    return build_tokenizer(template=None)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows to a file by its suffix, parquet in row groups of `group` rows."""

    def to_file(name: str, rows: Sequence[dict[str, Any]], group: int = 4) -> Path:
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return to_file


def rl_row(prompt: object, **more: Any) -> dict[str, Any]:
    """Build a row as verl's preprocessing writes it."""
    return {
        "prompt": prompt,
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": 0},
    } | more


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    return rl_row


@pytest.fixture
def tokenizer_with() -> Callable[..., PreTrainedTokenizerFast]:
    """Build a tokenizer of another template, with or without BOS."""
    return build_tokenizer
