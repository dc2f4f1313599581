from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.schema import DataConfig
from mrl.data import RLHFDataset

Write = Callable[..., Path]
Row = Callable[..., dict[str, Any]]
KNOWN = ("gsm8k", "reasoning_gym")


def make(path: Path, tokenizer: PreTrainedTokenizerFast, **config: Any) -> RLHFDataset:
    return RLHFDataset([path], tokenizer, DataConfig(**config))


def test_a_row_becomes_a_prompt(write: Write, row: Row, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [row("1+1", extra_info={"index": 7}), row([{"role": "user", "content": "1+1"}])]
    dataset = make(write("a.jsonl", rows), tokenizer)
    plain, chat = dataset.prompt(0, "0-0"), dataset.prompt(1, "0-1")
    assert plain.text == chat.text == "<u>1+1<a>"
    assert plain.token_ids == chat.token_ids
    assert tokenizer.decode(plain.token_ids) == plain.text
    assert (plain.uid, plain.data_source, plain.ground_truth) == ("0-0", "gsm8k", "1")
    assert plain.extra_info == {"index": 7}


def test_a_string_without_template_stands_for_itself(
    write: Write, row: Row, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = make(write("a.jsonl", [row("1+1=")]), plain_tokenizer)
    assert dataset.prompt(0, "u").text == "1+1="
    assert len(dataset.prompt(0, "u").token_ids) == 4


def test_a_chat_without_template_is_refused_by_row(
    write: Write, row: Row, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.jsonl", [row("x"), row([{"role": "user", "content": "x"}])])
    with pytest.raises(ValueError, match=r"a\.jsonl row 1: .*no chat template"):
        make(path, plain_tokenizer)


def test_template_arguments_reach_the_template(
    write: Write, row: Row, tokenizer_with: Callable[..., PreTrainedTokenizerFast]
) -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}{% if thinking %}!{% endif %}")
    path = write("a.jsonl", [row("x")])
    assert make(path, tokenizer).prompt(0, "u").text == "x"
    kwargs = {"thinking": True}
    assert make(path, tokenizer, apply_chat_template_kwargs=kwargs).prompt(0, "u").text == "x!"


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_ragged_chats_render_as_their_plain_objects(
    write: Write, row: Row, tokenizer: PreTrainedTokenizerFast, suffix: str
) -> None:
    call_x = {"name": "f", "arguments": {"x": 1}}
    call_y = {"name": "g", "arguments": {"y": [1, 2]}}
    chats = [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}, {"role": "tool", "content": "", "tool_calls": [call_x]}],
        [{"role": "user", "content": "c"}, {"role": "tool", "content": "", "tool_calls": [call_y]}],
    ]
    dataset = make(write(f"a.{suffix}", [row(chat) for chat in chats]), tokenizer)
    for i, chat in enumerate(chats):
        text = dataset.prompt(i, "u").text
        assert text == tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        assert "None" not in text and "null" not in text


@pytest.mark.parametrize("written", ["{{ bos_token }}", ""])
def test_exactly_one_bos(
    write: Write, row: Row, tokenizer_with: Callable[..., PreTrainedTokenizerFast], written: str
) -> None:
    tokenizer = tokenizer_with(written + "{{ messages[0].content }}", bos=True)
    ids = make(write("a.jsonl", [row("xy")]), tokenizer).prompt(0, "u").token_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 3


def test_a_cut_at_the_left_keeps_the_bos(
    write: Write, row: Row, tokenizer_with: Callable[..., PreTrainedTokenizerFast]
) -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}", bos=True)
    path = write("a.jsonl", [row("abcdef")])
    prompt = make(path, tokenizer, max_prompt_length=3, truncation="left").prompt(0, "u")
    assert prompt.text == "<s>ef"
    assert prompt.token_ids[0] == tokenizer.bos_token_id


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "roles", "number"),
    [
        (NO_SYSTEM, ("system", "user"), 0),
        (NO_SYSTEM, ("user", "system"), 1),
        (ALTERNATING, ("user", "assistant", "assistant", "user"), 2),
    ],
)
def test_a_template_error_names_file_row_and_role(
    write: Write,
    row: Row,
    tokenizer_with: Callable[..., PreTrainedTokenizerFast],
    template: str,
    roles: tuple[str, ...],
    number: int,
) -> None:
    fine, bad = ([{"role": r, "content": "x"} for r in some] for some in (("user",), roles))
    path = write("a.parquet", [row(fine), row(bad)])
    with pytest.raises(
        ValueError, match=rf"a\.parquet row 1: .* message {number} with role '{roles[number]}'"
    ):
        make(path, tokenizer_with(template))


@pytest.mark.parametrize(
    "empty", ["", "  \n", [], [{"role": "user", "content": ""}], None], ids=repr
)
@pytest.mark.parametrize("truncation", ["error", "filter"])
def test_an_empty_prompt_is_refused_with_its_row(
    write: Write, row: Row, tokenizer: PreTrainedTokenizerFast, empty: object, truncation: str
) -> None:
    path = write("a.jsonl", [row("x"), row(empty)])
    with pytest.raises(ValueError, match=r"a\.jsonl row 1: the prompt is (empty|missing)"):
        make(path, tokenizer, truncation=truncation)


def test_images_are_refused_in_a_text_only_run(
    write: Write, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.jsonl", [row("x", images=[]), row("<image> what?", images=["cat.png"])])
    with pytest.raises(ValueError, match=r"a\.jsonl row 1: images given, the model is text-only"):
        make(path, tokenizer)
    part = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(ValueError, match="row 0: "):
        make(write("b.jsonl", [row(part)]), tokenizer)


# Prompts of 8, 9 and 12 tokens against a limit of 8.
LENGTHS = ("a" * 8, "b" * 8 + "9", "c" * 8 + "9012")


def test_error_names_the_row_and_both_lengths(
    write: Write, row: Row, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.parquet", [row(p) for p in LENGTHS])
    with pytest.raises(ValueError, match=r"row 1: the prompt has 9 tokens, .*length is 8") as error:
        make(path, plain_tokenizer, max_prompt_length=8, truncation="error")
    assert "2 of 3 rows" in str(error.value)
    assert "data.max_prompt_length=12" in str(error.value)


def test_filter_drops_and_counts(
    write: Write,
    row: Row,
    plain_tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write("a.parquet", [row(p) for p in (LENGTHS[1], LENGTHS[0], LENGTHS[2])])
    dataset = make(path, plain_tokenizer, max_prompt_length=8, truncation="filter")
    assert (len(dataset), dataset.num_filtered) == (1, 2)
    assert dataset.prompt(0, "u").text == LENGTHS[0]
    assert dataset.where(0).endswith("row 1")
    assert "2 of 3 prompts filtered" in caplog.text
    with pytest.raises(IndexError):
        dataset.row(1)


def test_filtering_everything_is_refused(
    write: Write, row: Row, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.parquet", [row(p) for p in LENGTHS[1:]])
    with pytest.raises(ValueError, match=r"0 rows after filtering: all 2 .* shortest has 9"):
        make(path, plain_tokenizer, max_prompt_length=8, truncation="filter")


@pytest.mark.parametrize(
    ("side", "texts"),
    [("left", ("aaaaaaaa", "bbbbbbb9", "cccc9012")), ("right", ("aaaaaaaa", "b" * 8, "c" * 8))],
)
def test_left_and_right_cut_ids_and_text_alike(
    write: Write, row: Row, plain_tokenizer: PreTrainedTokenizerFast, side: str, texts: tuple[str]
) -> None:
    path = write("a.parquet", [row(p) for p in LENGTHS])
    dataset = make(path, plain_tokenizer, max_prompt_length=8, truncation=side)
    prompts = [dataset.prompt(i, "u") for i in range(3)]
    assert tuple(p.text for p in prompts) == texts
    for prompt in prompts:
        assert plain_tokenizer.decode(prompt.token_ids) == prompt.text


def test_an_unknown_truncation_is_refused(
    write: Write, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=r"data\.truncation is 'middle', expected one of error"):
        make(write("a.jsonl", [row("x")]), tokenizer, truncation="middle")


def test_a_raw_file_without_prompts_is_refused(
    write: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.parquet", [{"question": "1+1?", "answer": "2"}])
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'prompt'.* question, answer"):
        make(path, tokenizer)
    raw = make(path, tokenizer, prompt_key="question")
    with pytest.raises(ValueError, match="has no column 'data_source'") as error:
        raw.check_rewards(KNOWN, has_custom=False)
    assert "reward.custom_reward_function.path" in str(error.value)
    raw.check_rewards(KNOWN, has_custom=True)
    assert raw.prompt(0, "u").ground_truth is None


def test_an_empty_file_is_refused(write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"0 rows in .*a\.jsonl"):
        make(write("a.jsonl", []), tokenizer)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("source", ["", "/data/gsm8k", None])
def test_an_unknown_source_is_refused_unless_a_custom_function_scores(
    write: Write, row: Row, tokenizer: PreTrainedTokenizerFast, suffix: str, source: str | None
) -> None:
    rows = [row("x"), row("y", data_source=source), row("z", data_source=source)]
    dataset = make(write(f"a.{suffix}", rows), tokenizer)
    with pytest.raises(ValueError, match="no reward function for") as error:
        dataset.check_rewards(KNOWN, has_custom=False)
    for part in (repr(source), f"a.{suffix} row 1, 2 rows", "gsm8k, reasoning_gym", "path=FILE"):
        assert part in str(error.value)
    dataset.check_rewards(KNOWN, has_custom=True)


def test_a_row_without_ground_truth_is_refused(
    write: Write, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = make(write("a.jsonl", [row("x"), row("y", reward_model=None)]), tokenizer)
    with pytest.raises(ValueError, match=r"row 1 has no reward_model\.ground_truth"):
        dataset.check_rewards(KNOWN, has_custom=False)


def test_rows_that_were_filtered_need_no_reward(
    write: Write, row: Row, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.jsonl", [row("x"), row("y" * 9, data_source="other")])
    dataset = make(path, plain_tokenizer, max_prompt_length=8, truncation="filter")
    dataset.check_rewards(KNOWN, has_custom=False)


def test_the_fingerprint_follows_the_rows_in_use(
    write: Write, row: Row, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.parquet", [row(p) for p in LENGTHS])
    prints = {
        make(path, plain_tokenizer, max_prompt_length=n, truncation="filter").fingerprint()
        for n in (8, 9, 12, 13)
    }
    assert len(prints) == 3
