from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.schema import DataConfig
from mrl.data import PromptStream, RLHFDataset, StreamState, validation_batches


@pytest.fixture
def dataset_of(
    write: Callable[..., Path],
    row: Callable[..., dict[str, Any]],
    plain_tokenizer: PreTrainedTokenizerFast,
) -> Callable[..., RLHFDataset]:
    def make(size: int, letter: str = "p") -> RLHFDataset:
        path = write(f"{letter}{size}.parquet", [row(f"{letter}{i}") for i in range(size)])
        return RLHFDataset([path], plain_tokenizer, DataConfig())

    return make


def take(stream: PromptStream, steps: int) -> list[tuple[str, ...]]:
    return [tuple(p.text for p in stream.next_batch()) for _ in range(steps)]


def through_json(state: StreamState) -> StreamState:
    return StreamState(**json.loads(json.dumps(asdict(state))))


def test_an_epoch_takes_each_row_once_in_an_order_of_its_own(
    dataset_of: Callable[..., RLHFDataset],
) -> None:
    stream = PromptStream(dataset_of(12), 4, shuffle=True, seed=1)
    epochs = [sum(take(stream, 3), ()) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"p{i}" for i in range(12))
    assert epochs[0] != epochs[1]
    again = PromptStream(dataset_of(12), 4, shuffle=True, seed=1)
    other = PromptStream(dataset_of(12), 4, shuffle=True, seed=2)
    assert sum(take(again, 3), ()) == epochs[0] != sum(take(other, 3), ())


def test_without_shuffling_the_order_is_the_files(dataset_of: Callable[..., RLHFDataset]) -> None:
    stream = PromptStream(dataset_of(5), 2, shuffle=False, seed=1)
    assert take(stream, 3) == [("p0", "p1"), ("p2", "p3"), ("p0", "p1")]


def test_a_uid_is_unique_to_row_and_epoch(dataset_of: Callable[..., RLHFDataset]) -> None:
    stream = PromptStream(dataset_of(4), 2, shuffle=True, seed=1)
    prompts = [p for _ in range(4) for p in stream.next_batch()]
    assert len({p.uid for p in prompts}) == 8
    assert {p.uid for p in prompts[4:]} == {f"1-{p.text[1:]}" for p in prompts[4:]}


def test_the_end_of_the_last_epoch_is_an_end(dataset_of: Callable[..., RLHFDataset]) -> None:
    stream = PromptStream(dataset_of(10), 4, shuffle=True, seed=1, total_epochs=2)
    assert stream.steps_per_epoch == 2
    assert len(list(stream)) == 4
    with pytest.raises(StopIteration):
        stream.next_batch()


def test_left_out_rows_are_told_once(
    dataset_of: Callable[..., RLHFDataset], caplog: pytest.LogCaptureFixture
) -> None:
    take(PromptStream(dataset_of(10), 4, shuffle=True, seed=1), 6)
    assert caplog.text.count("leaves out 2 of 10 rows") == 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4, 7])
def test_a_restored_stream_continues_exactly(
    dataset_of: Callable[..., RLHFDataset], shuffle: bool, stop: int
) -> None:
    """Stops at 3 steps, the end of an epoch, and around it included."""
    whole = take(PromptStream(dataset_of(14), 4, shuffle, seed=3), 10)
    stopped = PromptStream(dataset_of(14), 4, shuffle, seed=3)
    take(stopped, stop)
    resumed = PromptStream(dataset_of(14), 4, shuffle, seed=3)
    resumed.restore(through_json(stopped.state()))
    assert take(resumed, 10 - stop) == whole[stop:]


def test_a_resume_at_an_epochs_end_runs_the_epochs_that_remain(
    dataset_of: Callable[..., RLHFDataset],
) -> None:
    stream = PromptStream(dataset_of(12), 4, shuffle=True, seed=3, total_epochs=1)
    take(stream, 3)
    resumed = PromptStream(dataset_of(12), 4, shuffle=True, seed=3, total_epochs=2)
    resumed.restore(stream.state())
    assert len(list(resumed)) == 3


def test_the_state_counts_rows_of_the_epoch(dataset_of: Callable[..., RLHFDataset]) -> None:
    stream = PromptStream(dataset_of(1000), 128, shuffle=True, seed=3)
    take(stream, 8)
    assert (stream.state().epoch, stream.state().position) == (1, 128)


def test_another_dataset_is_told_and_starts_at_its_first_row(
    dataset_of: Callable[..., RLHFDataset],
) -> None:
    stream = PromptStream(dataset_of(12), 4, shuffle=True, seed=3)
    take(stream, 5)
    other = PromptStream(dataset_of(12, "q"), 4, shuffle=True, seed=3)
    with pytest.warns(UserWarning, match="the dataset differs"):
        other.restore(stream.state())
    assert take(other, 4) == take(PromptStream(dataset_of(12, "q"), 4, shuffle=True, seed=3), 4)


def test_the_checkpoints_seed_stays_in_force(dataset_of: Callable[..., RLHFDataset]) -> None:
    stream = PromptStream(dataset_of(12), 4, shuffle=True, seed=3)
    take(stream, 1)
    resumed = PromptStream(dataset_of(12), 4, shuffle=True, seed=4)
    with pytest.warns(UserWarning, match="seed 3"):
        resumed.restore(stream.state())
    assert take(resumed, 5) == take(stream, 5)


def test_fewer_rows_than_a_batch_are_refused(dataset_of: Callable[..., RLHFDataset]) -> None:
    with pytest.raises(ValueError, match="10 rows after filtering < train_batch_size 16"):
        PromptStream(dataset_of(10), 16, shuffle=True, seed=1)


@pytest.mark.parametrize(("size", "sizes"), [(2, [2, 2, 1]), (None, [5]), (9, [5])])
def test_validation_takes_every_row_once(
    dataset_of: Callable[..., RLHFDataset], size: int | None, sizes: list[int]
) -> None:
    batches = list(validation_batches(dataset_of(5), size))
    assert [len(batch) for batch in batches] == sizes
    assert [p.uid for batch in batches for p in batch] == [f"val-{i}" for i in range(5)]
