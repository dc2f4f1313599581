"""Every policy loss over layouts: losses, gradients and corrections are those of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mrl.algorithms.losses import loss_counts, token_weights
from mrl.algorithms.masks import full_mask
from mrl.algorithms.reductions import reduced
from mrl.algorithms.surrogates import POLICY_LOSSES
from mrl.config.bounds import Correction, parse_rejections
from mrl.config.schema import MegatronConfig
from mrl.types import Batching
from tests.ranks import Ranks
from tests.workers.jobs import TWO_ROWS, both, group, layout, policy_batch, sequences

LAYOUTS = {
    "dp4-by-tokens": (4, layout(), Batching(max_tokens=24)),
    "cp2": (2, layout(context_parallel_size=2), TWO_ROWS),
    "tp2-pp2": (4, layout(tp=2, pp=2), TWO_ROWS),
}
CORRECTION = Correction("sequence", None, 1.5, False, parse_rejections("seq_max_k2", "0.02"))


def learn(
    ranks: Ranks, world: int, path: Path, where: MegatronConfig, cut: Batching, mode: str
) -> dict[str, float]:
    """Take a step without a change of the weights; give what it reports."""
    spec, rows = both(path, where), sequences()
    still = replace(spec.actor.optim, lr=0.0, min_lr=0.0)
    loss = replace(spec.policy_loss, loss_mode=mode, correction=CORRECTION)
    spec = replace(spec, actor=replace(spec.actor, optim=still), critic=None, policy_loss=loss)
    with ranks.job(world, spec) as pool:
        actor = group(pool, spec.actor, cut)
        kept = full_mask(rows.response_lengths)
        weights = token_weights(kept, "seq-mean-token-mean", *loss_counts(kept))
        batch = replace(policy_batch(rows, actor.log_probs(rows)[0]), weights=weights)
        return reduced(actor.update(batch))


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        pytest.param(mode, case, marks=() if (mode, case) == ("gspo", "cp2") else pytest.mark.slow)
        for mode in sorted(POLICY_LOSSES)
        for case in LAYOUTS
    ],
)
def test_a_loss_and_its_correction_are_those_of_one_rank(
    mode: str, case: str, ranks: Ranks, qwen2: Path
) -> None:
    wanted = learn(ranks, 1, qwen2, layout(), TWO_ROWS, mode)
    found = learn(ranks, LAYOUTS[case][0], qwen2, *LAYOUTS[case][1:], mode)
    assert 0 < wanted["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert wanted["actor/grad_norm"] > 0
    for name, value in wanted.items():
        if not name.startswith("perf/"):
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
