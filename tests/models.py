"""Tiny random models in Hugging Face folders; these functions run on a rank."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

EXPERTS = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "router_aux_loss_coef": 0.0,
}
HIDDEN = 64
VOCAB = 50  # not a multiple of 16: every layout pads it


def write_model(folder: Path, kind: str, **changes: Any) -> Path:
    """Save a random model of four layers, its tokenizer and a value head; give the folder.

    `kind` is qwen2 (tied embeddings, biases on q, k, v), llama (untied, no biases) or qwen3_moe
    (untied, norms on q and k, four experts in all layers but the first). Weights are spread
    widely, norms and biases too, so that log-probs are far from uniform and no parameter is
    without effect.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": kind == "qwen2",
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    if kind == "qwen3_moe":
        shape = EXPERTS | shape
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_file(
        {"weight": 0.1 * torch.randn(1, model.config.hidden_size)},
        folder / "value_head.safetensors",
    )
    characters = (string.ascii_lowercase + string.digits + "+-*/=().,:;?")[: VOCAB - 2]
    tokens = ["<pad>", "<eos>", *characters]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=None,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=128,
    )
    tokenizer.save_pretrained(folder)
    return folder
