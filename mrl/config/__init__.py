"""Config: loaded, checked and derived once, before any process starts; frozen afterwards."""

from mrl.config.check import check_config, check_files, check_trainable
from mrl.config.errors import ConfigError, Violation
from mrl.config.load import load_config, save_resolved
from mrl.config.plan import (
    ParallelLayout,
    RolePlan,
    RunPlan,
    build_plan,
    training_steps,
    warmup_steps,
)
from mrl.config.schema import Config
from mrl.config.show import print_plan

__all__ = [
    "Config",
    "ConfigError",
    "ParallelLayout",
    "RolePlan",
    "RunPlan",
    "Violation",
    "build_plan",
    "check_config",
    "check_files",
    "check_trainable",
    "load_config",
    "print_plan",
    "save_resolved",
    "training_steps",
    "warmup_steps",
]
