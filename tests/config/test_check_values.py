from __future__ import annotations

from mrl.config.check_values import CHOICES, RANGES, SIZES
from mrl.config.typed import schema_keys


def test_rules_speak_of_keys_that_exist():
    known = {key for key, found in schema_keys().items() if not found.is_section}
    assert known >= {*CHOICES, *RANGES, *SIZES}


def test_every_number_has_a_range_or_is_free_on_purpose():
    numbers = {key for key, found in schema_keys().items() if found.type in (int, float)}
    free = {
        "rollout.top_k",  # -1 or at least 1: see check.py
        "rollout.val_kwargs.top_k",
        "trainer.test_freq",  # below 1: off
        "trainer.save_freq",
    }
    assert numbers - {*RANGES, *SIZES} == free
