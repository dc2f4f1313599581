"""What training benchmarks work on: real shapes, rows by a length law, mini-batches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import ROOT
from benchmarks.sides import TINY
from mrl.types import PolicyBatch, Ragged, Sequences

_SEED = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A shape: a folder under configs/models, or `None` for a tiny one, and what differs."""

    name: str
    folder: str | None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the config.json that ranks read; they draw the weights."""
        shape: dict[str, Any] = dict(TINY)
        if self.folder is not None:
            text = (ROOT / "configs" / "models" / self.folder / "config.json").read_text()
            shape = json.loads(text)
        shape = {"initializer_range": 0.02, **shape, **self.changes}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape))
        return folder


@dataclass(frozen=True, slots=True)
class Rows:
    """A law of lengths: responses of `response` tokens, or a skewed draw of at most that."""

    law: str  # uniform | skewed
    prompt: int
    response: int
    tokens: int  # of the mini-batch, at least

    def draw(self, vocab: int, seed: int = _SEED) -> Sequences:
        """Draw random rows until they hold enough tokens; the same for the same seed.

        The skewed law is response * u ** 3 with u uniform: its mean is a quarter of the longest.
        """
        generator = torch.Generator().manual_seed(seed)
        rows, responses, total = [], [], 0
        while total < self.tokens:
            share = 1.0
            if self.law == "skewed":
                share = float(torch.rand([], generator=generator)) ** 3
            responses.append(max(1, round(share * self.response)))
            length = self.prompt + responses[-1]
            rows.append(torch.randint(1, vocab, (length,), generator=generator))
            total += length
        return Sequences(Ragged.from_rows(rows), torch.tensor(responses))


def policy_batch(sequences: Sequences, log_probs: Ragged, noise: float = 0.0) -> PolicyBatch:
    """Make a mini-batch of the rows: every response token counts alike.

    Advantages are normal; the old log-probs are off by up to `noise` standard deviations.
    """
    generator = torch.Generator().manual_seed(_SEED + 1)
    total = int(sequences.response_lengths.sum())
    advantages = torch.randn(total, generator=generator)
    shift = noise * torch.randn(total, generator=generator)
    return PolicyBatch(
        sequences,
        log_probs.with_values(log_probs.values + shift),
        log_probs.with_values(advantages),
        log_probs.with_values(torch.full((total,), 1 / total)),
        None,
    )
