from __future__ import annotations

import itertools

import pytest

from mrl.resharding.layout import intersect, subtract, subtract_all, translate, volume


def cells(box):
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


RANGES = [(0, 4), (0, 2), (1, 3), (3, 4)]


@pytest.mark.parametrize("a", list(itertools.product(RANGES, RANGES)))
def test_box_algebra_agrees_with_sets_of_elements(a):
    for b in itertools.product(RANGES, RANGES):
        common = intersect(a, b)
        assert (cells(common) if common else set()) == cells(a) & cells(b)
        parts = list(subtract(a, b))
        assert sum(map(volume, parts)) == len(cells(a) - cells(b))  # so the parts are disjoint
        assert set().union(*map(cells, parts)) == cells(a) - cells(b)


def test_several_holes_leave_what_none_covers():
    box = ((0, 4), (0, 4))
    holes = [((0, 2), (0, 4)), ((1, 4), (0, 3))]
    assert subtract_all(box, holes) == [((2, 4), (3, 4))]


def test_translation_keeps_the_place_inside_the_piece():
    assert translate(((5, 6), (1, 2)), ((4, 8), (0, 2)), ((0, 4), (10, 12))) == ((1, 2), (11, 12))
