from __future__ import annotations

import pytest
from transformers import LlamaConfig, Qwen2Config

from mrl.resharding import ModelShape
from tests.resharding.closed_form import tiny_shape


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mamba' is not supported \(llama, qwen2\)"):
        ModelShape.from_hf({"model_type": "mamba"})


def test_every_violation_is_reported_at_once():
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 4,
        "vocab_size": 8,
        "max_position_embeddings": 8,
        "attention_bias": True,
        "dtype": "int8",
    }
    with pytest.raises(ValueError) as error:
        ModelShape.from_hf(config)
    for part in (
        "intermediate_size",
        "attention_bias",
        "int8",
        "multiple of num_key_value_heads 4",
    ):
        assert part in str(error.value)


def test_sliding_window_is_refused_only_when_used():
    tiny_shape(use_sliding_window=False)
    with pytest.raises(ValueError, match="use_sliding_window"):
        tiny_shape(use_sliding_window=True)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "llama3", "factor": 8.0}])
def test_both_spellings_of_rope_mean_the_same(scaling):
    old = tiny_shape(rope_theta=5e5, rope_scaling=scaling)
    new = tiny_shape(rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": 5e5})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == scaling


@pytest.mark.parametrize("config_class", [Qwen2Config, LlamaConfig])
def test_configs_written_by_transformers_are_read(config_class):
    config = config_class(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    ).to_dict()
    shape = ModelShape.from_hf(config)
    assert (shape.head_dim, shape.num_layers, shape.rope_theta) == (16, 3, 10000.0)
    assert shape.qkv_bias == (config["model_type"] == "qwen2")
