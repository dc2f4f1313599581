"""Parameters of one rank of a Megatron role, and what its optimizer keeps of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from mrl.config.plan import ParallelLayout
from mrl.config.roles import split_layers
from mrl.config.schema import LoraConfig, MegatronConfig, OptimConfig
from mrl.config.stages import Chunks
from mrl.resharding.families import Entry, ModelShape
from mrl.resharding.vocab import padded_vocab

_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_LORA_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True)
class Weights:
    """Elements on one rank: those every tensor-parallel group holds, and the experts'."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """Count all."""
        return self.dense + self.experts


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one role on one rank."""

    params: float
    grads: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum the parts."""
        return self.params + self.grads + self.optimizer


def entry_elements(entry: Entry, shape: ModelShape) -> int:
    """Count the elements of an entry, of one expert where it has experts."""
    return sum(prod(shape.dims[dim] for dim in tensor.dims) for tensor in entry.logical)


def model_elements(shape: ModelShape) -> int:
    """Count the parameters of a model with its head."""
    family = shape.family
    found = sum(entry_elements(e, shape) for e in (family.embedding, family.final_norm))
    found += 0 if shape.tie_word_embeddings else entry_elements(family.lm_head, shape)
    for layer, count in layer_kinds(shape, range(shape.num_layers)):
        for entry in shape.layer_entries(layer):
            experts = shape.dims["experts"] if entry.experts else 1
            found += count * experts * entry_elements(entry, shape)
    return found


def layer_kinds(shape: ModelShape, layers: Iterable[int]) -> list[tuple[int, int]]:
    """Give one layer of each kind (dense, with experts) among `layers`, and how many are alike."""
    kinds: dict[bool, list[int]] = {}
    for layer in layers:
        kinds.setdefault(shape.has_experts(layer), []).append(layer)
    return [(alike[0], len(alike)) for alike in kinds.values()]


class RoleWeights:
    """The parameters of a role, stage by stage."""

    def __init__(
        self, shape: ModelShape, megatron: MegatronConfig, layout: ParallelLayout, has_head: bool
    ) -> None:
        self._shape, self._layout, self._has_head = shape, layout, has_head
        self.chunks: Chunks = split_layers(megatron, shape.num_layers)
        self._bytes = 4 if megatron.dtype == "float32" else 2
        self._distributed = megatron.use_distributed_optimizer
        self._stages = [self._stage(stage) for stage in range(layout.pp)]

    def stage(self, stage: int) -> Weights:
        """Give the parameters of a pipeline stage."""
        return self._stages[stage]

    def _stage(self, stage: int) -> Weights:
        shape, layout = self._shape, self._layout
        dense = experts = 0.0
        layers = [layer for chunk in self.chunks[stage] for layer in chunk]
        for layer, alike in layer_kinds(shape, layers):
            for entry in shape.layer_entries(layer):
                count = alike * entry_elements(entry, shape)
                if entry.experts:
                    experts += count * shape.dims["experts"] / (layout.ep * layout.etp)
                else:
                    dense += count / (1 if entry.kind == "replicated" else layout.tp)
        embedding = padded_vocab(shape.vocab_size, layout.tp) * shape.hidden_size / layout.tp
        if stage == 0:
            dense += embedding
        if stage == layout.pp - 1:
            dense += shape.hidden_size  # the last norm; a value head is as small
            if self._has_head and not (shape.tie_word_embeddings and layout.pp == 1):
                dense += embedding
        return Weights(dense, experts)

    def adapter(self, stage: int, lora: LoraConfig) -> Weights:
        """Count the elements of adapters: rank x (in + out) of every adapted matrix."""
        shape, layout, rank = self._shape, self._layout, lora.rank
        hidden, query = shape.hidden_size, shape.num_heads * shape.head_dim
        kv = 2 * shape.num_kv_heads * shape.head_dim
        layers = [layer for chunk in self.chunks[stage] for layer in chunk]
        dense = experts = 0.0
        for layer, alike in layer_kinds(shape, layers):
            has_experts = shape.has_experts(layer)
            width = shape.moe.ffn_size if shape.moe and has_experts else shape.ffn_size
            # the side that tensor parallelism cuts, and the one that it does not
            sides = dict(
                zip(
                    _LORA_LAYERS,
                    ((query + kv, hidden), (query, hidden), (2 * width, hidden), (width, hidden)),
                    strict=True,
                )
            )
            for name in lora.target_modules:
                cut, whole = sides[name]
                if has_experts and "fc" in name and shape.moe:
                    count = alike * shape.moe.num_experts / layout.ep
                    experts += count * rank * (cut / layout.etp + whole)
                else:
                    dense += alike * rank * (cut / layout.tp + whole)
        return Weights(dense, experts)

    def state(
        self, stage: int, ranks: int, optim: OptimConfig | None, lora: LoraConfig | None = None
    ) -> State:
        """Give the bytes of a stage's rank among `ranks` of the role; no `optim`: frozen.

        With adapters (`lora`) they alone have gradients and an optimizer.
        """
        weights = self._stages[stage]
        trained = weights
        params = weights.total * self._bytes
        if lora is not None and lora.rank:
            trained = self.adapter(stage, lora)
            params += trained.total * self._bytes
        if optim is None:
            return State(params, 0.0, 0.0)
        layout = self._layout
        grads = trained.total * _SIZE[optim.main_grads_dtype]
        each = _adam_bytes(optim, self._bytes)
        expert_copies = max(ranks / layout.pp / (layout.etp * layout.ep), 1)
        copies = layout.dp * layout.cp
        if not self._distributed:
            copies = expert_copies = 1
        return State(
            params, grads, each * (trained.dense / copies + trained.experts / expert_copies)
        )


def _adam_bytes(optim: OptimConfig, param_bytes: int) -> float:
    """Give the bytes of Adam's state a parameter, its main copy among them."""
    moments = _SIZE[optim.exp_avg_dtype] + _SIZE[optim.exp_avg_sq_dtype]
    main = _SIZE[optim.main_params_dtype] if param_bytes == 2 else 0
    if optim.use_precision_aware_optimizer and optim.main_params_dtype == "fp32":
        main = 2  # the 16 bits that the bfloat16 parameter lacks (Transformer Engine)
    return moments + main
