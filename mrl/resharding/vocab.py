"""The vocabulary rows of a Megatron model."""

from __future__ import annotations

# Rows of each vocabulary shard come in sixteens: what the tensor cores like, and no more.
_SHARD_MULTIPLE = 16


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Round the vocabulary up so that every shard has the same rows."""
    multiple = _SHARD_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple
