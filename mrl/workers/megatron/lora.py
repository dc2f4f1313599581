"""Low-rank adapters on Megatron's linear layers (Hu et al. 2021, section 4.1).

An adapted layer computes y = W x + (alpha / rank) B A x, and only A and B are trained. Of a
layer whose output TP cuts, A is whole on every rank and B cut with W; where TP cuts the input, A is
cut with W and B whole. Either way only the low-rank activations cross ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from mrl.config.schema import LoraConfig
from mrl.resharding.layout import Layout
from mrl.resharding.lora import ADAPTABLE, ADAPTER, COLUMN_CUT, adapter_layout, linear_of
from mrl.workers.megatron.groups import ParallelGroups
from mrl.workers.megatron.lora_files import load_adapter, save_adapter

# How the low-rank activations [s, b, rank] get from the cut of a layer's input to that of its
# output, by whether TP cuts the output and whether sequence parallelism is in force.
_CROSSINGS: Mapping[tuple[bool, bool], Callable[..., Tensor]] = {
    (True, True): gather_from_sequence_parallel_region,
    (True, False): copy_to_tensor_model_parallel_region,
    (False, True): reduce_scatter_to_sequence_parallel_region,
    (False, False): reduce_from_tensor_model_parallel_region,
}
_SEED_STRIDE = 1_000_003  # between the seeds of two layers' A


class LowRankAdapter(nn.Module):
    """The A and B of one linear layer on one rank."""

    def __init__(
        self,
        weight: Tensor,
        cut_output: bool,
        lora: LoraConfig,
        groups: ParallelGroups,
        sequence_parallel: bool,
        seed: int,
    ) -> None:
        """Draw A as PEFT does and set B to zero: the layer computes what it did without.

        A is drawn whole from `seed` and then cut, so it does not depend on the layout. `weight`
        [out, in] is the layer's own part of W.
        """
        super().__init__()
        rows, columns = weight.shape
        tp, self.scale = groups.tp, lora.alpha / lora.rank
        width = columns if cut_output else columns * tp
        whole = torch.empty(lora.rank, width)
        bound = 1 / math.sqrt(width)  # kaiming_uniform_ with a = sqrt(5)
        whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        own = whole if cut_output else whole.chunk(tp, dim=1)[groups.tp_rank]
        self.lora_A = nn.Parameter(own.to(weight).contiguous())
        self.lora_B = nn.Parameter(weight.new_zeros(rows, lora.rank))
        # Megatron counts a cut parameter's gradient on every rank, another's once, and sums
        # over TP what each rank computes from its own part of the sequence alone.
        is_cut, is_whole = (self.lora_B, self.lora_A) if cut_output else (self.lora_A, self.lora_B)
        set_tensor_model_parallel_attributes(is_cut, True, 0 if cut_output else 1, 1)
        is_whole.sequence_parallel = sequence_parallel
        self._cross = partial(_CROSSINGS[cut_output, sequence_parallel], group=groups.collection.tp)
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        """Give (alpha / rank) B A x for x [s, b, in], cut as the layer's input and output are."""
        low = self._cross(F.linear(x, self.lora_A))
        return F.linear(self.scale * low, self.lora_B)

    def merged(self, weight: Tensor) -> Tensor:
        """Give W + (alpha / rank) B A [out, in], summed in float32 and rounded once."""
        a, b = self.lora_A.float(), self.lora_B.float()
        return torch.addmm(weight.float(), b, a, alpha=self.scale).to(weight.dtype)


def _add(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Any, Any]) -> Any:
    """Add the adapter's part to what a Megatron linear layer gives: (y, bias)."""
    x, (y, bias) = inputs[0], output
    if isinstance(y, tuple):  # the layer normalises its input itself, and gives that too
        y, x = y
    adapter = getattr(module, ADAPTER)
    return (y + adapter(x) if adapter.is_on else y), bias


@dataclass(frozen=True, slots=True)
class _Adapted:
    """An adapted layer by its name among the rank's parameters."""

    name: str
    linear: nn.Module
    adapter: LowRankAdapter


class Adapters:
    """All adapters of one model, of which every rank holds its part."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        lora: LoraConfig,
        model: Layout,
        groups: ParallelGroups,
        model_path: str,
    ) -> None:
        """Freeze the model and adapt `lora.target_modules`; `model` lays its weights out.

        Call after the weights are loaded and before an optimizer takes them. Starts from
        `lora.adapter_path` where that is given. Raises ValueError for an adapter that does not
        fit.
        """
        self.lora, self.model_path = lora, model_path
        self.layout = adapter_layout(model, lora.rank, lora.target_modules)
        self._layers = list(_attach(chunks, lora, groups))
        self._frozen: dict[str, Tensor] = {}  # the adapted matrices, on the host
        if lora.adapter_path is not None:
            self.load(Path(lora.adapter_path))

    def params(self) -> dict[str, Tensor]:
        """Give this rank's A's and B's by the names that the layout has for them."""
        return {
            f"{layer.name}.{ADAPTER}.{name}": param
            for layer in self._layers
            for name, param in layer.adapter.named_parameters()
        }

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Let the model's weights hold the sum of base and adapter inside the block, in place.

        Afterwards the base is what it was, bit for bit: it is copied back from the host, where a
        copy is kept from the first time on. Nothing may be computed inside the block.
        """
        for layer in self._layers:
            if layer.name not in self._frozen:
                self._frozen[layer.name] = _host_copy(layer.linear.weight)
        try:
            with torch.no_grad():
                for layer in self._layers:
                    weight = layer.linear.weight
                    weight.copy_(layer.adapter.merged(weight))
            yield
        finally:
            with torch.no_grad():
                for layer in self._layers:
                    layer.linear.weight.copy_(self._frozen[layer.name], non_blocking=True)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute what it did before it was adapted inside the block."""
        for layer in self._layers:
            layer.adapter.is_on = False
        try:
            yield
        finally:
            for layer in self._layers:
                layer.adapter.is_on = True

    def save(self, folder: Path) -> list[Path]:
        """Write the adapter as a PEFT folder; all ranks take part. Gives this rank's files."""
        return save_adapter(folder, self.layout, self.params(), self.lora, self.model_path)

    def load(self, folder: Path) -> None:
        """Fill A and B from a PEFT folder; raises ValueError for one that does not fit."""
        load_adapter(folder, self.layout, self.params(), self.lora)


def _attach(
    chunks: Sequence[GPTModel], lora: LoraConfig, groups: ParallelGroups
) -> Iterator[_Adapted]:
    """Freeze the model chunks and put an adapter beside each target."""
    for index, chunk in enumerate(chunks):
        chunk.requires_grad_(False)
        prefix = chunk_prefix(index, len(chunks))
        config = chunk.config
        if config.recompute_granularity is not None and chunk.pre_process:
            # Recomputation trains nothing inside a block unless the block's input requires a
            # gradient, which a frozen embedding's output does not.
            chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
        for local_index, layer in enumerate(chunk.decoder.layers):
            for name, linear in list(layer.named_modules()):
                kind = linear_of(f"{name}.weight")
                if kind not in lora.target_modules:
                    continue
                layer_seed = groups.seed + layer.layer_number * _SEED_STRIDE
                adapter = LowRankAdapter(
                    linear.weight,
                    kind in COLUMN_CUT,
                    lora,
                    groups,
                    config.sequence_parallel,
                    layer_seed * len(ADAPTABLE) + ADAPTABLE.index(kind),
                )
                linear.add_module(ADAPTER, adapter)
                linear.register_forward_hook(_add)
                if hasattr(linear, "return_layernorm_output"):  # Transformer Engine's
                    linear.return_layernorm_output = True
                yield _Adapted(f"{prefix}decoder.layers.{local_index}.{name}", linear, adapter)


def chunk_prefix(chunk: int, count: int) -> str:
    """Tell the chunks of an interleaved stage apart, as Megatron's checkpoints do."""
    return f"model{chunk}." if count > 1 else ""


def _host_copy(weight: Tensor) -> Tensor:
    host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
    return host.copy_(weight.detach())
