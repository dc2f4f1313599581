"""A small model with experts learns through expert parallelism beside a live vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mrl import RayPPOTrainer, load_config
from mrl.tracking.jsonl import read_metrics
from mrl.types import PolicyBatch
from tests.runs import Recording, overrides, write_inputs

STEPS = 3
GRPO_EP2 = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "trainer.critic_warmup=0",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "rollout.name=vllm",
    "rollout.tensor_model_parallel_size=2",
    "actor.megatron.tensor_model_parallel_size=1",
    "actor.megatron.expert_model_parallel_size=2",
    "actor.megatron.moe_router_load_balancing_type=seq_aux_loss",
    "actor.megatron.moe_aux_loss_coeff=0.01",
    "actor.megatron.moe_z_loss_coeff=0.001",
)


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["disabled", "R2", "R3"])
def test_experts_learn_through_ep2_and_reach_the_engine_at_every_sync(
    replay: str, experts: Path, warm_pools: list[Recording], tmp_path: Path
) -> None:
    inputs = write_inputs(tmp_path, experts)
    run = tmp_path / "run"
    changes = overrides(run, *GRPO_EP2, f"actor.router_replay.mode={replay}")
    config = load_config(inputs.config, changes)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    RayPPOTrainer(config=config, tokenizer=tokenizer).fit(STEPS)
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["reshard/bytes_moved"] == row["reshard/bytes_floor"] > 0
        assert 0.5 < row["actor/moe_aux_loss"] < 4  # of 4 experts: 1 is even, 4 is all on one
        assert row["actor/moe_z_loss"] > 0
    # two optimizer steps a rollout: the second one's ratios are of other weights
    assert all(row["actor/ppo_kl"] != 0 for row in rows)
    assert rows[0]["actor/moe_aux_loss"] != rows[1]["actor/moe_aux_loss"]
    for batch in warm_pools[-1].batches:
        assert isinstance(batch, PolicyBatch)
        assert (batch.routing is None) == (replay == "disabled")
        if batch.routing is not None:
            assert batch.routing.lengths.tolist() == batch.sequences.tokens.lengths.tolist()
