"""The arguments of verl's public Megatron scripts: every key is accounted for."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from mrl.cli import main
from mrl.config import ConfigError, load_config
from mrl.config.aliases import ALIASES, outcome
from mrl.config.explain import OUTCOMES, Explained, explain, load_told, print_explained, tell
from mrl.config.outcomes import Ignored, Legacy, Refused
from mrl.config.typed import schema_keys
from tests.config import verl_docs

ONE_RANK = ("actor.ppo_micro_batch_size_per_gpu=1", "trainer.n_gpus_per_node=2")


def row(*overrides: str) -> Explained:
    """Explain the first of the overrides."""
    return explain(None, [*overrides, *ONE_RANK])[0]


@pytest.mark.parametrize("address", verl_docs.scripts(), ids=lambda a: a.rpartition("/")[2])
def test_every_key_of_a_script_has_an_outcome_and_none_is_unknown(address: str) -> None:
    arguments, rows = verl_docs.scripts()[address], verl_docs.explained(address)
    assert [r.given for r in rows[: len(arguments)]] == [
        argument.partition("=")[0].lstrip("+") for argument in arguments
    ]
    for found in rows:
        assert found.outcome in OUTCOMES
        assert found.key or found.reason, found
        assert found.reason or found.outcome in ("same", "renamed", "translated"), found
        assert "unknown key" not in found.reason, found


def test_most_scripts_run_as_they_stand_and_the_rest_say_why_not() -> None:
    refused = [
        address
        for address in verl_docs.scripts()
        if any(found.outcome == "refused" for found in verl_docs.explained(address))
    ]
    assert len(verl_docs.scripts()) == 31 and len(refused) == 9


def test_the_page_of_keys_says_what_the_table_says() -> None:
    assert verl_docs.FILE.read_text(encoding="utf-8") == verl_docs.text(), (
        "write it anew: python -m tests.config.verl_docs"
    )


@pytest.mark.parametrize(
    ("given", "key", "named"),
    [
        ("rollout.n=2", "rollout.n", "same"),
        ("actor_rollout_ref.rollout.n=2", "rollout.n", "same"),
        ("++actor_rollout_ref.rollout.n=2", "rollout.n", "same"),
        ("critic.model.path=c", "critic.path", "renamed"),
        ("actor_rollout_ref.nccl_timeout=1200", "trainer.fault_timeout_s", "renamed"),
        ("actor.megatron.router_replay.mode=R2", "actor.router_replay.mode", "renamed"),
        ("data.filter_overlong_prompts=True", "data.truncation=filter", "translated"),
        ("rollout.expert_parallel_size=8", "rollout.enable_expert_parallel=true", "translated"),
        ("critic.optim.lr_warmup_steps=null", "critic.optim.lr_warmup_steps=-1", "translated"),
        ("rollout.calculate_log_probs=True", "", "same"),
        ("rollout.quantization=null", "", "same"),
        ("rollout.load_format=dummy_dtensor", "", "ignored"),
        ("trainer.logger=['console','wandb']", "trainer.logger", "ignored"),
        ("rollout.agent.num_workers=8", "", "ignored"),
        ("rollout.quantization=fp8", "rollout.quantization", "refused"),
        ("reward_model.enable=True", "reward.reward_model.enable", "refused"),
        ("rollout.temperature=0", "rollout.temperature", "refused"),
        ("rollout.temprature=1", "rollout.temprature", "refused"),
    ],
)
def test_a_key_is_explained(given: str, key: str, named: str) -> None:
    found = row(given)
    assert (found.key, found.outcome) == (key, named)


def test_what_is_wrong_with_a_key_that_was_not_given_is_explained_too() -> None:
    rows = explain(None, [*ONE_RANK, "actor.megatron.moe_aux_loss_coeff=0.01"])
    (found,) = [r for r in rows if r.outcome == "refused"]
    assert "moe_aux_loss_coeff" in found.reason and "load_balancing_type" in found.given


def test_ignored_loggers_leave_the_others() -> None:
    load = {
        text: load_config(None, [*ONE_RANK, f"trainer.logger={text}"]).trainer.logger
        for text in ("[console,wandb]", '["console","swanlab","tensorboard"]', "wandb", "none")
    }
    assert list(load.values()) == [["console"], ["console", "tensorboard"], [], []]


def test_references_in_verls_spelling_are_followed() -> None:
    config = load_config(None, [
        *ONE_RANK, "actor_rollout_ref.rollout.n=3",
        "data.val_batch_size=${oc.select:actor_rollout_ref.rollout.n,1}",
        "rollout.max_num_seqs=${actor_rollout_ref.rollout.n}",
    ])  # fmt: skip
    assert config.data.val_batch_size == config.rollout.max_num_seqs == 3


def test_without_a_file_verls_defaults_hold() -> None:
    config = load_config(None, ["actor.ppo_micro_batch_size_per_gpu=1"])
    assert config.trainer.n_gpus_per_node == 8 and config.trainer.total_epochs == 30
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"


@pytest.mark.parametrize("name", [(), ("--config-path=config", "--config-name=ppo_trainer.yaml")])
def test_a_command_line_of_verl_is_planned_and_its_ignored_keys_are_told(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *name, "actor_rollout_ref.rollout.mode=async", *ONE_RANK]) == 0
    said = capsys.readouterr().err
    assert "1 ignored" in said and "rollout.mode=async: requests are batched" in said


def test_a_config_name_that_is_not_verls_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--config-name=my_own", *ONE_RANK])
    assert "give the file as CONFIG" in capsys.readouterr().err


def test_nothing_is_said_of_a_config_in_todays_keys() -> None:
    assert tell(explain(None, ONE_RANK)) == []


def test_every_entry_is_reached_and_gives_a_reason() -> None:
    for key, entry in ALIASES.items():
        if isinstance(entry, Ignored | Refused | Legacy):
            assert outcome(key) is entry and entry.why and key not in schema_keys()


def test_a_refused_feature_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"give rollout\.|did you mean rollout\."):
        load_config(None, [*ONE_RANK, "actor_rollout_ref.rollout.log_prob_micro_batch_size=8"])


VERLS = (
    "actor_rollout_ref.rollout.mode=async",
    "critic.model.path=null",
    "data.filter_overlong_prompts=True",
)
SAID = "keys: 1 renamed, 1 translated, 1 ignored (rollout.mode)"


@pytest.mark.parametrize(
    "command",
    [
        ["plan"], ["plan", "--json"], ["train", "--dry-run"], ["reshard"], ["reshard", "--json"],
        ["launch", "slurm"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_tells_the_keys_of_verl_beside_what_it_prints(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(verl_docs.FILE.parents[1])
    recipe = "configs/grpo/qwen2.5_0.5b_2gpu.yaml"
    main([*command, recipe, "trainer.device=cpu", *VERLS])
    out, err = capsys.readouterr()
    said = SAID.replace(" (rollout.mode)", "") if command[0] == "plan" else SAID
    assert said in err and "keys: " not in out
    if "--json" in command:
        json.loads(out)


def test_commands_that_train_tell_the_keys_before_they_refuse_the_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(verl_docs.FILE.parents[1])
    recipe = "configs/grpo/qwen2.5_0.5b_2gpu.yaml"
    for command in ("train", "sft", "check-layout"):
        assert main([command, recipe, *VERLS]) == 2
        assert SAID in capsys.readouterr().err, command


def test_only_the_first_rank_of_a_launcher_tells_the_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    load_told(None, [*VERLS, *ONE_RANK])
    assert capsys.readouterr().err == ""


def test_the_explanation_keeps_keys_whole_and_says_equal_reasons_once() -> None:
    long = "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1.0"
    rows = explain(None, [long, long.replace("offload_fraction=1.0", "cpu_offload=True"), *VERLS])
    console = Console(file=io.StringIO(), width=60)
    print_explained(rows, console)
    said = console.file.getvalue()
    assert long.removeprefix("actor_rollout_ref.") + "\n" in said
    assert said.count("Adam steps on the GPU") == 1
    assert "data.filter_overlong_prompts=true -> data.truncation=filter" in " ".join(said.split())
    order = [said.index(f"\n{name}: ") for name in ("ignored", "translated", "renamed")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("given", "outcome", "words"),
    [
        ("actor.optim.optimizer_cpu_offload=True", "ignored", "megatron.optimizer_offload=true"),
        ("actor.optim.optimizer_cpu_offload=False", "same", "off"),
        ("rollout.layered_summon=True", "ignored", "no parameter is gathered"),
        ("rollout.layered_summon=False", "same", "off"),
        ("rollout.load_format=safetensors", "ignored", "reads no files"),
        ("rollout.load_format=null", "same", "off"),
        ("actor.strategy=megatron", "same", "always so here: the training engine"),
        ("data.filter_overlong_prompts=False", "same", "sets nothing"),
    ],
)
def test_a_hint_says_what_to_set_or_that_nothing_is_to_do(
    given: str, outcome: str, words: str
) -> None:
    found = row(given)
    assert found.outcome == outcome and words in found.reason
