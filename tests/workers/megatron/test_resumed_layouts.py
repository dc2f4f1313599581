"""A run that was saved in one layout goes on in another, optimizer included."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms.reductions import reduced
from mrl.config.schema import LoraConfig
from mrl.resharding.layout import volume, whole
from mrl.resharding.torch_dist_files import DistributedCheckpoint
from mrl.types import Ragged
from mrl.workers.group import WorkerError
from mrl.workers.host import WorkerHost
from mrl.workers.megatron.places import flat_boxes
from mrl.workers.specs import JobSpec
from tests.marks import slow_but
from tests.ranks import ForkedPool, Ranks
from tests.workers.jobs import (
    OPTIM,
    group,
    job,
    layout,
    of_the_layout,
    policy_batch,
    role,
    sequences,
    value_batch,
    weights_of,
)

Where = tuple[int, Any]  # ranks and layout
SCHEDULED = replace(OPTIM, lr_warmup_steps=3, lr_decay_style="cosine", min_lr=1e-3)
ONE: Where = (1, layout())
TP2: Where = (2, layout(tp=2))
PP2: Where = (2, layout(pp=2))
DP2: Where = (2, layout())
CP2: Where = (2, layout(context_parallel_size=2))
PLAIN: Where = (2, layout(use_distributed_optimizer=False))
EVEN: Where = (4, layout(tp=2, pp=2))
EP2: Where = (2, layout(expert_model_parallel_size=2))
EXPERT_TP1: Where = (2, layout(tp=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1))
HALF: Where = (2, layout(tp=2, dtype="bfloat16"))
HALF_ONE: Where = (1, layout(dtype="bfloat16"))
HALF_PP2: Where = (2, layout(pp=2, dtype="bfloat16"))
AWAY: Where = (
    2, layout(pp=2, param_offload=True, grad_offload=True, optimizer_offload=True)
)  # fmt: skip
CHANGES: dict[str, tuple[str, Where, Where]] = {
    "tp2-to-pp2": ("qwen2", TP2, PP2),  # the tied embedding has two holders then
    "pp2-to-tp2": ("llama", PP2, TP2),
    "tp2-to-dp2": ("llama", TP2, DP2),
    "dp2-to-tp2": ("qwen2", DP2, TP2),
    "tp2-to-cp2": ("llama", TP2, CP2),
    "one-to-tp2-pp2": ("qwen2", ONE, EVEN),
    "tp2-pp2-to-one": ("qwen2", EVEN, ONE),
    "distributed-to-plain-optimizer": ("llama", TP2, PLAIN),
    "plain-to-distributed-optimizer": ("llama", PLAIN, TP2),
    "bfloat16-tp2-to-pp2": ("qwen2", HALF, HALF_PP2),
    "tp2-to-offloaded-pp2": ("qwen2", TP2, AWAY),
    "offloaded-pp2-to-tp2": ("qwen2", AWAY, TP2),
    "experts-ep2-to-pp2": ("qwen3_moe", EP2, PP2),
    "experts-pp2-to-ep2": ("qwen3_moe", PP2, EP2),
    "experts-ep2-to-tp2": ("qwen3_moe", EXPERT_TP1, TP2),
}
FAST = ("tp2-to-pp2", "experts-ep2-to-pp2")


def both(path: Path, where: Any) -> JobSpec:
    actor = role(path, where, optim=SCHEDULED, total_steps=8)
    return job(actor, replace(actor, name="critic", head="value"))


def train(pool: ForkedPool, spec: JobSpec, start: int) -> list[Any]:
    """Take two steps of each role, whose batches depend on the step's number."""
    rows, metrics = sequences(), []
    base = Ragged(torch.full((int(rows.response_lengths.sum()),), -2.0), rows.response_lengths)
    for step in (start, start + 1):
        near = base.with_values(base.values + 0.1 * step)
        metrics.append(reduced(group(pool, spec.actor).update(policy_batch(rows, near))))
        if spec.critic is not None:
            metrics.append(reduced(group(pool, spec.critic).update(value_batch(rows, near))))
    return metrics


def roles(spec: JobSpec) -> list[Any]:
    return [part for part in (spec.actor, spec.critic) if part is not None]


def state_of(checkpoint: Path) -> dict[str, Tensor]:
    """Read all of an optimizer's state, whatever layout wrote it."""
    found = DistributedCheckpoint(checkpoint / "dist_ckpt")
    return {
        key: found.read(key, [0] * len(info.size), info.size) for key, info in found.tensors.items()
    }


def assert_goes_on(
    ranks: Ranks, saved_in: JobSpec, before: int, spec: JobSpec, now: int, folder: Path
) -> None:
    with ranks.job(before, saved_in) as pool:
        train(pool, saved_in, 0)
        for part in roles(saved_in):
            group(pool, part).save(folder / "half" / part.name)
    with ranks.job(now, spec) as pool:
        train(pool, spec, 0)
        straight = train(pool, spec, 2)
        for part in roles(spec):
            group(pool, part).load(folder / "half" / part.name)
            group(pool, part).save(folder / "again" / part.name)
        resumed = train(pool, spec, 2)
    assert_same_saves(folder, spec)
    if spec.actor.layout.dtype == "bfloat16":  # layouts round apart within two steps
        return
    rounding = 1e-5
    for found, wanted in zip(resumed, straight, strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if not of_the_layout(name):
                assert found[name] == pytest.approx(value, rel=rounding, abs=rounding / 10), name


def weights_on_this_rank(host: WorkerHost) -> dict[str, bytes]:
    engine = host._roles["actor"].engine
    params = engine.chunks[0].named_parameters()
    return {name: param.detach().float().numpy().tobytes() for name, param in params}


def test_replicas_are_alike_where_the_optimizer_knows_weights_better_than_their_files(
    ranks: Ranks, llama: Path, tmp_path: Path
) -> None:
    before, old = HALF_ONE
    now, new = DP2
    saved_in, spec = (job(role(llama, where, optim=OPTIM)) for where in (old, new))
    with ranks.job(before, saved_in) as pool:
        train(pool, saved_in, 0)
        group(pool, saved_in.actor).save(tmp_path / "half")
    with ranks.job(now, spec) as pool:
        group(pool, spec.actor).load(tmp_path / "half")
        one, other = pool.each(weights_on_this_rank)
    assert one == other


def assert_same_saves(folder: Path, spec: JobSpec) -> None:
    """Nothing is lost on the way through the other layout, not the last bit."""
    for part in roles(spec):
        before, after = folder / "half" / part.name, folder / "again" / part.name
        state, other = state_of(before), state_of(after)
        assert len(state) >= 3 and state.keys() == other.keys()
        assert [key for key in state if not torch.equal(state[key], other[key])] == []
        assert any(value.count_nonzero() for key, value in state.items() if ".exp_avg." in key)
        weights, same = weights_of(before), weights_of(after)
        assert all(torch.equal(weights[key], same[key]) for key in weights)
        settings = [json.loads((p / "optimizer.json").read_text()) for p in (before, after)]
        assert settings[0] == settings[1]


@pytest.mark.parametrize("case", slow_but(FAST, CHANGES))
def test_a_run_goes_on_in_another_layout(
    case: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model, (before, old), (now, new) = CHANGES[case]
    path = request.getfixturevalue(model)
    assert_goes_on(ranks, both(path, old), before, both(path, new), now, tmp_path)


@pytest.mark.parametrize(
    ("before", "now"), [pytest.param(TP2, PP2), pytest.param(DP2, TP2, marks=pytest.mark.slow)]
)
def test_an_adapter_goes_on_in_another_layout(
    before: Where, now: Where, ranks: Ranks, qwen2: Path, tmp_path: Path
) -> None:
    def spec(where: Any) -> JobSpec:
        actor = role(qwen2, where, optim=SCHEDULED, total_steps=8)
        return job(replace(actor, lora=LoraConfig(rank=4, alpha=8)))

    assert_goes_on(ranks, spec(before[1]), before[0], spec(now[1]), now[0], tmp_path)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, spec = tmp_path_factory.mktemp("saved"), both(qwen2, layout(tp=2))
    with ranks.job(2, spec) as pool:
        train(pool, spec, 0)
        group(pool, spec.actor).save(folder / "actor")
    return folder


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code of the file's runs",)


def damaged(saved: Path, folder: Path, case: str) -> str:
    """Damage a copy of a checkpoint; give what loading it has to say."""
    import shutil

    shutil.copytree(saved, folder, dirs_exist_ok=True)
    dist_ckpt = folder / "actor" / "dist_ckpt"
    blobs = dist_ckpt / "__1_0.distcp"
    match case:
        case "old":
            (folder / "actor" / "optimizer.json").unlink()
            return r"optimizer\.json is missing: .*older mrl.*model\.path="
        case "cut":
            blobs.write_bytes(blobs.read_bytes()[:100])
            return r"is damaged: __1_0\.distcp has 100 bytes, \d+ were saved"
        case "lost":
            blobs.unlink()
            return r"is damaged: __1_0\.distcp is missing"
        case "evil":
            (dist_ckpt / ".metadata").write_bytes(pickle.dumps(Evil()))
            return r"names builtins\.print, which no checkpoint needs"
        case "dtypes":
            path = folder / "actor" / "optimizer.json"
            found = json.loads(path.read_text())
            path.write_text(json.dumps(found | {"dtypes": {"exp_avg": ["bfloat16"]}}))
            return r"exp_avg in bfloat16, this run's optimizer has float32; .*optim\.\*_dtype"
    raise AssertionError(case)


@pytest.mark.parametrize("case", slow_but(("evil",), ("old", "cut", "lost", "evil", "dtypes")))
def test_what_cannot_be_resumed_from_says_why(
    case: str, ranks: Ranks, qwen2: Path, saved: Path, tmp_path: Path
) -> None:
    message = damaged(saved, tmp_path, case)
    spec = job(role(qwen2))
    with ranks.job(1, spec) as pool, pytest.raises(WorkerError, match=f"ValueError: .*{message}"):
        group(pool, spec.actor).load(tmp_path / "actor")


def test_ranks_share_the_state_out_without_copies(saved: Path) -> None:
    found = DistributedCheckpoint(saved / "actor" / "dist_ckpt")
    for key, info in found.tensors.items():
        boxes = [tuple((o, o + s) for o, s in zip(c.offsets, c.sizes, strict=True))
                 for c in info.chunks]  # fmt: skip
        assert sum(map(volume, boxes)) == volume(whole(info.size)), key
    files = sorted(path.stat().st_size for path in (saved / "actor" / "dist_ckpt").glob("*_0.*"))
    assert len(files) == 2 and files[1] < 1.5 * files[0]


def megatron_reads(host: Any, folder: Path) -> list[str]:
    """Load all keys as Megatron-Core does; give those that differ from what our reader finds."""
    from megatron.core import dist_checkpointing

    found = DistributedCheckpoint(folder)
    with host._roles["actor"].engine.groups.active():
        tensors = dist_checkpointing.load_plain_tensors(str(folder))
    ours = {key: found.read(key, [0] * len(info.size), info.size)
            for key, info in found.tensors.items()}  # fmt: skip
    assert tensors.keys() >= ours.keys()
    return [key for key in ours if not torch.equal(tensors[key].cpu(), ours[key])]


def test_megatron_itself_reads_the_state(ranks: Ranks, qwen2: Path, saved: Path) -> None:
    with ranks.job(1, job(role(qwen2))) as pool:
        assert pool.each(megatron_reads, folder=saved / "actor" / "dist_ckpt") == [[]]


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 6)])
def test_flat_ranges_are_cut_into_boxes_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(volume(whole(shape))).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            boxes = list(flat_boxes(shape, start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
            found = [numbers[tuple(slice(*span) for span in box)].reshape(-1) for box in boxes]
            assert torch.cat([*found, numbers.new_empty(0)]).tolist() == list(range(start, stop))
