"""The tables of docs/verl.md: `python -m mrl.config.verl_docs` prints them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mrl.config.aliases import ALIASES, VALUE_ALIASES
from mrl.config.load import as_yaml
from mrl.config.outcomes import Ignored, Legacy, Outcome
from mrl.config.verl import DEFAULTS, IGNORED_ITEMS

_ROLES = ("actor", "critic", "ref")


def render() -> str:
    """Write the tables of renamed, translated, ignored and refused keys, and verl's defaults."""
    renamed = {old: f"`{new}`" if new else "dropped" for old, new in _texts()}
    fates = {old: new for old, new in ALIASES.items() if not isinstance(new, str)}
    means = {old: _settings(fate) for old, fate in fates.items() if _is_translated(fate)}
    means |= {
        f"{key}={as_yaml(value)}": f"`{as_yaml(other)}`"
        for key, values in VALUE_ALIASES.items()
        for value, other in values.items()
    }
    ignored = {old: fate.why for old, fate in fates.items() if isinstance(fate, Ignored)}
    ignored |= {
        f"{key}: {item}": why for key, items in IGNORED_ITEMS.items() for item, why in items.items()
    }
    refused = {
        old: f"{fate.why}{_allowed(fate)}"
        for old, fate in fates.items()
        if not isinstance(fate, Ignored) and not _is_translated(fate)
    }
    return "\n".join(
        (
            *_table("Renamed", "a key, or all keys below it", renamed),
            *_table("Translated", "means", means),
            *_table("Ignored", "because", ignored),
            *_table("Refused", "because, and the values that are allowed", refused),
            *_table(
                "Without a config file",
                "verl's default",
                {key: f"`{as_yaml(value)}`" for key, value in DEFAULTS.items()},
            ),
        )
    )


def _texts() -> list[tuple[str, str]]:
    return [(old, new) for old, new in ALIASES.items() if isinstance(new, str)]


def _is_translated(fate: Outcome) -> bool:
    return isinstance(fate, Legacy) and any(fate.settings.values())


def _settings(fate: Outcome) -> str:
    assert isinstance(fate, Legacy)
    values: dict[str, list[str]] = defaultdict(list)
    for value, settings in fate.settings.items():
        means = ", ".join(f"`{key}={as_yaml(v)}`" for key, v in settings.items())
        values[means or "as things are"].append(as_yaml(value))
    return "; ".join(f"{', '.join(same)}: {means}" for means, same in values.items())


def _allowed(fate: Outcome) -> str:
    if not isinstance(fate, Legacy):
        return ""
    return f" (allowed: {', '.join(f'`{as_yaml(value)}`' for value in fate.settings)})"


def _table(title: str, head: str, rows: dict[str, str]) -> Iterable[str]:
    yield from (f"### {title}", "", f"| key | {head} |", "|---|---|")
    yield from (f"| `{key}` | {text} |" for key, text in _without_roles(rows).items())
    yield ""


def _without_roles(rows: dict[str, str]) -> dict[str, str]:
    """Write keys that several roles share, and what is said of them, once."""
    roles: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, text in rows.items():
        role, _, rest = key.partition(".")
        if role in _ROLES:
            roles[rest, text.replace(f"{role}.", "<role>.")].append(role)
        else:
            roles[key, text].append("")
    found = {}
    for (rest, text), names in roles.items():
        if names == [""]:
            found[rest] = text
        else:
            role = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
            shared = text.replace("<role>.", f"{names[0]}." if len(names) == 1 else "<role>.")
            found[f"{role}.{rest}"] = shared
    return found


if __name__ == "__main__":
    print(render())
