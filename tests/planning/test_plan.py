"""Verdict, fixes, advice, suggestions, and how they are shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from mrl.cli import main
from mrl.config import Config, check_config, load_config
from mrl.planning.advice import RULES
from mrl.planning.change import Change, changed, words
from mrl.planning.compute import plan_time
from mrl.planning.hardware import GB, Assumptions, Machine
from mrl.planning.memory import _chunks_in_flight
from mrl.planning.plan import JobPlan, plan_job
from mrl.planning.show import print_job, print_suggestions
from mrl.planning.suggest import Suggestion, suggest
from tests.planning.figures import ROOT

SEVEN, SEVENTY = "grpo/qwen2.5_7b_8gpu.yaml", "grpo/llama3.1_70b_128gpu.yaml"
M = "actor.megatron."
PARTS = ("param", "grad", "optimizer")


@cache
def recipe(name: str) -> Config:
    return load_config(ROOT / "configs" / name)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def planned(name: str, change: Change | None = None, gpu: str = "h100", *assume: str) -> JobPlan:
    config = changed(recipe(name), change or {})
    assert not check_config(config)
    return plan_job(config, Machine.named(gpu, None, assume), exact_reshard=False)


@cache
def suggested() -> tuple[Suggestion, ...]:
    return suggest(planned(SEVEN).job)


def phases(plan: JobPlan) -> dict[str, dict[str, float]]:
    return {p.name: {k: v / GB for k, v in p.parts.items()} for p in plan.memory.peak.phases}


def test_a_reference_beside_adapters_is_free_only_in_the_actors_layout() -> None:
    found = []
    for own in ((), ("ref.megatron.use_fused_kernels=false",)):
        overrides = ("model.lora.rank=8", "actor.use_kl_loss=true", *own)
        config = load_config(ROOT / "configs" / SEVEN, overrides)
        plan = plan_job(config, Machine.named("h100", None, ()), exact_reshard=False)
        found.append(plan.memory.peak.phases[0].parts["parameters"] + plan.memory.peak.host)
    shared, apart = found  # wherever they wait while the engine generates
    assert apart - shared > 0.9 * plan.job.model_bytes / 2  # of two ranks under TP


def test_what_is_offloaded_is_on_the_device_only_where_it_works() -> None:
    found = phases(planned("ppo/qwen2.5_7b_8gpu.yaml"))
    assert found["rollout"]["parameters"] == found["rollout"]["optimizer"] == 0
    assert found["log-prob"]["optimizer"] == found["values"]["gradients"] == 0
    assert found["update actor"]["optimizer"] == pytest.approx(7.62 * 12 / 8, rel=0.02)
    # the critic's are away meanwhile
    assert found["update actor"]["parameters"] == pytest.approx(7.62 * 2 / 2, rel=0.02)
    assert found["transition"]["parameters"] == pytest.approx(7.62, rel=0.02)
    stays = phases(planned(SEVEN, {f"{M}{part}_offload": False for part in PARTS}))
    assert stays["rollout"]["optimizer"] == pytest.approx(7.62 * 12 / 8, rel=0.02)


def test_the_engine_takes_its_share_and_gives_it_back() -> None:
    found = phases(planned(SEVEN))
    engine = found["rollout"]["engine"] + found["rollout"]["kv cache"]
    budget = recipe(SEVEN).rollout.gpu_memory_utilization * 85.5
    # of the budget the context takes a part; graphs are beside it
    assert engine == pytest.approx(budget - 1.2 + 2.0, rel=0.01)
    assert "kv cache" not in found["update actor"]
    awake = phases(planned(SEVEN, {"rollout.free_cache_engine": False}))
    assert awake["update actor"]["kv cache"] == pytest.approx(found["rollout"]["kv cache"])


def test_recomputation_trades_memory_for_time() -> None:
    full = {f"{M}recompute_granularity": "full"}
    mlp = {f"{M}recompute_granularity": "selective", f"{M}recompute_modules": ("mlp",)}
    plans = [planned(SEVEN, change) for change in ({}, mlp, full)]
    memory = [phases(plan)["update actor"]["activations"] for plan in plans]
    seconds = [plan.time.of("update_actor") for plan in plans]
    assert memory == sorted(memory, reverse=True)
    assert seconds == sorted(seconds)
    assert seconds[2] / seconds[0] == pytest.approx(4 / 3, rel=0.1)


def test_the_first_pipeline_stage_keeps_most_micro_batches() -> None:
    assert [_chunks_in_flight(stage, 4, 1, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [_chunks_in_flight(stage, 4, 1, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert _chunks_in_flight(0, 4, 2, 8) == 2 * 3 + 4 + 1
    plan = planned(SEVENTY)
    kept = {
        group.stages["actor"]: next(
            p.parts["activations"] for p in group.phases if p.name == "update actor"
        )
        for group in plan.memory.groups
    }
    assert [kept[stage] for stage in range(4)] == sorted(kept.values(), reverse=True)
    assert sum(len(group.ranks) for group in plan.memory.groups) == 128


def test_ranks_of_a_split_job_hold_their_own_side_alone() -> None:
    split = {"placement.mode": "disaggregated", "placement.trainer_gpus": 4}
    groups = planned(SEVEN, split).memory.groups
    assert sorted(group.ranks for group in groups) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    trainer = next(group for group in groups if group.stages)
    assert not trainer.has_engine
    assert "rollout" not in {phase.name for phase in trainer.phases}


@pytest.mark.parametrize(
    "change",
    [
        {"rollout.gpu_memory_utilization": 0.95, **{f"{M}{p}_offload": False for p in PARTS}},
        {"actor.ppo_max_token_len_per_gpu": 65536},
        {"rollout.gpu_memory_utilization": 0.2},
    ],
)
def test_every_fix_is_legal_and_fits_and_the_cheapest_comes_first(change: Change) -> None:
    plan = planned(SEVEN, change)
    assert not plan.fits
    assert len(plan.fixes) == 2
    assert plan.fixes[0].seconds <= plan.fixes[1].seconds
    for fix in plan.fixes:
        again = planned(SEVEN, {**change, **fix.change})
        assert again.fits
        assert again.time.total == pytest.approx(fix.seconds)


def test_the_verdict_names_phase_rank_need_and_what_binds() -> None:
    text = planned(SEVEN, {"actor.ppo_max_token_len_per_gpu": 65536}).binds
    for word in ("update actor", "rank 0", "85.5", "activations"):
        assert word in text
    text = planned(SEVEN, {"rollout.gpu_memory_utilization": 0.2}).binds
    assert "rollout.gpu_memory_utilization=0.2" in text


ADVICE: dict[str, tuple[str, Change]] = {
    "generation_share": (SEVEN, {"data.max_response_length": 12288, "rollout.max_num_seqs": 64}),
    "log_prob_batch": (SEVEN, {"rollout.log_prob_max_token_len_per_gpu": None}),
    "rollout_tp": (SEVEN, {"rollout.tensor_model_parallel_size": 4}),
    "kinds_of_parallelism": ("grpo/llama3.1_70b_128gpu_128k.yaml", {}),
    "long_sequences": (SEVEN, {"data.max_response_length": 12288}),
    "group_size": (SEVEN, {"rollout.n": 32}),
    "starved_cache": (SEVEN, {"rollout.max_num_seqs": 1024, "data.train_batch_size": 1024}),
    "idle_ranks": (SEVENTY, {"actor.ppo_mini_batch_size": 1, "data.train_batch_size": 64}),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_says_its_number_and_its_key(rule: str) -> None:
    name, change = ADVICE[rule]
    found = [a for a in planned(name, change).advice if a.rule == rule]
    assert found
    assert any(c.isdigit() for c in found[0].found)
    assert found[0].key.split(".")[0] in ("actor", "rollout", "data")


def test_suggestions_are_legal_fit_and_beat_or_match_the_recipe() -> None:
    plan = planned(SEVEN)
    found = suggested()
    assert len(found) == 5
    assert found[0].time.total <= plan.time.total
    assert [s.time.total for s in found] == sorted(s.time.total for s in found)
    for suggestion in found:
        assert not check_config(changed(plan.job.config, suggestion.change))
        assert not suggestion.memory.problems
    assert len({words(s.change) for s in found}) == 5


def test_suggestions_match_a_recipe_with_a_large_budget_and_one_that_offloads() -> None:
    for name in ("grpo/qwen2.5_0.5b_1gpu.yaml", "grpo/qwen2.5_7b_2gpu.yaml"):
        plan = planned(name)
        best = suggest(plan.job, 1)[0]
        # beside the search: shares of memory come in steps, and the recipe's lie between them
        assert best.time.total < 1.01 * plan.time.total


def test_the_table_fits_100_columns() -> None:
    console = Console(file=io.StringIO(), width=100)
    plan = planned("ppo/llama3.1_70b_128gpu.yaml", {"actor.ppo_max_token_len_per_gpu": 65536})
    print_job(plan, console)
    print_suggestions(suggested(), console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for word in ("update", "transition", "tokens/s a GPU", "DOES NOT FIT", "would fit with", "gen"):
        assert word in text


def test_assumptions_are_named_and_can_be_given() -> None:
    slow, usual = planned(SEVEN, None, "h100", "update=0.1"), planned(SEVEN)
    assert slow.time.of("update_actor") > 4 * usual.time.of("update_actor")
    short = planned(SEVEN, None, "h100", "response=0.3")
    assert short.time.tokens < 0.5 * usual.time.tokens
    assert short.time.of("gen") < usual.time.of("gen")
    with pytest.raises(ValueError, match="nearest name: response"):
        Assumptions.given("h100", ["respons=1"])
    for text in ("update=fast", "update=0", "update=nan"):
        with pytest.raises(ValueError, match="update="):
            Assumptions.given("h100", [text])


def test_a_slower_network_slows_what_crosses_nodes_alone() -> None:
    config = recipe(SEVENTY)
    fast, slow = (
        plan_job(config, Machine.named("h100", link), False).time for link in ("ndr", "roce-100")
    )
    links = [
        phase.seconds["links"]
        for time in (fast, slow)
        for phase in time.phases
        if phase.name == "reshard"
    ]
    assert links[1] > 3 * links[0]
    assert slow.of("old_log_prob") < 1.2 * fast.of("old_log_prob")


def test_the_command_gives_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "memory.png"
    arguments = ["plan", f"configs/{SEVEN}", "--json", "--plot", str(picture), "--gpu", "h200"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 2048
    assert found["fits"] is True
    assert found["hardware"]["gpu"].startswith("H200")
    (group,) = found["memory"]["groups"]
    update = group["phases"]["update actor"]
    assert sum(v for k, v in update.items() if k != "total") == pytest.approx(update["total"])
    assert found["seconds"]["reshard_bytes"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments[:4], str(tmp_path / "memory.pdf")]) == 2


def test_a_model_of_70b_on_128_gpus_takes_seconds_and_no_torch() -> None:
    code = (
        "import sys, time\n"
        "from mrl.cli import main\n"
        f"status = main(['plan', 'configs/{SEVENTY}'])\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'megatron'} & set(sys.modules)\n"
        "print(status, sorted(heavy), time.process_time(), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    status, heavy, seconds = done.stderr.splitlines()[-1].split()
    assert (status, heavy) == ("0", "[]")
    assert float(seconds) < 5.0
    assert "FITS" in done.stdout


def test_the_share_of_generation_is_of_the_whole_step() -> None:
    plan = planned(SEVEN)
    assert plan.time.total == pytest.approx(sum(p.total for p in plan.time.phases))
    assert plan_time(plan.job).generation_share == plan.time.of("gen") / plan.time.total
