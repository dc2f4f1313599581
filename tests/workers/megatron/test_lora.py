"""Adapters on Megatron's layers: what they compute, what is trained, what is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.algorithms.reductions import reduced
from mrl.config.schema import LoraConfig, MegatronConfig
from mrl.types import Batching, Ragged, Sequences
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec, RoleSpec
from tests.ranks import ForkedPool, Ranks
from tests.workers.jobs import (
    ALL_ROWS,
    OPTIM,
    TWO_ROWS,
    assert_close,
    group,
    job,
    layout,
    policy_batch,
    role,
    sequences,
    weights_of,
)

LORA = LoraConfig(rank=3, alpha=7)
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
BLOCK = {name: "self_attn" if name in (*FUSED[0], "o_proj") else "mlp" for g in FUSED for name in g}
PREFIX = "base_model.model."


def adapted(path: Path, where: MegatronConfig | None = None, lora: LoraConfig = LORA) -> RoleSpec:
    return replace(role(path, where), lora=lora)


def draw_adapter(model: Path, folder: Path, lora: LoraConfig = LORA) -> LoraConfig:
    """Write a PEFT folder with nothing zero in it; give the settings that start from it."""
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(4):
        for names in FUSED:
            first = weights[f"model.layers.{layer}.{BLOCK[names[0]]}.{names[0]}.weight"]
            a = 0.1 * torch.randn(lora.rank, first.shape[1], generator=generator)
            for name in names:
                stem = f"model.layers.{layer}.{BLOCK[name]}.{name}"
                rows = len(weights[f"{stem}.weight"])
                b = 0.1 * torch.randn(rows, lora.rank, generator=generator)
                tensors[f"{PREFIX}{stem}.lora_A.weight"] = a.clone()
                tensors[f"{PREFIX}{stem}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return replace(lora, adapter_path=str(folder))


def adapter_of(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "adapter" / "adapter_model.safetensors")


def merged_by_hand(model: Path, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = load_file(model / "model.safetensors")
    for name, a in adapter.items():
        if ".lora_A." in name:
            key = name.removeprefix(PREFIX).replace("lora_A.", "")
            b = adapter[name.replace("lora_A", "lora_B")]
            weights[key] = weights[key] + LORA.alpha / LORA.rank * (b @ a)
    return weights


@dataclass(frozen=True)
class Adapted:
    """What transformers and autograd say of an adapted model."""

    log_probs: Tensor
    loss: float
    gradients: dict[str, Tensor]


def adapted_twin(path: Path, folder: Path, rows: Sequences, weights: Tensor) -> Adapted:
    """Compute the weighted negative log-likelihood and the gradients of A and B."""
    from torch.func import functional_call
    from transformers import AutoModelForCausalLM

    from tests.workers.transformers_twin import _score

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    leaves = {
        name: tensor.double().requires_grad_()
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    params = dict(model.named_parameters())
    for name, a in leaves.items():
        if ".lora_A." in name:
            key = name.removeprefix(PREFIX).replace("lora_A.", "")
            b = leaves[name.replace("lora_A", "lora_B")]
            params[key] = params[key] + LORA.alpha / LORA.rank * (b @ a)
    score: Any = lambda tokens: functional_call(model, params, (tokens,))  # noqa: E731
    log_probs, _ = _score(score, rows, 1.0)
    loss = -(log_probs * weights).sum()
    loss.backward()
    gradients = {name: leaf.grad.float() for name, leaf in leaves.items()}
    for names in FUSED:  # one A in Megatron
        for layer in range(4):
            keys = [
                f"{PREFIX}model.layers.{layer}.{BLOCK[name]}.{name}.lora_A.weight" for name in names
            ]
            total = sum(gradients[key] for key in keys)
            gradients |= dict.fromkeys(keys, total)
    return Adapted(log_probs.detach(), float(loss), gradients)


def write_gradients(host: WorkerHost, folder: Path) -> list[str]:
    """Write the gradients as if they were an adapter; give the names of all trained parameters."""
    from mrl.workers.megatron.lora_files import save_adapter

    engine = host._roles["actor"].engine
    adapters = engine.weights.adapters
    gradients = {name: param.main_grad for name, param in adapters.params().items()}
    save_adapter(folder, adapters.layout, gradients, adapters.lora, "")
    named = (item for chunk in engine.chunks for item in chunk.named_parameters())
    return [name for name, param in named if param.requires_grad]


@pytest.mark.parametrize("model", ["qwen2", "llama"])
def test_outputs_and_gradients_are_those_of_autograd(
    model: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path, rows = request.getfixturevalue(model), sequences()
    lora = draw_adapter(path, tmp_path / "start")
    spec = job(replace(adapted(path, lora=lora), optim=replace(OPTIM, clip_grad=1e9)))
    with ranks.job(1, spec) as pool:
        actor = group(pool, spec.actor, TWO_ROWS)
        log_probs, _ = actor.log_probs(rows)
        batch = policy_batch(rows, log_probs)
        weights = batch.weights.values
        metrics = reduced(actor.update(batch, "supervise"))
        trained = pool.each(write_gradients, folder=tmp_path / "gradients")[0]
    folder = tmp_path / "start"
    twin = ranks.run(1, adapted_twin, path=path, folder=folder, rows=rows, weights=weights)[0]
    assert_close(log_probs.values, twin.log_probs, "log-probs")
    assert metrics["sft/loss"] == pytest.approx(twin.loss, rel=1e-5)
    found = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert found.keys() == twin.gradients.keys()
    # what little k gets is the rest of large terms that cancel
    largest = max(float(gradient.abs().max()) for gradient in twin.gradients.values())
    for name, gradient in twin.gradients.items():
        scale = max(float(gradient.abs().max()), 0.1 * largest)
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * scale, name
    # B of q, k, v and of gate, up stand in one parameter: four layers of four pairs
    assert len(trained) == 32
    assert all(".lora.lora_" in name for name in trained)
    squares = [
        *(g.square().sum() for n, g in twin.gradients.items() if ".lora_B." in n),
        *(g.square().sum() for n, g in twin.gradients.items() if _is_first(n)),
    ]
    assert metrics["sft/grad_norm"] == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-5)


def _is_first(name: str) -> bool:
    """Say whether a tensor is the A of the first layer of a fused one."""
    return any(f".{names[0]}.lora_A." in name for names in FUSED)


CASES: dict[str, tuple[int, MegatronConfig, Batching]] = {
    "tp2": (2, layout(tp=2), TWO_ROWS),
    "tp2-without-sequence-parallel": (2, layout(tp=2, sequence_parallel=False), ALL_ROWS),
    "pp2-vpp2": (2, layout(pp=2, virtual_pipeline_model_parallel_size=2), TWO_ROWS),
    "dp2": (2, layout(), TWO_ROWS),
    "cp2": (2, layout(context_parallel_size=2), ALL_ROWS),
    "pp2": (2, layout(pp=2), ALL_ROWS),
    "dp2-plain-optimizer": (2, layout(use_distributed_optimizer=False), TWO_ROWS),
    "tp4-above-kv-heads": (4, layout(tp=4), ALL_ROWS),
    "tp2-pp2": (4, layout(tp=2, pp=2), TWO_ROWS),
    "tp2-cp2": (4, layout(tp=2, context_parallel_size=2), ALL_ROWS),
    "offload": (
        2,
        layout(tp=2, param_offload=True, grad_offload=True, optimizer_offload=True),
        TWO_ROWS,
    ),
    "recompute": (
        1,
        layout(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        TWO_ROWS,
    ),
}
FAST = ("tp2", "tp2-without-sequence-parallel", "pp2-vpp2", "dp2")


@dataclass(frozen=True)
class Work:
    """What an adapted actor gives before and after two updates."""

    log_probs: Ragged
    later: Tensor
    metrics: tuple[dict[str, float], ...]
    adapter: dict[str, Tensor]
    merged: dict[str, Tensor]


def base_bits(host: WorkerHost) -> dict[str, Tensor]:
    from mrl.workers.megatron.offload import READ

    host._roles["actor"].engine.memory.enter(READ)
    params = host._roles["actor"].engine.weights.params()
    return {name: param.detach().clone() for name, param in params.items()}


def work(
    pool: ForkedPool, spec: JobSpec, batching: Batching, folder: Path, base: Ragged | None = None
) -> Work:
    """Score, train twice around the policy `base` (None: its own), save."""
    actor, rows = group(pool, spec.actor, batching), sequences()
    before = pool.each(base_bits)
    log_probs, _ = actor.log_probs(rows)
    batch = policy_batch(rows, base if base is not None else log_probs)
    metrics = tuple(reduced(actor.update(batch)) for _ in range(2))
    actor.save(folder)
    for was, now in zip(before, pool.each(base_bits), strict=True):
        assert was.keys() == now.keys()
        assert all(torch.equal(was[name], now[name]) for name in was)
    later = actor.log_probs(rows)[0].values
    return Work(log_probs, later, metrics, adapter_of(folder), weights_of(folder))


@dataclass(frozen=True)
class Alone:
    """One rank's work, and where its adapter and its checkpoint are."""

    lora: LoraConfig
    work: Work
    checkpoint: Path


@pytest.fixture(scope="module")
def alone(ranks: Ranks, qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    lora = draw_adapter(qwen2, folder / "start")
    spec = job(adapted(qwen2, lora=lora))
    with ranks.job(1, spec) as pool:
        return Alone(lora, work(pool, spec, TWO_ROWS, folder / "actor"), folder / "actor")


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES],
)
def test_every_layout_trains_what_one_rank_trains(
    case: str, ranks: Ranks, qwen2: Path, alone: Alone, tmp_path: Path
) -> None:
    world, where, batching = CASES[case]
    spec = job(adapted(qwen2, where, alone.lora))
    with ranks.job(world, spec) as pool:
        found = work(pool, spec, batching, tmp_path, alone.work.log_probs)
    wanted = alone.work
    assert_close(found.log_probs.values, wanted.log_probs.values, "log-probs")
    names = ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "actor/entropy_loss")
    for mine, theirs in zip(found.metrics, wanted.metrics, strict=True):
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    assert_close(found.later, wanted.later, "log-probs after two updates")
    for tensors, others in ((found.adapter, wanted.adapter), (found.merged, wanted.merged)):
        assert tensors.keys() == others.keys()
        for name, tensor in others.items():
            assert_close(tensors[name], tensor, name)


def test_the_round_is_worth_comparing(alone: Alone, qwen2: Path) -> None:
    start = load_file(Path(str(alone.lora.adapter_path)) / "adapter_model.safetensors")
    for name, tensor in start.items():
        assert float((alone.work.adapter[name] - tensor).abs().max()) > 1e-4, name
    base = load_file(qwen2 / "model.safetensors")
    changed = {
        name for name, tensor in base.items() if not torch.equal(tensor, alone.work.merged[name])
    }
    assert changed == {name for name in base if name.split(".")[-2] in BLOCK and "bias" not in name}
    assert float((alone.work.later - alone.work.log_probs.values).abs().max()) > 0.1


def test_a_checkpoint_holds_the_sum_and_the_adapter(alone: Alone, qwen2: Path) -> None:
    for name, tensor in merged_by_hand(qwen2, alone.work.adapter).items():
        assert_close(alone.work.merged[name], tensor, name, relative=1e-6)
    config = json.loads((alone.checkpoint / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 7)
    assert config["target_modules"] == sorted(BLOCK)
    assert config["base_model_name_or_path"] == str(qwen2)


def first_adapter(host: WorkerHost, folder: Path) -> None:
    host._roles["actor"].engine.weights.adapters.save(folder)


def test_a_new_adapter_changes_nothing_and_is_drawn_whatever_the_layout(
    ranks: Ranks, qwen2: Path, tmp_path: Path
) -> None:
    rows, drawn, answers = sequences(), [], []
    for name, world, spec in (
        ("plain", 1, job(role(qwen2))),
        ("one", 1, job(adapted(qwen2))),
        ("tp2", 2, job(adapted(qwen2, layout(tp=2)))),
    ):
        with ranks.job(world, spec) as pool:
            answers.append(group(pool, spec.actor).log_probs(rows)[0].values)
            if name != "plain":
                pool.each(first_adapter, folder=tmp_path / name)
                drawn.append(load_file(tmp_path / name / "adapter_model.safetensors"))
    assert torch.equal(answers[0], answers[1])
    one, tp2 = drawn
    assert all(torch.equal(one[name], tp2[name]) for name in one)
    for name, tensor in one.items():
        if ".lora_B." in name:
            assert not tensor.any()
        else:  # kaiming_uniform_(a=sqrt(5)), as PEFT draws it
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < float(tensor.abs().max()) <= bound
    layers = [one[f"{PREFIX}model.layers.{i}.self_attn.q_proj.lora_A.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_a_resumed_run_goes_on_as_if_uninterrupted(
    ranks: Ranks, qwen2: Path, tmp_path: Path
) -> None:
    spec, rows = job(adapted(qwen2, layout(tp=2))), sequences()
    with ranks.job(2, spec) as pool:
        actor = group(pool, spec.actor)
        batch = policy_batch(rows, actor.log_probs(rows)[0])
        actor.update(batch)
        actor.save(tmp_path / "first")
        wanted = reduced(actor.update(batch)), actor.log_probs(rows)[0].values
    with ranks.job(2, spec) as pool:
        actor = group(pool, spec.actor)
        actor.load(tmp_path / "first")
        found = reduced(actor.update(batch)), actor.log_probs(rows)[0].values
    assert found[0] == wanted[0]
    assert torch.equal(found[1], wanted[1])


def shares_its_model(host: WorkerHost) -> bool:
    return host._roles["ref"].engine is host._roles["actor"].engine


def test_the_reference_is_the_actor_without_its_adapter(
    ranks: Ranks, qwen2: Path, alone: Alone
) -> None:
    rows, ref = sequences(), role(qwen2, name="ref", optim=None)
    with ranks.job(1, job(role(qwen2), ref=ref)) as pool:
        wanted = group(pool, ref).log_probs(rows)
    spec = job(adapted(qwen2, lora=alone.lora), ref=ref)
    with ranks.job(1, spec) as pool:
        actor, reference = group(pool, spec.actor), group(pool, ref)
        log_probs, _ = actor.log_probs(rows)
        actor.update(policy_batch(rows, log_probs))
        assert torch.equal(reference.log_probs(rows).values, wanted.values)
        assert float((actor.log_probs(rows)[0].values - wanted.values).abs().max()) > 0.1
        assert pool.each(shares_its_model) == [True]


def test_a_reference_that_would_wait_on_the_host_is_the_actor_too(qwen2: Path) -> None:
    ref, on_host = role(qwen2, name="ref", optim=None), replace(layout(), param_offload=True)
    assert job(adapted(qwen2), ref=replace(ref, layout=on_host)).ref_is_actors_base
    assert not job(adapted(qwen2), ref=replace(ref, layout=layout(tp=2))).ref_is_actors_base
    assert not job(role(qwen2), ref=ref).ref_is_actors_base


def load_checkpoint(host: WorkerHost, folder: Path) -> str:
    try:
        host._roles["actor"].load(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_run_without_an_adapter_does_not_go_on_from_one_with(
    ranks: Ranks, qwen2: Path, alone: Alone
) -> None:
    with ranks.job(1, job(role(qwen2))) as pool:
        (said,) = pool.each(load_checkpoint, folder=alone.checkpoint)
    assert f"model.path={alone.checkpoint / 'huggingface'}" in said


def load_adapter(host: WorkerHost, folder: Path) -> str:
    try:
        host._roles["actor"].engine.weights.adapters.load(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_an_adapter_that_does_not_fit_is_refused(ranks: Ranks, qwen2: Path, tmp_path: Path) -> None:
    draw_adapter(qwen2, tmp_path / "rank4", replace(LORA, rank=4))
    draw_adapter(qwen2, tmp_path / "apart")
    path = tmp_path / "apart" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{PREFIX}model.layers.2.self_attn.k_proj.lora_A.weight"] += 1
    save_file(tensors, path)
    draw_adapter(qwen2, tmp_path / "lost")
    path = tmp_path / "lost" / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[f"{PREFIX}model.layers.2.mlp.up_proj.lora_B.weight"]
    save_file(tensors, path)
    with ranks.job(1, job(adapted(qwen2))) as pool:

        def said(name: str) -> str:
            return pool.each(load_adapter, folder=tmp_path / name)[0]

        assert "r is 4, model.lora.rank is 3" in said("rank4")
        assert "k_proj.lora_A.weight differ" in said("apart")
        assert "missing base_model.model.model.layers.2.mlp.up_proj.lora_B.weight" in said("lost")
        assert "adapter_model.safetensors is missing" in said("absent")


@pytest.mark.slow
def test_attention_beside_experts_is_adapted_alike_in_every_layout(
    ranks: Ranks, qwen3_moe: Path, tmp_path: Path
) -> None:
    lora = replace(LORA, target_modules=("linear_qkv", "linear_proj"))
    rows, found = sequences(), []
    for world, where in ((1, layout()), (2, layout(expert_model_parallel_size=2))):
        spec = job(adapted(qwen3_moe, where, lora))
        with ranks.job(world, spec) as pool:
            actor = group(pool, spec.actor, TWO_ROWS)
            if not found:
                batch = policy_batch(rows, actor.log_probs(rows)[0])
            norms = [reduced(actor.update(batch))["actor/grad_norm"] for _ in range(2)]
            actor.save(tmp_path / str(world))
        found.append((norms, adapter_of(tmp_path / str(world))))
    (norms, adapter), (wanted_norms, wanted) = found
    assert norms == pytest.approx(wanted_norms, rel=1e-4)
    for name, tensor in wanted.items():
        assert_close(adapter[name], tensor, name, relative=1e-4)
