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
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from mrl.batching.packing import cut
from mrl.resharding.families import ModelShape
from mrl.types import Batching, PolicyBatch, Ragged, Sequences, ValueBatch
from mrl.workers.megatron.attention import PackedRow, Rotary, pack
from mrl.workers.megatron.build import Precision, build_chunks
from mrl.workers.megatron.groups import ParallelGroups
from mrl.workers.megatron.heads import select_hidden, vocab_parallel_log_probs
from mrl.workers.megatron.optimizer import Trainer, Update
from mrl.workers.megatron.weights import Weights
from mrl.workers.specs import RoleSpec

_HEAD_CHUNK = 4096  # predicted tokens whose logits exist at a time
_WEIGHTS_FOLDER = "huggingface"
_OPTIMIZER_FILE = "optimizer/rank_{rank:05d}.pt"

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
            self.trainer: Trainer | None = None
            if spec.optim is not None:
                self.trainer = Trainer(self.chunks, spec.layout, spec.optim, spec.total_steps)
            else:
                for chunk in self.chunks:
                    chunk.requires_grad_(False)
        self.config = self.chunks[0].config
        for chunk in self.chunks:
            chunk.eval()  # no layer drops out; nothing else depends on the mode

    @property
    def is_output_rank(self) -> bool:
        """Say whether this rank answers for its data-parallel part."""
        return self.groups.is_last_stage and self.groups.tp_rank == 0

    def log_probs(self, sequences: Sequences, batching: Batching) -> tuple[Ragged, Ragged] | None:
        """Give log-probs and entropies of the response tokens, float32 on the CPU.

        Rows keep their order. None on ranks that do not answer.
        """
        outputs = self._forward(sequences, batching)
        if outputs is None:
            return None
        order, columns = outputs
        return _restore(order, columns, 0), _restore(order, columns, 1)

    def values(self, sequences: Sequences, batching: Batching) -> Ragged | None:
        """Give values at the response tokens, float32 on the CPU; None where no answer is due."""
        outputs = self._forward(sequences, batching)
        if outputs is None:
            return None
        order, columns = outputs
        return _restore(order, columns, 0)

    def train(
        self, batch: PolicyBatch | ValueBatch, batching: Batching, loss: Loss
    ) -> tuple[dict[str, float], Update]:
        """Take one optimizer step on this rank's part of a mini-batch.

        Gives the sums that `loss` reported over the micro-batches (empty on ranks that do not
        answer) and the update.
        """
        trainer = self.trainer
        assert trainer is not None, f"{self.spec.name} is frozen"
        micro_batches = cut(batch.sequences.tokens.lengths.tolist(), batching)
        parts = [batch.select(indices) for indices in micro_batches]
        parts += [batch.select([])] * self._missing(len(parts))
        packed = self._pack([part.sequences for part in parts])
        rows = list(zip(packed, parts, strict=True))
        with self.groups.active():
            trainer.zero_grad()
            reports = self._run(rows, trainer.chunks, loss, forward_only=False)
            update = trainer.step()
        sums: dict[str, float] = {}
        if self.is_output_rank:
            for name in reports[0]:
                sums[name] = float(torch.stack([report[name] for report in reports]).sum())
        return sums, update

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write the weights as a Hugging Face folder and every rank's optimizer state.

        Gives the files that this rank then sees below `folder`.
        """
        assert self.trainer is not None
        self.weights.export(folder / _WEIGHTS_FOLDER, Path(self.spec.path))
        path = folder / _OPTIMIZER_FILE.format(rank=dist.get_rank())
        path.parent.mkdir(parents=True, exist_ok=True)
        self.trainer.save(path)
        files = (file for file in folder.rglob("*") if file.is_file())
        return tuple(sorted(str(file.relative_to(folder)) for file in files))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, in the layout that wrote it."""
        assert self.trainer is not None
        with self.groups.active():
            self.weights.load(folder / _WEIGHTS_FOLDER)
            self.trainer.load(folder / _OPTIMIZER_FILE.format(rank=dist.get_rank()))

    def _pack(self, micro_batches: Sequence[Sequences]) -> list[PackedRow]:
        multiple = self.groups.tp if self.config.sequence_parallel else 1
        if len(self.chunks) > 1:  # one length for all
            longest = max(int(rows.tokens.lengths.sum()) for rows in micro_batches)
            multiple *= max(1, -(-longest // multiple))
        rows = [
            pack(sequences, multiple, pad_token=0, device=self.precision.device)
            for sequences in micro_batches
        ]
        if self.precision.transformer_impl == "local":
            for row in rows:
                self.rotary.fill(row)
        return rows

    def _missing(self, count: int) -> int:
        """Count the empty micro-batches that this rank has to add; all ranks call it together.

        Where experts are spread over data-parallel parts, all run as many as the fullest; an
        interleaved pipeline runs whole rounds.
        """
        needed = count
        if self.groups.ep * self.groups.etp > self.groups.tp:
            most = torch.tensor(count)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            needed = int(most)
        if len(self.chunks) > 1:
            needed += -needed % self.groups.pp
        return needed - count

    @torch.no_grad()
    def _forward(
        self, sequences: Sequences, batching: Batching
    ) -> tuple[list[int], list[tuple[Ragged, ...]]] | None:
        micro_batches = cut(sequences.tokens.lengths.tolist(), batching)
        idle: list[list[int]] = [[]] * self._missing(len(micro_batches))
        packed = self._pack([sequences.select(rows) for rows in [*micro_batches, *idle]])
        rows = [(row, None) for row in packed]
        with self.groups.active():
            outputs = self._run(rows, self.chunks, None, forward_only=True)
        if not self.is_output_rank:
            return None
        return [i for indices in micro_batches for i in indices], outputs

    def _run(
        self,
        rows: Sequence[tuple[PackedRow, Any]],
        chunks: Sequence[torch.nn.Module],
        loss: Loss | None,
        forward_only: bool,
    ) -> list[Any]:
        """Drive Megatron's schedule over the micro-batches; give what the last stage collected."""
        run, tokens = get_forward_backward_func(), rows[0][0].tokens
        assert tokens is not None
        return run(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=[iter(rows) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(rows),
            # without interleaving stages exchange shapes instead: rows differ in length
            seq_length=tokens.shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward_step(
        self, loss: Loss | None, rows: Iterator[tuple[PackedRow, Any]], model: torch.nn.Module
    ) -> tuple[Any, Callable[..., Any]]:
        row, batch = next(rows)
        output = model(
            input_ids=row.tokens,
            position_ids=row.positions,
            attention_mask=None,
            packed_seq_params=row,
            output_processor=self._value_head if self.spec.head == "value" else self._lm_head,
        )

        def collect(output: Any, non_loss_data: bool = False) -> Any:
            if loss is None:
                return tuple(Ragged(c.float().cpu(), row.lengths) for c in output.unbind())
            value, sums = loss(output.unbind() if len(output) > 1 else output[0], batch)
            tokens = torch.zeros([], dtype=torch.int, device=value.device)
            return value, tokens, {name: total.detach() for name, total in sums.items()}

        return output, collect

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

        def log_probs(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logits = torch.nn.functional.linear(hidden, weight)
            return vocab_parallel_log_probs(
                logits, targets, self.shape.vocab_size, self.spec.temperature, group
            )

        targets = packed_seq_params.targets
        assert targets is not None
        if hidden.shape[0] <= _HEAD_CHUNK:
            return torch.stack(log_probs(hidden, targets))
        # Logits of a long row would outweigh the model: a chunk's live once forward, and are
        # computed again backward.
        chunks = [
            checkpoint(log_probs, *chunk, use_reentrant=False)
            for chunk in zip(hidden.split(_HEAD_CHUNK), targets.split(_HEAD_CHUNK), strict=True)
        ]
        return torch.stack([torch.cat(column) for column in zip(*chunks, strict=True)])

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


def _restore(order: list[int], columns: list[tuple[Ragged, ...]], which: int) -> Ragged:
    """Put the rows of one output column back into the order of the batch."""
    column = Ragged.concat([output[which] for output in columns])
    inverse = [0] * len(order)
    for position, row in enumerate(order):
        inverse[row] = position
    return column.select(inverse)
