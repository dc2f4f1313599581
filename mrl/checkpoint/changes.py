"""What changed in a config since a checkpoint was saved, and what may."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.checkpoint.atomic import write_atomically
from mrl.config import Config

CONFIG_FILE = "config.json"
OVERRIDE = "trainer.allow_changed"

# What training goes on from would not be what it was: refused, with the reason.
_HARMFUL: Mapping[str, str] = {
    r"model\.path": "the reference, and the model that an adapter adapts, are read from it",
    r"critic\.path": "the critic's shape is read from it",
    r"model\.lora\.(rank|alpha|target_modules)": "the optimizer's state is of other parameters",
    r"algorithm\.adv_estimator": "it decides whether there is a critic, and what updates mean",
}
# What changes no number of a run beyond rounding, or is checked where it is loaded.
_FREE = (
    r"trainer\.(nnodes|n_gpus_per_node|device|launcher|project_name|experiment_name|logger)",
    r"trainer\.(default_local_dir|val_.*|test_freq|save_freq|log_val_generations|resume_.*)",
    r"trainer\.(max_.*|hang_timeout_s|allow_changed|balance_batch|fault_timeout_s|full_determinism)",
    r"(placement|resharding)\..*",
    r"(actor|critic|ref)\.megatron\.(.*(_parallel|_stage|_split|offload|overlap|recompute).*|seed)",
    r"(actor|critic|ref)\.megatron\.(cp_comm_type|use_distributed_optimizer|use_fused_kernels)",
    r"(actor|critic|ref)\.checkpoint\..*",
    r".*(micro_batch_size_per_gpu|use_dynamic_bsz|max_token_len_per_gpu)",
    r"rollout\.(gpu_.*|tensor_model_parallel_size|max_num_.*|cpu_.*|val_kwargs\..*|enforce_eager)",
    r"data\.val_(batch_size|max_samples)",
    r"reward\.num_workers",
)


@dataclass(frozen=True, slots=True)
class Change:
    """A key with its value then and now, and why it must not differ ("": it may)."""

    key: str
    before: Any
    now: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r}, is {self.now!r}"


def save_config(config: Config, folder: Path) -> None:
    """Write the config into a checkpoint folder."""
    write_atomically(folder / CONFIG_FILE, json.dumps(asdict(config), indent=1) + "\n")


def changes_since(folder: Path, config: Config) -> tuple[Change, ...]:
    """List the keys that matter to training and differ from a checkpoint's, in the config's order.

    A key that one of the two does not know is not compared. Nothing where none was saved.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return ()
    before = dict(_leaves(json.loads(path.read_text(encoding="utf-8"))))
    now = dict(_leaves(json.loads(json.dumps(asdict(config)))))
    return tuple(
        Change(key, before[key], value, _reason(key))
        for key, value in now.items()
        if key in before and before[key] != value and not _matches(key, _FREE)
    )


def check_changes(folder: Path, config: Config) -> None:
    """Warn of all that changed since a checkpoint was saved.

    Raises ValueError for what may not change and is not in trainer.allow_changed, with the
    override that allows it.
    """
    changes, allowed = changes_since(folder, config), config.trainer.allow_changed
    if changes:
        listed = "; ".join(map(str, changes))
        warnings.warn(f"settings changed since {folder} was saved: {listed}", stacklevel=2)
    harmful = [change for change in changes if change.reason and change.key not in allowed]
    if harmful:
        listed = "; ".join(f"{change} ({change.reason})" for change in harmful)
        keys = ",".join([*allowed, *(change.key for change in harmful)])
        raise ValueError(
            f"{folder} was saved with other settings: {listed}. Put them back, train into another "
            f"trainer.default_local_dir, or resume all the same with {OVERRIDE}=[{keys}]"
        )


def _reason(key: str) -> str:
    return next((why for rule, why in _HARMFUL.items() if re.fullmatch(rule, key)), "")


def _matches(key: str, rules: Collection[str]) -> bool:
    return any(re.fullmatch(rule, key) for rule in rules)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
