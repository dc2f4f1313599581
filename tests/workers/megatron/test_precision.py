"""16-bit training keeps gradients, master weights and Adam's state in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mrl.check_layout import bounds_of
from mrl.config.schema import MegatronConfig, OptimConfig
from mrl.resharding.families import ModelShape
from mrl.workers.host import WorkerHost
from mrl.workers.megatron.build import Precision, transformer_config
from mrl.workers.megatron.fp8 import row_multiple
from tests.ranks import Ranks
from tests.workers.jobs import ALL_ROWS, assert_close, group, job, layout, policy_batch, role
from tests.workers.jobs import sequences as draw

HALF = layout(dtype="bfloat16")


def dtypes(host: WorkerHost) -> dict[str, set[torch.dtype]]:
    trainer = host._roles["actor"].engine.trainer
    chunks, inner = trainer.chunks, trainer.inner_optimizers
    params = [param for chunk in chunks for param in chunk.parameters()]
    adams = [state for part in inner for state in part.state.values()]
    return {
        "weights": {param.dtype for param in params},
        "gradients": {param.main_grad.dtype for param in params},
        "buffers": {buffer.grad_data.dtype for chunk in chunks for buffer in chunk.buffers},
        "masters": {p.dtype for part in inner for g in part.param_groups for p in g["params"]},
        "moments": {state[name].dtype for state in adams for name in ("exp_avg", "exp_avg_sq")},
    }


@pytest.mark.parametrize("distributed", [True, False])
def test_what_training_sums_up_is_float32(distributed: bool, ranks: Ranks, qwen2: Path) -> None:
    place = replace(HALF, use_distributed_optimizer=distributed)
    spec = job(role(qwen2, place))
    with ranks.job(2, spec) as pool:
        actor = group(pool, spec.actor)
        rows = draw()
        actor.update(policy_batch(rows, actor.log_probs(rows)[0]))
        for found in pool.each(dtypes):
            assert found.pop("weights") == {torch.bfloat16}
            assert set.union(*found.values()) == {torch.float32}


def share_beyond_bfloat16(host: WorkerHost) -> float:
    """Give the share of master weights that no bfloat16 weight could hold."""
    inner = host._roles["actor"].engine.trainer.inner_optimizers
    masters = [p.detach() for part in inner for g in part.param_groups for p in g["params"]]
    beyond = sum(int((p != p.bfloat16().float()).sum()) for p in masters)
    return beyond / sum(p.numel() for p in masters)


def test_a_step_too_small_for_bfloat16_is_kept(ranks: Ranks, qwen2: Path) -> None:
    # 1e-5 is far below half a unit of a weight of 0.2
    spec = job(role(qwen2, HALF, optim=OptimConfig(lr=1e-5, weight_decay=0.0)))
    with ranks.job(1, spec) as pool:
        actor = group(pool, spec.actor)
        rows = draw()
        assert pool.each(share_beyond_bfloat16)[0] < 0.1  # as loaded: from a bfloat16 weight
        actor.update(policy_batch(rows, actor.log_probs(rows)[0]))
        assert pool.each(share_beyond_bfloat16)[0] > 0.5


def test_bfloat16_outputs_stay_within_the_stated_bounds(ranks: Ranks, qwen2: Path) -> None:
    rows, found = draw(), {}
    for name, place in (("float32", layout()), ("bfloat16", HALF)):
        spec = job(role(qwen2, place, optim=None))
        with ranks.job(1, spec) as pool:
            found[name] = group(pool, spec.actor, ALL_ROWS).log_probs(rows)[0].values
    bounds = bounds_of("bfloat16", layers=4, has_experts=False)
    assert_close(found["bfloat16"], found["float32"], "log-probs", bounds.largest)
    mean = float((found["bfloat16"] - found["float32"]).abs().mean())
    assert bounds.mean is not None
    assert mean <= bounds.mean * float(found["float32"].abs().max())


SHAPE = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 50, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


def test_fp8_is_refused_without_a_gpu_or_with_the_local_layers() -> None:
    with pytest.raises(ValueError, match=r"fp8=hybrid needs a GPU, found device cpu"):
        Precision.of(MegatronConfig(fp8="hybrid"), torch.device("cpu"))
    with pytest.raises(ValueError, match="runs through Transformer Engine"):
        Precision.of(
            MegatronConfig(fp8="hybrid", transformer_impl="local"), torch.device("cuda", 0)
        )


def test_fp8_needs_widths_of_whole_blocks() -> None:
    shape = ModelShape.from_hf({**SHAPE, "intermediate_size": 72})
    precision = Precision(torch.device("cpu"), torch.bfloat16, "local")
    with pytest.raises(ValueError, match="the intermediate size of a rank is 72, expected multip"):
        transformer_config(shape, MegatronConfig(fp8="hybrid"), precision)


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        (layout(), 1),
        (layout(tp=2), 2),
        (layout(tp=2, sequence_parallel=False), 1),
        (layout(fp8="hybrid"), 16),
        (layout(tp=2, fp8="hybrid"), 32),
        (layout(fp8="e4m3", fp8_recipe="blockwise"), 128),
    ],
)
def test_rows_are_as_long_as_the_layers_take(place: MegatronConfig, wanted: int) -> None:
    precision = Precision(torch.device("cpu"), torch.bfloat16, "local")
    config = transformer_config(ModelShape.from_hf(SHAPE), place, precision)
    assert row_multiple(config) == wanted
    assert bool(config.fp8) == (place.fp8 is not None)
    assert not config.fp8_param
