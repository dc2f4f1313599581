"""The frozen reference policy on one rank."""

from __future__ import annotations

from mrl.types import Batching, Ragged, Sequences
from mrl.workers.megatron.engine import MegatronEngine


class Reference:
    """A policy that only scores."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine

    def log_probs(self, sequences: Sequences, batching: Batching) -> Ragged | None:
        """Give log-probs of the response tokens."""
        outputs = self.engine.log_probs(sequences, batching)
        return outputs[0] if outputs is not None else None
