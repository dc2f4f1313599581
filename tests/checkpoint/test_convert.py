"""`mrl convert`: the same bits both ways, loaded and saved by real Megatron at several layouts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.checkpoint.convert import Options, convert, parse_size
from mrl.checkpoint.convert.draft import MARKER
from mrl.cli import main
from mrl.resharding.torch_dist import KEY_FORMS
from tests.checkpoint.gpt_models import CONFIGS, differing, write_folder
from tests.marks import slow_but
from tests.ranks import ROOT, Ranks

INDEX = "model.safetensors.index.json"
SMALL = 8_000  # bytes a file: several files of a tiny model
# family, and the layouts that load or save it
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "llama-tp2": ("llama", {"tp": 2}),
    "qwen2-tied-pp2": ("qwen2", {"pp": 2}),
    # 50 rows of the vocabulary in shards of 16: the last rank's are padding but for two
    "qwen2-tp4-above-kv-heads": ("qwen2", {"tp": 4}),
    "moe-tp2-etp1": ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1}),
    "mixed-moe-pp2": ("qwen3_moe_mixed", {"pp": 2}),
    "mla-tp2": ("deepseek_v3", {"tp": 2}),
}


def world_of(where: dict[str, int]) -> int:
    etp = where.get("etp", where.get("tp", 1))
    return max(where.get("tp", 1), etp * where.get("ep", 1)) * where.get("pp", 1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model of each family."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_folder(root / name, name) for name in CONFIGS}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("model*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_tensors(found: Path, wanted: Path) -> None:
    a, b = tensors_of(found), tensors_of(wanted)
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        assert a[name].dtype == tensor.dtype, name
        assert torch.equal(a[name].view(torch.uint8), tensor.view(torch.uint8)), name


def assert_same_folder(found: Path, wanted: Path) -> None:
    assert_same_tensors(found, wanted)
    assert sorted(path.name for path in found.iterdir()) == sorted(
        path.name for path in wanted.iterdir()
    )
    for path in wanted.iterdir():
        if path.suffix == ".json":
            assert (found / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("case", slow_but(("qwen2-tied-pp2", "mixed-moe-pp2"), CASES))
def test_real_megatron_loads_it_and_what_it_saves_becomes_the_folder(
    case: str, folders: dict[str, Path], ranks: Ranks, tmp_path: Path
) -> None:
    family, where = CASES[case]
    source, saved, world = folders[family], tmp_path / "saved", world_of(where)
    saved.mkdir()
    convert(source, tmp_path / "mc", Options(max_shard_bytes=SMALL))
    found = ranks.run(
        world, differing, source=source, checkpoint=tmp_path / "mc", saved=saved, **where
    )
    assert found == [[]] * world
    # the norms of Megatron's local spec are float32 in every model
    convert(saved, tmp_path / "hf", Options(config=source, dtype="bfloat16"))
    assert_same_tensors(tmp_path / "hf", source)


@pytest.mark.parametrize("form", slow_but(("per_layer",), KEY_FORMS))
def test_every_form_of_keys_loads_and_comes_back(
    form: str, folders: dict[str, Path], ranks: Ranks, tmp_path: Path
) -> None:
    source = folders["qwen3_moe"]
    convert(source, tmp_path / "mc", Options(keys=form, tp=2, ep=2))
    metadata = dict(KEY_FORMS[form])
    found = ranks.run(2, differing, source=source, checkpoint=tmp_path / "mc", ep=2,
                      metadata=metadata)  # fmt: skip
    assert found == [[], []]
    convert(tmp_path / "mc", tmp_path / "hf", Options())
    assert_same_folder(tmp_path / "hf", source)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_there_and_back_is_the_same_folder(
    family: str, tp: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    convert(folders[family], tmp_path / "mc", Options(tp=tp, max_shard_bytes=SMALL))
    convert(tmp_path / "mc", tmp_path / "hf", Options())
    assert_same_folder(tmp_path / "hf", folders[family])


def test_a_tied_copy_of_the_head_comes_back(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", "qwen2")
    first = source / "model-00001-of-00002.safetensors"
    tensors, index = load_file(first), json.loads((source / INDEX).read_text())
    embedding = tensors_of(source)["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding}, first, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = first.name
    (source / INDEX).write_text(json.dumps(index))
    convert(source, tmp_path / "mc", Options())
    convert(tmp_path / "mc", tmp_path / "hf", Options())
    assert_same_tensors(tmp_path / "hf", source)


def test_files_can_be_cut_anew(folders: dict[str, Path], tmp_path: Path) -> None:
    convert(folders["llama"], tmp_path / "mc", Options())
    convert(tmp_path / "mc", tmp_path / "hf", Options(max_shard_bytes=SMALL))
    assert_same_tensors(tmp_path / "hf", folders["llama"])
    weight_map = json.loads((tmp_path / "hf" / INDEX).read_text())["weight_map"]
    assert weight_map.keys() == tensors_of(folders["llama"]).keys()
    assert len(set(weight_map.values())) > 2
    for file in set(weight_map.values()):
        own = load_file(tmp_path / "hf" / file)
        assert all(weight_map[name] == file for name in own)
        assert len(own) == 1 or sum(tensor.nbytes for tensor in own.values()) <= SMALL


def test_a_dtype_is_rounded_to_and_said(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders["deepseek_v3"]
    convert(source, tmp_path / "mc", Options(dtype="float32"))
    said = capsys.readouterr().out
    assert "tensors change from bfloat16 to float32" in said
    convert(tmp_path / "mc", tmp_path / "hf", Options(dtype="float16"))
    assert "tensors change from float32 to float16" in capsys.readouterr().out
    wanted = tensors_of(source)
    for name, tensor in tensors_of(tmp_path / "hf").items():
        is_fixed = name.endswith("e_score_correction_bias")  # float32 in every model
        assert tensor.dtype == (torch.float32 if is_fixed else torch.float16), name
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float16"


def test_mixed_dtypes_of_one_key_are_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", "llama")
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        name = "model.layers.2.mlp.down_proj.weight"
        if name in tensors:
            tensors[name] = tensors[name].float()
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"linear_fc2\.weight .*layers\.2.*--dtype|--dtype: .*"):
        convert(source, tmp_path / "mc", Options())
    assert not (tmp_path / "mc").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from mrl.checkpoint.convert import Options, convert
def say(text):
    if text.startswith("file 3/"):
        os.kill(os.getpid(), signal.SIGKILL)
convert(Path(sys.argv[1]), Path(sys.argv[2]), Options(max_shard_bytes=int(sys.argv[3])), say)
"""


@pytest.mark.parametrize("to", slow_but(("hf",), ["megatron", "hf"]))
def test_a_killed_conversion_goes_on_where_it_was(
    to: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source, options = folders["qwen3_moe"], Options(max_shard_bytes=SMALL)
    convert(source, tmp_path / "whole", options)
    if to == "hf":
        source = tmp_path / "whole"
        convert(source, tmp_path / "wanted", options)
    target = tmp_path / "target"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(target), str(SMALL)], cwd=ROOT
    )
    assert killed.returncode == -signal.SIGKILL
    draft = tmp_path / "target.converting"
    assert (draft / MARKER).is_file() and not target.exists()
    kind = "*.distcp" if to == "megatron" else "*.safetensors"
    before = {path.name: path.stat().st_mtime_ns for path in draft.glob(kind)}
    assert len(before) == 3
    # a fourth file is half-written, and a third lost its end
    fourth = "__3_0.distcp" if to == "megatron" else f"{min(before)[:10]}4{min(before)[11:]}.part"
    (draft / fourth).write_bytes(b"half")
    os.truncate(draft / max(before), 100)
    before.pop(max(before))
    convert(source, target, options)
    after = {path.name: path.stat().st_mtime_ns for path in target.glob(kind)}
    assert before.items() <= after.items()
    assert not draft.exists() and not list(target.rglob("*.part"))
    if to == "megatron":
        convert(target, tmp_path / "back", Options())
        assert_same_folder(tmp_path / "back", source)
    else:
        assert_same_folder(target, tmp_path / "wanted")


def test_a_draft_of_another_job_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def stop(text: str) -> None:
        if text.startswith("file 1/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folders["llama"], tmp_path / "mc", Options(max_shard_bytes=SMALL), stop)
    for source, options in (
        (folders["llama"], Options(max_shard_bytes=2 * SMALL)),
        (folders["qwen2"], Options(max_shard_bytes=SMALL)),
    ):
        with pytest.raises(ValueError, match=r"another source, or with other options.*delete it"):
            convert(source, tmp_path / "mc", options)
    convert(folders["llama"], tmp_path / "mc", Options(max_shard_bytes=SMALL))


def test_half_written_and_cut_short_sources_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    convert(folders["llama"], whole, Options(max_shard_bytes=SMALL))

    def refuse(change: Any, match: str) -> None:
        damaged = tmp_path / "damaged"
        shutil.copytree(whole, damaged)
        change(damaged)
        with pytest.raises(ValueError, match=match):
            convert(damaged, tmp_path / "hf", Options())
        assert not (tmp_path / "hf").exists()
        shutil.rmtree(damaged)

    refuse(lambda path: (path / MARKER).write_text("{}"), "half-written")
    refuse(lambda path: (path / "metadata.json").unlink(), "neither a Hugging Face folder")
    refuse(lambda path: (path / ".metadata").unlink(), "cut short")
    refuse(lambda path: (path / ".metadata").write_bytes(b"\x80"), "cannot be read")
    refuse(lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp is missing")
    refuse(lambda path: os.truncate(path / "__2_0.distcp", 100), "has 100 bytes, .* were saved")


def test_a_target_that_is_there_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="is there already; delete it, or choose another target"):
        convert(folders["llama"], tmp_path / "full", Options())
    (tmp_path / "empty").mkdir()
    convert(folders["llama"], tmp_path / "empty", Options())


def test_a_full_disk_is_found_before_the_first_byte(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"0\.00 GB free, .* are still to write"):
        convert(folders["llama"], tmp_path / "mc", Options())
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_the_config_does_not_describe_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    convert(folders["llama"], tmp_path / "mc", Options())
    other = write_folder(tmp_path / "other", "llama", num_hidden_layers=3, vocab_size=60)
    with pytest.raises(ValueError) as error:
        convert(tmp_path / "mc", tmp_path / "hf", Options(config=other))
    assert "has shape (4, " in str(error.value) and "config.json says (3, " in str(error.value)
    assert "output_layer.weight has shape (50, 32)" in str(error.value)
    tied = write_folder(tmp_path / "tied", "llama", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"output_layer\.weight is not of a llama"):
        convert(tmp_path / "mc", tmp_path / "hf", Options(config=tied))


def test_megatron_lm_folders_are_followed_by_their_tracker(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    convert(folders["llama"], root / "iter_0000012", Options())
    (root / "latest_checkpointed_iteration.txt").write_text("12\n")
    convert(root, tmp_path / "hf", Options())
    assert_same_folder(tmp_path / "hf", folders["llama"])


def test_the_command_says_what_it_does_and_ends_bad_input_with_one_message(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, mc, hf = str(folders["llama"]), str(tmp_path / "mc"), str(tmp_path / "hf")
    assert main(["convert", source, mc, "--tp", "2", "--pp", "2", "--max-shard-size", "8kB"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{source} (llama, 39 tensors, bfloat16) -> {mc} (Megatron, ")
    assert said[1] == "every tensor keeps its dtype and bits"
    assert said[2].startswith(f"writing to {mc}.converting; after an interruption, ")
    assert said[3].startswith("file 1/") and " left" in said[3]
    assert said[-1] == f"done: {mc}"
    for arguments, message in (
        ([source, mc], "is there already"),
        ([source, hf, "--to", "hf"], "is a Hugging Face folder already"),
        ([source, hf, "--tp", "3"], "tp 3"),
        ([source, hf, "--pp", "3"], "over 3 stages"),
        ([source, hf, "--dtype", "int8"], "--dtype int8: expected one of"),
        ([source, hf, "--keys", "flat"], "--keys flat: expected auto, stacked"),
        ([source, hf, "--max-shard-size", "big"], "size 'big'"),
        ([str(tmp_path / "none"), hf], "no such folder"),
        ([str(tmp_path), hf], "neither a Hugging Face folder"),
    ):
        assert main(["convert", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("mrl convert: ") and message in error and error.count("\n") == 1
    assert not Path(hf).exists()


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MiB", "700")] == [5 * 10**9, 1572864, 700]


GROWTH = """
import sys
from pathlib import Path
from mrl.checkpoint.convert import Options, convert
def peak(source, target):
    Path("/proc/self/clear_refs").write_text("5")
    before = rss("VmRSS")
    convert(Path(source), Path(target), Options(max_shard_bytes=10**9), lambda text: None)
    return rss("VmHWM") - before
def rss(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
small, big, root = (Path(path) for path in sys.argv[1:])
peak(small, root / "a"), peak(root / "a", root / "b")  # what is imported and cached once
print(peak(big, root / "c"), peak(root / "c", root / "d"))
"""


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
             "num_key_value_heads": 4, "head_dim": 64, "dtype": "float32"}  # fmt: skip
    small = write_folder(tmp_path / "small", "llama", **shape, num_hidden_layers=1)
    big = write_folder(tmp_path / "big", "llama", **shape, num_hidden_layers=30)
    model = sum(path.stat().st_size for path in big.glob("*.safetensors"))
    largest = 2 * 1024 * 256 * 4  # gate and up, which Megatron keeps as one
    ran = subprocess.run(
        [sys.executable, "-c", GROWTH, str(small), str(big), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    there, back = map(int, ran.stdout.split())
    assert model > 50 * largest
    assert there < 8 * largest and back < 8 * largest, (there, back, largest, model)
