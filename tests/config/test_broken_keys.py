"""Configs with one fault: refused by its key with a rule, and the nearest legal value if any."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mrl.config.check_values import CHOICES, RANGES, SIZES
from mrl.config.typed import schema_keys
from tests.config.test_broken_configs import GOOD, LEAVES, SECTIONS, refusal, tree

CONFIGS = 360
SAMPLE = 9  # one in so many is tried each time, all in the slow tests
KEYS = schema_keys()
NUMBERS = [name for name in LEAVES if KEYS[name].type in (int, float)]
INTEGERS = [name for name in LEAVES if KEYS[name].type is int]
SWITCHES = [name for name in LEAVES if KEYS[name].type is bool]
WORDS = [name for name in LEAVES if KEYS[name].type is str and name in CHOICES]
# of roles that are off by default, so that their values have no part in a run
LIVE = tuple(f"{s}." for s in ("actor", "data", "rollout", "algorithm", "trainer"))


@dataclass(frozen=True)
class Fault:
    """A config with a fault, the words that must be in the message, and whether a value is."""

    text: str
    overrides: tuple[str, ...]
    words: tuple[str, ...]
    nearest: bool = False


Make = Callable[[random.Random], Fault]
TEXT = yaml.safe_dump(tree(GOOD))


def given(rng: random.Random, key: str, value: str, *words: str, nearest: bool = False) -> Fault:
    """Set a key to a YAML value in the file or by an override."""
    words = (key, *words)
    if rng.random() < 0.5:
        return Fault(TEXT, (f"{key}={value}",), words, nearest)
    settings = {k: v for k, v in GOOD.items() if k != key}
    text = yaml.safe_dump(tree({**settings, key: "@"})).replace("'@'", value)
    return Fault(text, (), words, nearest)


def wrong_types(rng: random.Random) -> Fault:
    """Values of another type, near to a legal one."""
    kind = rng.randrange(4)
    if kind == 0:
        value = rng.choice(("2.5", "1e400", ".nan", "x", "[a]", "true", "!!binary aGk="))
        return given(rng, rng.choice(INTEGERS), value, "expected an integer")
    if kind == 1:
        value = rng.choice(("7", "-1", "2.5", "maybe", "[a]", "1000000000000000000000"))
        number = value[-1].isdigit()
        return given(rng, rng.choice(SWITCHES), value, "expected true or false", nearest=number)
    if kind == 2:
        key = rng.choice(INTEGERS)
        return given(rng, key, "[3]", "expected an integer", "nearest legal: 3", nearest=True)
    lists = [name for name in LEAVES if KEYS[name].describe().startswith("a list")]
    return given(rng, rng.choice(lists), "{a: 1}", rng.choice(("list", "keys")))


def negative_and_huge(rng: random.Random) -> Fault:
    """Numbers outside of what a key may be."""
    live = [n for n in (*RANGES, *SIZES) if n in NUMBERS and n.startswith(LIVE)]
    low = [n for n in live if n in SIZES or RANGES[n].low > -1]
    key = rng.choice(low)
    value = rng.choice((-7, -1, -(1 << 40), -(1 << 70)))
    return given(rng, key, str(value), "must be")


def unicode_values(rng: random.Random) -> Fault:
    """Digits of other scripts, look-alikes and characters that are not seen."""
    if rng.random() < 0.5:
        key = rng.choice(INTEGERS)
        return given(rng, key, '"\uff14"', "expected an integer", "nearest legal: 4", nearest=True)
    key = rng.choice(NUMBERS)
    value = rng.choice(('"\u0664"', '"1\u200b"', '"\u2460x"', '"\u221e"', '"\U0001d7d9x"', '"1_0"'))
    return given(rng, key, value, "expected a")


def unicode_keys(rng: random.Random) -> Fault:
    """Keys with a letter of another script: the real one is named."""
    key = rng.choice([n for n in LEAVES if "a" in n.rpartition(".")[2]])
    section, _, leaf = key.rpartition(".")
    other = f"{section}.{leaf.replace('a', rng.choice(('\u0430', '\u00e0', 'a\u200b')), 1)}"
    return Fault(TEXT, (f"{other}=1",), (other, "unknown key", "did you mean"))


def interpolations(rng: random.Random) -> Fault:
    """References to nothing, to oneself, to a section, of no resolver or no grammar."""
    key = rng.choice(LEAVES)
    value, words = rng.choice((
        ("${nowhere}", "nowhere"), (f"${{{key}}}", ""), ("${no_such_resolver:1}", "resolver"),
        (f"${{oc.select:{key},1}}", "refers to itself"), ("${oc.env:NO_SUCH_VARIABLE}", "NO_SUCH"),
        ("${actor}", "expected"), ("${..}", ""), ("${rollout.n.x}", ""), ("${}", ""), ("${a", ""),
    ))  # fmt: skip
    if words == "expected" and KEYS[key].is_free:
        words = ""
    return Fault(TEXT, (f"{key}='{value}'",), (key, words) if words != "resolver" else (key,))


def misplaced_groups(rng: random.Random) -> Fault:
    """Sections that are not there, under another one, or in the place of a value."""
    section, leaf = rng.choice(SECTIONS), rng.choice(LEAVES)
    kind = rng.randrange(4)
    if kind == 0:
        key = f"{rng.choice(('model_args', 'training', 'vllm', 'optimizer', 'env'))}.{leaf}"
        return Fault(TEXT, (f"+{key}=1",), (key, "unknown key"))
    if kind == 1:
        value = rng.choice(("[1]", "5", "text", "true"))
        return given(rng, section, value, "expected a section of keys")
    if kind == 2:
        plain = rng.choice([n for n in LEAVES if not KEYS[n].is_free])
        return Fault(TEXT, (f"{plain}.{rng.choice(('a', 'b.c'))}=1",), (plain, "has no keys"))
    key = f"{section}.no_such_key_{rng.randrange(99)}"
    return Fault(TEXT, (f"{key}=1",), (key, "unknown key"))


def lists_for_scalars(rng: random.Random) -> Fault:
    """Lists and mappings where one value belongs."""
    scalars = [n for n in LEAVES if KEYS[n].type in (int, float, bool)]
    value = rng.choice(("[1, 2]", "[[1]]", "[]", "[null]", "[{a: 1}]", "{}"))
    return given(rng, rng.choice(scalars), value, "expected")


def yaml_of_its_own(rng: random.Random) -> Fault:
    """Anchors, keys given twice, several documents, tags."""
    text, words = rng.choice((
        ("rollout: {n: 1, n: 2}", "duplicate"), ("actor: *nowhere", "undefined alias"),
        ("a: &a [*a]", ""), ("actor: &x {<<: *x}", ""), ("--- {}\n--- {}", ""),
        ("x: !!python/object/apply:os.system [ls]", ""), ("rollout: !weird {n: 1}", "weird"),
        ("base: &b x.yaml\nrollout: {n: *b}", "x.yaml"), ("<<: 5", ""), ("<<: [1, {a: 2}]", ""),
        ("rollout:\n  n: 1\n n: 2", ""), ("rollout:\n\tn: 1", ""), ("rollout: {n: 1", ""),
        ("? {a: 1}\n: 2", ""), ("%YAML 9.9\n---\na: 1", ""), ("rollout: 'n", ""), ("@: 1", ""),
    ))  # fmt: skip
    return Fault(text, (), (words,))


def no_mapping(rng: random.Random) -> Fault:
    """Files that hold nothing, a list, a text or noise: the file or what it lacks is named."""
    text = rng.choice((
        "", " \n", "# only a comment\n", "---\n", "...\n", "null", "[]", "- a: 1", "text", "5", "~",
        "true", "'quoted'", "\ufeff", "a" * 3000, "2020-01-01", "\r\n\r\n", ">\n folded", "|\n x",
    ))  # fmt: skip
    return Fault(text, (), ())


def override_syntax(rng: random.Random) -> Fault:
    """Overrides in another tool's syntax."""
    key = rng.choice(LEAVES)
    text = rng.choice((
        f"{key}", f"{key}:1", f"--{key}=1", f"{key}:=1", f"-{key}=1", f"{key} 1", f"~{key}",
        f"{key}@here=1", f"{key}[0]=1", f"/{key}=1", f"{key}/=1", f"{key}+=1", f'"{key}"=1',
        f"{key.replace('.', '/')}=1", f"{key.replace('.', '__')}=1", f"{key},a=1", f"{key}.=1",
        f"{key}={{", f"{key}=[", f"{key}='", f"{key}=@", f"{key}=%", f"{key}=*a", f"{key}=&",
    ))  # fmt: skip
    return Fault(TEXT, (text,), (key.rpartition(".")[2],))


def other_algorithms(rng: random.Random) -> Fault:
    """Keys and values of other algorithms and trainers."""
    key, value, words = rng.choice((
        ("algorithm.adv_estimator", "gpro", "nearest legal: grpo"),
        ("algorithm.adv_estimator", "q_learning", "must be one of"),
        ("algorithm.kl_penalty", "low_var", "must be one of"),
        ("actor.loss_agg_mode", "token_mean", "nearest legal: token-mean"),
        ("actor.policy_loss.loss_mode", "no_such_loss", ""),
        ("num_generations", "8", "unknown key"), ("beta", "0.1", "unknown key"),
        ("learning_rate", "1e-6", "unknown key"), ("algorithm.epsilon", "0.2", "unknown key"),
        ("per_device_batch_size", "8", "unknown key"), ("algorithm.expectile", "1", "unknown"),
        ("critic.target_update_interval", "5", "unknown key"), ("dpo.beta", "0.1", "unknown key"),
        ("actor.entropy_coef", "0.1", "actor.entropy_coeff"), ("replay.size", "1", "unknown key"),
        ("algorithm.kl_ctrl.type", "adaptiv", "nearest legal: adaptive"),
        ("algorithm.gamma", "1.5", "nearest legal: 1"), ("rollout.top_p", "0", "nearest legal"),
    ))  # fmt: skip
    return given(rng, key, value, words)


def misspelt_choices(rng: random.Random) -> Fault:
    """A word that is one letter off: the right one is named."""
    key = rng.choice([n for n in WORDS if n.startswith(LIVE)])
    word = rng.choice([w for w in CHOICES[key] if w and len(w) > 4] or ["x"])
    if word == "x":
        return given(rng, key, "no_such_choice", "must be one of")
    at = rng.randrange(1, len(word))
    off = word[:at] + word[at + 1 :]
    if off in CHOICES[key]:
        off = word + "z"
    return given(rng, key, off, "must be one of", "nearest legal", nearest=True)


MAKES: tuple[Make, ...] = (
    wrong_types, negative_and_huge, unicode_values, unicode_keys, interpolations, misplaced_groups,
    lists_for_scalars, yaml_of_its_own, no_mapping, override_syntax, other_algorithms,
    misspelt_choices,
)  # fmt: skip


def hold(seed: int, folder: Path) -> None:
    """See that the config of a seed is refused in the words that it asks for."""
    rng = random.Random(seed)
    make = MAKES[seed % len(MAKES)]
    fault = make(rng)
    path = folder / "run.yaml"
    path.write_text(fault.text, encoding="utf-8")
    about = f"seed {seed}, {make.__name__}: {fault.text[-300:]!r} {fault.overrides}"
    error = refusal(path, list(fault.overrides))
    assert error is not None, f"accepted: {about}"
    for words in fault.words:
        assert words in str(error), f"{words!r} is not in {str(error)[:400]!r}; {about}"
    assert all(v.rule.strip() and v.key.strip() for v in error.violations), about
    if fault.nearest:
        assert any(v.nearest for v in error.violations), f"{about}: {error}"


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_a_config_with_one_fault_is_refused_by_its_key(make: Make, tmp_path: Path) -> None:
    for seed in range(MAKES.index(make), CONFIGS, SAMPLE * len(MAKES)):
        hold(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_many_configs_with_one_fault_are_refused_by_its_key(make: Make, tmp_path: Path) -> None:
    for seed in range(MAKES.index(make), CONFIGS, len(MAKES)):
        hold(seed, tmp_path)
