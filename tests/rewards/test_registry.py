from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mrl.rewards import registry
from mrl.rewards.registry import Sources, known_sources, load_custom, register, resolve


def test_a_name_covers_itself_and_what_lies_under_it() -> None:
    sources = Sources({"reasoning_gym", "openai/gsm8k", "a/b", "a"})
    assert "reasoning_gym/chain_sum" in sources
    assert sources.match("a/b/c") == "a/b"
    for unknown in ("", "/data/gsm8k", "openai", "reasoning_gym_2", "gsm8k", 3):
        assert unknown not in sources


def test_built_in_sources_are_known_without_loading_them() -> None:
    code = (
        "import sys; from mrl.rewards.registry import known_sources; print(*known_sources());"
        "assert not {'torch', 'reasoning_gym', 'math_verify'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"gsm8k", "openai/gsm8k", "reasoning_gym", "math"} <= set(done.stdout.split())


def test_every_built_in_source_resolves() -> None:
    for source in known_sources():
        assert callable(resolve(source))


def test_an_unknown_source_is_refused_with_the_known_and_the_way_out() -> None:
    with pytest.raises(ValueError, match="'/data/gsm8k' has no reward function") as error:
        resolve("/data/gsm8k")
    assert "openai/gsm8k" in str(error.value)
    assert "reward.custom_reward_function.path" in str(error.value)


def test_a_custom_function_takes_every_source() -> None:
    def custom() -> float:
        return 1.0

    assert resolve("", custom) is custom
    assert resolve("gsm8k", custom) is custom


def test_a_registered_function_is_found_and_a_second_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_FUNCTIONS", dict(registry._FUNCTIONS))

    @register("mine")
    def first() -> float:
        return 1.0

    assert resolve("mine/easy") is first
    with pytest.raises(ValueError, match="'mine' already has"):
        register("mine")(lambda: 0.0)


def test_load_custom_names_file_functions_and_nearest(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def my_score(**k): return 1.0\ndef other(): pass\n")
    assert load_custom(file, "my_score")() == 1.0
    with pytest.raises(ValueError, match=r"mine\.py has no function 'my_scor'") as error:
        load_custom(file, "my_scor")
    assert "it has: my_score, other; did you mean 'my_score'?" in str(error.value)


def test_load_custom_refuses_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.py is not a file"):
        load_custom(tmp_path / "none.py", "f")
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"broken\.py failed to load: SyntaxError"):
        load_custom(broken, "f")
