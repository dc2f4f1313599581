"""The quickstart's tokenizer (one token a character) and its Qwen2-shaped model."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

# What a task may hold; with pad and eos, 64 tokens, so that no tensor-parallel size needs padding.
# Qwen2's byte-level alphabet writes space and newline so.
_SPACE, _NEWLINE = "\u0120", "\u010a"
CHARACTERS = (
    string.digits + _SPACE + _NEWLINE + "+-*/=().,:;!?'\"<>[]{}_#%" + string.ascii_lowercase
)
# The user's text, then "=": the shortest generation prompt that marks where the answer starts.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'user' and (add_generation_prompt or not loop.last) %}{{ '=' }}"
    "{% endif %}{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
)
MAX_LENGTH = 64  # tokens


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer: one token a character, no merges; other characters have no token.

    It is of Qwen2's own class, because that is what a Qwen2 folder is loaded with.
    """
    tokens = ["<pad>", "<eos>", *CHARACTERS]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=None,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=MAX_LENGTH,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_config(tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    """Shape the model: 4 heads of 32 and 2 KV groups, so that TP 2 and 4 divide it."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def save_model(folder: Path, seed: int) -> int:
    """Save tokenizer, config and random weights as a Hugging Face folder; give the parameters."""
    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(build_config(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
