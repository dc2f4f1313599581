"""Secrets in what a user gave: a config with one is refused, and no message repeats it.

A config is saved (config.yaml), shown (`mrl plan`) and rendered (Slurm scripts). Libraries look for
their keys in the environment.
"""

from __future__ import annotations

import os
import re

MASK = "***"
_NAME = re.compile(
    r"(?:^|[._-])(?:pass(?:word|wd)?|secret|credentials?|token|(?:api|auth|access|private|secret)"
    r"[_-]?key)$|authkey$",
    re.IGNORECASE,
)
_FORM = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|(?<=://)[^/\s@'\"]+(?=@)"  # user:password of a URL
)
_SHORTEST = 8  # characters of a value in the environment that is worth looking for
_VALUE_OF_NAME = re.compile(r"(?P<name>[\w.-]+)(?P<mark>\s*[=:]\s*)(?P<value>[^\s,;}\]]+)")


def names_secret(key: str) -> bool:
    """Tell whether a key or a variable is called as those of secrets are."""
    return bool(_NAME.search(key))


def has_secret(text: str) -> bool:
    """Tell whether a text holds what looks like a secret, or one of this environment."""
    return masked(text) != text


def masked(text: str) -> str:
    """Put *** for the secrets in a text."""
    for secret in sorted(_of_environment(), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _VALUE_OF_NAME.sub(_masked_value, _FORM.sub(MASK, text))


def _masked_value(match: re.Match[str]) -> str:
    if not names_secret(match["name"]) or match["value"] in ("null", "None", "''", '""'):
        return match[0]
    return f"{match['name']}{match['mark']}{MASK}"


def _of_environment() -> set[str]:
    return {
        value
        for name, value in os.environ.items()
        if names_secret(name) and len(value) >= _SHORTEST
    }
