"""The closed form against the modules that Megatron-Core itself builds, rank by rank."""

from __future__ import annotations

import re

import pytest

# isort: split (before megatron: torch keeps its own pickling)
import mrl.workers.megatron  # noqa: F401

# isort: split
from megatron.core import parallel_state

from mrl.config.stages import layers_of_chunk
from mrl.resharding import MegatronLayout
from mrl.resharding.coverage import padding_of
from mrl.resharding.layout import volume
from tests.resharding.families import tiny_model
from tests.resharding.real_megatron import build_chunks, megatron_rank, parameters_of

# name -> family case, numbers of the layout, what is uneven in the pipeline split
CASES: dict[str, tuple[str, dict[str, int], dict[str, object]]] = {
    "dense": ("llama", {"tp": 2, "pp": 2, "dp": 2}, {}),
    "qkv bias, cp": ("qwen2", {"tp": 2, "cp": 2, "dp": 2}, {}),
    "q and k norms, fewer kv heads than tp": ("qwen3", {"tp": 4, "pp": 2}, {}),
    "tied, one stage": ("llama-tied", {"tp": 2}, {}),
    "tied, three stages": ("llama-tied", {"tp": 2, "pp": 3}, {"last": 2}),
    "chunks": ("llama", {"tp": 2, "pp": 2, "vpp": 3}, {}),
    "tied, chunks": ("llama-tied", {"pp": 3, "vpp": 2}, {}),
    "first and last": ("llama", {"pp": 4}, {"first": 1, "last": 1}),
    "embedding and loss as layers": (
        "llama",
        {"pp": 2, "vpp": 2},
        {"account_for_embedding": True, "account_for_loss": True},
    ),
    "output norms": ("gemma2", {"tp": 2, "pp": 2}, {}),
    "output and q and k norms": ("gemma3_text", {"tp": 2, "pp": 2}, {}),
    "gate and up in one tensor": ("glm4", {"tp": 2, "pp": 2}, {}),
    "experts": ("mixtral", {"tp": 2, "pp": 2, "dp": 2}, {}),
    "ep": ("qwen3_moe", {"dp": 4, "pp": 2, "ep": 4}, {}),
    "ep, etp": ("qwen3_moe", {"tp": 2, "dp": 4, "ep": 2, "etp": 2}, {}),
    "ep beyond dp": ("mixtral", {"tp": 2, "cp": 2, "ep": 4, "etp": 1}, {}),
    "dense layers between, chunks": (
        "qwen3_moe-some",
        {"tp": 2, "pp": 2, "vpp": 3, "dp": 2, "ep": 2, "etp": 1},
        {},
    ),
    "shared experts, expert bias": ("glm4_moe-all", {"tp": 2, "pp": 2, "dp": 2, "ep": 2}, {}),
    "mla": ("deepseek_v3", {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 1}, {}),
    "mla, direct query": ("deepseek_v2-lite", {"tp": 2, "pp": 2, "dp": 1, "ep": 2, "etp": 1}, {}),
    "mla, uneven chunks": ("deepseek_v2", {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}, {"last": 2}),
}


def layout_of(case: str) -> MegatronLayout:
    family, sizes, split = CASES[case]
    shape = tiny_model(family)
    sizes = {"tp": 1, "pp": 1, "dp": 1, "padded_vocab": 16} | sizes
    chunks = layers_of_chunk(shape.num_layers, sizes["pp"], sizes.get("vpp", 1), **split)
    return MegatronLayout(shape, layers_of_chunk=chunks, **sizes)


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_of_every_rank_is_described(case):
    layout = layout_of(case)
    placed = layout.layout()
    seen_layers = set()
    for rank in range(layout.world_size):
        with megatron_rank(layout, rank):
            models = build_chunks(layout, CASES[case][2])
            # raises for names unknown or absent, boxes that do not fit and elements not covered
            padding_of(placed, rank, parameters_of(models))
            check_ranks(layout, rank)
            pieces = [piece for piece in placed.pieces if rank in piece.ranks]
            seen_layers |= check_layers(models, pieces)
            check_experts(models, pieces)
    assert seen_layers == set(range(layout.shape.num_layers))


def check_ranks(layout, rank):
    assert layout.coordinates(rank) == (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    if layout.shape.moe:
        assert layout.expert_dp == parallel_state.get_expert_data_parallel_world_size()


def check_layers(models, pieces):
    """Every local layer holds what its own number says."""
    layers = set()
    for chunk, model in enumerate(models):
        prefix = f"model{chunk}." if len(models) > 1 else ""
        for local, layer in enumerate(model.decoder.layers):
            layers.add(layer.layer_number - 1)
            mine = [p for p in pieces if p.param.startswith(f"{prefix}decoder.layers.{local}.")]
            assert mine
            for piece in mine:
                assert piece.tensor.startswith(f"model.layers.{layer.layer_number - 1}.")
    return layers


def check_experts(models, pieces):
    """Every local expert is the one that Megatron's layer says, cut by its expert-TP rank."""
    layers = [layer for model in models for layer in model.decoder.layers]
    indices = [layer.mlp.local_expert_indices for layer in layers if hasattr(layer.mlp, "experts")]
    for piece in pieces:
        if match := re.search(r"local_experts\.(\d+)\.linear_fc(\d)", piece.param):
            expert = int(re.search(r"experts\.(\d+)\.", piece.tensor)[1])
            assert all(expert == local[int(match[1])] for local in indices)
            start, stop = piece.box[int(match[2]) - 1]
            etp_rank = parallel_state.get_expert_tensor_parallel_rank()
            assert start == etp_rank * (stop - start)


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_hold_every_element_equally_often(case):
    layout = layout_of(case)
    held = {}
    for piece in layout.layout().pieces:
        elements = volume(piece.box) * len(piece.ranks)
        held[piece.tensor] = held.get(piece.tensor, 0) + elements
    tensors = layout.tensors()
    assert held.keys() == tensors.keys()
    for name, info in tensors.items():
        copies, rest = divmod(held[name], volume(tuple((0, n) for n in info.shape)))
        assert rest == 0
        assert copies >= layout.dp * layout.cp // layout.ep
