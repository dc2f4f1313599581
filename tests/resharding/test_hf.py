from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.resharding import FILE_RANK, MegatronLayout, ModelShape, hf_layout
from mrl.resharding.gate import check_written_once
from mrl.resharding.hf import INDEX_FILE, plan_shards, read_headers, shard_layout
from tests.resharding.closed_form import tiny_shape


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_transformers_has_the_familys_tensors(hf_folder, model_type, tied):
    folder = hf_folder(model_type, tied)
    shape = ModelShape.from_folder(folder)
    layout = hf_layout(folder, shape)
    assert layout.tensors == shape.tensors()
    assert layout.ranks == (FILE_RANK,)
    assert set(read_headers(folder)) == set(shape.tensors())
    assert ("lm_head.weight" in layout.tensors) == (not tied)


def test_sharded_checkpoints_are_read_through_their_index(hf_folder):
    single, sharded = hf_folder(name="a"), hf_folder(name="b", max_shard_size="10KB")
    assert (sharded / INDEX_FILE).is_file()
    shape = ModelShape.from_folder(sharded)
    assert hf_layout(sharded, shape).tensors == hf_layout(single, shape).tensors


def test_missing_unknown_and_misshapen_tensors_are_all_named(hf_folder):
    folder = hf_folder()

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.adapter"] = torch.zeros(2)
        tensors["model.layers.0.rotary_emb.inv_freq"] = torch.zeros(2)  # old files have it
        tensors["lm_head.weight"] = torch.zeros(16, 32)

    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        hf_layout(folder, ModelShape.from_folder(folder))
    message = str(error.value)
    assert "missing model.norm.weight" in message
    assert "unknown tensor model.layers.0.adapter" in message
    assert "lm_head.weight has shape (16, 32), config.json says (13, 32)" in message
    assert "inv_freq" not in message


def test_a_tied_checkpoint_may_repeat_its_embedding_but_not_contradict_it(hf_folder):
    folder = hf_folder(tied=True)
    shape = ModelShape.from_folder(folder)

    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, repeat)
    assert "lm_head.weight" not in hf_layout(folder, shape).tensors
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][3].add_(1))
    with pytest.raises(ValueError, match="tie_word_embeddings=true, but the head differs"):
        hf_layout(folder, shape)


def test_a_critic_leaves_the_head_in_the_file(hf_folder):
    folder = hf_folder()
    shape = ModelShape.from_folder(folder)
    critic = MegatronLayout(shape, 1, 1, 1, 16, has_lm_head=False)
    assert hf_layout(folder, shape, has_lm_head=False).tensors == critic.tensors()


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model weights"):
        read_headers(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelShape.from_folder(tmp_path)


def test_damaged_files_and_indices_are_named(hf_folder):
    folder = hf_folder(max_shard_size="10KB")
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["model.extra"] = index["weight_map"]["model.norm.weight"]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names model\.extra, which no file holds"):
        read_headers(folder)
    first = sorted(folder.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{first.name}: damaged"):
        read_headers(folder)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"{first.name}: named by"):
        read_headers(folder)


def test_files_go_evenly_to_the_ranks_that_hold_them():
    shape = tiny_shape()
    layout = MegatronLayout(shape, 2, 4, 1, 16).layout()
    total = sum(info.num_bytes for info in shape.tensors().values())
    shards = plan_shards(layout, layout.tensors, max_shard_bytes=total // 6)
    assert all(
        sum(layout.tensors[name].num_bytes for name in shard.tensors) <= total // 6
        for shard in shards
    )
    counts = [sum(shard.rank == rank for shard in shards) for rank in range(8)]
    assert max(counts) - min(counts) <= 1
    assert [name for shard in shards for name in shard.tensors] == list(layout.tensors)
    assert shards[0].rank in (0, 1)  # the first stage writes the embedding
    check_written_once(shard_layout(shards, layout.tensors))


def test_a_small_model_is_one_file():
    layout = MegatronLayout(tiny_shape(), 2, 2, 1, 16).layout()
    assert [s.file for s in plan_shards(layout, layout.tensors)] == ["model.safetensors"]
