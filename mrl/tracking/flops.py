"""FLOPs of a packed batch and what share of the hardware's peak they are.

Model FLOPs, not hardware FLOPs (Chowdhery et al. 2022, PaLM, appendix B): recomputation and padding
are not counted, attention is causal and per sequence, and the embedding lookup costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.resharding.families import ModelShape


def forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Count the FLOPs of one forward pass over sequences of these lengths."""
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    attention_weights = hidden * (width + 2 * kv_width) + width * hidden
    layer = attention_weights + 3 * hidden * shape.ffn_size
    per_token = 2 * (shape.num_layers * layer + hidden * shape.vocab_size)
    # Scores and their product with values: 2 * 2 FLOPs a pair and channel, half the pairs.
    pairs = sum(length**2 for length in lengths) / 2
    return float(per_token * sum(lengths) + shape.num_layers * 4 * width * pairs)


def training_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Count forward and backward: the backward pass costs twice the forward one."""
    return 3 * forward_flops(shape, lengths)


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
