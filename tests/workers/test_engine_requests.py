"""An engine that loses requests or memory says which, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.plan import spread
from mrl.config.schema import ReshardingConfig, RolloutConfig
from mrl.types import Sample, SamplingParams
from mrl.workers.group import RolloutGroup
from mrl.workers.host import WorkerHost
from mrl.workers.rollout import Rollout
from mrl.workers.specs import RolloutSpec
from tests.models import VOCAB
from tests.ranks import Ranks
from tests.workers import jobs
from tests.workers.test_rollout import SAMPLING, START_LIMIT_S, Case, prompts_of, spec_of

REQUESTS = [(f"p{i}", (5, 6, 7 + i)) for i in range(6)]


def answer(token: int = 8, reason: str | None = "stop") -> Any:
    return SimpleNamespace(token_ids=[token], text="x", finish_reason=reason)


def output(request: tuple[str, tuple[int, ...]], *answers: Any) -> Any:
    return SimpleNamespace(prompt_token_ids=list(request[1]), outputs=list(answers))


def ask(faults: str) -> list[int] | str:
    """Take vLLM's outputs of six requests of two answers; gives first tokens or the error."""
    from mrl.workers.rollout_vllm import _answers

    outputs = [output(r, answer(2 * i), answer(2 * i + 1)) for i, r in enumerate(REQUESTS)]
    if faults == "lost":
        del outputs[5], outputs[3]
    elif faults == "reversed":
        outputs.reverse()
    elif faults == "short":
        outputs[2].outputs.pop()
    elif faults == "missing":
        outputs[2].outputs[1] = None
    elif faults:
        outputs[4].outputs[0].finish_reason = faults if faults != "None" else None
    try:
        return [found.token_ids[0] for found in _answers(REQUESTS, outputs, 2)]
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("lost", ["4 of 6 prompts", "without an answer: p3, p5"]),
        ("reversed", ["6 of 6 prompts, or in another order"]),
        ("short", ["did not finish 1 of 6 prompts: p2 (1 of 2: stop)"]),
        ("missing", ["p2 (2 of 2: None, stop)"]),
        ("abort", ["p4 (2 of 2: abort, stop)"]),
        ("error", ["p4 (2 of 2: error, stop)"]),
        ("None", ["p4 (2 of 2: None, stop)"]),
    ],
)
def test_a_request_that_the_engine_loses_is_named(
    faults: str, said: list[str], ranks: Ranks
) -> None:
    (message,) = ranks.run(1, ask, faults=faults)
    assert all(part in message for part in said), message


def test_answers_are_listed_in_the_order_of_the_requests(ranks: Ranks) -> None:
    assert ranks.run(1, ask, faults="") == [list(range(12))]


def refuse_to_forget(call: str) -> str:
    """Let vLLM refuse to reset its prefix cache; gives the error of a call."""
    from mrl.workers.rollout_vllm import VLLMEngine

    engine = VLLMEngine.__new__(VLLMEngine)
    engine.llm = SimpleNamespace(reset_prefix_cache=lambda: False)  # type: ignore[assignment]
    engine._asleep = False
    calls: dict[str, Callable[[], Any]] = {
        "wake_cache": engine.wake_cache,
        "generate": lambda: engine.generate(REQUESTS, SAMPLING, 0),
    }
    try:
        calls[call]()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", ["wake_cache", "generate"])
def test_a_prefix_cache_that_is_not_forgotten_is_an_error(call: str, ranks: Ranks) -> None:
    (message,) = ranks.run(1, refuse_to_forget, call=call)
    assert message == "rank 0: vLLM refused to reset its prefix cache"


class Faulty:
    """An engine that fails, or answers with given tokens."""

    dtype = "float32"

    def __init__(self, error: Exception | None = None, response: Sequence[int] = ()) -> None:
        self.error, self.response = error, tuple(response)

    def generate(
        self, requests: Sequence[Any], sampling: SamplingParams, version: int
    ) -> list[tuple[Sample, ...]]:
        zeros = (0.0,) * len(self.response)
        return [
            (Sample(uid, ids, self.response, zeros, "", "stop", version),) for uid, ids in requests
        ]

    def wake_weights(self) -> None:
        if self.error is not None:
            raise self.error

    wake_cache = wake_weights


@pytest.fixture
def rollout(qwen2: Path) -> Callable[..., Rollout]:
    spec = RolloutSpec(
        config=RolloutConfig(gpu_memory_utilization=0.6),
        path=str(qwen2),
        tokenizer_path=str(qwen2),
        max_model_len=64,
        trust_remote_code=False,
        resharding=ReshardingConfig(),
        slots=None,
    )
    return lambda engine: Rollout(engine, spec, 0, colocated=True)


@pytest.mark.parametrize("part", ["weights", "cache"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"),
    ],
)
def test_an_engine_without_memory_names_its_share_and_what_is_free(
    error: Exception, part: str, rollout: Callable[..., Rollout]
) -> None:
    role = rollout(Faulty(error))
    with pytest.raises(MemoryError, match=f"no memory for its {part}: free .*=0.6: lower it") as e:
        role.wake_weights() if part == "weights" else role.wake_cache()
    assert e.value.__cause__ is error


def test_other_faults_of_an_engine_stay_what_they_are(rollout: Callable[..., Rollout]) -> None:
    with pytest.raises(RuntimeError, match=r"^refused$"):
        rollout(Faulty(RuntimeError("refused"))).wake_cache()


@pytest.mark.parametrize("bad", [VOCAB, VOCAB + 13, -1])
def test_a_token_that_the_model_does_not_have_is_told_with_its_prompt(
    bad: int, rollout: Callable[..., Rollout]
) -> None:
    with pytest.raises(ValueError, match=rf"prompt p2: token 2 of a response has id {bad}, .*0 to"):
        rollout(Faulty(response=(4, 5, bad, 6))).generate([("p2", (3, 4))], SAMPLING)
    with pytest.raises(ValueError, match=rf"prompt p3: token 1 of the prompt has id {bad}"):
        rollout(Faulty()).generate([("p2", (3, 4)), ("p3", (3, bad))], SAMPLING)
    last = (VOCAB - 1, 0)
    groups = rollout(Faulty(response=last)).generate([("p2", last)], SAMPLING)
    assert groups is not None and groups[0][0].response_ids == last


CYCLE = ("sleep", "wake_weights", "move", "written", "wake_cache", "generate")


def record_calls(host: WorkerHost) -> None:
    """Keep the names of what is asked of the engine and of the weights' mover; runs on a rank."""
    host.calls = []  # type: ignore[attr-defined]

    def listen(owner: Any, method: str, name: str) -> None:
        plain = getattr(owner, method)

        def recorded(*args: Any) -> Any:
            host.calls.append(name)  # type: ignore[attr-defined]
            return plain(*args)

        setattr(owner, method, recorded)

    for name in ("sleep", "wake_weights", "written", "wake_cache", "generate"):
        listen(host._roles["rollout"].engine, name, name)
    listen(host._roles["sync"]._model.mover, "run", "move")


def calls_of(host: WorkerHost) -> list[str]:
    """Give what `record_calls` kept; runs on a rank."""
    return host.calls  # type: ignore[attr-defined,no-any-return]


def test_weights_come_before_the_cache_and_the_cache_before_the_next_prompt(
    ranks: Ranks, policy: Path
) -> None:
    spec = spec_of(policy, Case(2, jobs.layout(2), "hf", 1))
    with ranks.job(2, spec, START_LIMIT_S) as pool:
        rollout = RolloutGroup(pool, 1, spread)
        rollout.sync(0)
        pool.each(record_calls)
        for version in range(1, 4):
            rollout.sleep()
            rollout.sync(version)
            rollout.generate(prompts_of((4, 5)), SAMPLING)
        assert pool.each(calls_of) == [list(CYCLE) * 3] * 2


def step_tokens(asked: int) -> int:
    from mrl.workers.rollout_vllm import _step_tokens

    config = RolloutConfig(max_num_seqs=16, max_num_batched_tokens=asked)
    spec: Any = SimpleNamespace(config=config, max_model_len=256)
    return _step_tokens(spec)


@pytest.mark.parametrize(("asked", "given"), [(8192, 16 * 256), (4000, 4000)])
def test_a_step_has_no_more_tokens_than_the_longest_sequences(
    asked: int, given: int, ranks: Ranks
) -> None:
    assert ranks.run(1, step_tokens, asked=asked) == [given]


def names_of_a_group() -> list[str]:
    import torch.distributed as dist

    from mrl.workers.rollout_vllm import _own_group_name

    os.environ["VLLM_DIST_IDENT"] = "//"  # what vLLM makes of env://
    group: Any = SimpleNamespace(
        ranks=list(range(dist.get_world_size())), unique_name="tp:0", device_group=dist.group.WORLD
    )
    return [_own_group_name(group) for _ in range(2)]


def test_a_group_of_engine_ranks_has_a_name_of_its_own(ranks: Ranks) -> None:
    first, second = ranks.run(2, names_of_a_group)
    assert first == second and first[0] != first[1]
    assert all(name.startswith("/") and "/" not in name[1:] for name in first)
