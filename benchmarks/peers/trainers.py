"""mrl and its peers as processes that do the same work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers.work import Measured, Trainer, Work, read_json_lines
from benchmarks.record import ROOT
from mrl.config import build_plan
from mrl.tracking.jsonl import read_metrics

_LIMIT_S = 3600.0
_TRL_SCRIPT = Path(__file__).with_name("trl_grpo.py")
_VERL_COMPAT = Path(__file__).with_name("verl_compat.py")
_TRL_MICRO = 8  # samples of a forward pass on a GPU: it holds whole logits


def call(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a trainer. Raises RuntimeError with the end of its log when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with log.open("w") as stream:
        done = subprocess.run(
            command, stdout=stream, stderr=subprocess.STDOUT, cwd=folder, timeout=_LIMIT_S,
            env={**os.environ, **environment},
        )  # fmt: skip
    if done.returncode != 0:
        end = log.read_text(errors="replace")[-6000:]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}; its log ends:\n{end}")


@dataclass(frozen=True, slots=True)
class Mrl:
    """mrl, by its own command."""

    def run(self, work: Work, folder: Path) -> Measured:
        """Do the work; its own timers are its wall clock."""
        command = [sys.executable, "-m", "mrl.cli", "train", str(work.recipe), *work.overrides]
        command += [f"trainer.default_local_dir={folder / 'run'}"]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        call(command, folder, {"PYTHONPATH": os.pathsep.join(paths)})
        rows = read_metrics(folder / "run" / "metrics.jsonl")
        return Measured.of_rows([row for row in rows if row["step"] > 0])


@dataclass(frozen=True, slots=True)
class Trl:
    """TRL's GRPOTrainer: generation by transformers on a CPU, by vLLM in its process on a GPU."""

    python: Path

    def run(self, work: Work, folder: Path) -> Measured:
        """Do the work by a script that its Python runs."""
        folder.mkdir(parents=True, exist_ok=True)
        out, asked = folder / "out.json", folder / "work.json"
        asked.write_text(json.dumps(trl_work(work, out)))
        threads = str(len(os.sched_getaffinity(0)))
        call([str(self.python), str(_TRL_SCRIPT), str(asked)], folder, {"OMP_NUM_THREADS": threads})
        found = json.loads(out.read_text())
        return Measured.of(found["step_s"], found["own_step_s"], found["tokens"])


def trl_work(work: Work, out: Path) -> dict[str, Any]:
    """Say the work in TRL's terms: an optimizer step is one of its steps."""
    config, plan = work.config, build_plan(work.config)
    actor, optim, rollout = config.actor, config.actor.optim, config.rollout
    update = actor.ppo_mini_batch_size * rollout.n // max(work.devices, 1)  # samples of a device
    micro = update if work.device == "cpu" else min(update, _TRL_MICRO)
    return {
        "out": str(out),
        "model": work.model,
        "reward": work.reward,
        "rows": work.rows(),
        "updates": work.updates,
        "on_gpu": work.device == "cuda",
        "engine_memory": rollout.gpu_memory_utilization,
        "settings": {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": update // micro,
            "steps_per_generation": update // micro * work.updates,
            "num_generations": rollout.n,
            "max_completion_length": config.data.max_response_length,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": max(rollout.top_k, 0),
            "learning_rate": optim.lr,
            "lr_scheduler_type": optim.lr_decay_style,
            "weight_decay": optim.weight_decay,
            "epsilon": plan.clip_ratio_low,
            "epsilon_high": plan.clip_ratio_high,
            "beta": 0.0,
            "max_steps": work.steps * work.updates,
            "seed": config.trainer.seed,
        },
    }


@dataclass(frozen=True, slots=True)
class Verl:
    """verl's main_ppo with vLLM, by Megatron or by FSDP."""

    python: Path
    engine: str  # of its config: megatron | dp (FSDP)

    def run(self, work: Work, folder: Path) -> Measured:
        """Do the work; the wall clock of a step is its own timing_s/step."""
        folder.mkdir(parents=True, exist_ok=True)
        data, log = folder / "train.parquet", folder / "metrics.jsonl"
        pq.write_table(pa.Table.from_pylist(work.rows()), data)
        shutil.copy(_VERL_COMPAT, folder)
        command = [str(self.python), "-m", "verl.trainer.main_ppo", f"model_engine={self.engine}"]
        call(
            [*command, *verl_overrides(work, data, self.engine)],
            folder,
            verl_environment(folder, log, self.engine),
        )
        rows = [line["data"] for line in read_json_lines(log)]
        return Measured.of_rows([row for row in rows if "timing_s/step" in row])


def verl_environment(folder: Path, log: Path, engine: str) -> dict[str, str]:
    """Say what verl's processes inherit, Ray's workers and vLLM's included."""
    kept = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # as in mrl: it would be compiled for two minutes
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # NVLink multicast, which not all hosts allow
        "VLLM_DISABLE_COMPILE_CACHE": "0",  # verl would compile anew at every start
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # a machine's memory may grow with its use
        "HF_HUB_OFFLINE": "1",
    }
    return {name: os.environ.get(name, value) for name, value in kept.items()} | {
        "PYTHONPATH": str(folder),  # its own packages first: the base's are below them
        "VERL_FILE_LOGGER_PATH": str(log),
        # verl: 1 for Megatron alone. 8 is CUDA's own.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if engine == "megatron" else "8",
    }


def verl_overrides(work: Work, data: Path, engine: str) -> list[str]:
    """Say the work in verl's keys, with its docs' advice for speed; offload as in the recipe."""
    config = work.config
    actor, rollout, optim = config.actor, config.rollout, config.actor.optim
    data_config = config.data
    role = "actor_rollout_ref"
    megatron = actor.megatron
    keys: dict[str, Any] = {
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": config.data.train_batch_size,
        "data.max_prompt_length": config.data.max_prompt_length,
        "data.max_response_length": config.data.max_response_length,
        "data.filter_overlong_prompts": False,
        f"{role}.model.path": work.model,
        f"{role}.model.external_lib": _VERL_COMPAT.stem,
        f"{role}.model.use_remove_padding": True,
        f"{role}.actor.optim.lr": optim.lr,
        f"{role}.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        f"{role}.actor.use_dynamic_bsz": True,
        f"{role}.actor.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        f"{role}.actor.use_kl_loss": False,
        f"{role}.rollout.name": "vllm",
        f"{role}.rollout.n": rollout.n,
        f"{role}.rollout.temperature": rollout.temperature,
        f"{role}.rollout.top_p": rollout.top_p,
        f"{role}.rollout.top_k": rollout.top_k,
        f"{role}.rollout.log_prob_use_dynamic_bsz": True,
        f"{role}.rollout.log_prob_max_token_len_per_gpu": (
            rollout.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        ),
        f"{role}.rollout.max_model_len": (
            rollout.max_model_len or data_config.max_prompt_length + data_config.max_response_length
        ),
        f"{role}.rollout.free_cache_engine": rollout.free_cache_engine,
        f"{role}.rollout.tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        f"{role}.rollout.gpu_memory_utilization": rollout.gpu_memory_utilization,
        f"{role}.rollout.max_num_seqs": rollout.max_num_seqs,
        f"{role}.rollout.max_num_batched_tokens": rollout.max_num_batched_tokens,
        f"{role}.rollout.enforce_eager": rollout.enforce_eager,
        "reward.custom_reward_function.path": work.reward,
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "trainer.logger": '["console","file"]',
        "trainer.n_gpus_per_node": work.devices,
        "trainer.nnodes": 1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.total_training_steps": work.steps,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
    if engine == "megatron":
        section = f"{role}.actor.megatron"
        keys |= {
            f"{section}.tensor_model_parallel_size": megatron.tensor_model_parallel_size,
            f"{section}.vanilla_mbridge": True,  # mbridge: Megatron-Bridge is not in its list
            f"{section}.param_offload": megatron.param_offload,  # gradients with them
            f"{section}.optimizer_offload": megatron.optimizer_offload,
            # What mrl has too. verl's own backend is flash, of a package that is missing here.
            f"{section}.override_transformer_config.attention_backend": "auto",
            f"+{section}.override_transformer_config.apply_rope_fusion": True,
            f"+{section}.override_transformer_config.bias_activation_fusion": True,
            f"{role}.actor.optim.use_precision_aware_optimizer": (
                optim.use_precision_aware_optimizer
            ),
            f"{role}.actor.optim.exp_avg_dtype": optim.exp_avg_dtype,
            f"{role}.actor.optim.exp_avg_sq_dtype": optim.exp_avg_sq_dtype,
        }
    else:
        section = f"{role}.actor.fsdp_config"
        keys |= {
            f"{section}.param_offload": megatron.param_offload,
            f"{section}.optimizer_offload": megatron.optimizer_offload,
            f"{section}.forward_prefetch": True,
            # Without flash-attn: its kernels in torch, and log-probs that never hold all logits
            # (verl's other way loops over tokens then).
            f"+{role}.model.override_config.attn_implementation": "torch_varlen",
            f"{role}.model.use_fused_kernels": True,
        }
    return [f"{key}={value}" for key, value in keys.items()]


# Of a peer by name: makes it with its Python.
PEERS: Mapping[str, Callable[[Path], Trainer]] = {
    "trl": Trl,
    "verl": lambda python: Verl(python, "megatron"),
    "verl_fsdp": lambda python: Verl(python, "dp"),
}
