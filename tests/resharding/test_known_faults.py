"""Faults of other trainers' weight transfer, each held by a test on a small input that shows it.

Tests are named as file::test, those of this file by ::test alone; paths are under tests/.

fault, where it was reported -> what holds it
 1 tied embeddings under PP: the last stage's copy missing, or counted twice (NVIDIA-NeMo/
   Megatron-Bridge 954, 957; NVIDIA/Megatron-LM 656)
   -> ::test_a_tied_embedding_is_filled_on_both_end_stages_and_leaves_once
 2 QKV interleaved wrongly where KV heads are fewer than TP (ai-dynamo/modelexpress 639, 650)
   -> resharding/test_megatron.py::test_sixty_four_heads_two_kv_heads_on_eight_ranks_are_covered,
      ::test_pieces_hold_what_megatron_would_hold
 3 a KV head sent once, needed by several engine ranks (cf. huggingface/transformers 48307)
   -> resharding/test_vllm_layout.py::test_kv_heads_are_replicated_where_tp_has_more_ranks,
      resharding/test_properties.py::test_a_wrong_kv_replica_shows
 4 padded vocabulary sent as it is, or padded rows left as garbage (huggingface/trl 3112;
   vllm-project/vllm 15124)
   -> ::test_padding_of_either_vocabulary_is_never_sent_and_ends_as_zeros
 5 a second load corrupts experts that were laid out anew after the first (vllm 42821, 56570;
   sgl-project/sglang 25692, 33743)
   -> resharding/test_vllm_engine.py::
      test_experts_written_in_place_are_live_and_a_repeated_update_changes_nothing,
      test_layers_that_vllm_lays_out_anew_are_refused_with_their_reason (the GPU kernels)
 6 experts' parameters renamed, stacked or dealt out otherwise by the engine (NVIDIA-NeMo/RL
   3280, 3403, 3565; vllm 25171)
   -> resharding/test_vllm_engine.py::test_vllms_own_loader_agrees_with_the_closed_form,
      test_an_expert_parallel_engine_takes_whole_experts
 7 down_proj of experts transposed twice (Megatron-Bridge 3162; THUDM/slime 1840)
   -> ::test_experts_that_are_not_square_arrive_as_they_are
 8 prefix, multimodal or encoder cache outlives an update (NeMo-RL 4018; prime-rl 1650; vllm
   9744, 46125; verl 6523)
   -> resharding/test_vllm_engine.py::test_a_cache_computed_with_old_weights_is_forgotten,
      workers/test_rollout.py::test_no_prefix_of_the_old_policy_survives_a_sync
 9 CUDA graphs or derived tensors point at old storage (vllm 48251, 48941, 48312, 55087;
   vllm-ascend 7473)
   -> resharding/test_vllm_engine.py::
      test_what_mla_derives_follows_an_in_place_write_at_the_same_addresses,
      workers/test_rollout.py::test_a_sync_writes_the_parameters_in_place;
      that graphs replay with the new weights needs a GPU
10 sleep drops buffers or restores them too early, a dummy load leaves them random (vllm 16564,
   16889, 29341, 54235; NeMo-RL 2631; OpenRLHF 723; verl 3461)
   -> resharding/test_vllm_engine.py::
      test_buffers_survive_a_dummy_load_and_the_loss_of_memory; sleep itself needs a GPU
11 float32 expert biases rounded to bfloat16 (Megatron-LM 1482, 7081; vllm 47777, 47797; sglang
   31213)
   -> resharding/test_sync.py::
      test_float32_biases_a_ten_thousandth_apart_stay_distinct_in_a_bfloat16_model,
      ::test_expert_biases_stay_distinct_in_the_engine_and_in_an_export
12 the wrong global layer under virtual stages or uneven ones (Megatron-LM 1583, 4775; NeMo-RL
   1126)
   -> ::test_layers_of_uneven_interleaved_stages_arrive_under_their_own_index
13 a parameter without a mapping is skipped (Megatron-Bridge 5294, 3348, 5252; vllm-ascend 13209;
   NeMo-RL 3619, 2999)
   -> ::test_a_tensor_left_out_of_a_mapping_is_refused_on_either_side,
      resharding/test_sync.py::test_unknown_missing_and_misshapen_parameters_are_all_named,
      resharding/test_planner.py::test_an_element_written_twice_is_named
14 a bucket used again before the receiver copied it (modelscope/ms-swift 10204, 10207)
   -> resharding/test_transports.py::test_a_receiver_that_is_late_gets_what_was_sent
15 ranks communicate in different orders and wait for ever (trl 6798, 7103; slime 2331; vime 329)
   -> resharding/test_transports.py::
      test_another_bucket_order_or_plan_on_one_rank_is_refused_before_the_first_send
16 two NCCL ranks on one GPU; IPC of memory that cannot be shared (OpenRLHF 726, 957; trl 3158;
   NeMo-RL 3782; vllm 42609; SkyRL 143)
   -> needs GPUs; trainer and engine of one rank are one process on one device, so no memory is
      shared between processes
17 a tied model changes the mapping of an untied one after it (slime 345; mbridge, by reading)
   -> resharding/test_sync.py::test_a_tied_model_leaves_no_trace_in_an_untied_one
18 equal pipeline stages presumed (AReaL 1560, 1564)
   -> ::test_three_uneven_stages_reach_the_engine_and_other_stages
19 the head of a tied model exported (verl, by reading)
   -> ::test_a_tied_embedding_is_filled_on_both_end_stages_and_leaves_once,
      resharding/test_hf_files.py::
      test_checkpoints_survive_the_way_through_megatron_bit_for_bit
20 gate and up swap halves when expert TP changes (Megatron-LM, by reading)
   -> ::test_gate_and_up_of_experts_stay_apart_when_expert_tp_ends
21 post_attention_layernorm is another norm in another family (GLM-4, Gemma-2)
   -> ::test_each_norm_of_a_layer_reaches_the_place_that_its_family_means
22 a float32 parameter cannot be sent in a bfloat16 model (OpenRLHF, by reading)
   -> resharding/test_sync.py::
      test_float32_weights_become_bfloat16_on_the_way_and_float32_routers_do_not
23 latent down-projections cut in one layer specification and whole in the other (Megatron-LM,
   by reading)
   -> ::test_latent_down_projections_arrive_from_either_layer_specification
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.stages import layers_of_chunk
from mrl.resharding import MegatronLayout, plan
from mrl.resharding.coverage import padding_of
from mrl.resharding.hf_files import HFWriter
from mrl.resharding.sync import Resharder, run_together
from mrl.resharding.transports import InProcess, Mailbox
from mrl.resharding.verify import differing
from mrl.resharding.vllm_layout import VLLMLayout
from tests.resharding.closed_form import (
    like,
    logical_values,
    megatron_params,
    tiny_shape,
    vllm_params,
)
from tests.resharding.families import tiny_config, tiny_model
from tests.resharding.placements import place
from tests.resharding.references import trained

EMBEDDING = "model.embed_tokens.weight"
NAN = float("nan")


def run(steps, src, dst):
    """Run a plan from and into the parameters of ranks of this process."""
    mailbox = Mailbox()
    run_together(
        [
            Resharder(steps, rank, src.get(rank, {}), dst.get(rank, {}), InProcess(rank, mailbox))
            for rank in sorted({*steps.src.ranks, *steps.dst.ranks})
        ]
    )


def in_engine(trainer, params, values, tp=1, dtype="float32"):
    """Send a trainer's parameters to engines full of NaN; give those, and what they should be."""
    engine = VLLMLayout(trainer.shape, tp, max(1, trainer.world_size // tp), dtype=dtype)
    kept = {name: values[name].to(getattr(torch, i.dtype)) for name, i in engine.tensors().items()}
    wanted = {
        rank: vllm_params(trainer.shape, tp, kept, rank % tp) for rank in range(engine.world_size)
    }
    found = {rank: like(held) for rank, held in wanted.items()}
    run(plan(trainer.layout(), engine.layout(), bucket_bytes=8192), params, found)
    return found, wanted


def check_engine(trainer, params, values, tp=1):
    found, wanted = in_engine(trainer, params, values, tp)
    for rank, held in wanted.items():
        assert differing(found[rank], held) == []
    return found


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_tied_embedding_is_filled_on_both_end_stages_and_leaves_once(tmp_path, pp):
    changes = {"num_hidden_layers": 4, "tie_word_embeddings": True}
    shape = tiny_model("llama", **changes)
    chunks = layers_of_chunk(4, pp, last=2 if pp == 3 else None)
    trainer = MegatronLayout(shape, 1, pp, 1, 16, layers_of_chunk=chunks)
    values = logical_values(shape)
    params = {rank: megatron_params(trainer, values, rank) for rank in range(pp)}
    assert "output_layer.weight" in params[pp - 1]
    assert "lm_head.weight" not in check_engine(trainer, params, values, tp=1)[0]

    # from a trainer of one stage, whose embedding is its head
    whole = MegatronLayout(shape, 1, 1, 1, 16)
    filled = {rank: like(held) for rank, held in params.items()}
    run(plan(whole.layout(), trainer.layout()), {0: megatron_params(whole, values, 0)}, filled)
    for rank, held in params.items():
        assert differing(filled[rank], held) == []
    holders = [
        (rank, name)
        for rank, held in filled.items()
        for name in held
        if name in ("embedding.word_embeddings.weight", "output_layer.weight")
    ]
    assert holders == [
        (0, "embedding.word_embeddings.weight"),
        (pp - 1, "output_layer.weight"),
    ]

    exported = export(tmp_path, tiny_config("llama", **changes), trainer, params, "float32")
    assert differing(exported, values) == []
    assert "lm_head.weight" not in exported


def export(folder, config, trainer, params, dtype):
    """Write the parameters of one process's ranks as one checkpoint file; give its tensors."""
    source, target, mailbox = folder / "source", folder / "target", Mailbox()
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    writers = [
        HFWriter(
            target, source, trainer.layout(), rank, held, InProcess(rank, mailbox), dtype=dtype
        )
        for rank, held in params.items()
    ]
    rounds = [writer.round(0) for writer in writers]
    run_together([resharder for resharder, _ in rounds])
    for writer, (_, tensors) in zip(writers, rounds, strict=True):
        writer.save(0, tensors)
    (file,) = target.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("engine_tp", [1, 2, 4])
def test_padding_of_either_vocabulary_is_never_sent_and_ends_as_zeros(tp, engine_tp):
    shape = tiny_shape(vocab=50, layers=1)  # 96 rows in Megatron, 64 in vLLM
    trainer = MegatronLayout(shape, tp, 1, 4 // tp, padded_vocab=96)
    values = logical_values(shape)
    params = {rank: megatron_params(trainer, values, rank) for rank in range(4)}
    rows = 96 // tp
    for rank, held in params.items():
        real = max(0, 50 - rank % tp * rows)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            held[name][real:] = NAN
    found = check_engine(trainer, params, values, engine_tp)
    for name in (EMBEDDING, "lm_head.weight"):
        full = torch.cat([found[rank][name] for rank in range(engine_tp)])
        assert full.shape[0] == 64
        assert torch.equal(full[:50], values[name])
        assert not full[50:].any()


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_that_are_not_square_arrive_as_they_are(tp):
    shape = tiny_model("qwen3_moe", num_hidden_layers=2)  # hidden 32, experts of 6 columns
    values = logical_values(shape)
    trainer = MegatronLayout(shape, 2, 1, 2, 16, ep=2, etp=1)
    params = {rank: trained(trainer, values, rank) for rank in range(4)}
    found = check_engine(trainer, params, values, tp)
    for layer in range(2):
        stack = found[0][f"model.layers.{layer}.mlp.experts.routed_experts.w2_weight"]
        assert tuple(stack.shape) == (4 * 32, 6 // tp)


def test_gate_and_up_of_experts_stay_apart_when_expert_tp_ends():
    shape = tiny_model("qwen3_moe", num_hidden_layers=1, num_experts=2)
    trainer = MegatronLayout(shape, 2, 1, 1, 16, etp=2)
    values = logical_values(shape)
    for name, value in values.items():
        if ".experts." in name:
            value.fill_(1 if "gate_proj" in name else 2 if "up_proj" in name else 3)
    params = {rank: trained(trainer, values, rank) for rank in range(2)}
    found, _ = in_engine(trainer, params, values)
    for held in found.values():
        halves = held["model.layers.0.mlp.experts.routed_experts.w13_weight"].view(2, 2, 6, 32)
        assert (halves[:, 0] == 1).all()
        assert (halves[:, 1] == 2).all()


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_expert_biases_stay_distinct_in_the_engine_and_in_an_export(tmp_path, case):
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 64}
    changes |= {"moe_intermediate_size": 2, "dtype": "bfloat16"}
    shape = tiny_model(case, **changes)
    trainer = MegatronLayout(shape, 1, 1, 2, 16, ep=2, dtype="bfloat16")
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    values = {
        name: torch.full(info.shape, 0.5, dtype=getattr(torch, info.dtype))
        for name, info in trainer.tensors().items()
    }
    values[bias] = 1 + 1e-4 * torch.arange(64, dtype=torch.float32)
    assert values[bias].bfloat16().unique().numel() < 8  # what rounding would leave
    params = {rank: trained(trainer, values, rank) for rank in range(2)}
    found, _ = in_engine(trainer, params, values, dtype="bfloat16")
    exported = export(tmp_path, tiny_config(case, **changes), trainer, params, "bfloat16")
    for held in (*found.values(), exported):
        assert held[bias].dtype == torch.float32
        assert torch.equal(held[bias], values[bias])
    assert exported[EMBEDDING].dtype == torch.bfloat16


CHUNKS_OF_FOURTEEN = (  # [pp][vpp] -> layers, two of them on the last stage
    ((0, 1), (7, 8)),
    ((2, 3), (9, 10)),
    ((4, 5), (11, 12)),
    ((6,), (13,)),
)


@pytest.mark.parametrize("engine_tp", [1, 2])
def test_layers_of_uneven_interleaved_stages_arrive_under_their_own_index(engine_tp):
    shape = tiny_shape(layers=14)
    chunks = layers_of_chunk(14, 4, 2, last=2)
    trainer = MegatronLayout(shape, 1, 4, 1, 16, vpp=2, layers_of_chunk=chunks)
    values = logical_values(shape)
    params = place(trainer.layout(), values)
    for stage, held in params.items():
        for name, param in held.items():
            chunk, _, inner = name.partition(".")
            if inner.startswith("decoder.layers."):
                local = int(inner.split(".")[2])
                param.fill_(CHUNKS_OF_FOURTEEN[stage][int(chunk[-1])][local])
    found, _ = in_engine(trainer, params, values, engine_tp)
    for held in found.values():
        layers = {name: int(name.split(".")[2]) for name in held if ".layers." in name}
        assert set(layers.values()) == set(range(14))
        for name, layer in layers.items():
            assert (held[name] == layer).all(), name


def test_three_uneven_stages_reach_the_engine_and_other_stages():
    shape = tiny_shape(layers=7)
    chunks = layers_of_chunk(7, 3, first=1, last=2)
    assert chunks == (((0,),), ((1, 2, 3, 4),), ((5, 6),))
    trainer = MegatronLayout(shape, 1, 3, 1, 16, layers_of_chunk=chunks)
    values = logical_values(shape)
    params = {rank: megatron_params(trainer, values, rank) for rank in range(3)}
    check_engine(trainer, params, values)
    for halves in (None, (((0, 1, 2, 3, 4),), ((5, 6),))):
        other = MegatronLayout(shape, 1, len(halves or "1"), 1, 16, layers_of_chunk=halves)
        wanted = {r: megatron_params(other, values, r) for r in range(other.world_size)}
        filled = {rank: like(held) for rank, held in wanted.items()}
        run(plan(trainer.layout(), other.layout()), params, filled)
        for rank, held in wanted.items():
            assert differing(filled[rank], held) == []


@pytest.mark.parametrize("case", ["deepseek_v2-lite", "qwen3", "glm4_moe-all"])
def test_a_tensor_left_out_of_a_mapping_is_refused_on_either_side(case):
    """Among them the input norm of latent attention, the q and k norms, and expert biases."""
    shape = tiny_model(case, num_hidden_layers=2)
    trainer = MegatronLayout(shape, 1, 1, 1, 16)
    engine = VLLMLayout(shape, 1, dtype="float32")
    values = logical_values(shape)
    for layout in (trainer.layout(), engine.layout()):
        params = place(layout, values)[0]
        padding_of(layout, 0, params)
        for lost in layout.tensors:
            tensors = {name: info for name, info in layout.tensors.items() if name != lost}
            pieces = tuple(piece for piece in layout.pieces if piece.tensor != lost)
            (param,) = {piece.param for piece in layout.pieces if piece.tensor == lost}
            without = replace(layout, tensors=tensors, pieces=pieces)
            with pytest.raises(ValueError, match=r"not in the layout|nothing covers") as error:
                padding_of(without, 0, params)
            assert param in str(error.value)


ATTENTION_NORMS = {"input_layernorm": 1, "self_attention.linear_proj.post_layernorm": 2}
MLP_NORMS = {"pre_mlp_layernorm": 3, "mlp.linear_fc2.post_layernorm": 4}
NORMS = {  # family -> constant of each norm in Megatron, then in the engine
    "llama": (
        {"input_layernorm": 1, "pre_mlp_layernorm": 3},
        {"input_layernorm": 1, "post_attention_layernorm": 3},
    ),
    "glm4": (
        ATTENTION_NORMS | MLP_NORMS,
        {
            "input_layernorm": 1,
            "post_self_attn_layernorm": 2,
            "post_attention_layernorm": 3,
            "post_mlp_layernorm": 4,
        },
    ),
    "gemma2": (
        ATTENTION_NORMS | MLP_NORMS,
        {
            "input_layernorm": 1,
            "post_attention_layernorm": 2,
            "pre_feedforward_layernorm": 3,
            "post_feedforward_layernorm": 4,
        },
    ),
}


@pytest.mark.parametrize("family", NORMS)
def test_each_norm_of_a_layer_reaches_the_place_that_its_family_means(family):
    trained_as, served_as = NORMS[family]
    shape = tiny_model(family, num_hidden_layers=1)
    trainer = MegatronLayout(shape, 1, 1, 1, 16)
    values = logical_values(shape)
    params = place(trainer.layout(), values)
    norms = {name for name in params[0] if ".layers." in name and "norm" in name}
    assert norms == {f"decoder.layers.0.{name}.weight" for name in trained_as}
    for name, constant in trained_as.items():
        params[0][f"decoder.layers.0.{name}.weight"].fill_(constant)
    (found,), _ = (tuple(side.values()) for side in in_engine(trainer, params, values))
    norms = {name for name in found if ".layers." in name and "norm" in name}
    assert norms == {f"model.layers.0.{name}.weight" for name in served_as}
    for name, constant in served_as.items():
        assert (found[f"model.layers.0.{name}.weight"] == constant).all(), name


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_latent_down_projections_arrive_from_either_layer_specification(impl):
    shape = tiny_model("deepseek_v3", num_hidden_layers=1)  # kv_lora_rank 16, RoPE 4
    trainer = MegatronLayout(shape, 2, 1, 1, 16, etp=1, ep=2, transformer_impl=impl)
    values = logical_values(shape)
    params = {rank: trained(trainer, values, rank) for rank in range(2)}
    down = params[1]["decoder.layers.0.self_attention.linear_kv_down_proj.weight"]
    assert down.shape[0] == (10 if impl == "local" else 20)
    for engine_tp in (1, 2):
        check_engine(trainer, params, values, engine_tp)
