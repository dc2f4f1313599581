from __future__ import annotations

import itertools

import pytest

from mrl.config.stages import layers_of_chunk


def megatron_chunks(num_layers, pp, vpp, **split):
    """What Megatron-Core itself answers; None where it refuses or does not deal each layer once."""
    import torch

    # isort: split (before megatron: torch keeps its own pickling)
    import mrl.workers.megatron  # noqa: F401

    # isort: split
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from tests.resharding.real_megatron import SPLIT_KEYS

    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            pipeline_dtype=torch.float32,
            **{SPLIT_KEYS[key]: value for key, value in split.items()},
        )
        chunks = tuple(
            tuple(
                tuple(range(start, start + get_num_layers_to_build(config, chunk, stage)))
                for chunk in range(vpp)
                for start in [
                    get_transformer_layer_offset(config, chunk if vpp > 1 else None, stage)
                ]
            )
            for stage in range(pp)
        )
    except (ValueError, AssertionError, ZeroDivisionError):
        return None
    dealt = sorted(layer for stage in chunks for chunk in stage for layer in chunk)
    return chunks if dealt == list(range(num_layers)) else None


SPLITS = [
    {"first": first, "last": last} for first in (None, 1, 2, 4) for last in (None, 1, 2, 4)
] + [
    {"account_for_embedding": embedding, "account_for_loss": loss}
    for embedding, loss in ((True, False), (False, True), (True, True))
]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_stages_and_chunks_are_megatrons(pp):
    legal = 0
    for vpp, split, num_layers in itertools.product((1, 2, 3), SPLITS, range(1, 20)):
        if pp == 1 and split.get("first") and split.get("last"):
            continue  # Megatron takes the last stage's count and drops the rest
        theirs = megatron_chunks(num_layers, pp, vpp, **split)
        try:
            ours = layers_of_chunk(num_layers, pp, vpp, **split)
        except ValueError:
            ours = None
        assert ours == theirs, (num_layers, pp, vpp, split)
        legal += ours is not None
    assert legal > 20


def test_fourteen_layers_in_two_chunks_with_a_short_last_stage():
    assert layers_of_chunk(14, 4, 2, last=2) == (
        ((0, 1), (7, 8)),
        ((2, 3), (9, 10)),
        ((4, 5), (11, 12)),
        ((6,), (13,)),
    )


def test_embedding_and_loss_take_the_place_of_a_layer():
    chunks = layers_of_chunk(10, 2, 2, account_for_embedding=True, account_for_loss=True)
    assert chunks == (((0, 1), (5, 6, 7)), ((2, 3, 4), (8, 9)))


def test_what_cannot_be_split_is_refused_with_the_nearest_legal_numbers():
    with pytest.raises(ValueError, match=r"30 layers do not .* 4 stages \(nearest legal: pp 3\)"):
        layers_of_chunk(30, 4)
    with pytest.raises(ValueError, match=r"7 layers .* 2 stages .*pp 3, or first 1, or last 2\)"):
        layers_of_chunk(10, 4, first=2, last=1)
    with pytest.raises(
        ValueError, match=r"vpp 2 needs more than one pipeline stage .*pp 2, or vpp"
    ):
        layers_of_chunk(8, 1, 2)
    with pytest.raises(ValueError, match="exclude accounting"):
        layers_of_chunk(8, 4, first=2, account_for_loss=True)
    with pytest.raises(ValueError, match="pp is 0, below 1; last is -1, below 1"):
        layers_of_chunk(8, 0, last=-1)
