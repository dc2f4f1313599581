from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.schema import DataConfig
from mrl.data import PreferencePair, RLHFDataset

Write = Callable[..., Path]
USER = {"role": "user", "content": "q"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def pairs(write: Write, tokenizer: PreTrainedTokenizerFast) -> Callable[..., RLHFDataset]:
    def make(*rows: dict[str, Any], suffix: str = "jsonl", **config: Any) -> RLHFDataset:
        return RLHFDataset([write(f"a.{suffix}", rows)], tokenizer, DataConfig(**config))

    return make


def texts(pair: PreferencePair, tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    return tuple(
        tokenizer.decode(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
    )


def test_the_columns_are_kept_and_encoded(
    pairs: Callable[..., RLHFDataset], tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = pairs({"prompt": "q", "chosen": "yes", "rejected": "no"}, suffix="parquet")
    assert dataset.row(0) == {"prompt": "q", "chosen": "yes", "rejected": "no"}
    assert texts(dataset.pair(0), tokenizer) == ("<u>q<a>", "yes<eos>", "no<eos>")


@pytest.mark.parametrize("whole", [True, False])
def test_a_side_may_be_the_conversation_or_what_follows_the_prompt(
    pairs: Callable[..., RLHFDataset], tokenizer: PreTrainedTokenizerFast, whole: bool
) -> None:
    start = [USER] if whole else []
    dataset = pairs(
        {"prompt": [USER], "chosen": [*start, answer("y")], "rejected": [*start, answer("n")]}
    )
    assert texts(dataset.pair(0), tokenizer) == ("<u>q<a>", "y", "n")


def test_a_conversation_that_ends_with_the_prompt_is_an_empty_response(
    pairs: Callable[..., RLHFDataset], tokenizer: PreTrainedTokenizerFast
) -> None:
    """The last common message stays in the prompt."""
    dataset = pairs({"prompt": [USER], "chosen": [USER], "rejected": [USER, answer("n")]})
    assert texts(dataset.pair(0), tokenizer) == ("<u>q<a>", "", "n")


def test_identical_pairs_are_left_out_with_a_count(
    pairs: Callable[..., RLHFDataset], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = pairs(
        {"prompt": "q", "chosen": "same", "rejected": "same"},
        {"prompt": "q", "chosen": "abcd", "rejected": "abce"},
        {"prompt": "q", "chosen": "abc", "rejected": "abd"},
        max_response_length=3,
    )
    found = dataset.pair_rows()
    assert (found.rows, found.num_identical) == ((2,), 2)
    assert "2 of 3 pairs dropped" in caplog.text
    with pytest.raises(ValueError, match="row 1: chosen and rejected are the same within"):
        dataset.pair(1)


def test_a_missing_side_is_named(pairs: Callable[..., RLHFDataset]) -> None:
    dataset = pairs({"prompt": "q", "chosen": "yes"})
    with pytest.raises(ValueError, match=r"a\.jsonl row 0: 'rejected' is missing"):
        dataset.pair(0)
