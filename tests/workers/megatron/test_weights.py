from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.workers.host import WorkerHost
from tests.ranks import Ranks
from tests.workers.jobs import job, layout, role

LAYOUTS = {
    "one": (1, layout()),
    "tp2-pp2": (4, layout(tp=2, pp=2)),
    "tp4-above-kv-heads": (4, layout(tp=4)),
    "pp2-dp2": (4, layout(pp=2)),
}


def export(host: WorkerHost, name: str, folder: Path) -> None:
    engine = host._roles[name].engine
    engine.weights.export(folder, Path(engine.spec.path))


def wipe(host: WorkerHost, name: str) -> None:
    with torch.no_grad():
        for param in host._roles[name].engine.chunks[0].parameters():
            param.fill_(7.0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["qwen2", "llama"])
def test_a_folder_comes_back_bit_for_bit(
    model: str, name: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(model)
    world, where = LAYOUTS[name]
    spec = job(role(source, where), role(source, where, "critic"))
    with ranks.job(world, spec) as pool:
        for part in ("actor", "critic"):
            pool.each(export, name=part, folder=tmp_path / part)
    wanted = load_file(source / "model.safetensors")
    body = {key: tensor for key, tensor in wanted.items() if key != "lm_head.weight"}
    assert_equal(load_file(tmp_path / "actor" / "model.safetensors"), wanted)
    assert_equal(load_file(tmp_path / "critic" / "model.safetensors"), body)
    head = "value_head.safetensors"
    assert_equal(load_file(tmp_path / "critic" / head), load_file(source / head))
    assert not (tmp_path / "actor" / head).exists()
    for part in ("actor", "critic"):
        assert json.loads((tmp_path / part / "config.json").read_text()) == json.loads(
            (source / "config.json").read_text()
        )
        assert (tmp_path / part / "tokenizer.json").read_bytes() == (
            source / "tokenizer.json"
        ).read_bytes()


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_an_exported_folder_loads_into_another_layout(
    ranks: Ranks, qwen2: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for world, where, source, folder in (
        (4, layout(tp=2, pp=2), qwen2, first),
        (2, layout(tp=2), first, second),
    ):
        spec = job(role(source, where), role(source, where, "critic"))
        with ranks.job(world, spec) as pool:
            pool.each(export, name="critic", folder=folder)
    head = "value_head.safetensors"
    assert_equal(load_file(second / head), load_file(qwen2 / head))
    assert_equal(load_file(second / "model.safetensors"), load_file(qwen2 / "model.safetensors"))


def test_bfloat16_is_rounded_once_on_load(ranks: Ranks, llama: Path, tmp_path: Path) -> None:
    spec = job(role(llama, layout(tp=2, dtype="bfloat16")))
    with ranks.job(2, spec) as pool:
        pool.each(export, name="actor", folder=tmp_path / "out")
    wanted = load_file(llama / "model.safetensors")
    assert_equal(
        load_file(tmp_path / "out" / "model.safetensors"),
        {name: tensor.bfloat16() for name, tensor in wanted.items()},
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_critic_without_a_stored_head_draws_one_by_its_seed(
    ranks: Ranks, llama: Path, tmp_path: Path
) -> None:
    for path in llama.iterdir():
        if path.name != "value_head.safetensors":
            (tmp_path / path.name).symlink_to(path)
    spec = job(role(tmp_path, layout(pp=2)), role(tmp_path, layout(pp=2), "critic"))
    heads = []
    for seed in (1, 1, 2):
        folder = tmp_path / f"out{len(heads)}"
        with ranks.job(2, replace(spec, seed=seed)) as pool:
            pool.each(export, name="critic", folder=folder)
        heads.append(load_file(folder / "value_head.safetensors")["weight"])
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    # the models of the tests spread their weights by 0.2
    assert heads[0].std() == pytest.approx(0.2, rel=0.3)


def tied_copies(host: WorkerHost) -> torch.Tensor:
    """Give a stage's copy of the embedding."""
    engine = host._roles["actor"].engine
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    params = dict(engine.chunks[0].named_parameters())
    return next(params[name] for name in names if name in params).detach().clone()


def test_both_copies_of_a_tied_embedding_are_loaded(ranks: Ranks, qwen2: Path) -> None:
    with ranks.job(2, job(role(qwen2, layout(pp=2)))) as pool:
        pool.each(wipe, name="actor")
        pool.each(reload, folder=qwen2)
        first, last = pool.each(tied_copies)
    wanted = load_file(qwen2 / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(first[: len(wanted)], wanted)
    assert torch.equal(first, last)
    assert not first[len(wanted) :].any()  # padding


def reload(host: WorkerHost, folder: Path) -> None:
    engine = host._roles["actor"].engine
    with engine.groups.active():
        engine.weights.load(folder)
