"""reward.components as users write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config import load_config
from mrl.config.components import reward_components, scores_any_source
from mrl.config.errors import ConfigError
from mrl.config.load import save_resolved
from mrl.config.schema import RewardComponentConfig

# verl's defaults on one rank.
BASE = [
    "trainer.n_gpus_per_node=1",
    "rollout.tensor_model_parallel_size=1",
    "actor.use_dynamic_bsz=true",
]


def test_components_are_read_by_name_in_their_order_and_saved(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            *BASE,
            "reward.components.correct.weight=1",
            "reward.components.format.path=f.py",
            "reward.components.format.weight=0.2",
            "reward.components.math={data_source: math}",
        ],
    )
    assert reward_components(config.reward.components) == {
        "correct": RewardComponentConfig(),
        "format": RewardComponentConfig(0.2, "f.py"),
        "math": RewardComponentConfig(data_source="math"),
    }
    save_resolved(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_every_fault_of_a_component_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(
            None,
            [
                *BASE,
                "reward.components.a.wieght=1",
                "reward.components.b.weight=none_at_all",
                "reward.components.c.weight=0",
                "reward.components.d={path: x.py, data_source: math}",
                "reward.components.e.name=f",
                "reward.components.acc.weight=1",
                "reward.components.g=7",
                "reward.components.h.weight=inf",
            ],
        )
    told = {violation.key.removeprefix("reward.components."): violation
            for violation in error.value.violations}  # fmt: skip
    assert told.keys() == {
        "a.wieght", "b.weight", "c.weight", "d.data_source", "e.name", "acc", "g", "h.weight",
    }  # fmt: skip
    assert told["a.wieght"].nearest == "weight"


@pytest.mark.parametrize(
    ("overrides", "anything"),
    [
        ([], False),
        (["reward.custom_reward_function.path=f.py"], True),
        (["reward.components.a.path=f.py"], True),
        (["reward.components.a.path=f.py", "reward.components.b.weight=2"], False),
        (["reward.components.a.data_source=math"], True),
    ],
)
def test_rows_of_unknown_sources_pass_where_no_function_is_chosen_by_source(
    overrides: list[str], anything: bool
) -> None:
    assert scores_any_source(load_config(None, [*BASE, *overrides])) is anything
