from __future__ import annotations

import json

import pytest
import torch

from benchmarks import cases, jobs, logprob, long_context, precision, run, train_step
from benchmarks.jobs import spread
from benchmarks.training import Run
from benchmarks.workload import Model, Rows, policy_batch
from mrl.resharding.families import ModelShape
from mrl.tracking.flops import training_flops
from mrl.types import Ragged


def smoke(benchmark, folder, *args):
    """Run a benchmark on CPU ranks; gives its parts as written."""
    assert run.main([benchmark, "--smoke", "--folder", str(folder), *args]) == 0
    result = json.loads((folder / f"{benchmark}_smoke.json").read_text())["result"]
    assert result["smoke"] and result["figures"]
    return result["parts"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_update_is_timed_profiled_and_rated_by_what_it_computes(tmp_path):
    parts = smoke("train_step", tmp_path, "--parts", "update", "--laws", "skewed", "--profile")
    found = parts["update"]["tiny"]
    assert set(found) == {"plain/skewed/64", "plain/skewed/128", "profile"}
    for budget in (64, 128):
        entry = found[f"plain/skewed/{budget}"]
        assert entry["min_s"] <= entry["median_s"] <= entry["max_s"]
        assert entry["metrics"]["actor/grad_norm"] > 0
        rows = Rows("skewed", 4, 40, 256).draw(128)
        lengths = rows.tokens.lengths.tolist()
        assert entry["predicted"] == int(rows.response_lengths.sum()) < entry["tokens"]
        shape = ModelShape.from_folder(Model("tiny", None).write(tmp_path / "tiny"))
        flops = training_flops(shape, lengths, entry["predicted"])
        assert entry["tflops_per_gpu"] == pytest.approx(flops / entry["median_s"] / 1e12)
    assert "aten::mm" in (tmp_path / "profile_update_tiny.txt").read_text()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_all_parts_run_on_a_laptop_and_every_layout_holds_its_bounds(tmp_path):
    parts = smoke("train_step", tmp_path)
    assert set(parts) == set(train_step.PARTS)
    text = json.dumps(parts)
    assert '"failed"' not in text and '"skipped"' not in text
    for kind in ("dense", "experts"):
        wanted = {name for name, way in precision.LAYOUTS[kind].items() if not way.needs_te}
        assert wanted <= set(parts["precision"][kind])
        for name in wanted:
            assert parts["precision"][kind][name]["broken"] == "none", name
    assert parts["growth"]["tiny"]["spread_from_step_2_gb"]["allocated"] == 0.0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_log_probs_alone_are_rated_for_each_law_of_lengths(tmp_path):
    found = smoke("logprob", tmp_path)["logprob"]["tiny"]
    assert set(found) == {"uniform/128", "skewed/128"}
    for entry in found.values():
        assert entry["tokens_per_s_per_gpu"] == pytest.approx(entry["tokens"] / entry["median_s"])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_long_row_trains_cut_over_two_ranks(tmp_path):
    found = smoke("long_context", tmp_path, "--tokens", "256", "320")["long"]["tiny"]
    assert {name: entry["tokens"] for name, entry in found.items()} == {"256": 256, "320": 320}
    assert all(entry["rows"] == 1 and entry["ranks"] == 2 for entry in found.values())
    assert all(entry["metrics"][-1]["actor/grad_norm"] > 0 for entry in found.values())


def test_a_benchmark_of_one_part_has_a_part_of_its_own_name():
    assert logprob.NAME == "logprob" and long_context.NAME == "long_context"
    assert "logprob" not in train_step.PARTS and "long" not in train_step.PARTS


def test_a_failed_measurement_is_recorded_and_the_others_go_on(tmp_path):
    here = jobs.Jobs("cpu", tmp_path)
    saved = []
    measuring = Run(cases.SMOKE, here, (), (), (), lambda: saved.append(1), None)
    found = {}

    def fail():
        raise RuntimeError("Traceback\n  x = y\ntorch.OutOfMemoryError: CUDA out of memory. Tried")

    measuring.attempt(found, "first", fail)
    measuring.attempt(found, "second", lambda: spread([2.0, 1.0, 4.0]))
    assert found["first"]["failed"] == "torch.OutOfMemoryError: CUDA out of memory. Tried"
    assert found["second"] == {"median_s": 2.0, "min_s": 1.0, "max_s": 4.0, "repeats": 3}
    assert len(saved) == 2


def test_the_skewed_law_has_a_quarter_of_the_longest_response_as_its_mean():
    rows = Rows("skewed", 512, 3584, 4_000_000).draw(100)
    responses = rows.response_lengths.float()
    assert float(responses.mean()) == pytest.approx(3584 / 4, rel=0.05)
    assert 3000 < int(responses.max()) <= 3584 and int(responses.min()) >= 1
    assert int(rows.tokens.lengths.sum()) >= 4_000_000
    again = Rows("skewed", 512, 3584, 4_000_000).draw(100)
    assert torch.equal(rows.tokens.values, again.tokens.values)


def test_every_response_token_of_a_mini_batch_counts_alike():
    rows = Rows("uniform", 3, 5, 20).draw(50)
    assert rows.tokens.lengths.tolist() == [8, 8, 8]
    batch = policy_batch(rows, Ragged(torch.zeros(15), rows.response_lengths))
    assert torch.equal(batch.weights.values, torch.full((15,), 1 / 15))


def test_real_and_smoke_runs_name_parts_that_fit_their_models():
    for scale in (cases.REAL, cases.SMOKE):
        assert set(scale.long) <= set(scale.cases)
        for case in scale.cases.values():
            assert set(case.budgets) == set(case.variants)
            assert max(case.log_prob_budgets) >= scale.prompt + scale.response


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_that_share_a_device_meet_and_train(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.Jobs, "devices", 1)
    here = jobs.Jobs("cpu", tmp_path)
    try:
        job = here.open(Model("tiny", None), (), 2, (4, 40))  # sums over the ranks first
        assert job.gpus == 1
        rows = Rows("uniform", 4, 40, 100).draw(job.shape.vocab_size)
        log_probs, _ = job.actor(64).log_probs(rows)
        assert len(log_probs.values) == int(rows.response_lengths.sum())
    finally:
        here.close()
