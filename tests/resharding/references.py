"""What real parameters hold, made by torch operations on whole tensors, for any Megatron layout.

It shares no code with the layouts under test: fused projections by `view` and `cat`, shards by
`chunk`, layers and experts by counting.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mrl.resharding import MegatronLayout, ReshardPlan
from mrl.resharding.coverage import padding_of, view_of
from tests.resharding.closed_form import pad_rows

Params = dict[str, Tensor]


def trained(layout: MegatronLayout, values: Mapping[str, Tensor], rank: int) -> Params:
    """Build one rank's Megatron parameters and buffers from the checkpoint's tensors."""
    return _Trained(layout, values, rank).params()


class _Trained:
    def __init__(self, layout: MegatronLayout, values: Mapping[str, Tensor], rank: int) -> None:
        self.layout, self.values, self.tp = layout, values, layout.tp
        self.tp_rank, _, _, self.stage = layout.coordinates(rank)
        index = (rank - layout.first_rank) % (layout.tp * layout.cp * layout.dp)
        self.etp = layout.tp if layout.etp is None else layout.etp
        self.etp_rank = index % self.etp
        self.ep_rank = index // self.etp % layout.ep
        self.te = layout.transformer_impl == "transformer_engine"

    def params(self) -> Params:
        layout, found = self.layout, Params()
        per_chunk = layout.shape.num_layers // (layout.pp * layout.vpp)
        for chunk in range(layout.vpp):
            prefix = f"model{chunk}." if layout.vpp > 1 else ""
            first = (chunk * layout.pp + self.stage) * per_chunk
            for local in range(per_chunk):
                layer = self.layer(f"model.layers.{first + local}.")
                for name, value in layer.items():
                    found[f"{prefix}decoder.layers.{local}.{name}"] = value
        first_chunk, last_chunk = ("model0.", f"model{layout.vpp - 1}.")
        if layout.vpp == 1:
            first_chunk = last_chunk = ""
        embedding = "model.embed_tokens.weight"
        if self.stage == 0:
            found[f"{first_chunk}embedding.word_embeddings.weight"] = self.vocabulary(embedding)
        if self.stage == layout.pp - 1:
            norm = self.values["model.norm.weight"]
            found[f"{last_chunk}decoder.final_layernorm.weight"] = norm.clone()
            tied = layout.shape.tie_word_embeddings
            if not tied or layout.pp > 1:
                head = self.vocabulary(embedding if tied else "lm_head.weight")
                found[f"{last_chunk}output_layer.weight"] = head
        return found

    def vocabulary(self, name: str) -> Tensor:
        return self.column(pad_rows(self.values[name], self.layout.padded_vocab))

    def column(self, weight: Tensor) -> Tensor:
        return weight.chunk(self.tp, 0)[self.tp_rank].clone()

    def row(self, weight: Tensor) -> Tensor:
        return weight.chunk(self.tp, 1)[self.tp_rank].clone()

    def layer(self, prefix: str) -> Params:
        hf = {n.removeprefix(prefix): v for n, v in self.values.items() if n.startswith(prefix)}
        found = self.latent(hf) if "self_attn.kv_b_proj.weight" in hf else self.attention(hf)
        found["self_attention.linear_proj.weight"] = self.row(hf["self_attn.o_proj.weight"])
        norm = hf["post_attention_layernorm.weight"].clone()
        if "mlp.gate.weight" in hf:
            return found | {"pre_mlp_layernorm.weight": norm} | self.mixture(hf)
        name = "mlp.linear_fc1.layer_norm_weight" if self.te else "pre_mlp_layernorm.weight"
        return found | {name: norm} | self.gated(hf, "mlp.", "mlp.")

    def attention(self, hf: Params) -> Params:
        name = "self_attention.linear_qkv.layer_norm_weight"
        found = {name if self.te else "input_layernorm.weight": hf["input_layernorm.weight"]}
        for kind in ("weight", "bias"):
            parts = [hf.get(f"self_attn.{part}_proj.{kind}") for part in "qkv"]
            if parts[0] is None:
                continue
            groups, inner = self.layout.shape.num_kv_heads, parts[0].shape[1:]
            fused = torch.cat([part.view(groups, -1, *inner) for part in parts], 1)
            found[f"self_attention.linear_qkv.{kind}"] = self.column(fused.reshape(-1, *inner))
        for part in "qk":
            if f"self_attn.{part}_norm.weight" in hf:
                norm = hf[f"self_attn.{part}_norm.weight"]
                found[f"self_attention.{part}_layernorm.weight"] = norm
        return {name: value.clone() for name, value in found.items()}

    def latent(self, hf: Params) -> Params:
        down = (lambda weight: weight.clone()) if self.te else self.column
        found = {"input_layernorm.weight": hf["input_layernorm.weight"].clone()}
        for part, kv in (("q", "kv_a_proj_with_mqa"), ("kv", "kv_a_proj_with_mqa")):
            low = f"self_attn.{'q_a_proj' if part == 'q' else kv}.weight"
            norm = f"linear_{part}_up_proj.layer_norm_weight"
            norm = norm if self.te else f"{part}_layernorm.weight"
            up = self.column(hf[f"self_attn.{part}_b_proj.weight"])
            found |= {
                f"self_attention.linear_{part}_down_proj.weight": down(hf[low]),
                f"self_attention.{norm}": hf[f"self_attn.{part}_a_layernorm.weight"].clone(),
                f"self_attention.linear_{part}_up_proj.weight": up,
            }
        return found

    def gated(self, hf: Params, source: str, target: str) -> Params:
        gate, up, down = (hf[f"{source}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return {
            f"{target}linear_fc1.weight": torch.cat([self.column(gate), self.column(up)]),
            f"{target}linear_fc2.weight": self.row(down),
        }

    def mixture(self, hf: Params) -> Params:
        found = {"mlp.router.weight": hf["mlp.gate.weight"].clone()}
        if "mlp.gate.e_score_correction_bias" in hf:
            bias = hf["mlp.gate.e_score_correction_bias"]
            found["mlp.router.expert_bias"] = bias.clone()
        if "mlp.shared_experts.gate_proj.weight" in hf:
            found |= self.gated(hf, "mlp.shared_experts.", "mlp.shared_experts.")
        count = self.layout.shape.moe.num_experts // self.layout.ep
        for j in range(count):
            source = f"mlp.experts.{self.ep_rank * count + j}."
            gate, up, down = (hf[f"{source}{part}_proj.weight"] for part in ("gate", "up", "down"))
            halves = [half.chunk(self.etp, 0)[self.etp_rank] for half in (gate, up)]
            names = [f"mlp.experts.local_experts.{j}.linear_fc{i}.weight" for i in (1, 2)]
            if self.layout.grouped_experts:
                names = [f"mlp.experts.linear_fc{i}.weight{j}" for i in (1, 2)]
            found[names[0]] = torch.cat(halves)
            found[names[1]] = down.chunk(self.etp, 1)[self.etp_rank].clone()
        return found


def execute(
    steps: ReshardPlan,
    src: Mapping[int, Params],
    dst: Mapping[int, Params],
    zero_padding: bool = True,
) -> None:
    """Run a plan, every rank by its own share: all of a bucket is read before any is written."""
    shares = {rank: steps.share(rank) for rank in src.keys() | dst.keys()}
    for rank, params in dst.items():
        for view in padding_of(steps.dst, rank, params):
            if zero_padding:
                view.zero_()
    for bucket in range(steps.num_buckets):
        sent, writes = {}, []
        for rank, share in shares.items():
            for copy in share[bucket]:
                side = dst if copy.forwarded else src
                if copy.src_rank == rank:
                    value = view_of(side[rank][copy.src_param], copy.src_box)
                    assert copy not in sent
                    sent[copy] = value.to(dst[copy.dst_rank][copy.dst_param].dtype).clone()
                if copy.dst_rank == rank:
                    writes.append(copy)
        assert len(sent) == len(writes)
        for copy in writes:
            view_of(dst[copy.dst_rank][copy.dst_param], copy.dst_box).copy_(sent[copy])
