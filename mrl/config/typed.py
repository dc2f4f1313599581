"""The schema seen as a tree of keys, and values brought to the types that it states."""

from __future__ import annotations

import re
import types
import unicodedata
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


_PLAIN = re.compile(r"[-+.0-9a-zA-Z ]*")  # how a number may be written as text: 1e-6, inf
_MOST_ROUNDED = 1 << 53  # above it a float is no exact integer


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


def nearest(value: Any, key: Key) -> str:
    """Spell the value of the key's type that is nearest to one of another type, "" for none."""
    kind, origin = key.type, get_origin(key.type)
    tries: list[Any] = []
    if origin in (list, tuple):
        tries = [[value]]
    elif kind is int and isinstance(value, float) and abs(value) < _MOST_ROUNDED:
        tries = [round(value)]
    elif isinstance(value, list) and len(value) == 1:
        tries = value
    elif kind is bool and _is_number(value):
        tries = [value != 0]
    elif kind in (int, float) and isinstance(value, str):  # full-width digits, 1e3, 1,000
        tries = [unicodedata.normalize("NFKC", value).replace(",", "").replace("_", "")]
    for other in tries:
        try:
            coerced = coerce(other, key)
        except TypeError:
            continue
        return str(coerced).lower() if isinstance(coerced, bool) else str(coerced)
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _scalar(value: Any, kind: type) -> Any:
    # the nodes read 7 as true, and digits of any script and 1_0 as numbers
    if value is None or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    if kind is bool and _is_number(value) and value not in (0, 1):
        raise TypeError
    if kind in (int, float) and isinstance(value, str) and not _PLAIN.fullmatch(value):
        raise TypeError
    try:
        return _SCALARS[kind][0](value=value)._value()
    except (ValidationError, OverflowError):  # an integer may be too large for a float
        raise TypeError from None
