from __future__ import annotations

import pytest
from transformers import LlamaConfig, Qwen2Config

from mrl.resharding import ModelShape
from mrl.resharding.families import MLAShape, MoEShape
from tests.resharding.closed_form import tiny_shape
from tests.resharding.families import tiny_config, tiny_model


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mamba' is not supported .*glm4, .*llama, "):
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


def test_experts_are_read_under_each_familys_keys():
    assert tiny_model("deepseek_v3").moe == MoEShape(
        num_experts=4,
        top_k=2,
        ffn_size=6,
        shared_ffn_size=12,
        layers=(1, 2, 3, 4, 5),
        score_function="sigmoid",
        norm_top_k=True,
        scaling_factor=2.5,
        num_groups=2,
        top_k_groups=1,
    )
    mixtral = tiny_model("mixtral").moe
    assert (mixtral.num_experts, mixtral.ffn_size, mixtral.shared_ffn_size) == (4, 24, 0)
    assert tiny_model("qwen3_moe-some").moe.layers == (0, 2, 3, 4, 5)
    assert tiny_model("qwen3_moe-step").moe.layers == (1, 3, 5)
    assert tiny_model("qwen3").moe is None


def test_both_spellings_of_the_number_of_experts_mean_the_same():
    config = tiny_config("qwen3_moe").to_dict()
    published = {key: value for key, value in config.items() if key != "num_local_experts"}
    assert ModelShape.from_hf(published | {"num_experts": 4}) == ModelShape.from_hf(config)
    with pytest.raises(ValueError, match="missing num_experts or num_local_experts"):
        ModelShape.from_hf(published)


def test_latent_attention_has_a_key_for_every_query_head():
    shape = tiny_model("deepseek_v2-lite")
    assert shape.mla == MLAShape(None, 16, 8, 4, 6)
    assert (shape.num_kv_heads, shape.head_dim) == (4, 12)


def test_settings_without_which_the_engine_builds_another_model_are_asked_for():
    config = tiny_config("deepseek_v3").to_dict()
    with pytest.raises(ValueError, match=r"scoring_func is None, vLLM .* 'sigmoid' only"):
        ModelShape.from_hf({key: value for key, value in config.items() if key != "scoring_func"})


def test_keys_that_transformers_leaves_out_have_their_familys_meaning():
    config = tiny_config("gemma2").to_dict()
    del config["tie_word_embeddings"]  # left out where it is true, the oldest default
    assert ModelShape.from_hf(config).tie_word_embeddings
    assert not tiny_model("llama").tie_word_embeddings


def test_a_model_with_two_kinds_of_attention_gives_the_rope_of_the_full_one():
    assert tiny_model("gemma3_text").rope_theta == 1e6


def test_layers_for_multi_token_prediction_are_not_the_models():
    shape = tiny_model("deepseek_v3")
    assert shape.ignores("model.layers.6.eh_proj.weight")
    assert shape.ignores("model.layers.5.self_attn.rotary_emb.inv_freq")
    assert not shape.ignores("model.layers.5.self_attn.o_proj.weight")
