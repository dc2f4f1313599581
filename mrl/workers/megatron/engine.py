"""One Megatron role on one rank: forward passes and optimizer steps over packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import AutoConfig

from mrl.resharding.families import ModelShape
from mrl.types import Cuts, PolicyBatch, Ragged, Sequences, ValueBatch
from mrl.workers.megatron import optimizer_state
from mrl.workers.megatron.attention import Rotary
from mrl.workers.megatron.build import Precision, build_chunks, forget_rotary_tables
from mrl.workers.megatron.fp8 import row_multiple
from mrl.workers.megatron.fused_head import linear_log_probs
from mrl.workers.megatron.groups import ParallelGroups
from mrl.workers.megatron.heads import full_log_probs, join_columns, select_hidden
from mrl.workers.megatron.lora import Adapters
from mrl.workers.megatron.moe import Experts
from mrl.workers.megatron.offload import LOAD, READ, TRAIN, RoleMemory
from mrl.workers.megatron.optimizer import Trainer, Update
from mrl.workers.megatron.rows import PackedRow, RowCut, fill_blocks, pack
from mrl.workers.megatron.saving import Saving, Written, flush
from mrl.workers.megatron.weights import Weights
from mrl.workers.specs import RoleSpec

_WEIGHTS_FOLDER = "huggingface"
_ADAPTER_FOLDER = "adapter"

Sums = Mapping[str, Tensor]  # name to a sum over tokens or sequences, float32 scalars
# From what the head gives (log-probs and entropies [M], or values [M]) and the micro-batch's rows
# to the loss, already weighted by the global denominator, and sums to report.
Loss = Callable[[Any, Any], tuple[Tensor, Sums]]


class MegatronEngine:
    """A model part with its groups; all ranks of a role call the same method together."""

    def __init__(self, spec: RoleSpec, groups: ParallelGroups, device: torch.device) -> None:
        """Build the model, load its weights and, unless frozen, its optimizer."""
        self.spec, self.groups = spec, groups
        self.precision = Precision.of(spec.layout, device)
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
        self.shape = ModelShape.from_hf(config.to_dict())
        self.rotary = Rotary.of(config)
        with groups.active():
            self.chunks = build_chunks(
                self.shape,
                spec.layout,
                self.precision,
                groups,
                self.rotary,
                spec.head,
                config.initializer_range,
            )
            self.weights = Weights(self.chunks, self.shape, self.precision, groups, spec.head)
            self.weights.load(Path(spec.path))
            if spec.lora is not None:
                self.weights.adapters = Adapters(
                    self.chunks, spec.lora, self.weights.layout, groups, spec.path
                )
            self.experts: Experts | None = None
            if self.shape.moe is not None:
                self.experts = Experts(
                    self.chunks, self.shape, spec.layout, groups, spec.router_replay
                )
            self.trainer: Trainer | None = None
            if spec.optim is not None:
                self.trainer = Trainer(self.chunks, spec.layout, spec.optim, spec.total_steps)
            else:
                for chunk in self.chunks:
                    chunk.requires_grad_(False)
        self.memory = RoleMemory(self.chunks, self.trainer, spec.layout, device)
        self._saving: Saving | None = None
        self.config = self.chunks[0].config
        self.row_cut = RowCut(
            groups.cp,
            groups.cp_rank,
            zigzag=self.precision.transformer_impl == "transformer_engine",
            multiple_of=row_multiple(self.config),
        )

    @property
    def is_output_rank(self) -> bool:
        """Say whether this rank answers for its data-parallel part."""
        groups = self.groups
        return groups.is_last_stage and groups.tp_rank == 0 and groups.cp_rank == 0

    def log_probs(
        self, sequences: Sequences, cuts: Cuts, routing: Ragged | None = None
    ) -> tuple[Ragged, ...] | None:
        """Give log-probs and entropies of the response tokens, float32 on the CPU.

        Rows keep their order. None on ranks that do not answer. `routing` makes the routers
        repeat those choices; a role that records them (R2) gives them as a third column.
        """
        outputs = self._forward(sequences, cuts, routing)
        if outputs is None:
            return None
        order, columns = outputs
        return tuple(Ragged.in_order(column, order) for column in zip(*columns, strict=True))

    def values(self, sequences: Sequences, cuts: Cuts) -> Ragged | None:
        """Give values at the response tokens, float32 on the CPU; None where no answer is due."""
        outputs = self._forward(sequences, cuts)
        if outputs is None:
            return None
        order, columns = outputs
        return Ragged.in_order([values for (values,) in columns], order)

    def train(
        self, batch: PolicyBatch | ValueBatch, cuts: Cuts, loss: Loss
    ) -> tuple[dict[str, float], Update]:
        """Take one optimizer step on this rank's part of a mini-batch.

        Gives the sums that `loss` reported over the micro-batches (empty on ranks that do not
        answer) and the update.
        """
        trainer = self.trainer
        assert trainer is not None, f"{self.spec.name} is frozen"
        parts = [batch.select(indices) for indices in cuts]
        packed = self._pack(
            [part.sequences for part in parts],
            [part.routing if isinstance(part, PolicyBatch) else None for part in parts],
        )
        # at once and before: a copy from the host between two micro-batches would wait for both
        rows = list(zip(packed, [part.to(self.precision.device) for part in parts], strict=True))
        sums: dict[str, float] = {}
        with self.groups.active():
            self.memory.enter(TRAIN)
            trainer.zero_grad()
            if self.experts is not None:
                self.experts.begin(
                    int(batch.sequences.tokens.lengths.sum()),
                    batch.routing if isinstance(batch, PolicyBatch) else None,
                )
            reports = self._run(rows, trainer.chunks, loss, forward_only=False)
            if self.experts is not None:
                sums |= self.experts.end()
            update = trainer.step()
        if self.is_output_rank:
            sums["row_tokens"] = sum(row.length for row in packed)
            sums["padding"] = sum(row.num_padding for row in packed)
            for name in reports[0]:
                sums[name] = float(torch.stack([report[name] for report in reports]).sum())
        return sums, update

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write the weights as a Hugging Face folder and the optimizer state in Megatron's format.

        Adapters are in those weights, and in a PEFT folder of their own. Gives this rank's files,
        which are on the disk then.
        """
        self.begin_save(folder, in_background=False)
        return self.finish_save()

    def begin_save(self, folder: Path, in_background: bool = True) -> None:
        """Start what `save` does: training may go on once this returns, but no other save.

        What is to be written is copied to the host first.
        """
        assert self.trainer is not None and self._saving is None
        self.memory.enter(READ)
        own: list[Path] = []
        if self.weights.adapters is not None:
            own += self.weights.adapters.save(folder / _ADAPTER_FOLDER)
        export = self.weights.export(
            folder / _WEIGHTS_FOLDER, Path(self.spec.path), later=in_background
        )
        state = self.trainer.saved
        chunks = state.chunks(self.weights.names(), self.weights.places, self.memory.read)
        if in_background:
            chunks = iter(list(chunks))

        def write() -> Written:
            files = [*own, *export()]
            flush(files)
            path, stored = optimizer_state.write(folder, chunks)
            return [*files, path], stored

        self._saving = Saving(folder, state.settings(self.memory.read), write, in_background)

    def is_saved(self) -> bool:
        """Say whether a save in the background has written all of this rank's, or failed."""
        return self._saving is None or self._saving.is_done

    def finish_save(self) -> tuple[str, ...]:
        """Wait for the end of a save, complete its folder, and give this rank's files.

        All ranks of the role call it together. Raises what a save in the background raised.
        """
        saving, self._saving = self._saving, None
        assert saving is not None
        files, stored = saving.wait()
        failed: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(failed, saving.error is not None)
        if saving.error is not None:
            raise saving.error
        if not any(failed):
            optimizer_state.complete(saving.folder, stored, saving.settings)
        return tuple(sorted(str(file.relative_to(saving.folder)) for file in files))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, in any layout."""
        assert self.trainer is not None
        with self.groups.active():
            self.memory.enter(LOAD)
            if self.weights.adapters is not None:
                self.weights.adapters.load(folder / _ADAPTER_FOLDER)
            elif (folder / _ADAPTER_FOLDER).is_dir():
                raise ValueError(
                    f"{folder} is of a run that trained an adapter alone: resume with its "
                    f"model.lora keys, or start anew from model.path={folder / _WEIGHTS_FOLDER}"
                )
            else:
                self.weights.load(folder / _WEIGHTS_FOLDER)
            self.trainer.saved.load(folder, self.weights.names(), self.weights.places)
            # weights that were saved in 16 bits are more exact in their owners' shards
            self.trainer.gather_params()

    def _pack(
        self, micro_batches: Sequence[Sequences], routing: Sequence[Ragged | None]
    ) -> list[PackedRow]:
        length = None
        if len(self.chunks) > 1:  # one length for all
            length = max(self.row_cut.row_length(rows) for rows in micro_batches)
        device = self.precision.device
        rows = [pack(rows, self.row_cut, device, length) for rows in micro_batches]
        if self.precision.transformer_impl == "local":
            for row in rows:
                fill_blocks(row)
                self.rotary.fill(row)
        if self.experts is not None:
            for row, own, choices in zip(rows, micro_batches, routing, strict=True):
                row.experts = self.experts.place(row, self.row_cut, own, choices)
        return rows

    @torch.no_grad()
    def _forward(
        self, sequences: Sequences, cuts: Cuts, routing: Ragged | None = None
    ) -> tuple[list[int], list[tuple[Ragged, ...]]] | None:
        packed = self._pack(
            [sequences.select(indices) for indices in cuts],
            [routing.select(indices) if routing is not None else None for indices in cuts],
        )
        rows = [(row, None) for row in packed]
        with self.groups.active():
            self.memory.enter(READ)
            columns = self._run(rows, self.chunks, None, forward_only=True)
            outputs = [
                tuple(Ragged(column, row.lengths) for column in output.cpu().unbind())
                for row, output in zip(packed, columns, strict=False)  # none but on the last stage
            ]
            if self.experts is not None and self.experts.records:
                chosen = self.experts.collect([row.experts for row in packed])
                outputs = [(*c, r) for c, r in zip(outputs, chosen, strict=False)]
        if not self.is_output_rank:
            return None
        return [i for indices in cuts for i in indices], outputs

    def _run(
        self,
        rows: Sequence[tuple[PackedRow, Any]],
        chunks: Sequence[torch.nn.Module],
        loss: Loss | None,
        forward_only: bool,
    ) -> list[Any]:
        """Drive Megatron's schedule over the micro-batches; give what the last stage collected."""
        for chunk in chunks:
            chunk.train(not forward_only)  # nothing drops out; only then is anything recomputed
        run = get_forward_backward_func()
        outputs: list[Any] = run(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=[iter(rows) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(rows),
            # without interleaving stages exchange shapes instead: rows differ in length
            seq_length=rows[0][0].length,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        forget_rotary_tables()
        return outputs

    def _forward_step(
        self, loss: Loss | None, rows: Iterator[tuple[PackedRow, Any]], model: torch.nn.Module
    ) -> tuple[Any, Callable[..., Any]]:
        row, batch = next(rows)
        if self.experts is not None:
            self.experts.row = row.experts
        output = model(
            input_ids=row.tokens,
            position_ids=row.positions,
            attention_mask=None,
            packed_seq_params=row,
            output_processor=self._head,
        )

        def collect(output: Any, non_loss_data: bool = False) -> Any:
            if loss is None:
                return output.float()  # fetched at the end: the host does not wait in between
            value, sums = loss(output.unbind() if len(output) > 1 else output[0], batch)
            tokens = torch.zeros([], dtype=torch.int, device=value.device)
            return value, tokens, {name: total.detach() for name, total in sums.items()}

        return output, collect

    def _head(self, packed_seq_params: PackedRow, **given: Any) -> Tensor:
        """Give the columns [C, M] of the row's predictions on every context-parallel rank."""
        row = packed_seq_params
        head = self._value_head if self.spec.head == "value" else self._lm_head
        columns = head(packed_seq_params=row, **given)
        if self.groups.cp == 1:
            return columns
        assert row.answers is not None
        return join_columns(columns, row.answers, row.num_predicted, self.groups.collection.cp)

    def _lm_head(
        self,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        packed_seq_params: PackedRow,
        **_: Any,
    ) -> Tensor:
        """Give log-probs and entropies as one tensor [2, M]: schedules know no tuples."""
        group = self.groups.collection.tp
        weight = output_weight if output_weight is not None else output_layer.weight
        hidden = select_hidden(
            hidden_states, packed_seq_params.predictors, self.config.sequence_parallel, group
        )
        targets = packed_seq_params.targets
        assert targets is not None
        head = linear_log_probs if self.spec.layout.use_fused_kernels else full_log_probs
        columns = head(hidden, weight, targets, self.shape.vocab_size, self.spec.temperature, group)
        return torch.stack(columns)

    def _value_head(
        self, hidden_states: Tensor, output_layer: Any, packed_seq_params: PackedRow, **_: Any
    ) -> Tensor:
        """Give values as [1, M]: that of a state is read where its action is predicted."""
        values: Tensor = output_layer.values(
            hidden_states,
            packed_seq_params.predictors,
            self.config.sequence_parallel,
            self.groups.collection.tp,
        )
        return values[None]
