"""How long is a GRPO step in TRL and verl, on the same model, batch, lengths and sampling?

All run in one go, in turn, each in processes and an environment of its own; the first step of each
run is left out. Tokens are those of prompts and responses, over the wall clock of the step. On a
CPU the work is the quickstart's (two data-parallel ranks of mrl, one process of TRL, the same
cores), on GPUs a recipe of benchmarks/recipes.py. TRL knows one token that ends a response: it
takes uniform ones.
First: benchmarks/peers/install.sh trl (or verl; without network: --pack DIR there, --wheels here).
mrl bench peers --name peers_cpu --peers trl                        on a quiet CPU
mrl bench peers --name peers_h200 --peers trl verl verl_fsdp --runs 1.5b_grpo
mrl bench peers --name peers_2x_h200 --peers verl verl_fsdp --runs 7b_grpo --laws uniform skewed
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.trainers import PEERS, Mrl
from benchmarks.peers.work import WARMUPS, Trainer, Work, to_json
from benchmarks.recipes import LAWS, REAL, configured, settings
from benchmarks.record import ROOT, output_of, parser_of
from mrl.config import load_config

NAME = "peers"
QUICKSTART = "quickstart"  # the work on a CPU
_STEPS, _ROUNDS = 6, 2
_PACKAGES = ("trl", "verl", "accelerate", "torch", "transformers", "vllm", "megatron-core")
_ENVIRONMENTS = Path.home() / ".cache" / "mrl-peers"
_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == str(ground_truth).strip())
"""


def quickstart(folder: Path, steps: int) -> Work:
    """Make the laptop quickstart's model and tasks, and its step."""
    from mrl.quickstart.make import make

    make(folder / "data")
    reward = folder / "reward.py"
    reward.write_text(_REWARD)
    recipe = ROOT / "configs" / "grpo" / "quickstart.yaml"
    overrides = (
        f"model.path={folder / 'data' / 'model'}",
        f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
        "data.val_files=[]",
        f"reward.custom_reward_function.path={reward}",
        # the fastest layout of two cores; the recipe's own is there to show tensor parallelism
        "actor.megatron.tensor_model_parallel_size=1",
        "actor.ppo_micro_batch_size_per_gpu=64",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[]",
        "trainer.device=cpu",
    )
    return Work(load_config(recipe, list(overrides)), overrides, recipe, steps, "cpu", 1)


def recipe(name: str, law: str, folder: Path, steps: int) -> Work:
    """Make a recipe's model and prompts, and its step, for as many GPUs as it asks for."""
    case = replace(REAL[name], law=law)
    config = configured(case, folder, steps)
    overrides = tuple(settings(case, folder, steps))
    path = ROOT / "configs" / case.recipe
    return Work(config, overrides, path, steps, "cuda", config.trainer.n_gpus_per_node)


def side_by_side(
    work: Work, trainers: Mapping[str, Trainer], rounds: int, folder: Path
) -> dict[str, Any]:
    """Let the trainers take turns, the first one changing every round.

    One that fails is told by the end of its log, and the others go on.
    """
    names = list(trainers)
    runs: dict[str, list[Any]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            try:
                runs[name].append(trainers[name].run(work, folder / f"{name}_{turn}"))
            except (RuntimeError, ValueError, subprocess.TimeoutExpired, OSError) as error:
                failed[name] = str(error)
            print(f"  round {turn + 1}, {name}: {_shown(runs[name], failed.get(name))}", flush=True)
    done = {
        name: to_json(found, work.devices) for name, found in runs.items() if name not in failed
    }
    return {
        name: {"failed": failed.get(name) or failed["mrl"]}
        if name not in done or "mrl" not in done
        else {"sides": {"mrl": done["mrl"], name: done[name]}}
        for name in names
        if name != "mrl"
    }


def _shown(runs: Sequence[Any], failed: str | None) -> str:
    if failed is not None:
        return f"failed: {failed[-300:]}"
    return ", ".join(f"{seconds:.2f}" for seconds in runs[-1].step_s) + " s a step"


def _python(peer: str, folder: Path) -> Path:
    """Find the Python of a peer; raises FileNotFoundError saying how to make it."""
    path = folder / peer.partition("_")[0] / "bin" / "python"
    if not path.exists():
        name = peer.partition("_")[0]
        raise FileNotFoundError(f"no {path}: run benchmarks/peers/install.sh {name}")
    return path


def _versions(python: Path) -> dict[str, str]:
    """Ask a peer's environment for the versions that matter."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "print(json.dumps({d.name: d.version for d in m.distributions() if d.name in sys.argv}))"
    )
    command = [str(python), "-c", code, *_PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def run(args: Sequence[str]) -> dict[str, Any]:
    """Compare, saving after each work."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=["trl"])
    parser.add_argument("--runs", nargs="+", default=[QUICKSTART], help=f"or {', '.join(REAL)}")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=["uniform"])
    parser.add_argument("--steps", type=int, default=_STEPS, help="of a run; the first warms up")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="runs of each side")
    parser.add_argument("--environments", type=Path, default=_ENVIRONMENTS, help="NAME/bin/python")
    options = parser.parse_args(list(args))
    output = output_of(NAME, options)
    if unknown := set(options.runs) - {QUICKSTART, *REAL}:
        raise ValueError(f"--runs {sorted(unknown)}: expected {QUICKSTART}, {', '.join(REAL)}")
    steps, rounds = (WARMUPS + 1, 1) if options.smoke else (options.steps, options.rounds)
    pythons = {peer: _python(peer, options.environments) for peer in options.peers}
    result: dict[str, Any] = {
        "smoke": options.smoke,
        "warmups": WARMUPS,
        "versions": {peer: _versions(python) for peer, python in pythons.items()},
        "peers": {},
    }
    trainers: dict[str, Trainer] = {"mrl": Mrl()}
    trainers |= {peer: PEERS[peer](python) for peer, python in pythons.items()}
    for name in options.runs:
        for law in options.laws if name != QUICKSTART else ("uniform",):
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                work = (
                    quickstart(folder, steps)
                    if name == QUICKSTART
                    else recipe(name, law, folder, steps)
                )
                found = side_by_side(work, trainers, rounds, folder)
            label = name if name == QUICKSTART else f"{name}/{law}"
            result["peers"] |= {f"{peer}, {label}": entry for peer, entry in found.items()}
            output.write(result)
    return result
