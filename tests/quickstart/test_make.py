from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mrl.config.schema import DataConfig
from mrl.data import RLHFDataset, SFTDataset
from mrl.quickstart.__main__ import main
from mrl.quickstart.make import HELDOUT_ROWS, SFT_ROWS, TRAIN_ROWS, make
from mrl.rewards.reasoning_gym import compute_score
from mrl.rewards.registry import known_sources

CONFIG = DataConfig(max_prompt_length=8, max_response_length=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quickstart") / "first"
    make(path, seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder / "model")


def rl(folder: Path, name: str, tokenizer: PreTrainedTokenizerBase) -> RLHFDataset:
    return RLHFDataset([folder / f"{name}.parquet"], tokenizer, CONFIG)


def test_a_token_is_a_character_and_eos_ends_a_response(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert len(tokenizer) == 64
    assert tokenizer.bos_token_id is None
    text = "12 + 34 = 46?\n"
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    dataset = SFTDataset([folder / "sft.parquet"], tokenizer, CONFIG)
    prompt, response = dataset.example(0)
    assert tokenizer.decode(prompt).endswith("=")
    assert response[-1] == tokenizer.eos_token_id
    assert len(dataset) == SFT_ROWS


def test_the_model_loads_and_tensor_parallel_sizes_divide_it(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    config = model.config
    assert config.model_type == "qwen2"
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 3e6
    assert model.dtype == torch.float32
    sizes = (config.vocab_size, config.num_attention_heads, config.intermediate_size)
    assert all(size % 4 == 0 for size in sizes)
    assert config.num_key_value_heads % 2 == 0


def test_rows_are_scored_by_their_own_verifier(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    dataset = rl(folder, "train", tokenizer)
    dataset.check_rewards(known_sources(), has_custom=False)
    assert len(dataset) == TRAIN_ROWS
    for i in range(0, len(dataset), 100):
        prompt = dataset.prompt(i, "u")
        answer = str(eval(prompt.text.removesuffix("=")))
        for text, acc in ((answer, 1.0), (f"{int(answer) + 1}", 0.0), ("", 0.0)):
            score = compute_score(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)
            assert score["acc"] == acc


def test_the_splits_share_no_task(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    train, heldout = (rl(folder, name, tokenizer) for name in ("train", "heldout"))
    sft = SFTDataset([folder / "sft.parquet"], tokenizer, CONFIG)
    tasks = [
        *(
            dataset.prompt(i, "u").token_ids
            for dataset in (train, heldout)
            for i in range(len(dataset))
        ),
        *(sft.example(i)[0] for i in range(len(sft))),
    ]
    assert len(tasks) == len(set(tasks)) == TRAIN_ROWS + HELDOUT_ROWS + SFT_ROWS


def test_what_is_there_stays_and_what_is_missing_is_made_alike(folder: Path) -> None:
    kept, lost = folder / "model" / "model.safetensors", folder / "sft.parquet"
    time, content = kept.stat().st_mtime_ns, lost.read_bytes()
    lost.unlink()
    make(folder, seed=1)
    assert kept.stat().st_mtime_ns == time
    assert lost.read_bytes() == content
    assert not list(folder.glob("*.partial"))


def test_another_seed_is_another_start_and_never_mixes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="made with seed 1, not 2"):
        make(folder, seed=2)
    make(tmp_path, seed=2)
    for name in ("model/model.safetensors", "train.parquet"):
        assert (tmp_path / name).read_bytes() != (folder / name).read_bytes()
    assert json.loads((tmp_path / "quickstart.json").read_text()) == {"seed": 2}


def test_the_command_reports_a_mix_of_seeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quickstart", str(folder), "--seed", "2"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {folder} was made with seed 1")
