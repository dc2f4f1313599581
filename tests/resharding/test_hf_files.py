from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file

from mrl.resharding import MegatronLayout, ModelShape, hf_layout, plan
from mrl.resharding.hf import INDEX_FILE
from mrl.resharding.hf_files import HFWriter, load_into
from mrl.resharding.sync import run_together
from mrl.resharding.transports import InProcess, Mailbox
from tests.resharding.closed_form import like, megatron_params


def stored(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def load(folder, layout):
    """Fill garbage parameters of every rank from a checkpoint."""
    values = stored(folder)
    params = {r: like(megatron_params(layout, values, r)) for r in range(layout.world_size)}
    steps = plan(hf_layout(folder, layout.shape, layout.has_lm_head), layout.layout())
    for rank in range(layout.world_size):
        load_into(folder, steps, rank, params[rank])
    return params


def export(folder, source, layout, params, **kwargs):
    mailbox = Mailbox()
    writers = [
        HFWriter(folder, source, layout.layout(), rank, own, InProcess(rank, mailbox), **kwargs)
        for rank, own in params.items()
    ]
    for index in range(writers[0].rounds):
        rounds = [writer.round(index) for writer in writers]
        run_together([resharder for resharder, _ in rounds])
        for writer, (_, tensors) in zip(writers, rounds, strict=True):
            writer.save(index, tensors)
    for writer in writers:
        writer.write_rest()


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_survive_the_way_through_megatron_bit_for_bit(
    hf_folder, tmp_path, model_type, tied
):
    source = hf_folder(model_type, tied, kv_heads=2)
    shape = ModelShape.from_folder(source)
    values = stored(source)
    sizes = [(1, 1, 1), (2, 2, 1), (4, 1, 2), (1, 2, 2)]
    impls = itertools.cycle(["local", "transformer_engine"])
    for sizes_of_role, impl in zip(sizes, impls, strict=False):
        layout = MegatronLayout(shape, *sizes_of_role, padded_vocab=16, transformer_impl=impl)
        params = load(source, layout)
        for rank in range(layout.world_size):
            assert_same_bits(params[rank], megatron_params(layout, values, rank))
        out = tmp_path / f"out{sizes_of_role}"
        export(out, source, layout, params, max_shard_bytes=12_000)
        assert_same_bits(stored(out), values)
        assert (out / "config.json").read_text() == (source / "config.json").read_text()
        assert (out / "tokenizer.json").is_file()
        assert (out / INDEX_FILE).is_file()


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_opens_an_export(hf_folder, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    source = hf_folder(tied=tied, vocab=5)
    layout = MegatronLayout(ModelShape.from_folder(source), 2, 2, 1, padded_vocab=8)
    export(tmp_path / "out", source, layout, load(source, layout))
    ids = torch.tensor([[0, 4, 2, 1]])
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(folder)(ids).logits
            for folder in (source, tmp_path / "out")
        )
    assert before.shape[-1] == 5
    assert torch.equal(before, after)


def test_a_bfloat16_checkpoint_trained_in_float32_returns_unchanged(hf_folder, tmp_path):
    source = hf_folder(dtype="bfloat16")
    layout = MegatronLayout(ModelShape.from_folder(source), 2, 1, 1, 16, dtype="float32")
    values = {name: value.float() for name, value in stored(source).items()}
    params = {rank: like(megatron_params(layout, values, rank)) for rank in range(2)}
    steps = plan(hf_layout(source, layout.shape), layout.layout())
    for rank in range(2):
        load_into(source, steps, rank, params[rank])
        assert_same_bits(params[rank], megatron_params(layout, values, rank))
    export(tmp_path / "out", source, layout, params)
    assert_same_bits(stored(tmp_path / "out"), stored(source))


def test_an_export_in_another_dtype_says_so(hf_folder, tmp_path):
    source = hf_folder(dtype="bfloat16")
    layout = MegatronLayout(ModelShape.from_folder(source), 2, 1, 1, 16, dtype="float32")
    values = {name: value.float() for name, value in stored(source).items()}
    params = {rank: megatron_params(layout, values, rank) for rank in range(2)}
    export(tmp_path / "out", source, layout, params, dtype="float32")
    assert_same_bits(stored(tmp_path / "out"), values)
    assert ModelShape.from_folder(tmp_path / "out").dtype == "float32"


def test_both_holders_of_a_tied_embedding_are_filled(hf_folder):
    source = hf_folder(tied=True)
    params = load(source, MegatronLayout(ModelShape.from_folder(source), 1, 2, 1, 16))
    embedding = params[0]["embedding.word_embeddings.weight"]
    assert torch.equal(embedding, params[1]["output_layer.weight"])
    assert not embedding[13:].any()


def test_a_critic_loads_all_but_the_head(hf_folder):
    source = hf_folder()
    layout = MegatronLayout(ModelShape.from_folder(source), 2, 2, 1, 16, has_lm_head=False)
    for params in load(source, layout).values():
        assert "output_layer.weight" not in params
        assert not any(param.isnan().any() for param in params.values())


def test_a_parameter_without_a_mapping_is_refused_before_anything_is_written(hf_folder):
    source = hf_folder()
    layout = MegatronLayout(ModelShape.from_folder(source), 1, 1, 1, 16)
    params = like(megatron_params(layout, stored(source), 0))
    params["decoder.layers.0.self_attention.q_layernorm.weight"] = torch.zeros(8)
    with pytest.raises(ValueError, match=r"q_layernorm\.weight is not in the layout"):
        load_into(source, plan(hf_layout(source, layout.shape), layout.layout()), 0, params)
    assert params["decoder.final_layernorm.weight"].isnan().all()


def test_saved_weights_are_never_written_over(hf_folder):
    source = hf_folder()
    layout = MegatronLayout(ModelShape.from_folder(source), 1, 1, 1, 16)
    with pytest.raises(ValueError, match="already holds weights"):
        export(source, source, layout, load(source, layout))
