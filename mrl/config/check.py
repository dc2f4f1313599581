"""Every rule of a config, checked together before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mrl.config.check_algorithm import check_algorithm
from mrl.config.check_batch import check_batch
from mrl.config.check_lora import check_adapter_files, check_lora
from mrl.config.check_memory import check_memory
from mrl.config.check_model import TRAINABLE_TYPES, check_model, read_shape
from mrl.config.check_moe import check_moe
from mrl.config.check_precision import check_precision
from mrl.config.check_values import SIZES, check_values
from mrl.config.components import check_component_files, check_components
from mrl.config.errors import Violation, raise_any
from mrl.config.plan import late_profiles
from mrl.config.roles import enabled_roles, world_size
from mrl.config.schema import Config


def check_config(config: Config) -> tuple[Violation, ...]:
    """Find every broken rule; reads the model's `config.json` where there is one."""
    found = check_values(config)
    found += _check_sampling(config)
    found += check_algorithm(config)
    found += check_components(config)
    found += _check_optim(config)
    found += _check_trainer(config)
    placed = list(_check_placement(config))
    # the arithmetic divides by these
    if not any(v.key in SIZES for v in found) and not placed:
        found += [*check_model(config), *check_batch(config), *check_memory(config)]
    found += check_lora(config)
    found += check_moe(config)
    found += check_precision(config)
    return tuple(_once([*found, *placed]))


def check_trainable(config: Config) -> None:
    """Refuse models that can be planned but not trained yet; raises `ConfigError`."""
    found = []
    shape = read_shape("model.path", config.model.path)
    if shape is not None and shape.model_type not in TRAINABLE_TYPES:
        rule = f"model_type {shape.model_type!r} can be planned and converted but not trained yet"
        found.append(Violation("model.path", config.model.path, rule, " or ".join(TRAINABLE_TYPES)))
    raise_any(_once(found))


def check_files(config: Config) -> None:
    """Check that the model, data and reward files of a run exist; raises `ConfigError`."""
    found = [*_check_model_folder("model.path", config.model.path)]
    if config.critic.path is not None and any(r.name == "critic" for r in enabled_roles(config)):
        found += _check_model_folder("critic.path", config.critic.path)
    tokenizer = config.model.tokenizer_path
    if tokenizer is not None and not Path(tokenizer).is_dir():
        found.append(Violation("model.tokenizer_path", tokenizer, "no such folder"))
    if not config.data.train_files and not config.trainer.val_only:
        found.append(Violation("data.train_files", [], "names no file to train on"))
    if not config.data.val_files and config.trainer.val_only:
        found.append(Violation("data.val_files", [], "names no file, but trainer.val_only=true"))
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        found += [Violation(key, f, "no such file") for f in files if not Path(f).is_file()]
    reward = config.reward.custom_reward_function.path
    if reward is not None and not Path(reward).is_file():
        found.append(Violation("reward.custom_reward_function.path", reward, "no such file"))
    found += check_component_files(config)
    resume = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and resume and not Path(resume).is_dir():
        found.append(Violation("trainer.resume_from_path", resume, "no such folder"))
    found += check_adapter_files(config)
    raise_any(found)


def _check_model_folder(key: str, path: str) -> Iterator[Violation]:
    folder = Path(path)
    if path in ("", "???"):
        yield Violation(key, path, "a model folder is needed")
    elif not folder.is_dir():
        yield Violation(key, path, "no such folder; expected a Hugging Face model folder")
    else:
        if not (folder / "config.json").is_file():
            yield Violation(key, path, "the folder has no config.json")
        if not any(folder.glob("*.safetensors")):
            yield Violation(key, path, "the folder has no weights (*.safetensors)")


def _check_sampling(config: Config) -> Iterator[Violation]:
    rollout, val = config.rollout, config.rollout.val_kwargs
    for key, top_k in (("rollout.top_k", rollout.top_k), ("rollout.val_kwargs.top_k", val.top_k)):
        if top_k < 1 and top_k != -1:
            yield Violation(key, top_k, "must be at least 1, or -1 for all tokens", "-1")
    if val.n > 1 and not (val.do_sample and val.temperature > 0):
        yield Violation(
            "rollout.val_kwargs.n",
            val.n,
            "greedy validation gives the same response every time; sample with "
            "rollout.val_kwargs.do_sample=true and a temperature above 0",
            "1",
        )


def _check_optim(config: Config) -> Iterator[Violation]:
    for role, optim in (("actor", config.actor.optim), ("critic", config.critic.optim)):
        if optim.min_lr > optim.lr:
            yield Violation(
                f"{role}.optim.min_lr", optim.min_lr, f"above {role}.optim.lr", f"{optim.lr:g}"
            )


def _check_placement(config: Config) -> Iterator[Violation]:
    placement, world = config.placement, world_size(config)
    given = {
        "placement.trainer_gpus": placement.trainer_gpus,
        "placement.rollout_gpus": placement.rollout_gpus,
    }
    if placement.mode != "disaggregated":
        for key, count in given.items():
            if count is not None:
                rule = "needs placement.mode=disaggregated; colocated roles are on all ranks"
                yield Violation(key, count, rule, "null")
        return
    if all(count is None for count in given.values()):
        rule = "is needed with placement.mode=disaggregated, or placement.trainer_gpus"
        yield Violation("placement.rollout_gpus", None, rule, str(max(1, world // 2)))
    counts = [count for count in given.values() if count is not None]
    most = world if len(counts) == 2 else world - 1  # the other side needs a rank
    for key, count in given.items():
        if count is not None and count > most:
            yield Violation(key, count, f"the job has {world} ranks", str(most))
    if len(counts) == 2 and sum(counts) < world:
        rule = f"leaves {world - sum(counts)} of the {world} ranks without a role"
        yield Violation(" + ".join(given), sum(counts), rule, f"at least {world}")


def _check_trainer(config: Config) -> Iterator[Violation]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield Violation(
            "trainer.resume_from_path",
            trainer.resume_from_path,
            "is needed with trainer.resume_mode=resume_path",
        )
    world, ranks = world_size(config), trainer.profile_ranks
    for rank in ranks or ():
        if rank >= world:
            rule = f"the job has ranks 0 to {world - 1}"
            yield Violation("trainer.profile_ranks", rank, rule, str(world - 1))
    if ranks and len(set(ranks)) < len(ranks):
        nearest = str(sorted(set(ranks)))
        yield Violation("trainer.profile_ranks", ranks, "names a rank twice", nearest)
    if trainer.total_training_steps is not None:
        yield from late_profiles(config, trainer.total_training_steps)


def _once(violations: Iterable[Violation]) -> list[Violation]:
    """Keep the first of equal violations: roles that share a key share its faults."""
    found: list[Violation] = []
    for violation in violations:
        if violation not in found:
            found.append(violation)
    return found
