"""A role's weights: their layout over the ranks, loading from files, export to files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.resharding.families import ModelShape
from mrl.resharding.hf import hf_layout
from mrl.resharding.hf_files import HFWriter, load_into
from mrl.resharding.layout import Layout, whole
from mrl.resharding.lora import ADAPTER
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.planner import plan
from mrl.resharding.torch_dist import slabs
from mrl.resharding.transports import Distributed
from mrl.resharding.vocab import padded_vocab
from mrl.workers.megatron.build import Precision
from mrl.workers.megatron.groups import ParallelGroups
from mrl.workers.megatron.lora import Adapters, chunk_prefix
from mrl.workers.megatron.places import Place, Places, alone, places

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
        self.chunks, self.shape, self.head, self.groups = chunks, shape, head, groups
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

    def names(self) -> dict[int, str]:
        """Give the names of all parameters by their `id`, those of adapters among them."""
        adapters = self.adapters.params() if self.adapters is not None else {}
        return {id(param): name for name, param in {**self._all(), **adapters}.items()}

    @cached_property
    def places(self) -> Places:
        """Say where checkpoints in Megatron's format keep what this rank holds of what is trained.

        An adapter's tensors have their PEFT names there.
        """
        if self.adapters is not None:
            layout = self.adapters.layout
            every = [alone(name, info.shape) for name, info in layout.tensors.items()]
            return places(layout, every, self.rank)
        found = places(self.layout, slabs(self.shape), self.rank)
        head = self._value_head()
        if head is not None:
            slab = alone(_HEAD_PARAM, head.shape)
            box = whole(head.shape)
            found[self._head_param] = [Place(box, slab, box, self._last_stage)]
        return found

    def export(
        self, folder: Path, source: Path, later: bool = False
    ) -> Callable[[], Collection[Path]]:
        """Write a Hugging Face folder in the parameters' dtype, adapters merged; all take part.

        `source` gives config.json and the tokenizer. Gives what lists this rank's files, and which,
        `later`, writes them first, from any thread.
        """
        dtype = next(iter(self.layout.tensors.values())).dtype
        writer = HFWriter(
            folder, source, self.layout, self.rank, self.params(), Distributed(), dtype=dtype
        )
        with self.merged():
            if later:
                write: Callable[[], None] | None = writer.collect()
            else:
                write = None
                writer.write()
        weight, head = self._value_head(), folder / VALUE_HEAD_FILE
        if weight is not None and self.rank == self._last_stage:
            kept = {"weight": weight.detach().to("cpu", copy=True)}
        else:
            kept = {}

        def finish() -> Collection[Path]:
            if write is not None:
                write()
            if kept:
                folder.mkdir(parents=True, exist_ok=True)
                save_file(kept, head)
            return [*writer.own_files, *([head] if kept else [])]

        if later:
            return finish
        files = finish()
        dist.barrier()
        return lambda: files

    @property
    def _last_stage(self) -> int:
        """Give the first rank of the last stage, on all of whose ranks the same value head is."""
        groups = self.groups
        return (groups.pp - 1) * groups.tp * groups.cp * groups.dp

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
