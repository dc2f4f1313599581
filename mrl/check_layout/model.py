"""The model folder and the prompts of a check."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from mrl.config import Config
from mrl.data import RLHFDataset

logger = logging.getLogger(__name__)

_MANY_PARAMETERS = 2e9
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja")


def require_weights(path: str) -> None:
    """Refuse a folder that is not there, or has no weights; raises ValueError."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path = {path!r}: expected a Hugging Face folder with config.json")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"model.path = {path!r}: the folder has a config.json and no weights "
            "(*.safetensors); give --random-weights to check the layouts of its shape"
        )


def write_random_model(config: Config, target: Path) -> Path:
    """Write a model of the shape of model.path with random weights into `target`; give it.

    Weights are drawn as transformers draws them, in the dtype of its config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source, trust = Path(config.model.path), config.model.trust_remote_code
    if not (source / "config.json").is_file():
        raise ValueError(f"model.path = {config.model.path!r}: the folder has no config.json")
    shape = AutoConfig.from_pretrained(source, trust_remote_code=trust)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(shape, trust_remote_code=trust)
    size = sum(parameter.numel() for parameter in meta.parameters())
    if size > _MANY_PARAMETERS:
        logger.warning(
            "writing %.1f billion random weights to %s: they take their room in memory and on the "
            "disk; a copy of config.json with fewer num_hidden_layers checks the same layouts",
            size / 1e9,
            target,
        )
    torch.manual_seed(config.trainer.seed)
    model = AutoModelForCausalLM.from_config(
        shape, dtype=shape.dtype or torch.float32, trust_remote_code=trust
    )
    model.save_pretrained(target)
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, target / file.name)
    return target


def real_prompts(config: Config, count: int) -> list[tuple[int, ...]]:
    """Give the first prompts of data.train_files as training renders them; none without files."""
    if not config.data.train_files:
        return []
    from transformers import AutoTokenizer

    path = config.model.tokenizer_path or config.model.path
    tokenizer = AutoTokenizer.from_pretrained(
        path, trust_remote_code=config.model.trust_remote_code
    )
    dataset = RLHFDataset(config.data.train_files, tokenizer, config.data)
    return [dataset.prompt(row, uid=str(row)).token_ids for row in range(min(count, len(dataset)))]
