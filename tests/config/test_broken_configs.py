"""Random broken configs: refused with the key and the rule, never with another error."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.config import ConfigError, build_plan, check_files, check_trainable, load_config
from mrl.config.aliases import ALIASES
from mrl.config.explain import explain
from mrl.config.typed import schema_keys

CONFIGS, PARTS = 200, 8  # one part is tried each time, all in the slow tests
LEAVES = [name for name, key in schema_keys().items() if not key.is_section]
SECTIONS = [name for name, key in schema_keys().items() if key.is_section]
GOOD: dict[str, Any] = {
    "actor.ppo_micro_batch_size_per_gpu": 1,
    "actor.ppo_mini_batch_size": 8,
    "data.train_batch_size": 8,
    "trainer.n_gpus_per_node": 4,
}
ODD = [
    None, True, False, 0, 1, -1, -7, 3, 5, 1 << 31, 1 << 64, -(1 << 70), 10**400, 0.0, -0.5, 1e-300,
    1e308, float("inf"), float("-inf"), float("nan"), "", " ", "auto", "null", "\u00e9\u4e2d\u200b",
    "\ud83d\ude00", "a\nb", "\x07", "x" * 5000, "${model.path}", "${", "${nowhere.at.all}", "${.}",
    "${oc.env:NO_SUCH_VARIABLE}", "${actor}", "???", "../..", "/dev/null", "\0", [], {}, [[]],
    [None], ["a", 1, None], [1, [2, [3]]], {"a": {"b": {"c": 1}}}, {1: 2}, {"": 3}, [{"a": 1}],
    "2020-01-01", "0x10", "1_000", "0o7", "1:30", "=", "yes", "~",
]  # fmt: skip
Break = Callable[[random.Random, Path], tuple[str, list[str]]]


def as_text(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n")


def tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Nest dotted keys; a later one takes the place of what it cannot be put into."""
    root: dict[str, Any] = {}
    for key, value in settings.items():
        node, (*parents, leaf) = root, key.split(".")
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[leaf] = value
    return root


def misspelt(rng: random.Random, key: str) -> str:
    at = rng.randrange(len(key))
    return rng.choice((key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key.upper()))


def wrong_values(rng: random.Random, _: Path) -> tuple[str, list[str]]:
    """Any value at any key, old spellings and sections too."""
    pool = [*LEAVES, *LEAVES, *SECTIONS, *filter(None, ALIASES)]
    chosen = {rng.choice(pool): rng.choice(ODD) for _ in range(rng.randint(1, 6))}
    if rng.random() < 0.5:
        return yaml.safe_dump(tree({**GOOD, **chosen})), []
    return yaml.safe_dump(tree(GOOD)), [f"{k}={as_text(v).strip()}" for k, v in chosen.items()]


def numbers(rng: random.Random, _: Path) -> tuple[str, list[str]]:
    """Layouts and sizes that contradict one another."""
    sizes = [n for n, key in schema_keys().items() if key.type in (int, float)]
    chosen = {name: rng.choice((-1, 0, 1, 2, 3, 7, 1 << 40)) for name in rng.sample(sizes, 8)}
    for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
        chosen[f"actor.megatron.{name}_parallel_size"] = rng.choice((0, 1, 2, 3, 5, 1 << 33))
    return yaml.safe_dump(tree({**GOOD, **chosen})), []


def unknown_keys(rng: random.Random, _: Path) -> tuple[str, list[str]]:
    """Misspelt, unknown, nested and empty keys."""
    keys = [misspelt(rng, rng.choice(LEAVES)) for _ in range(2)]
    keys += [rng.choice(("", ".", "a..b", ".actor", "actor.", "\u4e2d.\u6587", "a" * 300, "x.y.z"))]
    keys += [".".join(["deep"] * rng.randint(2, 60)), f"{rng.choice(LEAVES)}.below"]
    if rng.random() < 0.5:
        return yaml.safe_dump(tree({**GOOD, **dict.fromkeys(keys, 1)})), []
    return yaml.safe_dump(tree(GOOD)), [f"{rng.choice(('', '+', '++'))}{key}=1" for key in keys]


def odd_overrides(rng: random.Random, _: Path) -> tuple[str, list[str]]:
    """Overrides that are not key=value, or whose value is no YAML."""
    texts = (
        "actor", "=", "=1", "+", "++=", "~actor.optim", "--flag", "actor.optim.lr==1", "rollout.n",
        "rollout.n=[1,", "rollout.n={a: b", "rollout.n='", "rollout.n=1: 2: 3", "rollout.n=@",
        "rollout.n=*alias", "rollout.n=!!python/object:os.system", "rollout.n=&a 1", "rollout.n=\t",
        "rollout.n=%", "rollout.n=- 1", "rollout.n=`", "rollout.n=!!int x", "rollout.n={1: 2, 1}",
        "rollout.n=2\nrollout.n=3", "rollout n=1", "actor[0]=1", "\u00a0=1", "actor.=1", "a\0b=1",
        "actor={optim: {lr: x}}", "actor={lr}", "data.train_files[0]=x", "rollout.n=!!timestamp x",
        "rollout.n=!!binary x", "rollout.n=!!set {1}", "rollout.n=2020-13-45", "rollout.n=? a",
    )  # fmt: skip
    return yaml.safe_dump(tree(GOOD)), rng.sample(texts, rng.randint(1, 4))


def broken_files(rng: random.Random, _: Path) -> tuple[str, list[str]]:
    """Text that is not YAML, not a mapping, or both."""
    text = yaml.safe_dump(tree(GOOD))
    at = rng.randrange(len(text))
    noise = rng.choice(("\t", ":", "- ", "{", "]", "\x00", '"', "&a *b", "!!x", "\n\n---\n", "%Y"))
    files = (
        text[:at] + noise + text[at:],
        text + text,
        "- 1\n- 2\n", "just text", "", "null", "42", "{", "a: b: c", "*x", "&a {a: *a}",
        "? [1]\n: 2",
        "actor: {actor: {actor: 1}}", "1: 2", "null: 3", "true: {1: 2}", "[]: 1", "\ufeffactor: 1",
        "rollout: {n: 1, n: 2}", "actor: &a {<<: *a}", "x: !!python/name:os.system", "a: !u 1",
        "{" * 200, "[" * 3000, "actor: " + "{a: " * 150 + "1" + "}" * 150, "a: 2020-13-45",
        "trainer: {default_local_dir: 2020-01-01}", "rollout: {n: !!binary aGk=}", "a: !!set {b}",
        "actor: {optim: {betas: {0: 0.9, 1: 0.9}}}", "\ud800".encode("utf-8", "ignore").decode(),
    )  # fmt: skip
    return rng.choice(files), []


def wrong_bases(rng: random.Random, folder: Path) -> tuple[str, list[str]]:
    """Base files that are missing, circular, broken or no names."""
    (folder / "latin.yaml").write_bytes(b"actor: \xff\xfe")
    (folder / "list.yaml").write_text("[1]")
    (folder / "deep.yaml").write_text("base: run.yaml")
    bases = (
        "run.yaml", "deep.yaml", "list.yaml", "latin.yaml", "missing.yaml", ".", "..", "/", 5, [],
        ["a.yaml"], {"a": 1}, "", True, "x\0y", "~", "${a}", "???", "x" * 5000, "\u4e2d.yaml",
    )  # fmt: skip
    return yaml.safe_dump({"base": rng.choice(bases), **tree(GOOD)}), []


BREAKS: tuple[Break, ...] = (
    wrong_values, wrong_values, numbers, unknown_keys, odd_overrides, broken_files, wrong_bases,
)  # fmt: skip


def refusal(path: Path, overrides: list[str]) -> ConfigError | None:
    """Give the refusal of what `mrl train` checks before any process starts."""
    try:
        config = load_config(path, overrides)
        build_plan(config)
        check_files(config)
        check_trainable(config)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))]
)
def test_a_broken_config_is_refused_with_key_and_rule(part: int, tmp_path: Path) -> None:
    refused = 0
    for seed in range(part, CONFIGS, PARTS):
        rng = random.Random(seed)
        text, overrides = BREAKS[seed % len(BREAKS)](rng, tmp_path)
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8", errors="replace")
        error = refusal(path, overrides)
        about = f"seed {seed}: {text[:400]!r} {overrides}"
        if error is None:
            continue
        refused += 1
        for violation in error.violations:
            assert violation.key.strip() or overrides or "" in text, about
            assert re.search(r"[a-z]{2}", violation.rule), about
        assert str(error).startswith("config refused"), about
    assert refused >= CONFIGS // PARTS * 0.8, "most of what is broken is noticed"


@pytest.mark.parametrize("seed", range(0, CONFIGS, 23))
def test_a_broken_config_is_explained(seed: int, tmp_path: Path) -> None:
    text, overrides = BREAKS[seed % len(BREAKS)](random.Random(seed), tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        rows = explain(path, overrides)
    except ConfigError:
        return  # no file to explain
    assert all(row.reason or row.key for row in rows)
