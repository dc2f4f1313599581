from __future__ import annotations

import subprocess
import sys

import pytest

from mrl.launching.nodes import parse_nodelist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node01", "node01"),
        ("a[1-3,7],b01", "a1 a2 a3 a7 b01"),
        ("gpu[008-011]", "gpu008 gpu009 gpu010 gpu011"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-100].org", "n098.org n099.org n100.org"),
        ("r[1-2]c[01-02]", "r1c01 r1c02 r2c01 r2c02"),
        ("b2,a[1,3],a2", "b2 a1 a3 a2"),
        ("ip-10-0-0-[5-6]", "ip-10-0-0-5 ip-10-0-0-6"),
    ],
)  # fmt: skip
def test_hosts_come_in_slurms_order_and_width(text: str, hosts: str) -> None:
    assert parse_nodelist(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty name"),
        ("a,,b", "empty name"),
        ("a[1-3", "not closed"),
        ("a]1", "wrong ']' at character 1"),
        ("a[1[2]]", "wrong '['"),
        ("a[3-1]", "[3-1] is no range"),
        ("a[]", "is no range"),
        ("a[x]", "[x] is no range"),
        ("a b", "'a b' is no part of a host name"),
        ("$(reboot)", "no part of a host name"),
        ("a1,a[1-2]", "names a1 twice"),
    ],
)
def test_what_slurm_would_not_write_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_nodelist(text)
    assert said in str(refusal.value)


def test_the_command_prints_a_host_a_line() -> None:
    command = [sys.executable, "-m", "mrl.launching.nodes"]
    done = subprocess.run([*command, "a[1-2]"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("a1\na2\n", 0)
    done = subprocess.run([*command, "a["], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 1)
    assert "not closed" in done.stderr
