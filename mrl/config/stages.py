"""Which layers a pipeline stage and its model chunks hold, as Megatron-Core deals them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

Chunks = tuple[tuple[tuple[int, ...], ...], ...]  # [pp][vpp] -> global layer indices


def layers_of_chunk(
    num_layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
) -> Chunks:
    """List the global layer indices of each chunk of each stage.

    `first` and `last` are the layers of the first and the last stage where these differ from
    the others'; accounting lets the embedding or the loss take the place of a layer. Chunk 0 of
    all stages comes before chunk 1 of any (megatron-core 0.19 `get_num_layers_to_build` and
    `get_transformer_layer_offset`). Raises ValueError, with the nearest legal values, for what
    Megatron cannot split.
    """
    split = _Split(num_layers, pp, vpp, first, last, account_for_embedding, account_for_loss)
    if problems := list(split.problems()):
        raise ValueError(f"pipeline split: {'; '.join(problems)}{split.nearest_legal()}")
    counts = split.counts()
    chunks: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    start = 0
    for chunk in range(vpp):
        for stage in range(pp):
            stop = start + counts[stage][chunk]
            chunks[stage].append(tuple(range(start, stop)))
            start = stop
    return tuple(tuple(stage) for stage in chunks)


@dataclass(frozen=True, slots=True)
class _Split:
    num_layers: int
    pp: int
    vpp: int
    first: int | None
    last: int | None
    account_for_embedding: bool
    account_for_loss: bool

    @property
    def _given(self) -> tuple[int, ...]:
        return tuple(count for count in (self.first, self.last) if count is not None)

    @property
    def _rest(self) -> tuple[int, int]:
        """Count the layers, embedding and loss included, and stages that `_given` leaves."""
        slots = self.num_layers + self.account_for_embedding + self.account_for_loss
        return slots - sum(self._given), self.pp - len(self._given)

    def problems(self) -> Iterator[str]:
        sizes = {name: getattr(self, name) for name in ("num_layers", "pp", "vpp", "first", "last")}
        small = [f"{name} is {n}, below 1" for name, n in sizes.items() if n is not None and n < 1]
        if small:
            yield from small
            return
        if self.vpp > 1 and self.pp == 1:
            yield f"vpp {self.vpp} needs more than one pipeline stage"
        if self._given and (self.account_for_embedding or self.account_for_loss):
            yield "first and last exclude accounting for the embedding or the loss"
        layers, stages = self._rest
        if self._given and stages >= 0 and bool(layers) != bool(stages):
            yield f"first and last leave {layers} layers for {stages} other stages"
            return
        if stages < 0 or layers < 0 or (stages and layers % stages):
            yield f"{layers} layers do not divide over {stages} stages"
            return
        if self.vpp > 1 and not stages:
            yield f"vpp {self.vpp} needs a stage between first and last"  # Megatron divides by it
        for count in sorted({*self._given, *((layers // stages,) if stages else ())}):
            if count % self.vpp:
                yield f"the {count} layers of a stage do not divide over vpp {self.vpp} chunks"

    def _with(self, name: str, value: int) -> _Split:
        change: dict[str, Any] = {name: value}
        return replace(self, **change)

    def nearest_legal(self) -> str:
        """Name, for each number, the nearest value that is legal with the others as they are."""
        found = []
        for name in ("pp", "vpp", "first", "last"):
            value = getattr(self, name)
            legal = [
                n
                for n in range(1, max(self.num_layers, 1) + 1)
                if value is not None and not list(self._with(name, n).problems())
            ]
            if legal:
                found.append(f"{name} {min(legal, key=lambda n: abs(n - value))}")
        return f" (nearest legal: {', or '.join(found)})" if found else ""

    def counts(self) -> list[list[int]]:
        """Count the layers of each chunk of each stage."""
        layers, stages = self._rest
        per_stage = [layers // stages if stages else 0] * self.pp
        if self.first is not None:
            per_stage[0] = self.first
        if self.last is not None:
            per_stage[-1] = self.last
        counts = [[count // self.vpp] * self.vpp for count in per_stage]
        counts[0][0] -= self.account_for_embedding
        counts[-1][-1] -= self.account_for_loss
        return counts
