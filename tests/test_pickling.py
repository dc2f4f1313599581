"""A message arrives with every field that it left with."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest

from mrl.pickling import ByFields


@dataclass(frozen=True, slots=True)
class Plain(ByFields):
    first: int
    second: str = "two"


@dataclass(frozen=True, slots=True)
class Longer(Plain):
    third: tuple[int, ...] = ()


@pytest.mark.parametrize("message", [Plain(1), Plain(1, "b"), Longer(1, "b", (3, 4))])
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_all_fields_arrive_also_those_of_a_base(message: Plain, protocol: int) -> None:
    found = pickle.loads(pickle.dumps(message, protocol))
    assert found == message
    assert type(found) is type(message)
