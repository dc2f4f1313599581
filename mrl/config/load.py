"""YAML files, their bases and `key=value` overrides made into one checked `Config`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrl.config import schema
from mrl.config.aliases import (
    ALIASES,
    LEGACY,
    outcome,
    rename,
    rename_references,
    without_ignored,
)
from mrl.config.build import OPEN, Builder
from mrl.config.check import check_config
from mrl.config.check_values import check_values
from mrl.config.errors import ConfigError, Violation, raise_any
from mrl.config.outcomes import Ignored, Legacy, Refused
from mrl.config.secrets import MASK, has_secret, names_secret
from mrl.config.typed import schema_keys
from mrl.config.verl import DEFAULTS

_BASE = "base"
# PyYAML's own errors and those that its constructors of numbers, dates and nested text let through.
_UNREADABLE = (
    yaml.YAMLError,
    OmegaConfBaseException,
    ValueError,
    AttributeError,
    TypeError,
    RecursionError,
)
_LEGACY_ROOT = "_legacy"  # holds the values of keys that are translated after merging
_LONGEST_KEY = 100  # nothing longer is a misspelling


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> schema.Config:
    """Load a config file, its chain of `base:` files and `key=value` overrides; check all.

    Later overrides win over earlier ones, overrides over the file, the file over its base. Without
    a file (None) verl's defaults are below the overrides. File names inside the config stay as
    written, relative to the current directory. Raises `ConfigError` (a `ValueError`) with every
    violation found.
    """
    violations: list[Violation] = []
    sources = [DEFAULTS] if path is None else _read_chain(Path(path))
    trees = [*sources, *parse_overrides(overrides, violations)]
    layers = [_layer(tree, violations) for tree in trees]
    violations += _still_open(layers)
    defaults = {**_as_lists(asdict(schema.Config())), _LEGACY_ROOT: {}}
    merged = OmegaConf.merge(defaults, *_joined(layers))
    assert isinstance(merged, DictConfig)
    given = {key: value for layer in layers for key, value in _leaves(layer)}
    _translate_legacy(merged, given, violations)
    builder = Builder(merged, violations)
    config = builder.build()
    # Relations between values make sense only when each of them has its type.
    violations += check_values(config) if builder.failed else check_config(config)
    violations += _secrets(config)
    raise_any(violations)
    return config


def _secrets(config: schema.Config) -> list[Violation]:
    """Find values that hold a secret: the config is saved and shown."""
    rule = (
        "holds a secret, which config.yaml and logs would show; leave it to the environment "
        "(HF_TOKEN, ...), where libraries look for it"
    )
    return [
        Violation(key, MASK, rule)
        for key, value in _leaves(asdict(config))
        if value and (names_secret(key) or has_secret(str(value)))
    ]


def written(path: str | Path | None, overrides: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """List the keys of a config file, its bases and overrides as they are spelled, with values.

    Those of files come first, each once: what a later source says of a key counts. Overrides that
    cannot be read are left out. Raises `ConfigError` for files that cannot be read.
    """
    trees = [] if path is None else _read_chain(Path(path))
    trees += parse_overrides(overrides, [])
    return list({key: value for tree in trees for key, value in _leaves(tree)}.items())


def save_resolved(config: schema.Config, path: str | Path) -> None:
    """Write the config as YAML that `load_config` reads back to an equal `Config`.

    The file appears whole or not at all.
    """
    text = OmegaConf.to_yaml(OmegaConf.create(_escape(asdict(config))))
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)


def _as_lists(value: Any) -> Any:
    """Give tuples as lists: OmegaConf lets nothing but a sequence take the place of a tuple."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _escape(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    return value


def _read_chain(path: Path, seen: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """Read a file and the bases under it, the lowest first."""
    try:
        place, is_file = path.resolve(), path.is_file()
    except (OSError, ValueError) as error:  # too long, or with a character that no name has
        key = _BASE if seen else "config file"
        raise ConfigError([Violation(key, str(path), f"no file name: {error}")]) from error
    if place in seen:
        chain = " -> ".join(p.name for p in (*seen, place))
        raise ConfigError([Violation(_BASE, str(path), f"the base files form a circle: {chain}")])
    if not is_file:
        where = f", named as the base of {seen[-1]}" if seen else ""
        raise ConfigError(
            [Violation(_BASE if seen else "config file", str(path), f"no such file{where}")]
        )
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (*_UNREADABLE, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([Violation("config file", str(path), f"not YAML: {reason}")]) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            [Violation("config file", str(path), "must be a mapping of keys, not a list or text")]
        )
    named = {str(key): value for key, value in tree.items()}
    base = named.pop(_BASE, None)
    if base is None:
        return [named]
    if not isinstance(base, str):
        raise ConfigError([Violation(_BASE, base, f"must be one file name (in {path})")])
    return [*_read_chain(path.parent / base, (*seen, place)), named]


def parse_overrides(overrides: Sequence[str], violations: list[Violation]) -> list[dict[str, Any]]:
    """Read `key=value` texts, each a tree; those that cannot be read become violations."""
    parsed = (_parse_override(text, violations) for text in overrides)
    return [tree for tree in parsed if tree is not None]


def _parse_override(text: str, violations: list[Violation]) -> dict[str, Any] | None:
    key, equals, value = text.partition("=")
    key = key.strip()
    key = key[2:] if key.startswith("++") else key.removeprefix("+")
    if not equals or not key:
        violations.append(Violation(text, text, "an override must be key=value"))
        return None
    try:
        # OmegaConf's own YAML loader reads 1e-6 as a number and refuses a key given twice.
        node = OmegaConf.create(f"value: {value}" if value.strip() else {"value": ""})
        return {key: OmegaConf.to_container(node, resolve=False)["value"]}
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        violations.append(Violation(key, value, f"not YAML: {reason}"))
        return None


def _layer(tree: Mapping[str, Any], violations: list[Violation]) -> dict[str, Any]:
    """Bring one source of settings to today's keys, as a nested tree."""
    layer: dict[str, Any] = {}
    spelled: dict[str, tuple[str, Any]] = {}
    for spelling, value in _leaves(tree):
        key = rename(spelling)
        other, earlier = spelled.setdefault(key, (spelling, value))
        if other != spelling and earlier != value:
            rule = f"the same key as {other}, which is {earlier!r}; keep one of the two"
            violations.append(Violation(spelling, value, rule))
        elif isinstance(fate := outcome(key), Ignored):
            continue  # told by `explain`
        elif isinstance(fate, Refused):
            if value not in fate.off:
                violations.append(Violation(spelling, value, f"not supported: {fate.why}"))
        elif isinstance(fate, Legacy):
            layer.setdefault(_LEGACY_ROOT, {})[key] = value
        elif not _is_known(key):
            violations.append(_unknown(spelling, key, value))
        elif fault := _section_fault(key, value):
            violations.append(Violation(spelling, value, fault))
        elif not (value is None and _is_plain_section(key)):  # a bare `actor:` sets nothing
            _put(layer, key, rename_references(without_ignored(key, value)))
    return layer


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            leaves += _leaves({str(k): v for k, v in value.items()}, f"{key}.")
        else:
            leaves.append((key, value))
    return leaves


def _is_known(key: str) -> bool:
    keys = schema_keys()
    return key in keys or any(
        known.is_free and key.startswith(f"{name}.") for name, known in keys.items()
    )


def _is_plain_section(key: str) -> bool:
    known = schema_keys().get(key)
    return known is not None and known.is_section and not known.optional


def _joined(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give the same settings in few layers: OmegaConf takes long over each.

    A section in the place of a value, or the other way round, is left to OmegaConf.
    """
    joined: list[dict[str, Any]] = []
    for layer in layers:
        if not joined or not _fits(joined[-1], layer):
            joined.append({})
        _add(joined[-1], layer)
    return joined


def _fits(tree: Mapping[str, Any], layer: Mapping[str, Any]) -> bool:
    shared = [(tree[name], value) for name, value in layer.items() if name in tree]
    return all(
        isinstance(old, dict) == isinstance(new, dict)
        and (not isinstance(new, dict) or _fits(old, new))
        for old, new in shared
    )


def _add(tree: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for name, value in layer.items():
        if isinstance(value, dict):
            _add(tree.setdefault(name, {}), value)
        else:
            tree[name] = value


def _still_open(layers: Sequence[Mapping[str, Any]]) -> list[Violation]:
    """Find keys that a file leaves to be set (`???`) and nothing after it sets.

    Merging would keep the value from below. `model.path` may stay open: a plan needs no model.
    """
    last = {key: value for layer in layers for key, value in _leaves(layer)}
    return [
        Violation(key, value, "a value is needed")
        for key, value in last.items()
        if value == OPEN and key != "model.path"
    ]


def _section_fault(key: str, value: Any) -> str:
    """Say what is wrong with a value in the place of a section, "" when nothing is."""
    known = schema_keys().get(key)
    legal = value is None or value == {} or (isinstance(value, str) and "${" in value)
    return f"expected {known.describe()}" if known and known.is_section and not legal else ""


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):  # a section set to null or a reference before
            child = tree[parent] = {}
        tree = child
    tree[leaf] = value


def _unknown(written: str, key: str, value: Any) -> Violation:
    known = schema_keys()
    for name in (key.rsplit(".", count)[0] for count in range(1, key.count(".") + 1)):
        if name in known and not known[name].is_section:
            rule = f"{name} has no keys, it is {known[name].describe()}"
            return Violation(written, value, f"{rule}: unknown key; did you mean {name}?")
    near = _nearest_key(key)
    hint = f"did you mean {near}?" if near else "nothing known is like it"
    return Violation(written, value, f"unknown key; {hint}")


def _nearest_key(key: str) -> str:
    """Find the key that is most like another by its whole name or its last part, "" if none is."""
    leaves = [name for name, known in schema_keys().items() if not known.is_section]
    others = [old for old, new in ALIASES.items() if old and isinstance(new, str | Legacy)]
    whole, last = (difflib.SequenceMatcher(None, b=b) for b in (key, key.rpartition(".")[2]))
    best, likeness = "", 0.6
    for candidate in [*leaves, *others] if len(key) <= _LONGEST_KEY else []:
        whole.set_seq1(candidate)
        last.set_seq1(candidate.rpartition(".")[2])
        most = max(whole.quick_ratio(), 0.7 * last.quick_ratio() + 0.3)
        if most <= likeness:
            continue
        found = max(whole.ratio(), 0.7 * last.ratio() + 0.3 * whole.ratio())
        if found > likeness:
            best, likeness = candidate, found
    return best


def _translate_legacy(
    merged: DictConfig, given: Mapping[str, Any], violations: list[Violation]
) -> None:
    """Write the settings that legacy keys stand for; refuse others `given` beside them."""
    for key in merged[_LEGACY_ROOT]:
        try:
            value = merged[_LEGACY_ROOT][key]
        except OmegaConfBaseException as error:
            violations.append(Violation(key, None, str(error).splitlines()[0]))
            continue
        legacy = LEGACY[key]
        plain = value is None or isinstance(value, bool | int | float | str)
        known = plain and value in legacy.settings
        if not known:
            legal = " or ".join(as_yaml(v) for v in legacy.settings)
            violations.append(Violation(key, value, legacy.why, legal))
            continue
        for target, setting in legacy.settings[value].items():
            other = given.get(target)
            if other not in (None, setting) and not legacy.overrides:
                rule = f"means {target}={as_yaml(setting)}, which is {other!r}; keep one of the two"
                violations.append(Violation(key, value, rule))
            OmegaConf.update(merged, target, setting)


def as_yaml(value: Any) -> str:
    """Spell a value as in a config file."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
