from __future__ import annotations

import pytest


@pytest.fixture
def hf_folder(tmp_path):
    """Save a tiny random model the way transformers does; give its folder."""

    def save(
        model_type="qwen2",
        tied=False,
        vocab=13,
        kv_heads=2,
        hidden=32,
        dtype="float32",
        name="hf",
        **kwargs,
    ):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            model_type,
            hidden_size=hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            intermediate_size=24,
            vocab_size=vocab,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            dtype=dtype,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
        for param in model.parameters():  # biases and norms too
            param.data.normal_()
        folder = tmp_path / name
        model.save_pretrained(folder, **kwargs)
        (folder / "tokenizer.json").write_text("{}")
        return folder

    return save
