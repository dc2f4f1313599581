"""The schema seen as a tree of keys, and values brought to the types that it states."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode
from omegaconf.errors import ValidationError

from mrl.config.schema import Config

_SCALARS: dict[type, tuple[Any, str]] = {
    bool: (BooleanNode, "true or false"),
    int: (IntegerNode, "an integer"),
    float: (FloatNode, "a number"),
    str: (StringNode, "text"),
}


@dataclass(frozen=True)
class Key:
    """What the schema says of one key; a section is a key that has keys below it."""

    type: Any  # without `| None`
    optional: bool

    @property
    def is_section(self) -> bool:
        return is_dataclass(self.type)

    @property
    def is_free(self) -> bool:
        """Whether any key is allowed below it."""
        return get_origin(self.type) is dict

    def describe(self) -> str:
        """Name the expected type in a user's words."""
        return _describe(self.type) + (" or null" if self.optional else "")


@cache
def schema_keys() -> dict[str, Key]:
    """List every key of the schema by its dotted name, sections included."""
    return dict(_walk(Config, ""))


@cache
def field_keys(cls: type) -> dict[str, Key]:
    """List the fields of one section."""
    hints = get_type_hints(cls)
    return {f.name: _key(hints[f.name]) for f in fields(cls)}


def coerce(value: Any, key: Key) -> Any:
    """Bring a value to the key's type; `TypeError` when it has another."""
    if value is None and key.optional:
        return None
    kind, origin = key.type, get_origin(key.type)
    if kind in _SCALARS:
        return _scalar(value, kind)
    if origin is dict:
        return _plain(value, lambda v: isinstance(v, Mapping))
    if origin is list:
        items = [value] if isinstance(value, str) else _plain(value, _is_list)
        return [_scalar(item, get_args(kind)[0]) for item in items]
    if origin is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            items = [value] if isinstance(value, str) else _plain(value, _is_list)
            return tuple(_scalar(item, kinds[0]) for item in items)
        items = _plain(value, lambda v: _is_list(v) and len(v) == len(kinds))
        return tuple(_scalar(item, t) for item, t in zip(items, kinds, strict=True))
    raise NotImplementedError(f"the schema states a type that has no coercion: {kind}")


def _walk(cls: type, prefix: str) -> list[tuple[str, Key]]:
    found = []
    for name, key in field_keys(cls).items():
        found.append((prefix + name, key))
        if key.is_section:
            found += _walk(key.type, f"{prefix}{name}.")
    return found


def _key(hint: Any) -> Key:
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return Key(kind, optional=True)
    return Key(hint, optional=False)


def _describe(kind: Any) -> str:
    if is_dataclass(kind):
        return "a section of keys"
    if kind in _SCALARS:
        return _SCALARS[kind][1]
    if get_origin(kind) is dict:
        return "a mapping"
    words = [_describe(arg) for arg in get_args(kind) if arg is not Ellipsis]
    return f"a list of {words[0]}" if len(words) == 1 else "a list of " + " and ".join(words)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _plain(value: Any, fits: Callable[[Any], bool]) -> Any:
    if not fits(value):
        raise TypeError
    return value


def _scalar(value: Any, kind: type) -> Any:
    if value is None or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    try:
        return _SCALARS[kind][0](value=value)._value()
    except ValidationError:
        raise TypeError from None
