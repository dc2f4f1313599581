"""Which function scores a data source.

A reward function follows verl's protocol: `compute_score(data_source, solution_str, ground_truth,
extra_info=None)`, called by keyword, returning a number or a dict with `score`. Other numbers of
the dict become metrics.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ComputeScore = Callable[..., Any]

# The hard limit of the sample that is being scored, for functions that give parts of it away.
sample_limit_s: ContextVar[float] = ContextVar("sample_limit_s", default=30.0)

# The built-in sources and the module that registers each; loaded at the first use, because
# reasoning-gym and math-verify take seconds to import.
_BUILT_IN: Mapping[str, str] = {
    "gsm8k": "mrl.rewards.gsm8k",
    "openai/gsm8k": "mrl.rewards.gsm8k",
    "reasoning_gym": "mrl.rewards.reasoning_gym",
    "math": "mrl.rewards.math",
    "lighteval/MATH": "mrl.rewards.math",
    "DigitalLearningGmbH/MATH-lighteval": "mrl.rewards.math",
    "HuggingFaceH4/MATH-500": "mrl.rewards.math",
    "math_dapo": "mrl.rewards.math",
    "aime": "mrl.rewards.math",
    "code": "mrl.rewards.code",
    "codecontests": "mrl.rewards.code",
    "apps": "mrl.rewards.code",
    "codeforces": "mrl.rewards.code",
    "taco": "mrl.rewards.code",
}
_FUNCTIONS: dict[str, ComputeScore] = {}


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One response to score."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


class Sources(Collection[str]):
    """Data sources that have a function: a name stands for itself and everything under `name/`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = tuple(sorted(names))

    def match(self, data_source: str) -> str | None:
        """Give the longest registered name that covers a data source."""
        parts = data_source.split("/")
        for end in range(len(parts), 0, -1):
            if (name := "/".join(parts[:end])) in self._names:
                return name
        return None

    def __contains__(self, data_source: object) -> bool:
        return isinstance(data_source, str) and self.match(data_source) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def register(*names: str) -> Callable[[ComputeScore], ComputeScore]:
    """Register a compute_score function for data sources, each with everything under `name/`."""

    def add(function: ComputeScore) -> ComputeScore:
        for name in names:
            if name in _FUNCTIONS and _FUNCTIONS[name] is not function:
                raise ValueError(f"data source {name!r} already has {_FUNCTIONS[name].__module__}")
            _FUNCTIONS[name] = function
        return function

    return add


def known_sources() -> Sources:
    """Give the data sources that have a function, without loading it."""
    return Sources({*_BUILT_IN, *_FUNCTIONS})


def resolve(data_source: str, custom: ComputeScore | None = None) -> ComputeScore:
    """Find the function of a data source; a custom function takes them all.

    Raises:
        ValueError: if no function is known for the data source.
    """
    if custom is not None:
        return custom
    sources = known_sources()
    name = sources.match(data_source)
    if name is None:
        raise ValueError(
            f"data_source {data_source!r} has no reward function; known: {', '.join(sources)}; "
            "a function of your own is set with reward.custom_reward_function.path=FILE.py"
        )
    if name not in _FUNCTIONS:
        importlib.import_module(_BUILT_IN[name])
    return _FUNCTIONS[name]


def load_custom(path: str | Path, name: str) -> ComputeScore:
    """Load a user's compute_score from a Python file.

    Raises:
        ValueError: if the file is missing or broken, or holds no such function.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"reward.custom_reward_function.path: {file} is not a file")
    name_of_file = f"mrl_custom_reward_{zlib.crc32(str(file.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name_of_file, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward.custom_reward_function.path: {file} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that its dataclasses and pickles find their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code: anything may come out of it
        raise ValueError(
            f"reward.custom_reward_function.path: {file} failed to load: "
            f"{type(error).__name__}: {error}"
        ) from error
    functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    if name not in functions:
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"reward.custom_reward_function.name: {file} has no function {name!r}; "
            f"it has: {', '.join(functions) or 'none'}{hint}"
        )
    return functions[name]
