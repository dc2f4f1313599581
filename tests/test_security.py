"""What SECURITY.md says of files, code, secrets and ports."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import random
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
from rich.console import Console

from mrl.config import ConfigError, build_plan, load_config
from mrl.config.explain import explain, print_explained
from mrl.config.load import save_resolved
from mrl.config.secrets import masked, names_secret
from mrl.config.typed import schema_keys
from mrl.launching.dry_run import print_dry_run, view_ranks
from mrl.launching.slurm import SlurmJob, render
from mrl.resharding.torch_dist_files import load_plain, read_metadata
from mrl.workers.meeting import KEY_VARIABLE, loopback_store, new_key, take_key
from mrl.workers.spmd import rank_environment
from mrl.workers.wire import AUTHKEY_BYTES

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs/grpo/quickstart.yaml"
SECRET = "s3cr3t-0123456789abcdef"
TOKEN = "hf_" + "Ab3" * 12
VARIABLES = ("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "MRL_AUTHKEY", "AWS_SECRET_ACCESS_KEY")


@cache
def calls() -> tuple[tuple[str, str, dict[str, str]], ...]:
    """List all calls of the product: file:line, what is called, its keywords as text."""
    return tuple(_calls())


def _calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    for folder in ("mrl", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    given = {k.arg or "**": ast.unparse(k.value) for k in node.keywords}
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), given


# exec of model answers' programs is text that the sandbox runs (rewards/code.py), not a call here.
RUNS_TEXT = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "marshal.loads",
}
# The job's own sockets, after the key was shown.
UNPICKLES = {"mrl/workers/wire.py"}


def test_no_file_and_no_config_value_is_run() -> None:
    bad = []
    for where, name, given in calls():
        file = where.partition(":")[0]
        if name in RUNS_TEXT or given.get("shell", "False") != "False":
            bad.append(f"{where} {name}")
        if name == "torch.load" and given.get("weights_only") != "True":
            bad.append(f"{where} torch.load without weights_only=True")
        if name in ("pickle.load", "pickle.loads", "dill.load") and file not in UNPICKLES:
            bad.append(f"{where} {name}")
        if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
            bad.append(f"{where} {name}")
    assert bad == []


def test_code_of_a_model_folder_is_loaded_on_demand_only() -> None:
    assert load_config(QUICKSTART).model.trust_remote_code is False
    for where, _, given in calls():
        trust = given.get("trust_remote_code", "False")
        assert trust == "False" or re.search(r"\btrust(_remote_code)?$", trust), where


class _Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Runs(mark)))
    with pytest.raises(ValueError, match="not to be trusted"):
        read_metadata(tmp_path / ".metadata")
    for module, name in (("builtins", "eval"), ("os", "system"), ("torch", "load")):
        with pytest.raises(pickle.UnpicklingError, match="not to be trusted"):
            load_plain(f"c{module}\n{name}\n.".encode())
    # a dotted name reaches through a class that is allowed
    with pytest.raises(pickle.UnpicklingError):
        load_plain(b"\x80\x04\x8c\x07pathlib\x8c\x0fPath.__init__.__globals__\x93.")
    stream = io.BytesIO()
    torch.save(_Runs(mark), stream)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    assert not mark.exists()


# ------------------------------------------------------------------------------- shells
HOSTILE = (
    "$(touch HURT)",
    "`touch HURT`",
    "';touch HURT;'",
    '"; touch HURT; "',
    "\\\n touch HURT\n",
)


def test_a_slurm_script_runs_no_config_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/slurm_torchrun.sbatch").write_text('printf "%s\\0" "$@"\n')
    rng = random.Random(0)
    for _ in range(6):
        hostile = "".join(
            rng.choice([*HOSTILE, "a", " ", "#SBATCH --wrap=x", "|", "&", "*"]) for _ in range(4)
        )
        word = f"data.train_files={json.dumps([f'a{hostile}.jsonl'])}"
        job = SlurmJob("configs/grpo/quickstart.yaml", (word,), nodes=1, gpus_per_node=2)
        found = subprocess.run(
            ["bash", "-c", render(job)],
            env={"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": os.environ["PATH"]},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout.split("\0")[1] == word
        assert not list(tmp_path.rglob("HURT")) and not (ROOT / "HURT").exists()
    for hostile in HOSTILE:
        with pytest.raises(ValueError, match="#SBATCH"):
            render(SlurmJob("configs/grpo/quickstart.yaml", (), 1, 2, job_name=f"a{hostile}"))


def test_launch_scripts_evaluate_nothing_and_quote_arguments() -> None:
    for path in sorted((ROOT / "launch").iterdir()):
        code = "\n".join(
            line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")
        )
        assert not re.search(r"\beval\b", code), path
        assert not re.search(r'(?<!")\$(?:@|\*|\{@)', code), path


# ------------------------------------------------------------------------------- secrets
GIVEN = (
    f"trainer.experiment_name={TOKEN}",
    "model.path=https://user:pa55word@host/model",
    "trainer.project_name=${oc.env:WANDB_API_KEY}",
    f"reward.custom_reward_function.path=/x/{SECRET}.py",
    f"data.apply_chat_template_kwargs.api_key={SECRET[:5]}",
    f"trainer.wandb_api_key={SECRET[:5]}",
    f"model.hf_token={SECRET[:5]}",
)


@pytest.fixture
def secret_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, SECRET)


@pytest.mark.parametrize("override", GIVEN)
def test_a_config_with_a_secret_is_refused_by_key_without_saying_it(
    override: str, secret_environment: None
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(QUICKSTART, [override])
    said = io.StringIO()
    print_explained(explain(QUICKSTART, [override]), Console(file=said, width=300))
    assert override.partition("=")[0] in str(error.value)
    for text in (str(error.value), said.getvalue()):
        for secret in (SECRET[:5], TOKEN, "pa55word"):
            assert secret not in text


def test_what_is_no_secret_is_left_as_it_is() -> None:
    assert not [key for key in schema_keys() if names_secret(key)]
    for text in (
        "actor.ppo_max_token_len_per_gpu = 3",
        "/data/hf_models/a",
        "max_tokens=5",
        "a@b.c",
    ):
        assert masked(text) == text
    for name in VARIABLES:
        assert names_secret(name)


def test_no_secret_of_the_environment_is_saved_or_shown(
    secret_environment: None, tmp_path: Path
) -> None:
    config = load_config(QUICKSTART)
    save_resolved(config, tmp_path / "config.yaml")
    plan, shown = build_plan(config), io.StringIO()
    environment = rank_environment(0, 0, 1, 1, "cpu", os.environ)
    views = view_ranks(config, plan, "cpu", os.environ, 0)
    print_dry_run(config, views, environment, os.environ, 0, Console(file=shown, width=300))
    texts = [shown.getvalue(), (tmp_path / "config.yaml").read_text(), json.dumps(plan.to_json())]
    assert "OMP_NUM_THREADS" in texts[0]
    assert not [text for text in texts if SECRET in text]
    assert SECRET not in environment.values()


# ------------------------------------------------------------------------------- ports
def test_the_store_of_one_host_listens_on_loopback_alone() -> None:
    store = loopback_store()
    listens = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    ]
    assert listens == ["127.0.0.1"]
    store.set("a", "b")
    assert store.get("a") == b"b"


def test_a_stranger_is_turned_away_before_anything_is_unpickled(tmp_path: Path) -> None:
    listener = Listener(("127.0.0.1", 0), authkey=new_key())
    refused: list[Exception] = []

    def accept() -> None:
        try:
            listener.accept()
        except Exception as error:
            refused.append(error)

    thread = Thread(target=accept)
    thread.start()
    raw = Client(listener.address)  # without a key: it sends a pickle for the answer to the riddle
    raw.recv_bytes()
    raw.send(_Runs(tmp_path / "ran"))
    thread.join(10)
    assert refused and not (tmp_path / "ran").exists()
    listener.close()


def test_the_jobs_key_is_taken_from_the_environment_or_refused_unsaid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert take_key() is None
    monkeypatch.setenv(KEY_VARIABLE, "ab" * AUTHKEY_BYTES)
    assert take_key() == b"\xab" * AUTHKEY_BYTES and KEY_VARIABLE not in os.environ
    for wrong in ("ab", "not hexadecimal"):
        monkeypatch.setenv(KEY_VARIABLE, wrong)
        with pytest.raises(ValueError, match=KEY_VARIABLE) as error:
            take_key()
        assert "not hexadecimal" not in str(error.value)


def test_nothing_listens_on_every_address_unless_asked() -> None:
    for where, name, given in calls():
        if name.endswith("ray.init") or "include_dashboard" in given:
            assert given.get("include_dashboard", "False") == "False", where
    for path in (ROOT / "mrl").rglob("*.py"):
        assert "0.0.0.0" not in path.read_text(), path
    for path in (ROOT / "launch").iterdir():
        text = path.read_text()
        assert "bind_all" not in text and "dashboard-host" not in text
        assert "--include-dashboard=false" in text or "--head" not in text
    # of one host alone Ray listens on loopback; it reads the variable when it is imported
    job = (ROOT / "mrl/workers/job.py").read_text()
    assert job.index("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") < job.index("import RayPool")
