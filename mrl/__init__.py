"""mrl: reinforcement learning for large language models on Megatron-Core, with vLLM rollout.

The names below load what they need when they are first used, so that `mrl plan` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.config import load_config
    from mrl.data import RLHFDataset
    from mrl.trainer import RayPPOTrainer

__version__ = "0.1.0"
__all__ = ["RLHFDataset", "RayPPOTrainer", "load_config"]

_HOMES = {
    "RLHFDataset": "mrl.data",
    "RayPPOTrainer": "mrl.trainer",
    "load_config": "mrl.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mrl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
