"""Properties of plans between random layouts, against references that know no boxes."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from mrl.resharding import MegatronLayout, ModelShape, plan
from mrl.resharding.layout import nodes
from mrl.resharding.vllm_layout import VLLMLayout
from tests.resharding.closed_form import like, tiny_shape, vllm_params
from tests.resharding.references import execute, trained

SEEDS = range(40)
SIZES = [  # tp, pp, dp, cp
    sizes
    for sizes in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 3), (1, 2))
    if 2 <= math.prod(sizes) <= 12
]
MOE = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
V3 = MLA | {
    "v_head_dim": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


@dataclass(frozen=True)
class Case:
    trainer: MegatronLayout
    engine: VLLMLayout
    bucket_bytes: int

    def layouts(self):
        return self.trainer.layout(), self.engine.layout()

    def plan(self, **changes):
        return plan(*self.layouts(), **{"bucket_bytes": self.bucket_bytes} | changes)


def pick(rng, low, high):
    """Pick a power of two."""
    return 2 ** rng.randint(low, high)


def draw_shape(rng, experts):
    kv_heads = pick(rng, 0, 3)
    model_type = rng.choice(
        ["qwen3_moe", "deepseek_v3"] if experts else ["llama", "qwen2", "qwen3"]
    )
    config = {
        "model_type": model_type,
        "hidden_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": max(8, kv_heads),
        "num_key_value_heads": kv_heads,
        "head_dim": 4,
        "intermediate_size": 16,
        "vocab_size": rng.randint(5, 90),
        "max_position_embeddings": 64,
        "tie_word_embeddings": not experts and rng.random() < 0.4,
        "dtype": "float32",
    }
    if model_type == "qwen3_moe":
        config |= MOE | {"num_experts": experts}
    if model_type == "deepseek_v3":
        config |= MOE | V3 | {"n_routed_experts": experts, "num_key_value_heads": 8}
    return ModelShape.from_hf(config)


def draw(seed, ranks_per_node=4, first_engine_rank=None):
    """Draw a trainer and an engine on the same ranks, or apart."""
    rng = random.Random(seed)
    experts = rng.choice([0, 0, 4, 8])
    shape = draw_shape(rng, experts)
    tp, pp, dp, cp = rng.choice(SIZES)
    stage = tp * cp * dp
    etp = rng.choice([n for n in (1, 2) if stage % n == 0]) if experts else None
    ep = rng.choice([n for n in (1, 2, 4) if stage % (etp * n) == 0]) if experts else 1
    impl = rng.choice(["local", "transformer_engine"])
    world = stage * pp
    place = nodes(2 * world, ranks_per_node)
    trainer = MegatronLayout(
        shape,
        tp,
        pp,
        dp,
        padded_vocab=-(-shape.vocab_size // tp) * tp + tp * rng.randint(0, 3),
        cp=cp,
        transformer_impl=impl,
        dtype=rng.choice(["float32", "float32", "bfloat16"]),
        node_of_rank=place,
        vpp=rng.choice([1, 2]) if pp == 2 else 1,
        ep=ep,
        etp=etp,
        grouped_experts=impl == "transformer_engine" and experts > 0 and rng.random() < 0.5,
    )
    engine_tp = rng.choice([n for n in (1, 2, 4, 8) if world % n == 0])
    engine = VLLMLayout(
        shape,
        engine_tp,
        replicas=world // engine_tp,
        ep=experts >= engine_tp and rng.random() < 0.5,
        dtype=trainer.dtype,
        first_rank=world if rng.random() < 0.2 else 0,
        node_of_rank=place,
    )
    return Case(trainer, engine, bucket_bytes=rng.choice([1024, 8192, 65536]))


def logical(case):
    """Number the elements of every tensor, in the dtypes that the trainer keeps."""
    return {
        name: (torch.arange(1, 1 + torch.Size(info.shape).numel()) + 37 * place)
        .remainder(251)
        .to(getattr(torch, info.dtype))
        .view(info.shape)
        for place, (name, info) in enumerate(case.trainer.tensors().items())
    }


def wrong_params(case, steps, zero_padding=True):
    """Run a plan on every rank's parameters; list those that differ from what vLLM would load."""
    values = logical(case)
    trainer, engine = case.trainer, case.engine
    ranks = range(trainer.first_rank, trainer.first_rank + trainer.world_size)
    src = {rank: trained(trainer, values, rank) for rank in ranks}
    infos = engine.tensors()
    wanted = {
        engine.first_rank + i: vllm_params(
            engine.shape,
            engine.tp,
            {name: v.to(getattr(torch, infos[name].dtype)) for name, v in values.items()},
            i % engine.tp,
            engine.ep,
        )
        for i in range(engine.world_size)
    }
    dst = {rank: like(params) for rank, params in wanted.items()}
    execute(steps, src, dst, zero_padding)
    return {
        (rank, name)
        for rank, params in wanted.items()
        for name, value in params.items()
        if not torch.equal(dst[rank][name], value)
    }


def everyone(steps):
    return sorted({*steps.src.ranks, *steps.dst.ranks})


@pytest.mark.parametrize("forward", [False, True], ids=["direct", "forwarding"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_fills_the_engine_bit_for_bit_with_the_least_bytes(seed, forward):
    case = draw(seed)
    steps = case.plan(forward_within_node=forward)
    for rank in everyone(steps):
        assert steps.received_bytes(rank) == steps.floor_bytes(rank)
        assert steps.peak_buffer_bytes(rank) <= case.bucket_bytes
    assert wrong_params(case, steps) == set()
    assert steps.digest() == case.plan(forward_within_node=forward).digest()


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_of_all_ranks_are_one_list_in_one_order(seed):
    steps = draw(seed).plan()
    of_rank = defaultdict(list)
    for c in steps.copies:
        for rank in {c.src_rank, c.dst_rank}:
            of_rank[rank].append(c)
    for rank in everyone(steps):
        mine = [c for bucket in steps.share(rank) for c in bucket]
        assert mine == of_rank[rank]
        moved = {"local": 0, "sent": 0, "received": 0}
        for c in mine:
            way = "local" if c.is_local else "sent" if c.src_rank == rank else "received"
            moved[way] += c.num_elements * steps.dst.tensors[c.tensor].item_bytes
        assert steps.local_bytes(rank) == moved["local"]
        assert steps.sent_bytes(rank) == moved["sent"]
        assert steps.received_bytes(rank) == moved["received"]
        ends = {end for c in mine for end in (c.src_rank, c.dst_rank)} - {rank}
        assert steps.peers(rank) == tuple(sorted(ends))


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_that_hold_the_same_send_the_same(seed):
    case = draw(seed, ranks_per_node=1024)  # no node comes before another
    steps = case.plan(bucket_bytes=4096)
    alike = defaultdict(list)
    for rank in steps.src.ranks:
        held = frozenset((piece.tensor, piece.box) for piece in steps.src.pieces_of(rank))
        alike[held].append(steps.sent_bytes(rank))
    for sent in alike.values():
        mean = sum(sent) / len(sent)
        row = 4 * 4 * case.trainer.shape.hidden_size  # what is split is split by rows
        assert max(sent) - mean <= max(0.05 * mean, row), sent
        assert mean - min(sent) <= max(0.05 * mean, row), sent


@pytest.mark.parametrize("seed", SEEDS)
def test_forwarding_brings_each_element_to_a_node_once(seed):
    case = draw(seed)
    place = case.trainer.node_of_rank
    steps = case.plan(forward_within_node=True)
    crossing = defaultdict(int)
    for c in steps.copies:
        size = c.num_elements * steps.dst.tensors[c.tensor].item_bytes
        if place[c.src_rank] != place[c.dst_rank]:
            assert not c.forwarded
            crossing[place[c.dst_rank]] += size
    assert crossing == needed_from_outside(case, place)


def needed_from_outside(case, place):
    """Count by node the bytes that some rank needs and no rank holds, element by element."""
    src, dst = case.layouts()

    def cover(layout, node):
        masks = {}
        for piece in layout.pieces:
            if any(place[rank] == node for rank in piece.ranks):
                shape = layout.tensors[piece.tensor].shape
                mask = masks.setdefault(piece.tensor, torch.zeros(shape, dtype=torch.bool))
                mask[tuple(slice(a, b) for a, b in piece.box)] = True
        return masks

    counts = {}
    for node in sorted(set(place.values())):
        held, needed = cover(src, node), cover(dst, node)
        missing = sum(
            int((mask & ~held[name] if name in held else mask).sum()) * dst.tensors[name].item_bytes
            for name, mask in needed.items()
        )
        if missing:
            counts[node] = missing
    return counts


# mutations: what must fail does fail


def changed(layout, change, *endings):
    """Change the pieces of tensors whose names end so; `change` returns their replacements."""
    chosen = [piece for piece in layout.pieces if piece.tensor.endswith(endings)]
    others = [piece for piece in layout.pieces if not piece.tensor.endswith(endings)]
    assert chosen
    return replace(layout, pieces=(*others, *change(chosen)))


def dense_case(**changes):
    shape = tiny_shape("qwen3", kv_heads=2, layers=4)
    sizes = {"tp": 2, "pp": 2, "dp": 1, "padded_vocab": 16} | changes
    trainer = MegatronLayout(shape, **sizes)
    engine = VLLMLayout(shape, 4, replicas=trainer.world_size // 4, dtype="float32")
    return Case(trainer, engine, bucket_bytes=4096)


def expert_case():
    config = {"n_routed_experts": 4, "num_hidden_layers": 2} | MOE | V3
    shape = tiny_shape("deepseek_v3", kv_heads=8, **config)
    trainer = MegatronLayout(shape, 2, 1, 1, padded_vocab=16, ep=2, etp=1)
    return Case(trainer, VLLMLayout(shape, 2, ep=True, dtype="float32"), bucket_bytes=4096)


def test_unchanged_cases_pass():
    for case in (dense_case(), dense_case(vpp=2), expert_case()):
        assert wrong_params(case, case.plan()) == set()


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_gate_and_up_swapped_show(side):
    case = dense_case()
    src, dst = case.layouts()

    def swap(pieces):
        names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        for piece in pieces:
            part = piece.tensor.split(".")[-2]
            yield replace(piece, tensor=piece.tensor.replace(part, names[part]))

    endings = ("gate_proj.weight", "up_proj.weight")
    if side == "trainer":
        src = changed(src, swap, *endings)
    else:
        dst = changed(dst, swap, *endings)
    wrong = {name.split(".", 3)[-1] for _, name in wrong_params(case, plan(src, dst))}
    assert wrong == {"mlp.gate_up_proj.weight"}


def test_a_wrong_kv_replica_shows():
    case = dense_case()
    src, dst = case.layouts()

    def other_head(pieces):  # two heads on four ranks: 0, 0, 1, 1 becomes 0, 1, 0, 1
        for piece in pieces:
            head = piece.box[0][0] // 4
            yield replace(piece, ranks=(head, head + 2))

    dst = changed(dst, other_head, "k_proj.weight")
    wrong = wrong_params(case, plan(src, dst))
    assert {rank for rank, _ in wrong} == {1, 2}
    assert {name.split(".", 3)[-1] for _, name in wrong} == {"self_attn.qkv_proj.weight"}


def test_skipped_padding_shows():
    case = dense_case()
    wrong = wrong_params(case, case.plan(), zero_padding=False)
    assert {name for _, name in wrong} == {"model.embed_tokens.weight", "lm_head.weight"}


def test_permuted_vpp_chunks_show():
    case = dense_case(vpp=2)
    chunks = tuple(stage[::-1] for stage in case.trainer.chunks)
    src = replace(case.trainer, layers_of_chunk=chunks).layout()
    wrong = wrong_params(case, plan(src, case.engine.layout()))
    assert {name.split(".")[2] for _, name in wrong} == {"0", "1", "2", "3"}


def test_a_dropped_expert_bias_is_refused():
    case = expert_case()
    src, dst = case.layouts()
    without = changed(src, lambda pieces: [], "e_score_correction_bias")
    with pytest.raises(ValueError, match=r"layers\.1.*correction_bias.*no rank of megatron holds"):
        plan(without, dst)
    # dropped on both sides: the parameters know better
    names = [name for name in src.tensors if not name.endswith("correction_bias")]
    steps = plan(src.restrict(names), dst.restrict(names))
    with pytest.raises(ValueError, match=r"correction_bias is not in the layout"):
        wrong_params(case, steps)


def test_a_bucket_order_changed_on_one_rank_changes_the_digest():
    steps = dense_case().plan(bucket_bytes=256)
    assert steps.num_buckets > 2
    other = [{0: 1, 1: 0}.get(bucket, bucket) for bucket in range(steps.num_buckets)]
    blocks = [
        replace(block, buckets=np.array(other, np.int32)[block.buckets]) for block in steps.blocks
    ]
    assert replace(steps, blocks=blocks).digest() != steps.digest()


def test_any_changed_route_changes_the_digest():
    steps = dense_case().plan()
    for column in range(steps.blocks[0].table.shape[1]):
        table = steps.blocks[0].table.copy()
        table[-1, column] += 1
        blocks = [replace(steps.blocks[0], table=table), *steps.blocks[1:]]
        assert replace(steps, blocks=blocks).digest() != steps.digest()


@pytest.mark.parametrize("place", range(9))
def test_a_missing_source_piece_is_named(place):
    src, dst = dense_case().layouts()
    lost = src.pieces[place * len(src.pieces) // 9]
    pieces = tuple(piece for piece in src.pieces if piece is not lost)
    with pytest.raises(ValueError) as error:
        plan(replace(src, pieces=pieces), dst)
    assert f"{lost.tensor}(" in str(error.value)
    assert "no rank of megatron holds it" in str(error.value)


@pytest.mark.parametrize("place", range(9))
def test_a_missing_engine_piece_is_named(place):
    case = dense_case()
    src, dst = case.layouts()
    lost = dst.pieces[place * len(dst.pieces) // 9]
    pieces = tuple(piece for piece in dst.pieces if piece is not lost)
    with pytest.raises(
        ValueError, match=r"no rank holds|nothing covers|is absent|not in the layout"
    ):
        wrong_params(case, plan(src, replace(dst, pieces=pieces)))


@pytest.mark.parametrize("place", range(9))
def test_an_engine_piece_given_twice_is_named(place):
    src, dst = dense_case().layouts()
    twice = dst.pieces[place * len(dst.pieces) // 9]
    with pytest.raises(ValueError, match="is written twice") as error:
        plan(src, replace(dst, pieces=(*dst.pieces, twice)))
    assert twice.tensor in str(error.value)
