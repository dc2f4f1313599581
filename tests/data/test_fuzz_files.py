"""Odd and damaged data files: every row is read as it was written, or refused by file and row."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.schema import DataConfig
from mrl.data.dataset import RLHFDataset
from mrl.data.files import RowFiles

Row = Callable[..., dict[str, Any]]
FEW, MANY = 150, 6000
TEXTS = ["x", " ", "\0", "\ufeff", "\u2028", "\U0001f600", "a" * 9000, "\ud800", "\udc00\ud800"]


def read_all(path: Path, tokenizer: PreTrainedTokenizerFast) -> RLHFDataset:
    """Read a file as a run does before its first step, and all of its prompts."""
    dataset = RLHFDataset([path], tokenizer, DataConfig(max_prompt_length=20000))
    dataset.check_rewards({"gsm8k"}, has_custom=False)
    for i in range(len(dataset)):
        dataset.prompt(i, uid=str(i))
    return dataset


def is_read(path: Path, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Tell whether a file is read; one that is refused is named."""
    try:
        read_all(path, tokenizer)
    except ValueError as error:
        assert str(path) in str(error), error
        return False
    return True


def any_value(rng: random.Random, depth: int = 0) -> Any:
    plain = [None, True, 0, -1, 2**70, 1.5, float("inf"), "", rng.choice(TEXTS)]
    if depth > 3 or rng.random() < 0.5:
        return rng.choice(plain)
    items = [any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if rng.random() < 0.5:
        return items
    names = ["role", "content", "type", "ground_truth", "text", "tool_calls"]
    return {rng.choice(names): item for item in items}


def any_line(rng: random.Random, row: Row) -> bytes:
    """Write a row with an odd value, as JSON or as damaged JSON."""
    values = row("hello")
    for key in rng.sample(sorted(values), k=rng.randrange(3)):
        values[key] = any_value(rng)
    if rng.random() < 0.3:
        values["prompt"] = [{"role": "user", "content": any_value(rng)}]
    line = json.dumps(values, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    damage = rng.randrange(8)
    if damage == 0:
        line = line[: rng.randrange(len(line))]
    elif damage == 1:
        place = rng.randrange(len(line))
        line = line[:place] + rng.randbytes(2).replace(b"\n", b"") + line[place:]
    elif damage == 2:
        line = b"\xef\xbb\xbf" + line
    return line


def fuzz_lines(seed: int, count: int, path: Path, row: Row, t: PreTrainedTokenizerFast) -> int:
    rng, read = random.Random(seed), 0
    for _ in range(count):
        path.write_bytes(b"\n".join(any_line(rng, row) for _ in range(rng.randint(1, 2))))
        read += is_read(path, t)
    return read


def test_any_line_is_read_or_refused_by_file(
    tmp_path: Path, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert 0 < fuzz_lines(0, FEW, tmp_path / "a.jsonl", row, tokenizer) < FEW


@pytest.mark.slow
def test_many_lines_are_read_or_refused_by_file(
    tmp_path: Path, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert 0 < fuzz_lines(1, MANY, tmp_path / "a.jsonl", row, tokenizer) < MANY


def damaged(rng: random.Random, whole: bytes) -> bytes:
    if rng.random() < 0.3:
        return whole[: rng.randrange(len(whole))]
    data = bytearray(whole)
    for _ in range(rng.choice([1, 3, 30])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def fuzz_parquet(seed: int, count: int, path: Path, row: Row, t: PreTrainedTokenizerFast) -> int:
    rng, read = random.Random(seed), 0
    rows = [row([{"role": "user", "content": f"question {i}"}]) for i in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    whole = path.read_bytes()
    for number in range(count):
        path = path.with_name(f"{number}.parquet")  # the old one may still be mapped
        path.write_bytes(damaged(rng, whole))
        read += is_read(path, t)
        path.unlink()
    return read


def test_damaged_parquet_is_refused_by_file(
    tmp_path: Path, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert fuzz_parquet(0, FEW, tmp_path / "a.parquet", row, tokenizer) < FEW


@pytest.mark.slow
def test_much_damaged_parquet_is_refused_by_file(
    tmp_path: Path, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert fuzz_parquet(1, MANY, tmp_path / "a.parquet", row, tokenizer) < MANY


def test_a_row_group_of_other_rows_than_its_metadata_count_is_refused(
    tmp_path: Path, row: Row
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row([{"role": "user", "content": "x"}])] * 3), path)
    rows = RowFiles(path)
    rows.readers[0].counts = [4]
    for read in (
        lambda: rows.row(0),
        lambda: list(rows.scan()),
        lambda: list(rows.scan(["data_source"])),
    ):
        with pytest.raises(ValueError, match=r"a\.parquet .*group 0: it holds 3 rows, .* count 4"):
            read()


MESSAGE = pa.struct(
    [("role", pa.string()), ("content", pa.large_string()), ("tool_calls", pa.list_(pa.int64()))]
)
TALK = [{"role": "user", "content": "x", "tool_calls": None}]
READ = {
    "large strings": pa.array(["x", "y"], pa.large_string()),
    "a dictionary": pa.array(["x", "y"]).dictionary_encode(),
    "large lists": pa.array([TALK, TALK], pa.large_list(MESSAGE)),
    "lists of one length": pa.array([TALK, TALK], pa.list_(MESSAGE, 1)),
    "null in a message": pa.array([TALK, [{"role": "user", "content": "y"}]], pa.list_(MESSAGE)),
}
REFUSED = {
    "null": pa.array(["x", None]),
    "nothing but null": pa.nulls(2),
    "a null message": pa.array([TALK, [None]], pa.list_(MESSAGE)),
    "bytes": pa.array([b"x", b"y"]),
    "numbers": pa.array([1, 2]),
    "times": pa.array([1, 2], pa.timestamp("us", "UTC")),
    "maps": pa.array([[("role", "user")]] * 2, pa.map_(pa.string(), pa.string())),
    "bytes said to be text": pa.Array.from_buffers(
        pa.string(), 2, pa.array([b"x", b"\xff\xfe"]).buffers()
    ),
}


def table_with(prompts: pa.Array) -> pa.Table:
    truth = [{"style": "rule", "ground_truth": "1"}] * len(prompts)
    sources = ["gsm8k"] * len(prompts)
    return pa.table({"prompt": prompts, "data_source": sources, "reward_model": truth})


@pytest.mark.parametrize("kind", READ)
def test_prompts_of_any_string_and_list_type_are_read(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    pq.write_table(table_with(READ[kind]), tmp_path / "a.parquet")
    prompt = read_all(tmp_path / "a.parquet", tokenizer).prompt(0, uid="")
    assert prompt.text == "<u>x<a>" and prompt.ground_truth == "1"


@pytest.mark.parametrize("kind", REFUSED)
def test_prompts_of_another_type_are_refused_by_file(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    pq.write_table(table_with(REFUSED[kind]), tmp_path / "a.parquet")
    assert not is_read(tmp_path / "a.parquet", tokenizer)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_read_or_refused_by_file(unit: str, tmp_path: Path) -> None:
    for number in (0, 1_700_000_000, 2**52):
        table = pa.table({"when": pa.array([number], pa.timestamp(unit))})
        pq.write_table(table, tmp_path / f"{number}.parquet")
        try:
            stored = RowFiles([tmp_path / f"{number}.parquet"]).row(0)
        except ValueError as error:
            assert f"{number}.parquet" in str(error) and number == 2**52
        else:
            assert stored["when"].year >= 1970


def test_no_rows_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    pq.write_table(table_with(pa.array([], pa.string())), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(b"\n \n\r\n")
    for name in ("a.parquet", "a.jsonl"):
        with pytest.raises(ValueError, match="0 rows"):
            read_all(tmp_path / name, tokenizer)


def test_a_row_of_many_megabytes_is_read(tmp_path: Path) -> None:
    text = "\u00e9" * (2 << 20)
    pq.write_table(pa.table({"prompt": [text]}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False), "utf-8")
    for name in ("a.parquet", "a.jsonl"):
        assert RowFiles([tmp_path / name]).row(0)["prompt"] == text


def test_nothing_of_a_row_is_lost_silently(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """One of two values of a name would be."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "prompt": "y"}')
    columns = [pa.array(["x"]), pa.array(["y"])]
    twice = pa.Table.from_arrays(columns, names=["prompt", "prompt"])
    pq.write_table(twice, tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(ValueError, match=r"a\.(jsonl|parquet).*'prompt'"):
            read_all(tmp_path / name, tokenizer)


def test_a_mark_at_the_start_of_the_file_is_no_part_of_it(
    tmp_path: Path, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row("x")), "utf-8-sig")
    assert read_all(tmp_path / "a.jsonl", tokenizer).prompt(0, uid="").text == "<u>x<a>"


ODD_ROWS = {
    "data_source": [3, ["gsm8k"], {"a": 1}, "\ud800"],
    "reward_model": ["rule", [1], 3, True],
    "extra_info": ["x", [1], 3],
    "prompt": ["\ud800", 3, [3], [{"role": 1}], {"role": "user"}, [{"role": "user", "content": 3}]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in ODD_ROWS.items() for value in values]
)
def test_a_value_of_another_kind_is_refused_by_its_row(
    key: str, value: object, tmp_path: Path, row: Row, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [row("x"), row("y") | {key: value}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(ValueError, match=r"a\.jsonl row 1"):
        read_all(tmp_path / "a.jsonl", tokenizer)
