"""Responses of training come from the distribution that is trained, or are weighed for it."""

from __future__ import annotations

import pytest

ONE_RANK = "actor: {ppo_micro_batch_size_per_gpu: 1}\nalgorithm: {adv_estimator: grpo}"
CUTS = ["rollout.top_p=0.5", "rollout.top_p=0.8", "rollout.top_p=0.999", "rollout.top_k=1",
        "rollout.top_k=50"]  # fmt: skip
WEIGHED = "algorithm.rollout_correction.rollout_is=token"


@pytest.mark.parametrize("engine", ["vllm", "hf"])
@pytest.mark.parametrize("cut", CUTS)
def test_truncated_sampling_is_refused_where_it_is_not_corrected(refuse, cut: str, engine: str):
    key, value = cut.split("=")
    (found,) = refuse(f"rollout.name={engine}", "rollout.n=2", cut, text=ONE_RANK)
    assert found.key == key and float(found.value) == float(value)
    assert "truncated distribution" in found.rule
    assert found.nearest == ("1" if key.endswith("top_p") else "-1")


@pytest.mark.parametrize("cut", CUTS)
def test_weighed_samples_may_be_truncated_where_the_engine_tells_their_log_probs(
    plan, refuse, cut: str
):
    accepted = plan("rollout.name=vllm", "rollout.n=2", cut, WEIGHED, text=ONE_RANK)
    assert any("truncated distribution" in warning for warning in accepted.warnings)
    # transformers' log-probs here are those of the full distribution
    assert refuse("rollout.name=hf", "rollout.n=2", cut, WEIGHED, text=ONE_RANK)


@pytest.mark.parametrize("cut", ["top_p=0.7", "top_k=20"])
def test_validation_may_sample_as_it_likes(load, cut: str):
    val = "rollout.val_kwargs"
    sampled = (f"{val}.do_sample=true", f"{val}.temperature=0.6")
    load(*sampled, f"{val}.{cut}", "rollout.n=2", text=ONE_RANK)
