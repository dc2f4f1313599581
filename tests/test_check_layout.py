"""`mrl check-layout`: one batch, several layouts, and a verdict that can be trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mrl.check_layout import (
    Bounds,
    Round,
    auto_layouts,
    bounds_of,
    check_layouts,
    compare,
    parse_layout,
    print_check,
)
from mrl.check_layout import run as check_run
from mrl.check_layout.batch import Targets, make_rows, policy_batch, response_lengths, value_batch
from mrl.cli import main
from mrl.config import load_config
from mrl.config.check_model import read_shape
from mrl.config.schema import MegatronConfig
from mrl.types import Batching
from tests.runs import Inputs, Recording, overrides

BOUNDS = Bounds(largest=1e-5, scalar=1e-5, mean=None, later=10.0, reason="")


def test_a_name_gives_sizes_options_and_a_cut() -> None:
    layout = parse_layout("tp2pp2,recompute=selective,fused=false,tokens=64")
    found = layout.megatron(MegatronConfig(context_parallel_size=4, moe_z_loss_coeff=0.1))
    assert found == MegatronConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        recompute_granularity="selective",
        use_fused_kernels=False,
        moe_z_loss_coeff=0.1,  # of the model, so kept
    )
    assert layout.batching == Batching(max_tokens=64)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("tp1", 1), ("tp2pp2", 4), ("tp2dp3", 6), ("cp2tp2", 4), ("ep2", 2), ("ep2etp1tp2", 2),
     ("ep2tp2", 4), ("ep4pp2", 8), ("recompute", 1)],
)  # fmt: skip
def test_a_layout_has_as_few_ranks_as_it_can(name: str, ranks: int) -> None:
    assert parse_layout(name).world_size == ranks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tp2xp2", "'tp2xp2' is not known"),
        ("tp", "'tp' is not known"),
        ("tp2tp4", "names tp twice"),
        ("tp0", "whole number of at least 1"),
        ("tp2,recomputed", "did you mean recompute"),
        ("tp2,recompute=maybe", "expected one of full, selective, false"),
        ("rows=many", "whole number"),
        ("", "is empty"),
    ],
)
def test_an_unknown_layout_is_refused_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ValueError, match="layout") as error:
        parse_layout(name)
    assert message in str(error.value)


def test_the_automatic_layouts_fit_the_ranks_and_the_model(qwen2: Path, qwen3_moe: Path) -> None:
    dense, experts = read_shape("", str(qwen2)), read_shape("", str(qwen3_moe))
    two = auto_layouts(dense, 2, 100)
    assert {"config", "tp2", "pp2", "pp2vpp2", "cp2", "dp2", "tp1,tokens=100"} <= set(two)
    assert max(parse_layout(name).world_size for name in two) == 2
    assert not any("ep2" in name for name in two)
    assert {"ep2", "ep2etp1tp2", "tp2pp2"} <= set(auto_layouts(experts, 4, 100))


def test_responses_are_skewed_odd_and_one_is_a_single_token() -> None:
    lengths = response_lengths(16, 100, seed=7)
    assert lengths == response_lengths(16, 100, seed=7)
    assert min(lengths) == 1
    assert max(lengths) in (99, 100)
    assert sum(lengths) / 16 < 0.4 * max(lengths)  # a few long ones
    assert sum(length % 2 for length in lengths) >= 8


def test_a_batch_keeps_the_prompts_and_trains_both_ways() -> None:
    prompts = [(5, 6, 7), (8,), (9, 10)]
    rows = make_rows(prompts, 40, tokens=[5, 6, 8], seed=7)
    for row, length, prompt in zip(rows.tokens.rows(), rows.response_lengths, prompts, strict=True):
        assert tuple(row[: -int(length)].tolist()) == prompt
    column = rows.tokens.with_values(rows.tokens.values.float())
    log_probs = replace(column, values=torch.zeros(int(rows.response_lengths.sum())),
                        lengths=rows.response_lengths)  # fmt: skip
    batch = policy_batch(rows, log_probs, Targets(has_reference=True))
    assert batch.weights.values.sum() == pytest.approx(1)
    assert (batch.weights.values == 0).any()
    assert batch.ref_log_probs is not None
    for column in (batch.old_log_probs, batch.advantages):
        assert column.values.min() < 0 < column.values.max()
    assert len(value_batch(rows, log_probs, Targets()).returns.values) == len(log_probs.values)


def done(offset: float = 0.0, norm: float = 2.0) -> Round:
    values = torch.linspace(-4, -1, 9)
    moved = values.clone()
    moved[3] += offset
    actor = ({"actor/pg_loss": -0.5, "actor/grad_norm": norm},)
    return Round(moved, values, None, values, None, actor, ())


def test_equal_rounds_are_the_same_and_a_moved_token_is_not() -> None:
    assert compare(done(), done(), BOUNDS).ok
    assert compare(done(3e-5), done(), BOUNDS).ok  # of a magnitude of 4
    found = compare(done(5e-5), done(), BOUNDS)
    assert not found.ok
    assert found.worst.name == "log-probs"
    assert found.worst.found == pytest.approx(5e-5, rel=1e-2)
    assert compare(done(norm=2.1), done(), BOUNDS).worst.name == "grad norm"


def test_not_a_number_differs() -> None:
    found = compare(done(float("nan")), done(), BOUNDS)
    assert not found.ok
    assert found.worst.name == "log-probs"
    assert not compare(done(norm=float("nan")), done(), BOUNDS).ok
    with_experts = bounds_of("bfloat16", 4, has_experts=True)
    assert not compare(done(float("nan")), done(), with_experts).ok
    assert not compare(done(float("inf")), done(), with_experts).ok


def test_a_yardstick_says_how_far_a_dtype_may_be() -> None:
    bounds = bounds_of("bfloat16", 4, has_experts=False)
    yardstick = compare(done(0.05), done(), bounds)
    assert compare(done(0.1), done(), bounds, yardstick).ok
    assert compare(done(0.2), done(), bounds).ok
    found = compare(done(0.2), done(), bounds, yardstick)
    assert {d.name for d in found.differences if not d.ok} == {"log-probs", "mean log-probs"}


def test_rounds_of_different_batches_cannot_be_compared() -> None:
    short = replace(done(), log_probs=torch.zeros(3))
    with pytest.raises(ValueError, match="9 tokens against the reference's 3"):
        compare(done(), short, BOUNDS)


def test_bounds_grow_with_the_roundings() -> None:
    assert bounds_of("float32", 32, has_experts=False).largest == 1e-5
    assert bounds_of("float32", 32, has_experts=True).largest == 1e-4
    few, many = (bounds_of("bfloat16", layers, False) for layers in (2, 32))
    assert 1e-2 < few.scalar < many.scalar < 0.3
    assert bounds_of("bfloat16", 2, False, fp8=True).largest > few.largest


def checked(inputs: Inputs, run: Path, *names: str) -> check_run.CheckReport:
    return check_layouts(load_config(inputs.config, overrides(run)), names, ranks=2)


def test_layouts_of_a_model_are_the_same_and_an_impossible_one_says_why(
    inputs: Inputs, warm_pools: list[Recording], tmp_path: Path
) -> None:
    report = checked(inputs, tmp_path, "config", "pp2,fused=false", "tp3")
    assert report.ok
    own, pipeline, refused = report.layouts
    assert (own.ranks, pipeline.ranks) == (2, 2)
    for result in (own, pipeline):
        assert result.comparison is not None
        assert result.comparison.ok
        assert result.round is not None
        assert len(result.round.critic) == 2  # the config has a critic
    assert refused.problem.startswith("actor.megatron.tensor_model_parallel_size = 3")
    assert "4 attention heads" in refused.problem
    assert "nearest legal: 1, 2, 4" in refused.problem
    assert len(warm_pools) == 3  # none was started for what is not possible
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_check(report, console)
    text = console.export_text()
    assert "tp3 not possible: actor.megatron.tensor_model_parallel_size = 3" in text.replace(
        "\n", " "
    )
    assert max(map(len, text.splitlines())) <= 100


def test_a_layout_of_more_ranks_than_the_host_takes_is_not_started(
    inputs: Inputs, warm_pools: list[Recording], tmp_path: Path
) -> None:
    (refused,) = checked(inputs, tmp_path, "dp4096").layouts
    assert not refused.possible
    assert "it has 4096 ranks, and this host" in refused.problem
    assert len(warm_pools) == 1


def test_the_command_ends_with_1_when_a_layout_differs(
    inputs: Inputs,
    warm_pools: list[Recording],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    honest = check_run.run_round

    def wrong_when_compared(*args: object) -> Round:
        found = honest(*args)  # type: ignore[arg-type]
        return found if args[-1] is None else replace(found, entropies=found.entropies + 0.1)

    monkeypatch.setattr(check_run, "run_round", wrong_when_compared)
    grpo = ("algorithm={adv_estimator: grpo, use_kl_in_reward: false}", "trainer.critic_warmup=0")
    given = ["check-layout", str(inputs.config), *overrides(tmp_path, *grpo), "--json"]
    assert main([*given, "--layouts", "tp1,rows=1", "data.max_response_length=6"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    (layout,) = report["layouts"]
    over = [difference["name"] for difference in layout["differences"] if not difference["ok"]]
    assert over == ["entropy"]
    assert report["response_tokens"] < 8 * 6
    assert layout["critic"] == []


def test_a_folder_without_weights_is_refused_or_filled(
    inputs: Inputs, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in policy.glob("*.json"):
        (bare / file.name).write_bytes(file.read_bytes())
    given = ["check-layout", str(inputs.config), *overrides(tmp_path, f"model.path={bare}")]
    assert main(given) == 2
    assert "--random-weights" in capsys.readouterr().err
    # the whole way with drawn weights, to a layout that needs no ranks but the reference's
    from mrl.check_layout.model import require_weights, write_random_model

    config = load_config(inputs.config, overrides(tmp_path, f"model.path={bare}"))
    require_weights(str(write_random_model(config, tmp_path / "drawn")))


def test_it_starts_its_own_ranks(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="run it without torchrun"):
        checked(inputs, tmp_path, "tp2")
