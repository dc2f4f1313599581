"""Mixture of experts: balancing losses, loads, frozen routers and replayed choices.

The losses of an optimizer step, added to the role's own for each layer with experts, are means
over the step's T tokens; padding is no token. E experts, K of them chosen for a token.

- Balance (Fedus et al. 2021, Switch Transformer, section 2.2): coefficient times the sum over
  groups g of T_g / T * E * sum_i f_gi P_gi, where f_gi is the share of the choices in the group
  that fell on expert i and P_gi the mean router probability of i. A group is a micro-batch
  (aux_loss), a sequence (seq_aux_loss), or the step (global_aux_loss; Qiu et al. 2025, section 3:
  f then counts the micro-batches of all data-parallel parts up to the present one, and with
  replayed routing, which is known before, the whole step).
- z (Zoph et al. 2022, ST-MoE, section 3.3): coefficient times the mean of the squared logsumexp
  of a token's router logits.

f carries no gradient. Only aux_loss, and global_aux_loss without replay, depend on how rows are
cut into micro-batches, by f alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from mrl.config.schema import MegatronConfig
from mrl.resharding.families import ModelShape
from mrl.types import Ragged, Sequences
from mrl.workers.megatron.groups import ParallelGroups
from mrl.workers.megatron.rows import PackedRow, RowCut

METRICS = ("moe_aux_loss", "moe_z_loss", "moe_max_violation")
_BYTE = 256  # experts that a byte can name; NCCL sums no 16-bit integers


@dataclass(slots=True)
class RoutedRow:
    """A micro-batch as its routers see it: t tokens on this rank, of T in the row."""

    position: Tensor  # [t] int64 in the row, on the CPU
    sequence: Tensor  # [t] int64: which sequence of the micro-batch; padding: any
    real: Tensor  # [t] float32: 0 for padding
    own: Tensor  # row positions of the sequences' tokens, end to end, on the CPU
    lengths: Tensor  # [N] int64, tokens of each sequence, on the CPU
    length: int  # T
    choices: Tensor | None  # [t, layers with experts of this rank, K]: to be replayed
    chosen: dict[int, Tensor] = field(default_factory=dict)  # layer to [t, K], as recorded


class Router(TopKRouter):
    """Megatron's router with losses that carry the step's token count, and replay of choices."""

    experts: Experts
    slot: int  # among the routers of this rank

    def adopt(self, experts: Experts, slot: int) -> None:
        """Join the routers of a role."""
        self.experts, self.slot = experts, slot
        self.waiting: deque[RoutedRow] = deque()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for logits [t, 1, E]: probabilities and choices, [t, E] each."""
        row = self._row()
        replay = self.router_replay
        if replay is not None:
            replay.clear_indices()
            replay.set_router_replay_action(RouterReplayAction.RECORD)
            if row.choices is not None:
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
                replay.set_target_indices(row.choices[:, self.slot].long())
        probs, chosen = super().routing(logits)
        if replay is not None and self.experts.records and not self.experts.training:
            recorded = replay.get_recorded_indices()  # none where a choice was repeated
            row.chosen[self.layer_number - 1] = (
                recorded if row.choices is None else row.choices[:, self.slot]
            )
        if torch.is_grad_enabled():
            logits = logits.view(-1, logits.shape[-1])
            probs = self.experts.balance(self.slot, row, logits, probs, chosen)
        return probs, chosen

    def _row(self) -> RoutedRow:
        """Give the micro-batch of this pass.

        A training pass without gradients comes again at its turn in the backward pass, in order,
        when other micro-batches have begun already.
        """
        if torch.is_grad_enabled() and self.waiting:
            return self.waiting.popleft()
        row = self.experts.row
        assert row is not None
        if self.experts.training and not torch.is_grad_enabled():
            self.waiting.append(row)
        return row


def use_router(block: TransformerBlockSubmodules) -> None:
    """Build `Router` into the layers with experts of a specification."""
    for spec in block.layer_specs:
        mlp = spec.submodules.mlp
        if isinstance(mlp, partial) and mlp.func is MoELayer:
            mlp.keywords["submodules"].router = Router


def expert_config(shape: ModelShape, layout: MegatronConfig, uses_te: bool) -> dict[str, Any]:
    """Say in Megatron's settings how experts are laid out and chosen.

    Megatron's own balancing losses stay off: they are scaled for a loss that is divided by its
    tokens afterwards.
    """
    # Megatron's default dispatcher refuses variable lengths, with experts or without
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    if shape.moe is None:
        return dispatcher
    grouped = uses_te if layout.moe_grouped_gemm is None else layout.moe_grouped_gemm
    if grouped and not uses_te:
        raise ValueError(
            "megatron.moe_grouped_gemm=true needs transformer_impl=transformer_engine: "
            "use moe_grouped_gemm=false or null"
        )
    return {
        **dispatcher,
        "num_moe_experts": shape.moe.num_experts,
        "moe_ffn_hidden_size": shape.moe.ffn_size,
        "moe_layer_freq": [int(shape.has_experts(i)) for i in range(shape.num_layers)],
        "moe_router_topk": shape.moe.top_k,
        # the chosen weights sum to 1 exactly where the softmax comes after the choice
        "moe_router_pre_softmax": not shape.moe.norm_top_k,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": uses_te,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
    }


class Experts:
    """The routers of a role on one rank, over all its chunks.

    `row` is the micro-batch that the next pass is about; a step is bounded by `begin` and `end`.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        layout: MegatronConfig,
        groups: ParallelGroups,
        replay: str,
    ) -> None:
        """Take the routers of built chunks; frozen ones get no gradient from here on.

        `replay` is actor.router_replay.mode.
        """
        assert shape.moe is not None
        self.moe, self.layout, self.groups = shape.moe, layout, groups
        self.routers: list[Router] = []
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    layer.mlp.router.adopt(self, len(self.routers))
                    self.routers.append(layer.mlp.router)
        if layout.freeze_moe_router:
            for router in self.routers:
                router.weight.requires_grad_(False)
        if replay != "disabled":
            for router in self.routers:
                router.router_replay = RouterReplay()
            # Megatron lists every router of the process there, whatever its role
            RouterReplay.clear_global_router_replay_instances()
        self.records = replay == "R2"
        self.device = next(chunks[0].parameters()).device
        self.row: RoutedRow | None = None
        self.training = False
        self._tokens = 1.0

    @property
    def _slots(self) -> list[int]:
        """Place each router of this rank among the model's layers with experts."""
        return [self.moe.layers.index(router.layer_number - 1) for router in self.routers]

    def place(
        self, row: PackedRow, cut: RowCut, sequences: Sequences, routing: Ragged | None
    ) -> RoutedRow:
        """Tell the routers about a packed micro-batch of `sequences`.

        `routing` [tokens, layers with experts, K] makes them repeat those choices.
        """
        assert row.part is not None
        position = row.part
        if self.groups.tp > 1:
            position = position.chunk(self.groups.tp)[self.groups.tp_rank]
        sequence = torch.zeros(row.length, dtype=torch.int64)
        own, start = [], 0
        for index, length in enumerate(sequences.tokens.lengths.tolist()):
            own.append(torch.arange(start, start + length))
            sequence[start : start + length] = index
            start += cut.padded(length)
        real, filled = torch.zeros(row.length), torch.cat([torch.arange(0), *own])
        real[filled] = 1.0
        choices = None
        if routing is not None:
            # padding may go anywhere, to K experts
            whole = torch.arange(self.moe.top_k, dtype=routing.values.dtype)
            whole = whole.repeat(row.length, len(self._slots), 1)
            whole[filled] = routing.values[:, self._slots]
            choices = whole[position].to(self.device)
        return RoutedRow(
            position,
            sequence[position].to(self.device),
            real[position].to(self.device),
            filled,
            sequences.tokens.lengths,
            row.length,
            choices,
        )

    def begin(self, tokens: int, routing: Ragged | None) -> None:
        """Begin an optimizer step on `tokens` of this data-parallel part; all ranks call it.

        `routing` is what all of them will repeat.
        """
        dp, experts = self.groups.collection.dp, self.moe.num_experts
        total = torch.tensor(float(tokens), device=self.device)
        dist.all_reduce(total, group=dp)
        self._tokens, self.training = float(total), True
        self._sums = torch.zeros(len(self.routers), 2 + experts, device=self.device)
        self._loads = torch.zeros(len(self.routers), experts, device=self.device)
        self._loads_known = routing is not None
        if routing is not None:
            for slot, layer in enumerate(self._slots):
                chosen = routing.values[:, layer].reshape(-1).long()
                self._loads[slot] = chosen.bincount(minlength=experts).to(self._loads)
            dist.all_reduce(self._loads, group=dp)
        for router in self.routers:
            router.waiting.clear()

    def end(self) -> Mapping[str, float]:
        """End the step and give `METRICS`, the same on all ranks, means over layers.

        Losses are without their coefficients and given where those are set; a balance of 1 is
        perfect. A violation is how far the fullest expert's load is above the mean, relative to
        it (Wang et al. 2024, MaxVio of a global batch).
        """
        self.training, self.row = False, None
        sums = torch.zeros(len(self.moe.layers), self._sums.shape[1], device=self.device)
        sums[self._slots] = self._sums
        dist.all_reduce(sums)
        loads = sums[:, 2:]
        violation = (loads.amax(1) / loads.mean(1).clamp(min=1) - 1).mean()
        found = dict(zip(METRICS, [*sums[:, :2].mean(0).tolist(), float(violation)], strict=True))
        for name, coefficient in (
            ("moe_aux_loss", self.layout.moe_aux_loss_coeff),
            ("moe_z_loss", self.layout.moe_z_loss_coeff),
        ):
            if not coefficient:
                del found[name]
        return found

    def balance(
        self, slot: int, row: RoutedRow, logits: Tensor, probs: Tensor, chosen: Tensor
    ) -> Tensor:
        """Attach this rank's part of a layer's balancing losses to the routing probabilities."""
        layout, loss = self.layout, None
        counts = chosen * row.real[:, None]
        if layout.moe_aux_loss_coeff:
            aux = self._aux_loss(slot, row, logits, counts)
            loss = layout.moe_aux_loss_coeff * aux
            self._sums[slot, 0] += aux.detach()
        if layout.moe_z_loss_coeff:
            z = (logits.float().logsumexp(1).square() * row.real).sum() / self._tokens
            scaled = layout.moe_z_loss_coeff * z
            loss = scaled if loss is None else loss + scaled
            self._sums[slot, 1] += z.detach()
        self._sums[slot, 2:] += counts.sum(0)
        return probs if loss is None else MoEAuxLossAutoScaler.apply(probs, loss)

    def _aux_loss(self, slot: int, row: RoutedRow, logits: Tensor, counts: Tensor) -> Tensor:
        """Give this rank's part of the sum over groups: their T_g cancel but one."""
        kind, collection = self.layout.moe_router_load_balancing_type, self.groups.collection
        of_step = kind == "global_aux_loss"
        scores = logits.float().softmax(1) * row.real[:, None]
        if kind == "seq_aux_loss":
            shape = (max(len(row.lengths), 1), counts.shape[1])
            scores = scores.new_zeros(shape).index_add(0, row.sequence, scores)
            load = counts.new_zeros(shape).index_add(0, row.sequence, counts)
        else:
            scores, load = scores.sum(0, keepdim=True), counts.sum(0, keepdim=True)
        if not (of_step and self._loads_known):
            dist.all_reduce(load, group=collection.tp_dp_cp if of_step else collection.tp_cp)
        if of_step:
            if not self._loads_known:
                self._loads[slot] += load[0]
            load = self._loads[slot][None].clone()
        share = load / load.sum(1, keepdim=True).clamp(min=1)
        return self.moe.num_experts / self._tokens * (share * scores).sum()

    def collect(self, rows: Sequence[RoutedRow]) -> list[Ragged]:
        """Give the recorded choices of each micro-batch's tokens, uint8 or int32 on the CPU.

        Values are [tokens, layers with experts, K]; all ranks call it together.
        """
        dtype = torch.uint8 if self.moe.num_experts <= _BYTE else torch.int32
        slots = {router.layer_number - 1: slot for router, slot in zip(
            self.routers, self._slots, strict=True)}  # fmt: skip
        found = []
        for row in rows:
            size = (row.length, len(self.moe.layers), self.moe.top_k)
            whole = torch.zeros(size, dtype=dtype, device=self.device)
            position = row.position.to(self.device)
            for layer, chosen in row.chosen.items():
                whole[position, slots[layer]] = chosen.to(dtype)
            # every token of every layer is on one rank
            dist.all_reduce(whole, group=self.groups.collection.tp_cp)
            dist.all_reduce(whole, group=self.groups.collection.pp)
            own = whole.cpu()[row.own]
            found.append(Ragged(own, row.lengths))
        return found
