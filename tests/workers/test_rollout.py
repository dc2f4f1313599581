"""The live engine answers with the trainer's weights, and draws what its seeds say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.batching.experience import collect
from mrl.config.plan import spread
from mrl.config.schema import MegatronConfig, OptimConfig, ReshardingConfig, RolloutConfig
from mrl.resharding.sync import SyncStats
from mrl.resharding.verify import compare_with_reload
from mrl.types import PolicyBatch, Prompt, Ragged, Sample, SamplingParams
from mrl.workers.group import RolloutGroup, TrainGroup, call_all
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec, RolloutSpec
from tests.models import VOCAB
from tests.ranks import ForkedPool, Ranks
from tests.workers import jobs

LENGTHS = (3, 40, 140, 7, 150, 20)  # the long ones fill blocks of the engine's prefix cache
RESPONSE = 8
BUCKET_BYTES = 64 * 1024  # several buckets
MODEL_LENGTH = 160
SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=RESPONSE, seed=11)
GREEDY = replace(SAMPLING, n=1, temperature=0.0)
START_LIMIT_S = 400.0  # of a job with an engine on every rank


@dataclass(frozen=True)
class Case:
    """Where actor and engine are."""

    world: int
    actor: MegatronConfig
    engine: str
    tp: int  # of the engine
    model: str = "policy"  # a fixture
    trainer: range | None = None
    rollout: range | None = None
    slots: tuple[int, ...] | None = None
    ep: bool = False  # of the engine
    mode: str = "direct"

    @property
    def engine_ranks(self) -> range:
        return range(self.world) if self.rollout is None else self.rollout


EP2 = {"expert_model_parallel_size": 2}
SPLIT = {"trainer": range(2), "rollout": range(2, 4)}
CASES = {
    "tp2-pp2-to-tp2": Case(4, jobs.layout(2, 2), "vllm", 2, slots=(0, 2, 1, 3)),
    "tp2-pp2-to-tp1": Case(4, jobs.layout(2, 2), "vllm", 1),
    "tp2-pp2-to-tp4": Case(4, jobs.layout(2, 2), "vllm", 4),
    "tp4-to-tp2": Case(4, jobs.layout(4), "vllm", 2),
    "tp2-to-tp1": Case(2, jobs.layout(2), "vllm", 1),
    "tied-pp2-to-tp2": Case(2, jobs.layout(1, 2), "vllm", 2),
    "pp2-vpp2-to-tp2": Case(
        2, jobs.layout(1, 2, virtual_pipeline_model_parallel_size=2), "vllm", 2
    ),
    "ep2-to-tp2": Case(2, jobs.layout(**EP2), "vllm", 2, model="experts"),
    "ep2-tp2-to-ep2": Case(4, jobs.layout(2, **EP2), "vllm", 2, model="experts", ep=True),
    "2-and-2-tp2-to-tp2": Case(4, jobs.layout(2), "vllm", 2, **SPLIT),
    "2-and-2-pp2-to-tp1": Case(4, jobs.layout(1, 2), "vllm", 1, **SPLIT),
    "4-and-4-tp2-pp2-to-2-of-tp2": Case(
        8, jobs.layout(2, 2), "vllm", 2, trainer=range(4), rollout=range(4, 8)
    ),
    "2-of-3-and-2-of-3-to-tp1": Case(
        3, jobs.layout(2), "vllm", 1, trainer=range(2), rollout=range(1, 3)
    ),
    "tp2-to-tp1-gather": Case(2, jobs.layout(2), "vllm", 1, mode="gather"),
    "tp2-pp2-to-hf": Case(4, jobs.layout(2, 2), "hf", 1),
    "tp2-pp2-to-hf-gather": Case(4, jobs.layout(2, 2), "hf", 1, mode="gather"),
    "2-and-2-tp2-to-hf": Case(4, jobs.layout(2), "hf", 1, **SPLIT),
    "2-of-3-and-2-of-3-to-hf": Case(
        3, jobs.layout(2), "hf", 1, trainer=range(2), rollout=range(1, 3)
    ),
}
FAST = ("tp2-pp2-to-tp2", *(name for name, case in CASES.items() if case.engine == "hf"))


@dataclass(frozen=True)
class Job:
    """Ranks with an actor and an engine, synchronised once, and the controller's hands on them."""

    pool: ForkedPool
    actor: TrainGroup
    rollout: RolloutGroup
    case: Case
    traffic: list[SyncStats]  # of the first sync, by rank

    def on_engines(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run a module-level function on the engine's ranks."""
        return self._on(self.case.engine_ranks, function, kwargs)

    def on_trainers(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run a module-level function on the actor's ranks."""
        return self._on(self.case.trainer or range(self.case.world), function, kwargs)

    def _on(self, ranks: range, function: Callable[..., Any], kwargs: dict[str, Any]) -> list[Any]:
        call = (function.__module__, function.__qualname__, kwargs)
        return call_all(self.pool, ranks, "", "run", *call)


def addresses(host: WorkerHost) -> dict[str, int]:
    """Give where the engine's parameters lie; runs on a rank."""
    params = host._roles["rollout"].engine.params()
    return {name: param.data_ptr() for name, param in params.items()}


def compare_engine_with(host: WorkerHost, folder: Path) -> str:
    """Compare the engine with its own load of a checkpoint; runs on a rank."""
    try:
        compare_with_reload(host._roles["rollout"].engine.model, folder)
    except ValueError as error:
        return str(error)
    return ""


def spoil_engine(host: WorkerHost, rank: int) -> None:
    """Change one element of one rank's engine; runs on a rank."""
    if host.rank == rank:
        params = host._roles["rollout"].engine.params()
        next(iter(params.values())).view(-1)[0] += 1e-3


def greedy_log_probs(host: WorkerHost, token_ids: tuple[int, ...]) -> tuple[int, tuple[float, ...]]:
    """Ask vLLM itself, which forgets no prefix; runs on a rank.

    Gives the prompt's tokens that it found in its cache, and the log-probs of the answer.
    """
    import vllm

    with host._engine.active():
        output = host._roles["rollout"].engine.llm.generate(
            [vllm.inputs.TokensPrompt(prompt_token_ids=list(token_ids))],
            vllm.SamplingParams(temperature=0.0, max_tokens=RESPONSE, logprobs=0),
            use_tqdm=False,
        )[0]
    answer = output.outputs[0]
    log_probs = [row[t].logprob for t, row in zip(answer.token_ids, answer.logprobs, strict=True)]
    return output.num_cached_tokens, tuple(log_probs)


def set_temperature(host: WorkerHost, temperature: float) -> None:
    """Let the actor score at another temperature; runs on a rank."""
    engine = host._roles["actor"].engine
    engine.spec = replace(engine.spec, temperature=temperature)


def spec_of(model: Path, case: Case) -> JobSpec:
    """Give a job of an actor that takes steps that show and an engine."""
    optim = OptimConfig(lr=3e-3, weight_decay=0.0)
    actor = jobs.role(model, case.actor, optim=optim)
    config = RolloutConfig(
        name=case.engine,
        n=SAMPLING.n,
        tensor_model_parallel_size=case.tp,
        enable_expert_parallel=case.ep,
        max_num_seqs=32,
        max_num_batched_tokens=512,
    )
    rollout = RolloutSpec(
        config=config,
        path=str(model),
        tokenizer_path=str(model),
        max_model_len=MODEL_LENGTH,
        trust_remote_code=False,
        resharding=ReshardingConfig(mode=case.mode, verify="every_step", bucket_bytes=BUCKET_BYTES),
        slots=case.slots,
    )
    return replace(
        jobs.job(actor),
        rollout=rollout,
        timeout_s=START_LIMIT_S,
        trainer_ranks=case.trainer,
        rollout_ranks=case.rollout,
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CASES],
)
def job(request: pytest.FixtureRequest, ranks: Ranks) -> Iterator[Job]:
    case = CASES[request.param]
    spec = spec_of(request.getfixturevalue(case.model), case)
    with ranks.job(case.world, spec, START_LIMIT_S) as pool:
        rollout = RolloutGroup(pool, case.tp, spread, case.engine_ranks, case.slots)
        actor = jobs.group(pool, spec.actor, world=len(case.trainer or range(case.world)))
        yield Job(pool, actor, rollout, case, rollout.sync(0))


@pytest.fixture(scope="module")
def vllm_job(job: Job) -> Job:
    if job.case.engine != "vllm":
        pytest.skip("about vLLM's own parts")
    return job


def prompts_of(lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [Prompt(f"p{i}", tuple(row), "", "", None, {}) for i, row in enumerate(rows)]


def gap(job: Job, groups: Sequence[Sequence[Sample]]) -> float:
    """Give the largest difference between the engine's and the actor's log-probs."""
    batch = collect(groups)
    log_probs, _ = job.actor.log_probs(batch.sequences)
    return float((log_probs.values - batch.rollout_log_probs.values).abs().max())


def update(job: Job) -> None:
    """Take an optimizer step that changes every answer."""
    batch = collect(job.rollout.generate(prompts_of(seed=4), SAMPLING))
    old, _ = job.actor.log_probs(batch.sequences)
    advantages = torch.randn(old.values.shape, generator=torch.Generator().manual_seed(5))
    weights = torch.full_like(old.values, 1 / len(old.values))
    job.actor.update(
        PolicyBatch(
            batch.sequences, old, old.with_values(advantages), old.with_values(weights), None
        )
    )


def test_engine_and_trainer_give_the_same_log_probs_before_and_after_an_update(job: Job) -> None:
    prompts, found = prompts_of(), []
    for version in (0, 1):
        groups = job.rollout.generate(prompts, SAMPLING)
        assert gap(job, groups) < 1e-4
        assert {sample.policy_version for group in groups for sample in group} == {version}
        found.append(groups)
        if version == 0:
            update(job)
            assert gap(job, groups) > 1e-2, "the update must be seen, or this test holds nothing"
            job.rollout.sync(1)
    assert gap(job, found[1]) < 1e-4


def test_log_probs_have_the_sampling_temperature_applied(job: Job) -> None:
    groups = job.rollout.generate(prompts_of(), replace(SAMPLING, temperature=0.7))
    assert gap(job, groups) > 1e-2
    try:
        job.on_trainers(set_temperature, temperature=0.7)
        assert gap(job, groups) < 1e-4
    finally:
        job.on_trainers(set_temperature, temperature=1.0)


def test_a_sync_moves_exactly_the_bytes_that_a_rank_needs_and_lacks(job: Job) -> None:
    again = job.rollout.sync(2)
    if job.case.mode == "gather":
        assert all(stats.bytes_moved >= stats.bytes_floor for stats in again)
        return
    for first, second in zip(job.traffic, again, strict=True):
        assert first.bytes_moved == first.bytes_floor == second.bytes_moved
    assert sum(stats.bytes_moved for stats in again) > 0


def test_a_sync_writes_the_parameters_in_place(job: Job) -> None:
    before = job.on_engines(addresses)
    update(job)
    job.rollout.sync(3)
    assert job.on_engines(addresses) == before


def test_engine_equals_its_own_load_of_the_exported_checkpoint(
    vllm_job: Job, tmp_path: Path
) -> None:
    job = vllm_job
    update(job)
    job.actor.save(tmp_path / "actor")
    folder = tmp_path / "actor" / "huggingface"
    stale = job.on_engines(compare_engine_with, folder=folder)
    assert all("differ" in reason for reason in stale), "the comparison must see an old policy"
    job.rollout.sync(4)
    assert job.on_engines(compare_engine_with, folder=folder) == [""] * len(job.case.engine_ranks)
    spoiled = job.case.engine_ranks[1]
    job.on_engines(spoil_engine, rank=spoiled)
    seen = job.on_engines(compare_engine_with, folder=folder)
    assert [bool(reason) for reason in seen] == [r == spoiled for r in job.case.engine_ranks]
    job.rollout.sync(4)
    assert job.on_engines(compare_engine_with, folder=folder) == [""] * len(job.case.engine_ranks)


def test_no_prefix_of_the_old_policy_survives_a_sync(vllm_job: Job) -> None:
    job = vllm_job
    longest = max(prompts_of(), key=lambda prompt: len(prompt.token_ids))
    ids = longest.token_ids
    job.on_engines(greedy_log_probs, token_ids=ids)
    cached, stale = job.on_engines(greedy_log_probs, token_ids=ids)[0]
    assert cached > 0, "the cache must be at work, or this test holds nothing"
    update(job)
    job.rollout.sync(5)
    cached, fresh = job.on_engines(greedy_log_probs, token_ids=ids)[0]
    assert cached == 0
    assert fresh != pytest.approx(stale, abs=1e-2)
    everywhere = [longest] * job.rollout.replicas
    groups = job.rollout.generate(everywhere, GREEDY)  # as without a cache
    assert {group[0].log_probs for group in groups} == {fresh}
    assert gap(job, groups) < 1e-4


def test_responses_keep_the_order_and_the_ids_of_the_prompts(job: Job) -> None:
    prompts = prompts_of()
    groups = job.rollout.generate(prompts, SAMPLING)
    assert [len(group) for group in groups] == [SAMPLING.n] * len(prompts)
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in group:
            assert (sample.uid, sample.prompt_ids) == (prompt.uid, prompt.token_ids)
            assert len(sample.log_probs) == len(sample.response_ids)


def test_a_response_ends_by_its_stop_token_or_at_its_length(job: Job) -> None:
    groups = job.rollout.generate(prompts_of((3,) * 24), SAMPLING)
    samples = [sample for group in groups for sample in group]
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        *inner, last = sample.response_ids
        assert 1 not in inner  # <eos>
        assert (sample.finish_reason == "stop") == (last == 1)
        assert sample.finish_reason == "stop" or len(sample.response_ids) == RESPONSE


def test_fewer_prompts_than_replicas_are_answered(job: Job) -> None:
    (group,) = job.rollout.generate(prompts_of((5,)), SAMPLING)
    assert [sample.uid for sample in group] == ["p0"] * SAMPLING.n


def test_replicas_and_samples_of_a_prompt_differ(job: Job) -> None:
    first = prompts_of((20,))[0]
    copies = [replace(first, uid=str(i)) for i in range(2 * job.rollout.replicas)]
    groups = job.rollout.generate(copies, SAMPLING)
    answers = {sample.response_ids for group in groups for sample in group}
    assert len(answers) > len(copies), "drawn with one seed, copies would repeat each other"
    by_replica = [tuple(s.response_ids for s in group) for group in groups[::2]]
    assert len(set(by_replica)) == len(by_replica)
    assert all(len(set(group)) > 1 for group in by_replica)


def test_a_draw_depends_on_its_seed_alone(job: Job) -> None:
    prompts, other = prompts_of(seed=21), prompts_of((30, 150), seed=9)  # in no cache yet
    first = job.rollout.generate(prompts, SAMPLING)
    job.rollout.generate(other, replace(SAMPLING, seed=77))
    assert job.rollout.generate(prompts, SAMPLING) == first
    assert job.rollout.generate(prompts, replace(SAMPLING, seed=12)) != first
    greedy: Any = job.rollout.generate(prompts, GREEDY)
    assert job.rollout.generate(prompts, replace(GREEDY, seed=78)) == greedy


def test_ragged_columns_of_the_engine_fit_the_trainer(job: Job) -> None:
    batch = collect(job.rollout.generate(prompts_of(), SAMPLING))
    log_probs, entropies = job.actor.log_probs(batch.sequences)
    for column in (log_probs, entropies, batch.rollout_log_probs):
        assert isinstance(column, Ragged)
        assert torch.equal(column.lengths, batch.sequences.response_lengths)
