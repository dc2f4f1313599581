from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.schema import DataConfig
from mrl.data import SFTDataset

Write = Callable[..., Path]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_an_example_is_prompt_and_response_with_eos(
    write: Write, tokenizer: PreTrainedTokenizerFast, suffix: str
) -> None:
    chat = [{"role": "user", "content": "1+1"}]
    dataset = SFTDataset(
        [write(f"a.{suffix}", [{"prompt": chat, "response": "2"}])], tokenizer, DataConfig()
    )
    prompt, response = dataset.example(0)
    assert tokenizer.decode(prompt) == "<u>1+1<a>"
    assert tokenizer.decode(response) == "2<eos>"


def test_prompts_render_as_in_rl(
    write: Write, tokenizer_with: Callable[..., PreTrainedTokenizerFast]
) -> None:
    tokenizer = tokenizer_with(bos=True)
    path = write("a.jsonl", [{"prompt": "1+1", "response": "2"}])
    prompt, response = SFTDataset([path], tokenizer, DataConfig()).example(0)
    assert tokenizer.decode(prompt) == "<s><u>1+1<a>"
    assert tokenizer.bos_token_id not in response


ROWS = [
    {"prompt": "abc", "response": "12"},
    {"prompt": "abcd", "response": "12"},
    {"prompt": "abc", "response": "1234"},
]


def test_long_examples_by_mode(write: Write, plain_tokenizer: PreTrainedTokenizerFast) -> None:
    path = write("a.jsonl", ROWS)

    def make(truncation: str, rows: int = 3) -> SFTDataset:
        config = DataConfig(max_prompt_length=3, max_response_length=rows, truncation=truncation)
        return SFTDataset([path], plain_tokenizer, config)

    with pytest.raises(ValueError, match=r"row 1: prompt and response have 4 and 3 .* 2 of 3 rows"):
        make("error")
    filtered = make("filter")
    assert (len(filtered), filtered.num_filtered) == (1, 2)
    with pytest.raises(ValueError, match="0 rows after filtering"):
        make("filter", rows=1)
    left = make("left")
    assert plain_tokenizer.decode(left.example(1)[0]) == "bcd"
    assert plain_tokenizer.decode(left.example(2)[1]) == "123"
    assert plain_tokenizer.decode(make("right").example(1)[0]) == "abc"


@pytest.mark.parametrize("response", ["", None, 3])
def test_an_unusable_response_is_refused_with_its_row(
    write: Write, plain_tokenizer: PreTrainedTokenizerFast, response: Any
) -> None:
    path = write("a.jsonl", [ROWS[0], {"prompt": "x", "response": response}])
    with pytest.raises(ValueError, match=r"a\.jsonl row 1: the response is"):
        SFTDataset([path], plain_tokenizer, DataConfig())


def test_a_missing_column_or_eos_is_named(
    write: Write, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=r"no column 'response'.*data\.response_key"):
        SFTDataset([write("a.parquet", [{"prompt": "x"}])], plain_tokenizer, DataConfig())
    plain_tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS"):
        SFTDataset([write("b.parquet", ROWS)], plain_tokenizer, DataConfig())
