"""Messages that cross a boundary: frozen dataclasses with ragged columns.

Shape legend: N rows (sequences), P prompt tokens of a row, R response tokens of a row,
T tokens of all rows end to end. Token columns that speak of the response (log-probs, values,
advantages, masks) have one entry for each *response* token, so their lengths are the rows' R.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.columns import AtEnd as AtEnd
from mrl.columns import ByRow as ByRow
from mrl.columns import Joined as Joined
from mrl.columns import Ragged as Ragged
from mrl.columns import Repeated as Repeated
from mrl.columns import from_bytes, to_bytes
from mrl.pickling import ByFields


class Numbers(Sequence[Any]):
    """An immutable row of numbers that reads and compares as a tuple and is stored as an array.

    A step has tens of millions of tokens: as Python objects they would take seconds to pickle.
    """

    __slots__ = ("array",)

    def __init__(self, numbers: Sequence[Any] | npt.NDArray[Any], dtype: type[np.generic]) -> None:
        """Store a copy of the numbers, or the array itself where it has the dtype already."""
        self.array: npt.NDArray[Any]
        # not `isinstance`: that of an abstract class takes longer than all else here
        self.array = np.asarray(numbers.array if type(numbers) is Numbers else numbers, dtype)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        found = self.array[index].tolist()
        return tuple(found) if isinstance(index, slice) else found

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | Numbers):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def as_array(numbers: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Give the array of `Numbers`, or an array itself; of anything else a copy."""
    # not `isinstance`: that of an abstract class takes longer than all else here
    return numbers.array if type(numbers) is Numbers else np.asarray(numbers)


_set = object.__setattr__  # a step makes tens of thousands of samples


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row, rendered and tokenised once; engine and trainer use the same ids."""

    uid: str  # unique to the row and the epoch: the key that groups samples
    token_ids: tuple[int, ...]  # [P]
    text: str  # the rendered prompt
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of the engine to one prompt."""

    uid: str
    prompt_ids: Sequence[int]  # [P]
    response_ids: Sequence[int]  # [R], the stop token included when one was sampled
    log_probs: Sequence[float]  # [R] float32, of the sampled tokens, temperature applied
    text: str  # decoded response without special tokens
    finish_reason: str  # "stop" or "length"
    policy_version: int
    # [P + R, layers with experts, chosen experts] integers, where the engine reports them
    routing: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        response_ids = Numbers(self.response_ids, np.int32)
        log_probs = Numbers(self.log_probs, np.float32)
        _set(self, "prompt_ids", Numbers(self.prompt_ids, np.int32))
        _set(self, "response_ids", response_ids)
        _set(self, "log_probs", log_probs)
        if len(log_probs.array) != len(response_ids.array):
            raise ValueError(
                f"{self.uid}: {len(self.log_probs)} log-probs for {len(self.response_ids)} tokens"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams(ByFields):
    """How the engine draws responses."""

    n: int
    temperature: float
    top_p: float
    top_k: int  # -1: all
    max_tokens: int
    seed: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Batching:
    """How a rank cuts its rows into micro-batches: by count, or by a token budget."""

    micro_batch_size: int | None = None  # rows
    max_tokens: int | None = None  # of one packed row

    def __post_init__(self) -> None:
        if (self.micro_batch_size is None) == (self.max_tokens is None):
            raise ValueError("Batching takes either micro_batch_size or max_tokens")


# The micro-batches of a data-parallel part: row indices of each, empty where rows run out.
Cuts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one sample; `value` is None when the sample is unscored."""

    value: float | None
    status: str  # "ok", "timeout" or "error"
    detail: str = ""
    extra: Mapping[str, float] | None = None  # further numbers that the function returned


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Prompts and responses as token rows; equal to themselves alone."""

    tokens: Ragged  # int32 or int64; a row is prompt then response, P + R tokens
    response_lengths: Tensor  # [N] int64, each at most the row's length

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, indices: Sequence[int]) -> Sequences:
        """Take rows by index, in that order."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return Sequences(self.tokens.select(indices), self.response_lengths[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the lengths as bytes."""
        return _unpickle_sequences, (self.tokens, to_bytes(self.response_lengths))


def _unpickle_sequences(tokens: Ragged, lengths: bytes) -> Sequences:
    return Sequences(tokens, from_bytes(lengths, torch.int64))


@dataclass(frozen=True, slots=True)
class PolicyBatch(ByFields):
    """What the actor needs for one optimizer step; columns have one entry a response token."""

    sequences: Sequences
    # float32; None: those of the policy as it is, which the update computes anyway
    old_log_probs: Ragged | None
    advantages: Ragged  # float32
    weights: Ragged  # float32: loss weight of each token, 0 where masked; sums are global
    ref_log_probs: Ragged | None  # float32, present when the loss has a KL term
    # [tokens, layers with experts, chosen experts], of prompts and responses: to be replayed
    routing: Ragged | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def select(self, indices: Sequence[int]) -> PolicyBatch:
        """Take rows by index, in that order."""
        return PolicyBatch(
            self.sequences.select(indices),
            self.old_log_probs.select(indices) if self.old_log_probs is not None else None,
            self.advantages.select(indices),
            self.weights.select(indices),
            self.ref_log_probs.select(indices) if self.ref_log_probs is not None else None,
            self.routing.select(indices) if self.routing is not None else None,
        )

    def to(self, device: torch.device) -> PolicyBatch:
        """Bring the response columns to a device."""
        return PolicyBatch(
            self.sequences,
            self.old_log_probs.to(device) if self.old_log_probs is not None else None,
            self.advantages.to(device),
            self.weights.to(device),
            self.ref_log_probs.to(device) if self.ref_log_probs is not None else None,
            self.routing,
        )


@dataclass(frozen=True, slots=True)
class ValueBatch(ByFields):
    """What the critic needs for one optimizer step; columns have one entry a response token."""

    sequences: Sequences
    old_values: Ragged  # float32
    returns: Ragged  # float32
    weights: Ragged  # float32, as in PolicyBatch

    def __len__(self) -> int:
        return len(self.sequences)

    def select(self, indices: Sequence[int]) -> ValueBatch:
        """Take rows by index, in that order."""
        return ValueBatch(
            self.sequences.select(indices),
            self.old_values.select(indices),
            self.returns.select(indices),
            self.weights.select(indices),
        )

    def to(self, device: torch.device) -> ValueBatch:
        """Bring the response columns to a device."""
        return ValueBatch(
            self.sequences,
            self.old_values.to(device),
            self.returns.to(device),
            self.weights.to(device),
        )
