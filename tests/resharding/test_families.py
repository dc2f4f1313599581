from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from mrl.resharding.families import REGISTRY, ModelShape
from tests.resharding.families import CASES, tiny_config


def test_every_family_has_a_case():
    assert {model_type for model_type, _ in CASES.values()} == set(REGISTRY)


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_that_transformers_saves(case):
    config = tiny_config(case, num_hidden_layers=3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    saved = revert_weight_conversion(model, state)
    ours = ModelShape.from_hf(config.to_dict()).tensors("bfloat16")
    assert {name: info.shape for name, info in ours.items()} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
