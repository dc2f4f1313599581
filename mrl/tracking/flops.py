"""FLOPs of a packed batch and what share of the hardware's peak they are.

Model FLOPs, not hardware FLOPs (Chowdhery et al. 2022, PaLM, appendix B): recomputation and padding
are not counted, attention is causal and per sequence, and the embedding lookup costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.resharding.families import ModelShape


def forward_flops(shape: ModelShape, lengths: Sequence[int], predicted: int | None = None) -> float:
    """Count the FLOPs of one forward pass over sequences of these lengths.

    Of experts those that a token is sent to count, and the router. The head counts for `predicted`
    tokens, those whose log-prob is asked for (None: for all).
    """
    return _linear_flops(shape, lengths, predicted) + _attention_flops(shape, lengths)


def _linear_flops(shape: ModelShape, lengths: Sequence[int], predicted: int | None) -> float:
    weights = shape.num_layers * _attention_weights(shape)
    weights += sum(_mlp_weights(shape, layer) for layer in range(shape.num_layers))
    tokens = sum(lengths)
    head = 2 * shape.hidden_size * shape.vocab_size * (tokens if predicted is None else predicted)
    return float(2 * weights * tokens + head)


def _attention_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    # Scores and their product with values: 2 FLOPs each a pair and channel, half the pairs.
    value_dim = shape.mla.v_head_dim if shape.mla else shape.head_dim
    channels = 2 * shape.num_heads * (shape.head_dim + value_dim)
    pairs = sum(length**2 for length in lengths) / 2
    return float(shape.num_layers * channels * pairs)


def _attention_weights(shape: ModelShape) -> int:
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    if shape.mla is None:
        return hidden * (2 * width + 2 * shape.num_kv_heads * shape.head_dim)
    mla, heads = shape.mla, shape.num_heads
    query = hidden * width
    if mla.q_lora_rank:
        query = mla.q_lora_rank * (hidden + width)
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expanded = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + latent + expanded + heads * mla.v_head_dim * hidden


def _mlp_weights(shape: ModelShape, layer: int) -> int:
    if shape.moe is None or not shape.has_experts(layer):
        return 3 * shape.hidden_size * shape.ffn_size
    moe = shape.moe
    width = moe.top_k * moe.ffn_size + moe.shared_ffn_size
    return shape.hidden_size * (3 * width + moe.num_experts)


def training_flops(
    shape: ModelShape,
    lengths: Sequence[int],
    predicted: int | None = None,
    weights_frozen: bool = False,
) -> float:
    """Count forward and backward: the backward pass costs twice the forward one.

    Beside adapters, which are too small to count, the weights are frozen: no product gives their
    gradients.
    """
    linear, attention = _linear_flops(shape, lengths, predicted), _attention_flops(shape, lengths)
    return (2 if weights_frozen else 3) * linear + 3 * attention


# Dense bfloat16 FLOP/s by the vendor's data sheet; the first name that the device's name contains.
PEAK_FLOPS: dict[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L4": 121e12,
}


def peak_flops(device_name: str) -> float | None:
    """Look up a GPU's peak by the name that CUDA gives it; None for a CPU or an unknown one."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


def mfu(flops: float, seconds: float, num_gpus: int, peak: float | None) -> float | None:
    """Give the share of the peak that was used; None where no peak is known: leave it out."""
    return None if peak is None else flops / (seconds * num_gpus * peak)
