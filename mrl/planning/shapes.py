"""Whether there is anything to plan with; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from mrl.config import Config


def has_shape(config: Config) -> bool:
    """Tell whether the models' sizes are there to plan with."""
    paths = [config.model.path, *([config.critic.path] if config.critic.path else [])]
    return all((Path(path) / "config.json").is_file() for path in paths)
