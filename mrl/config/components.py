"""`reward.components`: several rewards, each by its name, as one weighted sum."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.config.errors import ConfigError, Violation
from mrl.config.schema import Config, RewardComponentConfig
from mrl.config.typed import coerce, field_keys, nearest

_SECTION = "reward.components"
# The dict of a reward function has these of its own.
_TAKEN = ("score", "acc", "overlong")


def reward_components(components: Mapping[str, Any]) -> dict[str, RewardComponentConfig]:
    """Read `reward.components`, in their order.

    Raises:
        ConfigError: with every fault found.
    """
    faults: list[Violation] = []
    found = {name: _read(name, value, faults) for name, value in components.items()}
    if faults:
        raise ConfigError(faults)
    return found


def check_components(config: Config) -> Iterator[Violation]:
    """Check that each component is a function with a weight."""
    faults: list[Violation] = []
    for name, value in config.reward.components.items():
        part = _read(name, value, faults)
        key = f"{_SECTION}.{name}"
        if name in _TAKEN or not name.replace("_", "").isalnum():
            rule = f"names letters, digits and _, but not {', '.join(_TAKEN)}"
            faults.append(Violation(key, name, rule))
        if not math.isfinite(part.weight) or part.weight == 0:
            faults.append(Violation(f"{key}.weight", part.weight, "a finite number, not 0", "1.0"))
        if part.path is not None and part.data_source is not None:
            rule = f"either {key}.path or {key}.data_source names the function"
            faults.append(Violation(f"{key}.data_source", part.data_source, rule, "null"))
        if part.path is None and part.name != RewardComponentConfig.name:
            faults.append(Violation(f"{key}.name", part.name, f"needs {key}.path"))
    yield from faults


def check_component_files(config: Config) -> Iterator[Violation]:
    """Check that the files of components exist."""
    for name, part in reward_components(config.reward.components).items():
        if part.path is not None and not Path(part.path).is_file():
            yield Violation(f"{_SECTION}.{name}.path", part.path, "no such file")


def scores_any_source(config: Config) -> bool:
    """Tell whether no function is chosen by the data source of a row."""
    parts = reward_components(config.reward.components).values()
    if config.reward.custom_reward_function.path is not None:
        return True
    return bool(parts) and all(part.path or part.data_source for part in parts)


def _read(name: str, value: object, faults: list[Violation]) -> RewardComponentConfig:
    """Read one component; what is wrong with it is noted and left at its default."""
    key, keys = f"{_SECTION}.{name}", field_keys(RewardComponentConfig)
    if value is None:
        return RewardComponentConfig()
    if not isinstance(value, Mapping):
        faults.append(Violation(key, value, f"expected a section of {', '.join(keys)}"))
        return RewardComponentConfig()
    found = {}
    for leaf, given in value.items():
        if leaf not in keys:
            near = difflib.get_close_matches(str(leaf), keys, 1)
            rule = f"unknown key; known: {', '.join(keys)}"
            faults.append(Violation(f"{key}.{leaf}", given, rule, *near))
            continue
        try:
            found[leaf] = coerce(given, keys[leaf])
        except TypeError:
            rule = f"expected {keys[leaf].describe()}"
            faults.append(Violation(f"{key}.{leaf}", given, rule, nearest(given, keys[leaf])))
    return RewardComponentConfig(**found)
