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
   -> needs a GPU; a rank that has none is refused by the worker, and trainer and engine of one
      rank are one process, so no memory is shared
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

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.stages import layers_of_chunk
from mrl.resharding import MegatronLayout, plan
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
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_experts_that_are_not_square_arrive_as_they_are(case, tp):
    shape = tiny_model(case, num_hidden_layers=2)  # hidden 32, experts of 6 or 24
    values = logical_values(shape)
    trainer = MegatronLayout(shape, 2, 1, 2, 16, ep=2, etp=1)
    if case == "mixtral":
        params = place(trainer.layout(), values)
    else:
        params = {rank: trained(trainer, values, rank) for rank in range(4)}
    found = check_engine(trainer, params, values, tp)
    stack = next(value for name, value in found[0].items() if name.endswith("w2_weight"))
    assert tuple(stack.shape) == (4 * 32, shape.moe.ffn_size // tp)
