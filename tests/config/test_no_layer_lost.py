"""Whatever the pipeline, each layer is on one stage, or the config is refused with the numbers."""

from __future__ import annotations

import itertools

import pytest

from mrl.config.stages import layers_of_chunk


@pytest.mark.parametrize("layers", [1, 7, 30, 80])
def test_each_layer_is_on_one_stage_or_the_split_is_refused(layers: int) -> None:
    accepted = 0
    ends = [(None, None), (1, None), (None, 3), (2, 4), (layers, None), (None, layers - 1)]
    accounts = list(itertools.product((False, True), repeat=2))
    for pp, vpp in itertools.product((1, 2, 3, 4, 16), (1, 2, 4)):
        for (first, last), (embedding, loss) in itertools.product(ends, accounts):
            try:
                chunks = layers_of_chunk(layers, pp, vpp, first, last, embedding, loss)
            except ValueError as error:
                assert "pipeline split: " in str(error)
                continue
            assert len(chunks) == pp and {len(stage) for stage in chunks} == {vpp}
            dealt = sorted(layer for stage in chunks for chunk in stage for layer in chunk)
            assert dealt == list(range(layers)), (pp, vpp, first, last, embedding, loss)
            accepted += 1
    assert accepted


@pytest.mark.parametrize("last", [1, 27, 29, 56])
def test_one_stage_has_all_layers_and_no_other_number(last: int) -> None:
    for ends in ({"last": last}, {"first": last}, {"first": last, "last": last}):
        with pytest.raises(ValueError, match="pipeline split"):
            layers_of_chunk(28, 1, **ends)
    assert layers_of_chunk(28, 1, last=28) == ((tuple(range(28)),),)


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(30, 4, 1), (80, 16, 2), (31, 2, 1), (12, 8, 1)])
def test_an_even_split_that_would_lose_layers_names_the_numbers(
    layers: int, pp: int, vpp: int
) -> None:
    with pytest.raises(ValueError, match=rf"\b{layers}\b.*\b{pp}\b|\b{layers // pp}\b.*\b{vpp}\b"):
        layers_of_chunk(layers, pp, vpp)
