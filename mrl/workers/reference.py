"""The frozen reference policy on one rank."""

from __future__ import annotations

from mrl.types import Cuts, Ragged, Sequences
from mrl.workers.megatron.engine import MegatronEngine


class Reference:
    """A policy that only scores: a model of its own, or the actor's without its adapters."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine

    def log_probs(self, sequences: Sequences, cuts: Cuts) -> Ragged | None:
        """Give log-probs of the response tokens."""
        with self.engine.weights.unadapted():
            outputs = self.engine.log_probs(sequences, cuts)
        return outputs[0] if outputs is not None else None
