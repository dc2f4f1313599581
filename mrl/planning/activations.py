"""Bytes that a Transformer Engine decoder layer keeps for its backward pass, a token, in bfloat16.

After Korthikanti et al. 2022, section 4, with what Transformer Engine 2.20 really saves: a fused
norm and linear layer keeps its input and the normalised one, SwiGLU its input, flash attention
q, k, v and its output. No dropout masks. h hidden, q and kv widths of the heads, f the MLP's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.config.schema import MegatronConfig
from mrl.resharding.families import ModelShape

_B = 2  # bytes of bfloat16


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes a token of one rank's part of a layer."""

    kept: float  # from forward to backward
    backward: float  # above that while its own backward pass runs
    forward: float  # at most at once without a backward pass


class Activations:
    """Counts the layers of one role on one rank."""

    def __init__(self, shape: ModelShape, layout: MegatronConfig, imbalance: float) -> None:
        self._shape, self._m, self._imbalance = shape, layout, imbalance
        self.tp = layout.tensor_model_parallel_size
        cut = layout.sequence_parallel and self.tp > 1
        self.hidden = _B * shape.hidden_size / (self.tp if cut else 1)  # of the residual stream

    def layer(self, index: int) -> LayerBytes:
        """Count a layer that keeps everything but what selective recomputation drops."""
        shape, m = self._shape, self._m
        selective = m.recompute_granularity == "selective"
        dropped = frozenset(m.recompute_modules) if selective else frozenset()
        attention = self._attention()
        has_experts = shape.has_experts(index)
        kept, widest, gradient = self._experts(dropped) if has_experts else self._mlp()
        forward = 3 * self.hidden + widest
        backward = gradient + self.hidden
        if ("moe" if has_experts else "mlp") in dropped:
            backward += kept - self.hidden
            kept = self.hidden  # its input
        return LayerBytes(attention + kept, backward, forward)

    def _attention(self) -> float:
        shape = self._shape
        value = shape.mla.v_head_dim if shape.mla else shape.head_dim
        heads, kv = shape.num_heads / self.tp, max(shape.num_kv_heads / self.tp, 1)
        query, key = heads * shape.head_dim, kv * shape.head_dim
        qkv = _B * (query + key + kv * value)
        output = _B * heads * value
        statistics = 4 * heads  # log-sum-exp of each head in float32
        norms = 2 * _B * query + 2 * _B * key if shape.qk_norm else 0
        return 2 * self.hidden + qkv + output + statistics + norms

    def _mlp(self) -> tuple[float, float, float]:
        """Give bytes kept, at once in a forward pass, and of gradients at once."""
        width = _B * self._shape.ffn_size / self.tp
        return 2 * self.hidden + 3 * width, 3 * width, 2 * width

    def _experts(self, dropped: frozenset[str]) -> tuple[float, float, float]:
        moe = self._shape.moe
        assert moe is not None
        etp = self._m.expert_tensor_parallel_size or self.tp
        copies = moe.top_k * self._imbalance  # of a token, on the ranks that compute it
        if self.tp > 1:  # the tokens of the tensor-parallel ranks are dispatched apart, then cut
            copies *= etp / self.tp
        rows = copies * _B * self._shape.hidden_size
        width = copies * _B * moe.ffn_size / etp
        shared = _B * moe.shared_ffn_size / self.tp
        router = 4 * 4 * moe.num_experts / (self.tp if self._m.sequence_parallel else 1)
        norm = self.hidden if "layernorm" in dropped else 2 * self.hidden
        act = 0 if "moe_act" in dropped else width
        # permuted input, fc1 output, activation; output before it is weighted and put back
        kept = norm + router + 2 * rows + 2 * width + act + 3 * shared
        return kept, 2 * rows + 3 * width + 3 * shared, 2 * width + 2 * rows

    def chunk(self, layers: Sequence[int], with_backward: bool) -> tuple[float, float]:
        """Give bytes a token that a chunk of layers keeps, and the most above that at once."""
        if not layers:
            return 0.0, 0.0
        first = {self._shape.has_experts(i): i for i in layers}
        kinds = {kind: self.layer(i) for kind, i in first.items()}
        counted = {i: kinds[self._shape.has_experts(i)] for i in layers}
        if not with_backward:
            return 0.0, max(layer.forward for layer in counted.values())
        m = self._m
        most = max(counted.values(), key=lambda layer: layer.kept)
        backward = max(layer.backward for layer in counted.values())
        if m.recompute_granularity != "full":
            return sum(layer.kept for layer in counted.values()), backward
        count = m.recompute_num_layers or 1
        if m.recompute_method == "block":  # the first `count` layers, each on its own
            rest = [counted[i].kept for i in list(layers)[count:]]
            return self.hidden * min(count, len(layers)) + sum(rest), backward + most.kept
        groups = -(-len(layers) // count)
        return self.hidden * groups, backward + most.kept * min(count, len(layers))

    def recomputed_share(self) -> float:
        """Give the part of a forward pass's products that is computed a second time."""
        m, shape = self._m, self._shape
        if m.recompute_granularity is None:
            return 0.0
        if m.recompute_granularity == "full":
            if m.recompute_method == "block" and m.recompute_num_layers:
                on_rank = shape.num_layers / m.pipeline_model_parallel_size
                return min(m.recompute_num_layers / on_rank, 1.0)
            return 1.0
        share = 0.0
        mlp = "moe" if shape.moe else "mlp"
        if mlp in m.recompute_modules:
            width = shape.moe.top_k * shape.moe.ffn_size if shape.moe else shape.ffn_size
            attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
            share += 3 * width / (3 * width + attention)
        if "core_attn" in m.recompute_modules:
            share += 0.05
        return share


def head_bytes(
    shape: ModelShape, predicted: int, tokens: int, layout: MegatronConfig, chunk_bytes: int
) -> tuple[float, float]:
    """Give bytes of the language-model head in a forward pass and in an update.

    Fused: a chunk of logits, the hidden states and their gradient in float32. Plain: logits of
    every predicted token in bfloat16 and four copies in float32, 18 bytes each.
    """
    tp = layout.tensor_model_parallel_size
    hidden = shape.hidden_size
    norm = 2 * _B * hidden * tokens / (tp if layout.sequence_parallel else 1)
    picked = _B * hidden * predicted
    logits = 18.0 * predicted * shape.vocab_size / tp
    if layout.use_fused_kernels:
        logits = min(chunk_bytes, _B * predicted * shape.vocab_size / tp)
        rows = 48.0 * predicted
        return picked + logits + rows, norm + 4 * picked + logits + rows
    return norm + picked + logits, norm + 2 * picked + logits
