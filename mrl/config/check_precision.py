"""Rules between dtypes, FP8, the transformer implementation and the device."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.errors import Violation
from mrl.config.roles import RoleSettings, enabled_roles
from mrl.config.schema import Config, MegatronConfig

# Delayed scaling keeps scales of its own, which these replay without
_NOT_WITH_DELAYED = ("layernorm", "moe_act")


def check_precision(config: Config) -> Iterator[Violation]:
    """Check what the config alone can know; the chip is asked when a worker starts."""
    for role in enabled_roles(config):
        yield from _check_impl(config, role)
        if role.megatron.fp8 is not None:
            yield from _check_fp8(config, role)
        elif role.megatron.fp8_recipe != MegatronConfig().fp8_recipe:
            yield Violation(
                f"{role.keys['megatron']}.fp8_recipe",
                role.megatron.fp8_recipe,
                "has no effect without fp8",
                MegatronConfig().fp8_recipe,
            )


def _check_impl(config: Config, role: RoleSettings) -> Iterator[Violation]:
    m, section = role.megatron, role.keys["megatron"]
    if m.transformer_impl != "transformer_engine":
        return
    key = f"{section}.transformer_impl"
    if config.trainer.device == "cpu":
        rule = "Transformer Engine needs a GPU, and trainer.device is cpu"
        yield Violation(key, m.transformer_impl, rule, "auto")
    elif m.dtype == "float32":
        rule = f"its attention over packed rows takes bfloat16, and {section}.dtype is float32"
        yield Violation(key, m.transformer_impl, rule, "auto")


def _check_fp8(config: Config, role: RoleSettings) -> Iterator[Violation]:
    m, section = role.megatron, role.keys["megatron"]
    key = f"{section}.fp8"
    if config.trainer.device == "cpu":
        yield Violation(key, m.fp8, "needs a GPU, and trainer.device is cpu", "null")
    if m.transformer_impl == "local":
        rule = "runs through Transformer Engine, and transformer_impl is local"
        yield Violation(key, m.fp8, rule, "null, or transformer_impl=auto")
    if m.dtype == "float32":
        rule = f"is a way to compute in bfloat16, and {section}.dtype is float32"
        yield Violation(key, m.fp8, rule, f"null, or {section}.dtype=bfloat16")
    if m.fp8_recipe != "delayed":
        return
    if not role.trained:
        yield Violation(
            f"{section}.fp8_recipe",
            "delayed",
            f"takes its scales from earlier training steps, which the frozen {role.name} never "
            "takes",
            "tensorwise",
        )
    replayed = [name for name in m.recompute_modules if name in _NOT_WITH_DELAYED]
    if m.recompute_granularity == "selective" and replayed:
        rule = f"cannot recompute {', '.join(replayed)} (recompute_modules)"
        yield Violation(f"{section}.fp8_recipe", "delayed", rule, "tensorwise")
