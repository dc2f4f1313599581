from __future__ import annotations

import io

from mrl.tracking.console import ConsoleLog

METRICS = {
    "critic/score/mean": 0.5,
    "response_length/mean": 12.25,
    "actor/pg_loss": -0.01234,
    "actor/ppo_kl": 0.00012,
    "actor/grad_norm": 0.7,
    "actor/lr": 1e-6,
    "perf/throughput": 12345.6,
    "timing_s/step": 3.21,
    "val-core/basic_arithmetic/acc/mean@1": 0.61,
}


def printed(act) -> list[str]:
    stream = io.StringIO()
    act(ConsoleLog(120, stream))
    return stream.getvalue().splitlines()


def test_a_step_is_one_line_however_narrow_the_log():
    lines = printed(lambda log: log.step(7, METRICS))
    assert lines == [
        "step   7/120  score 0.500  len 12.2  loss -0.0123  kl 1.20e-04  grad 0.700  lr 1.0e-06"
        "  tok/s/gpu 12,346  s 3.2  val basic_arithmetic 0.610"
    ]


def test_what_a_step_does_not_have_is_left_out():
    assert printed(lambda log: log.step(120, {"timing_s/step": 1.0})) == ["step 120/120  s 1.0"]


def test_unscored_samples_are_told():
    (line,) = printed(lambda log: log.step(1, {"reward/unscored": 3.0}))
    assert line.endswith("unscored 3")
    (line,) = printed(lambda log: log.step(1, {"reward/unscored": 0.0}))
    assert "unscored" not in line


def test_nothing_in_a_log_file_is_an_escape_code():
    lines = printed(lambda log: (log.start("mrl"), log.step(1, METRICS), log.finish("done")))
    assert "\x1b" not in "".join(lines)
    assert "mrl" in lines[0]


def test_the_summary_shows_first_and_last():
    def act(log: ConsoleLog) -> None:
        log.step(1, METRICS)
        log.step(2, {"critic/score/mean": 0.75})
        log.finish("run")

    (row,) = [line for line in printed(act) if "critic/score/mean" in line]
    assert "0.500" in row
    assert "0.750" in row


def test_brackets_in_names_are_text():
    (line,) = printed(lambda log: log.step(1, {"val-core/[red]a/acc/mean@1": 0.5}))
    assert "[red]a 0.500" in line
    lines = printed(lambda log: (log.step(1, {"val-core/[red]a/acc/mean@1": 0.5}), log.finish("x")))
    assert any("val-core/[red]a" in line for line in lines[1:])
