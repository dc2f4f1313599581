"""Rules of experts: balancing losses, frozen routers, grouped products, replayed routing."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.check_model import ModelShape, read_shape
from mrl.config.errors import ConfigError, Violation
from mrl.config.roles import RoleSettings, enabled_roles
from mrl.config.schema import Config

_REPLAY = "actor.router_replay.mode"
# Keys of experts, with the values that ask for nothing, as Python and as YAML has them.
_KEYS: dict[str, tuple[object, str]] = {
    "moe_router_load_balancing_type": ("none", "none"),
    "moe_aux_loss_coeff": (0.0, "0"),
    "moe_z_loss_coeff": (0.0, "0"),
    "freeze_moe_router": (False, "false"),
    "moe_grouped_gemm": (None, "null"),
}
_OF_TRAINING = [key for key in _KEYS if key != "moe_grouped_gemm"]
_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


def check_moe(config: Config) -> Iterator[Violation]:
    """Check every role's experts against its model, and the replay against the engine."""
    policy = _shape("model.path", config.model.path)
    for role in enabled_roles(config):
        shape = policy
        if role.name == "critic" and config.critic.path is not None:
            shape = _shape("critic.path", config.critic.path)
        if shape is not None and not shape.experts:
            yield from _useless(config, role, list(_KEYS), f"{shape.path} has no experts")
            continue
        if role.trained:
            yield from _check_losses(role)
            yield from _check_frozen(config, role)
        else:
            yield from _useless(config, role, _OF_TRAINING, f"the {role.name} role is not trained")
        yield from _check_grouped(config, role)
    yield from _check_replay(config, policy)


def _shape(key: str, path: str) -> ModelShape | None:
    try:
        return read_shape(key, path)
    except ConfigError:  # told by `check_model`
        return None


def _useless(config: Config, role: RoleSettings, keys: list[str], rule: str) -> Iterator[Violation]:
    for key in keys:
        value, (nothing, nearest) = vars(role.megatron)[key], _KEYS[key]
        # what follows the actor is meant for the actor
        follows = role.name != "actor" and value == vars(config.actor.megatron)[key]
        if value != nothing and not follows:
            yield Violation(f"{role.keys['megatron']}.{key}", value, rule, nearest)


def _check_losses(role: RoleSettings) -> Iterator[Violation]:
    m, section = role.megatron, role.keys["megatron"]
    kind, coefficient = m.moe_router_load_balancing_type, m.moe_aux_loss_coeff
    if kind != "none" and coefficient == 0:
        rule = f"moe_router_load_balancing_type={kind} needs a coefficient above 0"
        yield Violation(f"{section}.moe_aux_loss_coeff", coefficient, rule, "0.001")
    if kind == "none" and coefficient > 0:
        rule = f"moe_aux_loss_coeff={coefficient:g} has no loss to weigh"
        yield Violation(f"{section}.moe_router_load_balancing_type", kind, rule, "aux_loss")


def _check_frozen(config: Config, role: RoleSettings) -> Iterator[Violation]:
    m, section = role.megatron, role.keys["megatron"]
    adapters = role.name == "actor" and config.model.lora.rank > 0
    if not m.freeze_moe_router and not adapters:
        return
    why = "freeze_moe_router=true"
    if adapters:
        why = "model.lora.rank above 0, which trains adapters alone"
        if m.freeze_moe_router:
            rule = f"has no effect with {why}"
            yield Violation(f"{section}.freeze_moe_router", True, rule, "false")
    for key in _LOSSES:
        if value := vars(m)[key]:
            yield Violation(f"{section}.{key}", value, f"has no router to train with {why}", "0")


def _check_grouped(config: Config, role: RoleSettings) -> Iterator[Violation]:
    m, key = role.megatron, f"{role.keys['megatron']}.moe_grouped_gemm"
    on_cpu = config.trainer.device == "cpu"
    if m.moe_grouped_gemm and (on_cpu or m.transformer_impl == "local" or m.dtype == "float32"):
        rule = "runs through Transformer Engine, in bfloat16 on a GPU"
        yield Violation(key, True, rule, "null")


def _check_replay(config: Config, policy: ModelShape | None) -> Iterator[Violation]:
    mode = config.actor.router_replay.mode
    if mode == "disabled":
        return
    if policy is not None and not policy.experts:
        yield Violation(_REPLAY, mode, f"{policy.path} has no experts", "disabled")
    elif mode == "R3" and config.rollout.name != "vllm":
        rule = f"rollout.name={config.rollout.name} does not say which experts it chose"
        yield Violation(_REPLAY, mode, rule, "R2")
