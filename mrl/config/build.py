"""The frozen tree of a config, built from merged values of any type."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrl.config import schema
from mrl.config.aliases import VALUE_ALIASES
from mrl.config.errors import Violation
from mrl.config.typed import Key, coerce, field_keys, nearest

OPEN = "???"  # OmegaConf's mark of a value to be given
_ABSENT = object()
# Sections that may be given in part: what is not said follows the section named here.
_FOLLOWS = {"ref.megatron": "actor.megatron", "critic.megatron": "actor.megatron"}


class Builder:
    """Builds the frozen tree, noting every value of a wrong type."""

    def __init__(self, merged: DictConfig, violations: list[Violation]) -> None:
        self.failed = False  # a value is None in place of what was found
        self._merged = merged
        self._plain = OmegaConf.to_container(merged, resolve=False)
        self._violations = violations
        self._built: dict[str, Any] = {}  # sections by dotted name

    def build(self) -> schema.Config:
        return self._section(schema.Config, "")

    def _section(self, cls: Any, prefix: str) -> Any:
        values = {name: self._value(prefix + name, key) for name, key in field_keys(cls).items()}
        section = self._built[prefix.rstrip(".")] = cls(**values)
        return section

    def _value(self, name: str, key: Key) -> Any:
        raw = self._raw(name)
        if not key.is_section and _is_settled(raw):  # most are: OmegaConf takes long over each
            return self._typed(name, raw, key)
        try:
            value = OmegaConf.select(self._merged, name, default=_ABSENT)
            missing = self._is_missing(name)
            if isinstance(value, Container) and not key.is_section:
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            if "RecursionError" in reason:
                reason = "refers to itself"
            return self._refuse(name, None if raw is _ABSENT else raw, reason)
        if missing:
            return OPEN
        if value is _ABSENT:
            return self._followed(name)
        if key.is_section:
            if isinstance(value, DictConfig):
                strange = [str(k) for k in value if str(k) not in field_keys(key.type)]
                if not strange:
                    return self._section(key.type, f"{name}.")
                # Only a reference to another section leads here: keys as such are checked before.
                rule = f"refers to a section of other keys: {', '.join(strange)}"
                return self._refuse(name, None if raw is _ABSENT else raw, rule)
            if value is None and key.optional:
                return None
            return self._refuse(name, value, f"expected {key.describe()}")
        return self._typed(name, value, key)

    def _typed(self, name: str, value: Any, key: Key) -> Any:
        try:
            return coerce(_other_spelling(name, value), key)
        except TypeError:
            return self._refuse(name, value, f"expected {key.describe()}", nearest(value, key))

    def _is_missing(self, name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        node = OmegaConf.select(self._merged, parent) if parent else self._merged
        return isinstance(node, DictConfig) and OmegaConf.is_missing(node, leaf)

    def _followed(self, name: str) -> Any:
        section, _, leaf = name.rpartition(".")
        model = self._built.get(_FOLLOWS.get(section, ""))
        if is_dataclass(model):
            return getattr(model, leaf)
        return self._refuse(name, None, "the section it is in lacks it")

    def _refuse(self, name: str, value: Any, rule: str, legal: str = "") -> None:
        self.failed = True
        self._violations.append(Violation(name, value, rule, legal))

    def _raw(self, name: str) -> Any:
        """Find a value as it is written; `_ABSENT` below a reference."""
        node: Any = self._plain
        for part in name.split("."):
            node = node.get(part, _ABSENT) if isinstance(node, dict) else _ABSENT
        return node


def _is_settled(value: Any) -> bool:
    """Tell whether a value is a plain one that refers to nothing."""
    if isinstance(value, str):
        return "${" not in value and value != OPEN
    return value is None or isinstance(value, bool | int | float)


def _other_spelling(name: str, value: Any) -> Any:
    spellings = VALUE_ALIASES.get(name)
    if spellings is None or isinstance(value, list):
        return value
    return spellings.get(value, value)
