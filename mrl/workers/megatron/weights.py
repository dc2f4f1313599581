"""A role's weights: their layout over the ranks, loading from files, export to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.resharding.families import ModelShape
from mrl.resharding.hf import hf_layout
from mrl.resharding.hf_files import HFWriter, load_into
from mrl.resharding.layout import Layout
from mrl.resharding.lora import ADAPTER
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.planner import plan
from mrl.resharding.transports import Distributed
from mrl.resharding.vocab import padded_vocab
from mrl.workers.megatron.build import Precision
from mrl.workers.megatron.groups import ParallelGroups
from mrl.workers.megatron.lora import Adapters, chunk_prefix

VALUE_HEAD_FILE = "value_head.safetensors"
_HEAD_PARAM = "output_layer.weight"


class Weights:
    """The weights of one role, seen by all its ranks together."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        precision: Precision,
        groups: ParallelGroups,
        head: str,
    ) -> None:
        """Describe the weights of a built model; every rank of the job takes part."""
        self.chunks, self.shape, self.head = chunks, shape, head
        self.adapters: Adapters | None = None
        self.rank = dist.get_rank()
        self.layout: Layout = MegatronLayout(
            shape,
            tp=groups.tp,
            pp=groups.pp,
            dp=groups.dp,
            cp=groups.cp,
            vpp=groups.vpp,
            ep=groups.ep,
            etp=groups.etp,
            padded_vocab=padded_vocab(shape.vocab_size, groups.tp),
            transformer_impl=precision.transformer_impl,
            grouped_experts=chunks[0].config.moe_grouped_gemm,
            layers_of_chunk=_layers_of_chunk(chunks, groups),
            has_lm_head=head == "lm",
            dtype=str(precision.dtype).removeprefix("torch."),
        ).layout()

    def merged(self) -> AbstractContextManager[None]:
        """Let the parameters be, inside the block, those of the model with its adapters."""
        return self.adapters.merged() if self.adapters is not None else nullcontext()

    def unadapted(self) -> AbstractContextManager[None]:
        """Let the model compute without its adapters inside the block."""
        return self.adapters.off() if self.adapters is not None else nullcontext()

    def params(self) -> Mapping[str, Tensor]:
        """Give this rank's parameters that a checkpoint knows, by Megatron's names.

        Those of adapters are not among them.
        """
        params = self._all()
        if self.head == "value":
            params.pop(self._head_param, None)
        return params

    @property
    def _head_param(self) -> str:
        return chunk_prefix(len(self.chunks) - 1, len(self.chunks)) + _HEAD_PARAM

    def _all(self) -> dict[str, Tensor]:
        count = len(self.chunks)
        return {
            chunk_prefix(index, count) + name: param
            for index, chunk in enumerate(self.chunks)
            for name, param in chunk.named_parameters()
            if f".{ADAPTER}." not in name
        }

    def load(self, folder: Path) -> None:
        """Fill the parameters from a Hugging Face folder, reading only this rank's slices.

        A value head that the folder does not hold stays as it was drawn.
        """
        source = hf_layout(folder, self.shape, has_lm_head=self.head == "lm")
        load_into(folder, plan(source, self.layout), self.rank, self.params())
        weight = self._value_head()
        if weight is not None and (folder / VALUE_HEAD_FILE).exists():
            stored = load_file(folder / VALUE_HEAD_FILE)
            with torch.no_grad():
                weight.copy_(stored["weight"])

    def export(self, folder: Path, source: Path) -> None:
        """Write a Hugging Face folder in the parameters' dtype, adapters merged; all take part.

        `source` gives config.json and the tokenizer.
        """
        dtype = next(iter(self.layout.tensors.values())).dtype
        writer = HFWriter(
            folder, source, self.layout, self.rank, self.params(), Distributed(), dtype=dtype
        )
        with self.merged():
            writer.write()
        weight = self._value_head()
        # every rank of the last stage holds the same head: the first of the stage writes it
        holders: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(holders, weight is not None)
        if weight is not None and self.rank == holders.index(True):
            save_file({"weight": weight.detach().cpu()}, folder / VALUE_HEAD_FILE)
        dist.barrier()

    def _value_head(self) -> Tensor | None:
        if self.head != "value":
            return None
        return self._all().get(self._head_param)


def _layers_of_chunk(
    chunks: Sequence[GPTModel], groups: ParallelGroups
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Read the global layer indices of every stage's chunks from the live modules."""
    own = tuple(tuple(layer.layer_number - 1 for layer in chunk.decoder.layers) for chunk in chunks)
    stages: list[tuple[tuple[int, ...], ...]] = [()] * groups.pp
    dist.all_gather_object(stages, own, group=groups.collection.pp)
    return tuple(stages)
