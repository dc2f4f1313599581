"""Transformer Engine's attention where context-parallel ranks outnumber key/value heads."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mrl.workers.megatron.attention import spread_groups, spread_kv


class SpreadKVAttention(TEDotProductAttention):
    """Transformer Engine's attention with an all-to-all, whose heads must divide over its ranks.

    Key/value heads that do not are repeated, as for our own attention.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        tp = config.tensor_model_parallel_size
        # a2a+p2p: the inner ranks alone exchange heads
        sizes = config.hierarchical_context_parallel_sizes
        self._ranks = sizes[0] if sizes else config.context_parallel_size
        self._heads = config.num_attention_heads // tp
        groups = max(1, config.num_query_groups // tp)
        config = copy.copy(config)
        config.num_query_groups = spread_groups(groups, self._ranks, self._heads) * tp
        super().__init__(config, *args, **kwargs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attend with enough key/value heads for every rank."""
        key, value = (spread_kv(x, self._ranks, self._heads) for x in (key, value))
        return super().forward(query, key, value, *args, **kwargs)
