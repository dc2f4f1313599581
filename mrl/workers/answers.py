"""What an engine answers, on its way to the controller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mrl.pickling import ByFields
from mrl.types import Ragged, Sample, as_array


class SampleGroups(list[tuple[Sample, ...]]):
    """The samples of some prompts: a list that is pickled as a few columns.

    A step has tens of thousands of samples, whose arrays and texts one by one take longer to
    pickle than all their bytes to copy.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_groups, (_Columns.of(self),)


@dataclass(frozen=True, slots=True)
class _Column(ByFields):
    """Rows end to end."""

    values: npt.NDArray[Any]  # [T]
    stops: npt.NDArray[np.int64]  # [N]

    @staticmethod
    def of(rows: Sequence[npt.NDArray[Any]]) -> _Column:
        return _Column(np.concatenate(rows), np.cumsum([len(row) for row in rows]))

    def rows(self) -> Iterator[npt.NDArray[Any]]:
        """Split into views."""
        values = self.values
        return (values[start:stop] for start, stop in pairwise([0, *self.stops.tolist()]))


@dataclass(frozen=True, slots=True)
class _Columns(ByFields):
    """The fields of the samples, one column each."""

    group_sizes: list[int]
    uids: list[str]
    prompt_ids: _Column
    response_ids: _Column
    log_probs: _Column
    texts: _Column  # UTF-8
    finish_reasons: list[str]
    policy_versions: list[int]
    routing: Ragged | list[Tensor | None]

    @staticmethod
    def of(groups: Iterable[tuple[Sample, ...]]) -> _Columns:
        """Take the fields apart."""
        sizes: list[int] = []
        samples: list[Sample] = []
        for group in groups:
            sizes.append(len(group))
            samples += group
        if not samples:
            return _Columns(sizes, [], _NOTHING, _NOTHING, _NOTHING, _NOTHING, [], [], [])
        texts = [np.frombuffer(s.text.encode("utf-8", _ERRORS), np.uint8) for s in samples]
        routing = [s.routing for s in samples]
        known = [tensor for tensor in routing if tensor is not None]
        return _Columns(
            sizes,
            [s.uid for s in samples],
            _Column.of([as_array(s.prompt_ids) for s in samples]),
            _Column.of([as_array(s.response_ids) for s in samples]),
            _Column.of([as_array(s.log_probs) for s in samples]),
            _Column.of(texts),
            [s.finish_reason for s in samples],
            [s.policy_version for s in samples],
            Ragged.from_rows(known) if len(known) == len(samples) else routing,
        )

    def samples(self) -> Iterator[Sample]:
        """Put the fields together."""
        routing = self.routing.rows() if isinstance(self.routing, Ragged) else self.routing
        texts = (str(row.data, "utf-8", _ERRORS) for row in self.texts.rows())
        return map(
            Sample,
            self.uids,
            self.prompt_ids.rows(),
            self.response_ids.rows(),
            self.log_probs.rows(),
            texts,
            self.finish_reasons,
            self.policy_versions,
            routing,
        )


_ERRORS = "surrogatepass"  # as pickle itself
_NOTHING = _Column(np.empty(0, np.uint8), np.empty(0, np.int64))


def _unpickle_groups(columns: _Columns) -> SampleGroups:
    samples = columns.samples()
    return SampleGroups(tuple(islice(samples, size)) for size in columns.group_sizes)
