from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mrl.tracking.rollouts import rollout_rows
from mrl.tracking.tokens import EACH, HEAD, TAIL, TokenColumns, dump_tokens, ends, pieces
from mrl.types import Prompt, Ragged, Repeated, Sample, Score


def decode(ids: object) -> str:
    """Decode bytes: a character may take several tokens."""
    assert isinstance(ids, list)
    return bytes(ids).decode("utf-8", "replace")


def rows_of(scores: list[float | None], length: int = 3) -> list:
    prompts = {str(i // 2): Prompt(str(i // 2), (1,), "ask", "sums", "7", {}) for i in range(99)}
    samples = [
        Sample(str(i // 2), (1,), [65 + i] * length, [-0.5 - i] * length, "text", "stop", 1)
        for i in range(len(scores))
    ]
    return rollout_rows(
        4, prompts, samples, [Score(s, "ok" if s is not None else "error") for s in scores]
    )


def columns_of(rows: list) -> TokenColumns:
    lengths = torch.tensor([len(row.sample.response_ids) for row in rows])
    engine = Ragged.from_rows([torch.tensor(list(row.sample.log_probs)) for row in rows])
    advantages = Repeated(torch.arange(len(rows), dtype=torch.float32), lengths)
    return TokenColumns(engine, engine.with_values(engine.values - 0.25), advantages)


def test_a_sample_carries_its_own_columns(tmp_path: Path) -> None:
    rows = rows_of([0.0, 1.0, 0.5, None, 0.25, 0.75])
    path = dump_tokens(tmp_path, 4, rows, columns_of(rows), decode)
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "4.jsonl" and len(told) == 2 * EACH
    for row in told:
        i = int(row["advantages"][0])
        assert row["pieces"] == [chr(65 + i)] * 3 and row["uid"] == str(i // 2)
        assert row["rollout_log_probs"] == [-0.5 - i] * 3
        assert row["old_log_probs"] == [-0.75 - i] * 3
        assert row["score"] == rows[i].score.value


def test_best_and_worst_are_of_different_prompts_and_scored() -> None:
    rows = rows_of([0.9, 1.0, 0.5, None, 0.0, 0.1])
    assert list(ends(rows)) == [("best", 1), ("best", 2), ("worst", 4), ("worst", 0)]


@pytest.mark.parametrize("scores", [[], [None, None], [0.5], [0.5, 0.5]])
def test_few_samples_are_shown_once(scores: list[float | None], tmp_path: Path) -> None:
    rows = rows_of(scores)
    indices = [i for _, i in ends(rows)]
    assert len(set(indices)) == len(indices) <= len(scores)


def test_a_long_response_keeps_its_ends(tmp_path: Path) -> None:
    rows = rows_of([1.0], length=HEAD + TAIL + 7)
    path = dump_tokens(tmp_path, 1, rows, columns_of(rows), decode)
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["left_out"] == 7 and row["left_out_after"] == HEAD
    assert {len(row[n]) for n in ("pieces", "rollout_log_probs", "advantages")} == {HEAD + TAIL}


def test_without_the_trainers_log_probs_there_are_none(tmp_path: Path) -> None:
    rows = rows_of([1.0])
    full = columns_of(rows)
    columns = TokenColumns(full.rollout_log_probs, None, full.advantages)
    (line,) = dump_tokens(tmp_path, 1, rows, columns, decode).read_text().splitlines()
    assert json.loads(line)["old_log_probs"] is None


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    rows = rows_of([1.0])
    columns = TokenColumns(Ragged.from_rows([torch.tensor([0.0, float("nan"), -1.0])]), None,
                           columns_of(rows).advantages)  # fmt: skip
    (line,) = dump_tokens(tmp_path, 1, rows, columns, decode).read_text().splitlines()
    assert json.loads(line)["rollout_log_probs"] == [0.0, None, -1.0]


def test_pieces_join_to_the_text_of_all_tokens() -> None:
    text = "caf\u00e9 \u6570 = 7"
    told = pieces(list(text.encode()), decode)
    assert "".join(told) == text and len(told) == len(text.encode())


def test_a_leading_space_is_kept() -> None:
    words = ["two", "words", "here"]
    told = pieces([0, 1, 2], lambda ids: " ".join(words[i] for i in ids))
    assert told == ["two", " words", " here"]
