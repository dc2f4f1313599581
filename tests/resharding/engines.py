"""What the tests of vLLM do on warm ranks, which have imported it already."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mrl.config.schema import ReshardingConfig, RolloutConfig
from mrl.resharding import ModelShape
from mrl.resharding.coverage import padding_of, view_of
from mrl.resharding.verify import compare_with_reload
from mrl.resharding.vllm import (
    addresses,
    check_addresses,
    constants,
    engine_layout,
    live_params,
    refresh_derived,
    restore_constants,
)
from mrl.resharding.vllm_layout import VLLMLayout
from mrl.types import SamplingParams
from mrl.workers.specs import RolloutSpec
from tests.resharding.closed_form import FAMILIES, MLA

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True)
class Group:
    """What vLLM's layers ask of a process group while they are built."""

    world_size: int
    rank_in_group: int
    is_first_rank: bool = True
    is_last_rank: bool = True

    @property
    def device_group(self) -> Group:
        return self

    def size(self) -> int:
        return self.world_size

    def rank(self) -> int:
        return self.rank_in_group


def write_config(case: str, folder: Path, **changes: int) -> Path:
    """Save the config.json of a tiny model of a family; it has no weights."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type, extra = FAMILIES[case]
    sizes = SIZES | dict(extra) | changes
    if model_type.startswith("deepseek"):
        del sizes["head_dim"]
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = AutoConfig.for_model(model_type, **sizes).to_dict() | dict(extra) | changes
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def _buildable() -> Iterator[None]:
    """Let vLLM build any model class in this process: attention is never run.

    MLA has no attention on a CPU; what it keeps of its weights is the same with any.
    """
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.models import registry
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    choose = mla_attention.get_attn_backend

    def backend(*args: Any, **kwargs: Any) -> Any:
        return TritonMLABackend if kwargs.get("use_mla") else choose(*args, **kwargs)

    with (
        mock.patch.object(registry, "_run_in_subprocess", lambda function: function()),
        mock.patch.object(mla_attention, "get_attn_backend", backend),
        mock.patch.object(mla_attention, "get_mla_prefill_backend", lambda config: mock.Mock),
    ):
        yield


def build(folder: Path, tp: int = 1, rank: int = 0, ep: bool = False) -> nn.Module:
    """Build vLLM's own model class as the rank of a TP group would."""
    import vllm._custom_ops
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    vllm._custom_ops._supports_onednn = False
    for name in ("_TP", "_EP"):
        setattr(parallel_state, name, Group(tp, rank))
    for name in ("_PP", "_DP", "_PCP", "_DCP"):
        setattr(parallel_state, name, Group(1, 0))
    with _buildable(), set_default_torch_dtype(torch.bfloat16):
        config = VllmConfig(
            model_config=ModelConfig(str(folder), skip_tokenizer_init=True, dtype="bfloat16"),
            parallel_config=ParallelConfig(enable_expert_parallel=ep),
        )
        with set_current_vllm_config(config):
            return initialize_model(config)


def loader_agrees(case: str, folder: Path, sizes: Sequence[tuple[int, bool]]) -> None:
    """Compare what vLLM's own loader does with the closed form, at each (TP, EP)."""
    shape = ModelShape.from_folder(write_config(case, folder))
    for tp, ep in sizes:
        closed = VLLMLayout(shape, tp, ep=ep).layout()
        for rank in range(tp):
            model = build(folder, tp, rank, ep)
            traced = engine_layout(model, shape.tensors("bfloat16"), rank)
            expected = [replace(piece, ranks=(rank,)) for piece in closed.pieces_of(rank)]
            assert sorted(traced.pieces, key=_place) == sorted(expected, key=_place), (tp, ep, rank)
            assert traced.tensors == {name: closed.tensors[name] for name in traced.tensors}
            assert traced.padded == closed.padded & traced.tensors.keys()


def _place(piece: Any) -> Any:
    return piece.param, piece.local


def after_loading(model: nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Do what vLLM does to a model of `dtype` once its weights are there."""
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    config = ModelConfig(str(folder), skip_tokenizer_init=True, dtype=dtype)
    process_weights_after_loading(model, config, torch.device("cpu"))


def spec(
    folder: Path, tp: int = 1, ep: bool = False, slots: Any = None, length: int = 64
) -> RolloutSpec:
    """Ask for an engine."""
    return RolloutSpec(
        config=RolloutConfig(
            tensor_model_parallel_size=tp,
            enable_expert_parallel=ep,
            max_num_seqs=8,
            max_num_batched_tokens=256,
        ),
        path=str(folder),
        tokenizer_path=str(folder),
        max_model_len=length,
        trust_remote_code=False,
        resharding=ReshardingConfig(),
        slots=slots,
    )


PROMPTS = ((5, 7, 11), (2, 3, 5, 7, 9, 11, 13), (4,) * 20)
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, stop=(), n=1, seed=0)


def write(engine: Any, values: dict[str, Tensor], layout: Any) -> None:
    """Write a checkpoint into the live parameters, and nothing else."""
    params, rank = engine.params(), dist.get_rank()
    for padding in padding_of(layout, rank, params):
        padding.zero_()
    for piece in layout.pieces_of(rank):
        view_of(params[piece.param], piece.local).copy_(view_of(values[piece.tensor], piece.box))
    engine.written()
    engine.wake_cache()


def draw(engine: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Generate greedily; give prompts, responses and their log-probs."""
    requests = [(str(index), ids) for index, ids in enumerate(PROMPTS)]
    groups = engine.generate(requests, GREEDY, 0)
    return [(s.prompt_ids, s.response_ids, s.log_probs) for group in groups for s in group]


def export(folder: Path, values: dict[str, Tensor]) -> Path:
    """Save other weights of the same model; give their folder, one a rank."""
    changed = folder / f"changed_{dist.get_rank()}"
    changed.mkdir(exist_ok=True)
    (changed / "config.json").write_text((folder / "config.json").read_text())
    save_file(values, changed / "model.safetensors", metadata={"format": "pt"})
    return changed


def expected_log_probs(folder: Path, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Ask transformers for the log-probs of a response."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([[*prompt, *response]])).logits.log_softmax(-1)
    rows = rows[0, len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(response)[:, None])[:, 0]


def serve(
    folder: Path, tp: int = 1, ep: bool = False, slots: tuple[int, ...] | None = None
) -> list[Any]:
    """Start an engine, write three updates into it and check each against transformers.

    The third is the first again. Gives what they generate.
    """
    from mrl.workers.rollout_vllm import VLLMEngine

    shape = ModelShape.from_folder(folder)
    engine = VLLMEngine(spec(folder, tp, ep, slots), torch.device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = engine.layout(shape.tensors("float32"), rank)
    closed = VLLMLayout(shape, tp, world // tp, ep, dtype="float32", slots=slots).layout()
    assert sorted(layout.pieces, key=_place) == sorted(
        (replace(piece, ranks=(rank,)) for piece in closed.pieces_of(rank)), key=_place
    )
    before = {name: param.data_ptr() for name, param in engine.params().items()}
    original, updates = load_file(folder / "model.safetensors"), []
    for scale in (1.0, 0.5, 1.0):
        values = {
            name: value * scale if "experts" in name or "mlp" in name else value
            for name, value in original.items()
        }
        write(engine, values, layout)
        changed, drawn = export(folder, values), draw(engine)
        compare_with_reload(engine.model, changed)
        for prompt, response, found in drawn:
            expected = expected_log_probs(changed, prompt, response)
            assert torch.allclose(torch.tensor(found), expected, atol=2e-4), (found, expected)
        updates.append(drawn)
    assert updates[0] == updates[2] != updates[1]
    assert before == {name: param.data_ptr() for name, param in engine.params().items()}
    engine.close()
    return updates[0]


def stale_prefix(folder: Path) -> None:
    """Update an engine whose prefix cache holds a prompt, with and without waking the cache."""
    import vllm

    from mrl.workers.rollout_vllm import VLLMEngine

    engine = VLLMEngine(spec(folder, length=256), torch.device("cpu"))
    # the CPU backend caches blocks of 128 tokens
    shape, prompt = ModelShape.from_folder(folder), [2 + i % 48 for i in range(200)]
    layout = engine.layout(shape.tensors("float32"), 0)
    values = load_file(folder / "model.safetensors")
    write(engine, values, layout)
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)

    def first_log_prob() -> tuple[float, int]:
        output = engine.llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0]
        token = output.outputs[0].token_ids[0]
        expected = expected_log_probs(changed, prompt, [token])
        found = output.outputs[0].logprobs[0][token].logprob
        return abs(found - float(expected)), output.num_cached_tokens

    changed = export(folder, values)
    assert first_log_prob()[0] < 1e-4
    values = {name: -value if "v_proj" in name else value for name, value in values.items()}
    changed = export(folder, values)
    params = engine.params()
    for piece in layout.pieces:
        view = view_of(params[piece.param], piece.local)
        view.copy_(view_of(values[piece.tensor], piece.box))
    wrong, cached = first_log_prob()
    assert cached and wrong > 1e-3, "the stale cache does not show: the test proves nothing"
    with (
        mock.patch.object(engine.llm.llm_engine, "reset_mm_cache") as images,
        mock.patch.object(engine.llm.llm_engine, "reset_encoder_cache") as encoder,
    ):
        engine.written()
        engine.wake_cache()
    assert images.called and encoder.called
    wrong, cached = first_log_prob()
    assert (wrong < 1e-4, cached) == (True, 0)
    engine.close()


def mla_follows(folder: Path, dtype: torch.dtype) -> None:
    """Write kv_b_proj of an MLA model in place; `dtype` is that of what vLLM derives."""
    model = build(write_config("deepseek_v3", folder))
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    after_loading(model, folder, dtype)
    before, params = addresses(model), live_params(model)
    assert not [name for name in params if name.endswith(("W_UV", "W_UK_T"))]
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.weight.mul_(3)
    refresh_derived(model, dtype)
    check_addresses(model, before)
    sizes = [MLA["qk_nope_head_dim"], MLA["v_head_dim"]]
    for index, layer in enumerate(model.model.layers):
        weight = params[f"model.layers.{index}.self_attn.kv_b_proj.weight"].to(dtype)
        keys, values = weight.view(-1, sum(sizes), weight.shape[1]).split(sizes, 1)
        attention = layer.self_attn.mla_attn.mla_attn
        assert torch.equal(attention.W_UK_T, keys)
        assert torch.equal(attention.W_UV, values.transpose(1, 2))
    attention.W_UV = nn.Parameter(attention.W_UV.clone(), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"moved .*layers\.1\..*W_UV"):
        check_addresses(model, before)


def constants_survive(case: str, folder: Path) -> None:
    """Lose everything but the parameters, as sleep level 2 does; a dummy load loses nothing."""
    from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights

    model = build(write_config(case, folder))
    fresh = constants(model)
    initialize_dummy_weights(model, None)
    after_loading(model, folder)
    saved = constants(model)
    assert all(torch.equal(saved[name], value) for name, value in fresh.items())
    wanted = {"cos_sin_cache"} | ({"normalizer"} if case.startswith("gemma") else set())
    assert wanted <= {name.rpartition(".")[2] for name in saved}
    before = addresses(model)
    for module in model.modules():
        for name, value in {**module._buffers, **vars(module)}.items():
            if isinstance(value, Tensor) and name != "kv_cache":
                value.fill_(77)
    restore_constants(model, saved)
    after = constants(model)
    assert all(torch.equal(after[name], value) for name, value in saved.items())
    check_addresses(model, before)


def relaid_layers_are_refused(folder: Path) -> None:
    """Ask for the layout of models whose bytes are not where the loader put them."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    def refused(reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            engine_layout(model, tensors, 0)

    write_config("qwen3_moe", folder, moe_intermediate_size=32)
    tensors = ModelShape.from_folder(folder).tensors("bfloat16")
    model = build(folder)
    engine_layout(model, tensors, 0)
    experts = model.model.layers[0].mlp.experts.routed_experts
    method, parallel = experts.quant_method, experts.moe_config.moe_parallel_config
    for backend in ("FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "AITER"):
        with mock.patch.object(method, "unquantized_backend", UnquantizedMoeBackend[backend]):
            refused(r"layers\.0\.mlp\.experts.*lays experts out anew.*moe_backend='triton'")
    with mock.patch.object(parallel, "enable_eplb", True):
        refused(r"EPLB\) moves and copies experts")
    embedding, attention = model.model.embed_tokens, model.model.layers[1].self_attn
    with mock.patch.object(embedding, "org_vocab_size", embedding.num_embeddings - 2):
        refused(r"model\.embed_tokens: 2 rows of LoRA vocabulary")
    with mock.patch.object(attention.o_proj, "quant_method", object()):
        refused(r"layers\.1\.self_attn\.o_proj: quantised \(object\)")
    after_loading(model, folder)
    with mock.patch.object(method.cpu_fused_moe, "isa", "vec"):
        refused(r"CPUFusedMOE packed the experts; make CPUFusedMOE\.check_grouped_gemm")
