"""Rules of memory: recomputation, the optimizer's dtypes, overlap, fused accumulation."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.check_model import ModelShape, read_shape
from mrl.config.errors import ConfigError, Violation
from mrl.config.roles import RoleSettings, enabled_roles, split_layers
from mrl.config.schema import Config, MegatronConfig, OptimConfig

_DTYPE_KEYS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_OF_EXPERTS = ("layernorm", "moe", "moe_act")
_OF_TRANSFORMER_ENGINE = ("layernorm", "moe_act")
# Keys that do nothing for a role without gradients.
_OF_TRAINING = (
    "recompute_granularity",
    "grad_offload",
    "optimizer_offload",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "gradient_accumulation_fusion",
)


def check_memory(config: Config) -> Iterator[Violation]:
    """Check what the config alone can know; the device is asked when a worker starts."""
    optims = {"actor": config.actor.optim, "critic": config.critic.optim}
    policy = _shape("model.path", config.model.path)
    for role in enabled_roles(config):
        shape = policy
        if role.name == "critic" and config.critic.path is not None:
            shape = _shape("critic.path", config.critic.path)
        yield from _check_effect(config, role)
        yield from _check_recompute(role, shape)
        yield from _check_overlap(role)
        yield from _check_fusion(config, role)
        if role.name in optims:
            yield from _check_optimizer(config, role, optims[role.name])


def _shape(key: str, path: str) -> ModelShape | None:
    try:
        return read_shape(key, path)
    except ConfigError:  # told by `check_model`
        return None


def _check_effect(config: Config, role: RoleSettings) -> Iterator[Violation]:
    """Refuse what a role's own section asks for in vain; a shared one is the actor's."""
    if role.keys["megatron"] == "actor.megatron":
        return
    useless = {}
    if not role.trained:
        useless = dict.fromkeys(_OF_TRAINING, f"the {role.name} role is not trained")
    if role.name == "critic":
        useless["use_fused_kernels"] = "a value head has no logits"
    for key, rule in useless.items():
        value, usual = (vars(layout)[key] for layout in (role.megatron, MegatronConfig()))
        if value not in (usual, vars(config.actor.megatron)[key]):  # not one that follows
            nearest = "null" if usual is None else str(usual).lower()
            yield Violation(f"{role.keys['megatron']}.{key}", value, rule, nearest)


def _check_recompute(role: RoleSettings, shape: ModelShape | None) -> Iterator[Violation]:
    m, section = role.megatron, f"{role.keys['megatron']}.recompute"
    given = {"method": m.recompute_method, "num_layers": m.recompute_num_layers}
    if m.recompute_granularity != "full":
        for name, value in given.items():
            if value is not None:
                yield Violation(
                    f"{section}_{name}", value, f"needs {section}_granularity=full", "null"
                )
    elif shape is not None and m.recompute_num_layers is not None:
        yield from _check_num_layers(role, shape, m.recompute_num_layers)
    modules, usual = m.recompute_modules, MegatronConfig().recompute_modules
    if m.recompute_granularity == "selective":
        yield from _check_modules(role, shape)
    elif modules != usual:
        rule = f"needs {section}_granularity=selective"
        yield Violation(f"{section}_modules", list(modules), rule, str(list(usual)))


def _check_num_layers(role: RoleSettings, shape: ModelShape, count: int) -> Iterator[Violation]:
    try:
        chunks = split_layers(role.megatron, shape.layers)
    except ValueError:  # told by `check_model`
        return
    most = max(len(layers) for stage in chunks for layers in stage)
    if count > most:
        rule = f"a rank computes at most {most} layers in a row, of the {shape.layers} of the model"
        key = f"{role.keys['megatron']}.recompute_num_layers"
        yield Violation(key, count, rule, str(most))


def _check_modules(role: RoleSettings, shape: ModelShape | None) -> Iterator[Violation]:
    m = role.megatron
    key, modules = f"{role.keys['megatron']}.recompute_modules", list(m.recompute_modules)
    refused: dict[str, str] = {}
    if "shared_experts" in modules:
        refused["shared_experts"] = "no model that can be trained has shared experts"
    for module in _OF_TRANSFORMER_ENGINE:
        if m.transformer_impl == "local" and module in modules:
            refused[module] = f"{module} needs Transformer Engine, and transformer_impl is local"
    if shape is not None and not shape.experts:
        for module in _OF_EXPERTS:
            if module in modules:
                refused[module] = f"{module} needs a model with experts"
    nearest = [module for module in modules if module not in refused] or ["core_attn"]
    for rule in refused.values():
        yield Violation(key, modules, rule, str(nearest))
    if not modules:
        rule = "names nothing to compute again"
        yield Violation(key, modules, rule, "['core_attn']")


def _check_overlap(role: RoleSettings) -> Iterator[Violation]:
    m, section = role.megatron, role.keys["megatron"]
    if not m.overlap_param_gather:
        return
    if not m.use_distributed_optimizer:
        rule = f"needs {section}.use_distributed_optimizer=true, which shards what is gathered"
        yield Violation(f"{section}.overlap_param_gather", True, rule, "false")
    if not m.overlap_grad_reduce:
        rule = f"needs {section}.overlap_grad_reduce=true, which cuts the parameters into buckets"
        yield Violation(f"{section}.overlap_param_gather", True, rule, "false")


def _check_fusion(config: Config, role: RoleSettings) -> Iterator[Violation]:
    m = role.megatron
    if m.gradient_accumulation_fusion and config.trainer.device == "cpu":
        rule = "adds products to gradients in kernels of a GPU, and trainer.device is cpu"
        yield Violation(f"{role.keys['megatron']}.gradient_accumulation_fusion", True, rule, "null")


def _check_optimizer(config: Config, role: RoleSettings, optim: OptimConfig) -> Iterator[Violation]:
    m, key = role.megatron, f"{role.name}.optim.use_precision_aware_optimizer"
    if not optim.use_precision_aware_optimizer:
        for name in _DTYPE_KEYS:
            if (value := vars(optim)[name]) != "fp32":
                rule = f"needs {key}=true: the usual optimizer is all float32"
                yield Violation(f"{role.name}.optim.{name}", value, rule, "fp32")
        return
    if not m.use_distributed_optimizer:
        rule = f"needs {role.keys['megatron']}.use_distributed_optimizer=true"
        yield Violation(key, True, rule, "false")
    if config.trainer.device == "cpu":
        rule = "its fused Adam is Transformer Engine's and needs a GPU; trainer.device is cpu"
        yield Violation(key, True, rule, "false")
    elif m.dtype == "float32":
        rule = f"is for 16-bit parameters, and {role.keys['megatron']}.dtype is float32"
        yield Violation(key, True, rule, "false")
