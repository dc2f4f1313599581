from __future__ import annotations

import io

from rich.console import Console

from mrl.config import build_plan, print_plan


def shown(config) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_plan(build_plan(config), config, console)
    return console.file.getvalue()


def test_the_table_holds_every_number_and_a_row_a_role(load):
    text = shown(load("data.train_batch_size=64", "actor.ppo_mini_batch_size=64"))
    for words in (
        "prompts 64",
        "samples 768",
        "tokens per step 786,432",
        "replicas 3",
        "prompts per replica 22, 21 x2",
        "sequences per replica 264, 252 x2",
        "actor whole 6 128 16 of 8 16 of 8 1",
        "ref whole 6 128 - 16 of 8 -",
    ):
        assert any(" ".join(line.split()).startswith(words) for line in text.splitlines()), words


def test_the_table_fits_100_columns_without_cutting(load):
    text = shown(
        load(
            "trainer.nnodes=64",
            "trainer.n_gpus_per_node=8",
            "actor.megatron.tensor_model_parallel_size=8",
            "actor.megatron.pipeline_model_parallel_size=4",
            "actor.megatron.virtual_pipeline_model_parallel_size=2",
            "actor.megatron.context_parallel_size=2",
            "actor.megatron.expert_model_parallel_size=2",
            "actor.use_dynamic_bsz=true",
            "actor.ppo_max_token_len_per_gpu=131072",
            "data.train_batch_size=8192",
            "actor.ppo_mini_batch_size=1024",
        )
    )
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "TP8 PP4 VPP2" in text and "CP2 EP2 ETP8" in text
    assert "dynamic, 262,144 tok" in text


def test_only_enabled_roles_are_shown(load):
    text = shown(load("algorithm.adv_estimator=grpo"))
    assert "critic whole" not in " ".join(text.split())


def test_warnings_are_printed(load):
    text = shown(load("rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is=token"))
    assert "warning rollout.top_p=0.9" in text


def test_paths_are_printed_as_they_are(load):
    assert "/models/[new]" in shown(load("model.path='/models/[new]'"))
