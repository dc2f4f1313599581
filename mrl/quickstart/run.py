"""The whole way on a laptop: make model and tasks, warm up, then train with RL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from mrl.config import Config, build_plan, check_files, load_config, print_plan
from mrl.quickstart.make import make
from mrl.sft import SFTTrainer, warm_start
from mrl.trainer import RayPPOTrainer

_SFT_CONFIG = "configs/sft/quickstart.yaml"


def run(config_path: str, seed: int, overrides: Sequence[str]) -> None:
    """Run the quickstart below `runs/quickstart/seed_<seed>`; finished stages are not repeated.

    `overrides` change the last stage. Raises ValueError for a config that cannot be used.
    """
    root = Path("runs/quickstart") / f"seed_{seed}"
    print(f"1/3 model and tasks in {root / 'data'}", flush=True)
    make(root / "data", seed)
    print("2/3 supervised warm-up", flush=True)
    config = load_config(_SFT_CONFIG, [
        f"model.path={root / 'data' / 'model'}",
        f"data.train_files=[{root / 'data' / 'sft.parquet'}]",
        f"trainer.default_local_dir={root / 'sft'}",
        f"data.seed={seed}",
    ])  # fmt: skip
    check_files(config)
    SFTTrainer(config, _tokenizer(config)).fit()
    weights = warm_start(root / "sft")
    config = load_config(config_path, [
        f"model.path={weights}",
        f"data.train_files=[{root / 'data' / 'train.parquet'}]",
        f"data.val_files=[{root / 'data' / 'heldout.parquet'}]",
        f"data.seed={seed}",
        f"rollout.seed={seed}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={root / Path(config_path).parent.name}",
        *overrides,
    ])  # fmt: skip
    check_files(config)
    print(f"3/3 {config.algorithm.adv_estimator} from {weights}", flush=True)
    print_plan(build_plan(config), config)
    RayPPOTrainer(config, _tokenizer(config)).fit()
    folder = config.trainer.default_local_dir
    print(f"look at it: .venv/bin/tensorboard --logdir {folder}/tensorboard")


def _tokenizer(config: Config) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(config.model.path)
