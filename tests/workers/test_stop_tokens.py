"""A response ends where the model or the user says, with nothing in it that was not drawn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mrl.batching.experience import collect
from mrl.config.plan import spread
from mrl.types import Sample
from mrl.workers.group import RolloutGroup, TrainGroup
from tests.ranks import Ranks
from tests.workers import jobs
from tests.workers.test_rollout import (
    RESPONSE,
    SAMPLING,
    START_LIMIT_S,
    Case,
    prompts_of,
    spec_of,
)

EOS, A, B = 1, 2, 3  # of the tokenizer; "a" and "b"
STOP_IDS = (EOS, 7, 20)  # of generation_config.json
ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Hands:
    """An actor and an engine on one rank."""

    actor: TrainGroup
    rollout: RolloutGroup

    def draw(self, *stop: str) -> list[tuple[Sample, ...]]:
        return self.rollout.generate(prompts_of((3, 9) * 12), replace(SAMPLING, stop=stop))

    def gap(self, groups: list[tuple[Sample, ...]]) -> float:
        """Give the largest difference between the engine's and the actor's log-probs."""
        batch = collect(groups)
        log_probs, _ = self.actor.log_probs(batch.sequences)
        return float((log_probs.values - batch.rollout_log_probs.values).abs().max())


@contextmanager
def running(ranks: Ranks, model: Path, engine: str) -> Iterator[Hands]:
    case = Case(1, jobs.layout(), engine, 1)
    spec = spec_of(model, case)
    with ranks.job(1, spec, START_LIMIT_S) as pool:
        hands = Hands(jobs.group(pool, spec.actor), RolloutGroup(pool, 1, spread))
        hands.rollout.sync(0)
        yield hands


@pytest.fixture(scope="module")
def model(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy with several stop ids, as instruction-tuned models have."""
    folder = tmp_path_factory.mktemp("stops") / "model"
    shutil.copytree(policy, folder)
    file = folder / "generation_config.json"
    # what else it says is of chats, not of training: no response may follow it
    more = {"eos_token_id": list(STOP_IDS), "repetition_penalty": 9.0, "top_k": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def hands(request: pytest.FixtureRequest, ranks: Ranks, model: Path) -> Iterator[Hands]:
    with running(ranks, model, request.param) as found:
        yield found


def test_the_first_of_any_stop_id_of_the_model_ends_a_response(hands: Hands) -> None:
    groups = hands.draw()
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        *inner, last = sample.response_ids
        assert not set(inner) & set(STOP_IDS)
        assert sample.finish_reason == ("stop" if last in STOP_IDS else "length")
        assert sample.finish_reason == "stop" or len(sample.response_ids) == RESPONSE
    assert {s.response_ids[-1] for s in samples} >= set(STOP_IDS)
    assert "length" in {s.finish_reason for s in samples}
    assert hands.gap(groups) < 1e-4


def test_a_stop_string_ends_a_response_and_adds_no_token(hands: Hands) -> None:
    groups = hands.draw("a", "b")
    samples = [sample for group in groups for sample in group]
    ended = [sample for sample in samples if sample.response_ids[-1] in (A, B)]
    assert {sample.response_ids[-1] for sample in ended} == {A, B}
    assert any(len(sample.response_ids) == RESPONSE for sample in samples)
    for sample in samples:
        *inner, last = sample.response_ids
        assert not set(inner) & {A, B, *STOP_IDS}
        assert sample.finish_reason == ("stop" if last in (A, B, *STOP_IDS) else "length")
        assert not set(sample.text) & {"a", "b"}  # as vLLM gives it
    assert hands.gap(groups) < 1e-4  # each token was drawn by the policy
