"""An adapted actor's way into the engine: merged into its weights, or the adapter alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mrl.batching.experience import collect
from mrl.config.plan import spread
from mrl.config.schema import LoraConfig, MegatronConfig, ReshardingConfig, RolloutConfig
from mrl.resharding.verify import compare_with_reload
from mrl.types import Prompt, Sample, SamplingParams
from mrl.workers.group import RolloutGroup, TrainGroup
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec, RolloutSpec
from tests.models import VOCAB
from tests.ranks import Ranks
from tests.workers import jobs
from tests.workers.megatron.test_lora import LORA, adapted, adapter_of, draw_adapter

GREEDY = SamplingParams(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, seed=11)
START_LIMIT_S = 600.0  # of a job with vLLM on every rank
SENT = replace(LORA, merge=False)


def spec_of(
    model: Path,
    where: MegatronConfig,
    lora: LoraConfig,
    engine: str = "hf",
    tp: int = 1,
    trainer: range | None = None,
    rollout: range | None = None,
) -> JobSpec:
    """Give a job of an adapted actor and an engine."""
    config = RolloutConfig(
        name=engine, tensor_model_parallel_size=tp, max_num_seqs=32, max_num_batched_tokens=512
    )
    return replace(
        jobs.job(adapted(model, where, lora)),
        rollout=RolloutSpec(
            config=config,
            path=str(model),
            tokenizer_path=str(model),
            max_model_len=160,
            trust_remote_code=False,
            resharding=ReshardingConfig(verify="every_step", bucket_bytes=64 * 1024),
            slots=None,
            lora=None if lora.merge else lora,
        ),
        timeout_s=START_LIMIT_S,
        trainer_ranks=trainer,
        rollout_ranks=rollout,
    )


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 40, 7, 100)]
    return [Prompt(f"p{i}", tuple(row), "", "", None, {}) for i, row in enumerate(rows)]


def gap(actor: TrainGroup, groups: Sequence[Sequence[Sample]]) -> float:
    """Give the largest difference between the engine's and the actor's log-probs."""
    batch = collect(groups)
    log_probs, _ = actor.log_probs(batch.sequences)
    return float((log_probs.values - batch.rollout_log_probs.values).abs().max())


def train(actor: TrainGroup) -> None:
    rows = jobs.sequences()
    actor.update(jobs.policy_batch(rows, actor.log_probs(rows)[0]))


def engine_params(host: WorkerHost) -> dict[str, Tensor]:
    params = host._roles["rollout"].engine.params()
    return {name: param.clone() for name, param in params.items()}


def base_params(host: WorkerHost) -> dict[str, Tensor]:
    params = host._roles["actor"].engine.weights.params()
    return {name: param.detach().clone() for name, param in params.items()}


def test_a_merged_engine_holds_what_the_checkpoint_holds_bit_for_bit(
    ranks: Ranks, policy: Path, tmp_path: Path
) -> None:
    lora = draw_adapter(policy, tmp_path / "start")
    spec = spec_of(policy, jobs.layout(tp=2), lora)
    with ranks.job(2, spec) as pool:
        rollout, actor = RolloutGroup(pool, 1, spread), jobs.group(pool, spec.actor)
        base = pool.each(base_params)
        rollout.sync(0)
        first = rollout.generate(prompts(), GREEDY)
        assert gap(actor, first) < 1e-4
        train(actor)
        assert gap(actor, first) > 1e-2, "the update must be seen, or this test holds nothing"
        rollout.sync(1)
        actor.save(tmp_path / "actor")
        wanted = load_file(tmp_path / "actor" / "huggingface" / "model.safetensors")
        for held in pool.each(engine_params):
            assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())
        assert gap(actor, rollout.generate(prompts(), GREEDY)) < 1e-4
        for was, now in zip(base, pool.each(base_params), strict=True):
            assert all(torch.equal(was[name], now[name]) for name in was)


def record_adapters(host: WorkerHost) -> None:
    """Let an engine that takes no adapters keep a copy of those that arrive."""
    if "rollout" in host._roles:
        engine = host._roles["rollout"].engine
        engine.taken = []
        engine.adapt = lambda adapter: engine.taken.append(
            {name: tensor.clone() for name, tensor in adapter.items()}
        )


def taken(host: WorkerHost) -> list[dict[str, Tensor]]:
    return host._roles["rollout"].engine.taken if "rollout" in host._roles else []


def test_the_adapter_alone_follows_the_model_to_every_rank_of_the_engine(
    ranks: Ranks, policy: Path, tmp_path: Path
) -> None:
    # rank 0 trains, rank 2 generates, rank 1 does both
    lora = draw_adapter(policy, tmp_path / "start", SENT)
    spec = spec_of(policy, jobs.layout(pp=2), lora, trainer=range(2), rollout=range(1, 3))
    with ranks.job(3, spec) as pool:
        pool.each(record_adapters)
        rollout = RolloutGroup(pool, 1, spread, range(1, 3))
        actor = jobs.group(pool, spec.actor, world=2)
        first = rollout.sync(0)
        train(actor)
        second = rollout.sync(1)
        actor.save(tmp_path / "actor")
        found, held = pool.each(taken), pool.each(engine_params_if_any)
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    for before, after in found[1:]:
        for tensors, wanted in ((before, start), (after, adapter_of(tmp_path / "actor"))):
            assert tensors.keys() == wanted.keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())
    base = load_file(policy / "model.safetensors")
    for params in held[1:]:
        assert all(torch.equal(params[name], tensor) for name, tensor in base.items())
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in (base, start)]
    assert [first[2].bytes_moved, second[2].bytes_moved] == [sum(sizes), sizes[1]]


def engine_params_if_any(host: WorkerHost) -> dict[str, Tensor]:
    return engine_params(host) if "rollout" in host._roles else {}


def engine_differs(host: WorkerHost, folder: Path) -> str:
    if "rollout" not in host._roles:
        return ""
    try:
        compare_with_reload(host._roles["rollout"].engine.model, folder)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_vllm_answers_alike_with_the_sum_and_with_the_adapter_beside(
    ranks: Ranks, policy: Path, tmp_path: Path
) -> None:
    answers = []
    for name, where, tp, places in (
        ("merged", jobs.layout(tp=2), 1, {}),
        ("sent", jobs.layout(tp=2), 2, {}),
        ("sent", jobs.layout(pp=2), 1, {"trainer": range(2), "rollout": range(1, 3)}),
    ):
        lora = draw_adapter(policy, tmp_path / "start", LORA if name == "merged" else SENT)
        spec = spec_of(policy, where, lora, "vllm", tp, **places)
        world = 3 if places else 2
        with ranks.job(world, spec, START_LIMIT_S) as pool:
            rollout = RolloutGroup(pool, tp, spread, places.get("rollout"))
            actor = jobs.group(pool, spec.actor, world=2)
            rollout.sync(0)
            first = rollout.generate(prompts(), GREEDY)
            assert gap(actor, first) < 1e-4, name
            train(actor)
            assert gap(actor, first) > 1e-2, "the update must be seen"
            rollout.sync(1)
            groups = rollout.generate(prompts(), GREEDY)
            assert gap(actor, groups) < 1e-4, name
            rollout.sync(2)  # the same adapter again: nothing is scaled twice
            assert gap(actor, rollout.generate(prompts(), GREEDY)) < 1e-4, name
            answers.append([sample for group in groups for sample in group])
            if name == "merged":
                actor.save(tmp_path / "actor")
                folder = tmp_path / "actor" / "huggingface"
                assert not any(pool.each(engine_differs, folder=folder))
    for other in answers[1:]:
        for mine, theirs in zip(answers[0], other, strict=True):
            assert mine.response_ids == theirs.response_ids
            assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
