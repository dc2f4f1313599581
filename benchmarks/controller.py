"""What does the controller itself cost a step, from 64 to 1,024 ranks, and what grows with them?

The trainer's own step runs with its own groups, batching, metrics and transport; only the far ends
of the sockets are missing: ranks answer from this process what ranks would. Their time and that of
the reward function are left out, as is the network, for which the bytes are given. Seconds are CPU
time of the controller's thread, so that other work on the machine does not count. What it does
while all ranks have work delays no step: the next mini-batch (`beside_ranks`, taken off the total),
and in another thread the samples' file and the metrics (`beside_step_s`).
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import mrl.batching.experience
import mrl.credit
import mrl.generation
import mrl.trainer
import mrl.workers.group
from benchmarks import record
from mrl.algorithms.reductions import Mean, Metric, Same, Sum
from mrl.checkpoint.folder import CheckpointFolder
from mrl.checkpoint.state import TrainerState
from mrl.config import Config, RunPlan, build_plan, check_config, load_config
from mrl.data import StreamState
from mrl.resharding.report import build_report
from mrl.resharding.sync import SyncStats
from mrl.tracking.rates import Rates
from mrl.tracking.recorder import Recorder
from mrl.tracking.timers import Timers
from mrl.types import Prompt, Ragged, Sample, Score
from mrl.workers.answers import SampleGroups
from mrl.workers.group import Answers, MegatronRanks, TrainGroup
from mrl.workers.job import job_spec, roles_on
from mrl.workers.pool import SpmdPool
from mrl.workers.specs import JobSpec, RankInfo
from mrl.workers.wire import Call, Packed, Reply, pack

NAME = "controller"
RECIPE = record.ROOT / "configs" / "grpo" / "llama3_70b_8node.yaml"
RANKS = (64, 128, 256, 512, 1024)
_ELSEWHERE = "elsewhere"  # the phase of what ranks and reward processes do
_CHARACTERS_A_TOKEN = 4

# The functions of the controller whose time is told apart; the innermost one counts.
PHASES: tuple[tuple[Any, str, str], ...] = (
    (mrl.generation, "collect", "collect"),
    (mrl.trainer, "rollout_rows", "rollout_dump"),
    (Recorder, "rollouts", "rollout_dump"),
    (TrainGroup, "_split", "split"),
    (TrainGroup, "_costs", "split"),
    (mrl.workers.group, "imbalance", "split"),
    (mrl.workers.group, "_dealt", "scatter"),
    (TrainGroup, "_send", "scatter"),
    (mrl.workers.group, "_in_order", "reorder"),
    (mrl.credit.Credit, "__call__", "advantages"),
    (mrl.credit, "loss_mask", "weights"),
    (mrl.batching.experience, "token_weights", "weights"),
    (mrl.trainer._Run, "_update_actor", "mini_batches"),
    (Rates, "__call__", "metrics"),
    (Recorder, "step", "metrics"),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a step: responses are `longest` * u ** 3 tokens, a quarter on average."""

    prompts: int
    samples: int  # of each prompt
    prompt_tokens: int
    longest: int  # tokens of a response
    mini_batches: int


BATCHES = {
    "1024x8": Batch(prompts=1024, samples=8, prompt_tokens=512, longest=4096, mini_batches=4),
    "512x16": Batch(prompts=512, samples=16, prompt_tokens=128, longest=8064, mini_batches=4),
    "1024x16": Batch(prompts=1024, samples=16, prompt_tokens=128, longest=8064, mini_batches=4),
}
SMOKE = Batch(prompts=32, samples=4, prompt_tokens=8, longest=64, mini_batches=2)


def configured(ranks: int, batch: Batch, folder: Path) -> Config:
    """Lay a dense policy out over the ranks: 8 GPUs hold it, and 4 an engine."""
    config = load_config(
        RECIPE,
        [
            f"model.path={record.ROOT / 'configs' / 'models' / 'Llama-3-8B'}",
            f"data.train_batch_size={batch.prompts}",
            f"data.max_prompt_length={batch.prompt_tokens}",
            f"data.max_response_length={batch.longest}",
            f"rollout.n={batch.samples}",
            "rollout.tensor_model_parallel_size=4",
            f"actor.ppo_mini_batch_size={batch.prompts // batch.mini_batches}",
            "actor.ppo_max_token_len_per_gpu=16384",
            "actor.use_kl_loss=true",
            "actor.megatron.tensor_model_parallel_size=4",
            "actor.megatron.pipeline_model_parallel_size=2",
            f"trainer.nnodes={ranks // 8}",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[]",
            "trainer.device=cpu",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
        ],
    )
    if violations := check_config(config):
        raise ValueError("\n".join(map(str, violations)))
    return config


class Stream:
    """Prompts without a dataset."""

    epoch = 0

    def __init__(self, batch: Batch) -> None:
        ids = tuple(range(1000, 1000 + batch.prompt_tokens))
        self.prompts = tuple(
            Prompt(str(i), ids, "q" * batch.prompt_tokens, "task", "42", {})
            for i in range(batch.prompts)
        )

    def next_batch(self) -> tuple[Prompt, ...]:
        """Give the same prompts every step."""
        return self.prompts

    def state(self) -> Any:
        """Say that nothing moves."""
        return StreamState(0, 0, 0, "")


class Decoder:
    """A tokenizer of one character a token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Give as many characters as tokens."""
        return "x" * len(ids)


class Scorer:
    """Scores without a reward process."""

    def __init__(self, timers: Callable[[], Timers]) -> None:
        self._timers = timers

    def score(self, items: Sequence[Any]) -> tuple[Score, ...]:
        """Give every other response a 1."""
        with self._timers()(_ELSEWHERE):
            return tuple(Score(float(i % 2), "ok", "", {"acc": i % 2}) for i in range(len(items)))


class SleepingPool(SpmdPool):
    """The pool of a job whose ranks do nothing; their answers are pickled as theirs would be."""

    def __init__(self, plan: RunPlan, batch: Batch, spec: JobSpec) -> None:
        super().__init__(None, plan.world_size, spec)  # type: ignore[arg-type]
        self.timers = Timers()
        self.idle: Callable[[], None] = lambda: None  # what this process does while ranks work
        layout = plan.roles["actor"].layout
        parts = MegatronRanks(layout.tp, layout.cp, plan.roles["actor"].dp, layout.pp)
        last = range(self.world_size * (layout.pp - 1) // layout.pp, self.world_size)
        self._outputs = {r for r in last if r % (layout.tp * layout.cp) == 0}
        assert len(self._outputs) == parts.dp
        slots = (spec.rollout.slots if spec.rollout else None) or range(self.world_size)
        self._engines = {rank for rank, slot in enumerate(slots) if slot % plan.rollout_tp == 0}
        self._responses = _responses(batch)
        self._queue: list[tuple[int, Packed]] = []  # calls that ranks have not answered
        self._busy_since: float | None = None  # when all ranks had one
        self.beside_ranks = 0.0  # seconds since then, until one was waited for
        self._known: tuple[Packed, Call] | None = None  # what ranks without an answer read once
        self._sent = [0] * self.world_size  # bytes
        self._counted = (pack(None), 0)  # the last call and its bytes

    def wait(self, calls: Sequence[Answers]) -> list[list[Any]]:
        """Receive what the ranks answer."""
        if self._busy_since is not None:
            self.beside_ranks += time.thread_time() - self._busy_since
        with self.timers("gather"):
            with self.timers(_ELSEWHERE):
                self.idle()
                replies = [(rank, self._reply(rank, call)) for rank, call in self._taken(calls)]
            for rank, packed in replies:
                reply = Reply._make(packed.unpack())
                self._clocks.answered(rank)
                if self._pending[reply.number][1].take(rank, reply.value):
                    del self._pending[reply.number]
        self._busy_since = time.thread_time() if self._all_are_busy() else None
        return [call.result() for call in calls]

    def _taken(self, calls: Sequence[Answers]) -> list[tuple[int, Packed]]:
        """Take from the queue what is waited for."""
        due = [any(self._pending[self._call(c).number][1] is a for a in calls)
               for _, c in self._queue]  # fmt: skip
        taken = [one for one, is_due in zip(self._queue, due, strict=True) if is_due]
        self._queue = [one for one, is_due in zip(self._queue, due, strict=True) if not is_due]
        return taken

    def _all_are_busy(self) -> bool:
        return len(self._queue) >= self.world_size == len({rank for rank, _ in self._queue})

    def sent_bytes(self) -> list[int]:
        """Give what was sent to each rank since the last time."""
        sent, self._sent = self._sent, [0] * self.world_size
        return sent

    def _deliver(self, rank: int, call: Packed) -> None:
        self._queue.append((rank, call))
        if len(self._queue) >= self.world_size and self._busy_since is None:
            self._busy_since = time.thread_time() if self._all_are_busy() else None
        if call is not self._counted[0]:  # a socket would not ask each time
            self._counted = (call, call.num_bytes)
        self._sent[rank] += self._counted[1]

    def _reply(self, rank: int, packed: Packed) -> Packed:
        call = self._call(packed)
        value: Any = None
        if call.method == "describe":
            value = RankInfo(rank, f"node{rank // 8}", rank, "cpu", "H100")
        elif call.method == "run":
            value = SyncStats(1, 1, 1, 0.1)
        elif call.method == "sleep":
            value = 0
        elif rank in (self._engines if call.method == "generate" else self._outputs):
            call = _arrived(packed).unpack()  # in memory of its own
            value = getattr(self, f"_{call.method}")(call.role, *call.args)
        return _arrived(pack(tuple(Reply(call.number, value, None))))

    def _call(self, packed: Packed) -> Call:
        if self._known is None or self._known[0] is not packed:
            self._known = (packed, packed.unpack())
        return self._known[1]

    def _generate(self, role: str, requests: Sequence[Any], sampling: Any) -> Any:
        return SampleGroups(
            tuple(replace(sample, uid=uid, prompt_ids=ids) for sample in self._responses[int(uid)])
            for uid, ids in requests
        )

    def _log_probs(self, role: str, sequences: Any, cuts: Any) -> Any:
        lengths = sequences.response_lengths
        column = Ragged(-torch.rand(int(lengths.sum())), lengths)
        return column if role == "ref" else (column, column)

    def _update_fresh(self, role: str, batch: Any, cuts: Any) -> Any:
        return self._update(role, batch, cuts), self._log_probs(role, batch.sequences, cuts)

    def _update(self, role: str, batch: Any, cuts: Any) -> dict[str, Metric]:
        tokens = float(batch.weights.total)
        means = {f"reward/{role}_mean_{i}/mean": Mean(tokens * 0.1, tokens) for i in range(8)}
        sums = {f"reward/{role}_sum_{i}/mean": Sum(0.1) for i in range(4)}
        return {**means, **sums, f"{role}/grad_norm": Same(1.0), f"{role}/lr": Same(1e-6)}


def _arrived(packed: Packed) -> Packed:
    """Lay the arrays of a message into memory of their own, as a socket would."""
    arrays = (np.frombuffer(array, np.uint8).copy() for array in packed.arrays)
    return Packed(packed.pickled, tuple(array.data for array in arrays))


def _responses(batch: Batch) -> list[list[Sample]]:
    """Draw the responses of all prompts; the same for the same batch."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(batch.prompts * batch.samples, generator=generator) ** 3
    lengths = (shares * batch.longest).long().clamp(min=1).tolist()
    ids = torch.randint(1, 100_000, (batch.longest,), generator=generator).int().numpy()
    log_probs = (-torch.rand(batch.longest, generator=generator).double()).numpy()
    text = "the answer is " * (batch.longest * _CHARACTERS_A_TOKEN // 14 + 1)
    samples = [
        Sample("", (), ids[:n], log_probs[:n], text[: n * _CHARACTERS_A_TOKEN], "stop", 0)
        for n in lengths
    ]
    return [samples[i :: batch.prompts] for i in range(batch.prompts)]


@dataclass(frozen=True, slots=True)
class _Trainer:
    """What a run takes from its trainer."""

    config: Config
    plan: RunPlan
    stream: Any
    checkpoints: CheckpointFolder
    tokenizer: Any
    val_dataset: None = None


def _timed(timers: Callable[[], Timers], function: Callable[..., Any], phase: str) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with timers()(phase):
            return function(*args, **kwargs)

    return run


def measure(ranks: int, batch: Batch, steps: int) -> dict[str, Any]:
    """Plan and take some steps; gives CPU seconds, bytes and memory of the controller."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # so that the time of the process is that of one core
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        marks = [time.perf_counter()]
        config = configured(ranks, batch, Path(folder))
        plan = build_plan(config)
        marks.append(time.perf_counter())
        traffic = build_report(config)
        marks.append(time.perf_counter())
        spec = job_spec(config, plan, steps)
        marks.append(time.perf_counter())
        pool = SleepingPool(plan, batch, spec)
        roles = roles_on(pool, config, plan, spec)
        checkpoints = CheckpointFolder(Path(folder), None)
        trainer: Any = _Trainer(config, plan, Stream(batch), checkpoints, Decoder())
        recorder = stack.enter_context(Recorder(config, plan, steps, 0))
        pool.idle = recorder.settle
        scorer: Any = Scorer(lambda: pool.timers)
        state = TrainerState(0, 0, 0, {}, 0.0)
        run = mrl.trainer._Run(trainer, roles, scorer, recorder, state, steps + 1, Event())
        for owner, name, phase in PHASES:
            timed = _timed(lambda: pool.timers, getattr(owner, name), phase)
            stack.enter_context(patch.object(owner, name, timed))
        mrl.trainer._collect_rarely()  # as a run does
        before, found, walls, beside = _peak_gb(), [], [], []
        for step in range(1, steps + 1):
            pool.sent_bytes()
            pool.timers, start = Timers(clock=time.thread_time), time.perf_counter()
            pool.beside_ranks = 0.0
            used = time.process_time() - time.thread_time()
            run.step(step)
            found.append(_seconds(pool.timers, pool.beside_ranks))
            walls.append(time.perf_counter() - start)
            beside.append(time.process_time() - time.thread_time() - used)
        best = min(found, key=lambda seconds: seconds["total"])
        sent = pool.sent_bytes()
        return {
            "data_parallel_parts": plan.roles["actor"].dp,
            "engine_replicas": plan.replicas,
            "step_s": best,
            "step_s_of_each": [seconds["total"] for seconds in found],
            "beside_step_s": min(beside),
            "wall_s_with_ranks": walls,
            "sent_bytes": {"mean": sum(sent) / len(sent), "max": max(sent), "all": sum(sent)},
            "peak_memory_gb": {"before_steps": before, "in_steps": _peak_gb()},
            "plan_s": {
                "config_and_plan": marks[1] - marks[0],
                "reshard_report": marks[2] - marks[1],
                "job_spec": marks[3] - marks[2],
            },
            "reshard_buckets": traffic.plan.num_buckets,
        }


def _seconds(timers: Timers, beside_ranks: float) -> dict[str, float]:
    """Give what delays the step: the controller's phases, most first, but what is done beside."""
    named = {k.removeprefix("timing_s/"): v for k, v in timers.metrics().items()}
    total = named.pop("step") - named.pop(_ELSEWHERE) - beside_ranks
    phases = dict(sorted(named.items(), key=lambda item: -item[1]))
    return {"total": total, **phases, "beside_ranks": -beside_ranks}


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def run(args: Sequence[str]) -> dict[str, Any]:
    """Measure each batch at each number of ranks, in a process of its own but in a smoke run."""
    options = _parse(args)
    if options.smoke:
        return _grow(SMOKE, options, measure)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as process:

        def apart(ranks: int, batch: Batch, steps: int) -> dict[str, Any]:
            return process.submit(measure, ranks, batch, steps).result()

        return {name: _grow(BATCHES[name], options, apart) for name in options.batches}


def _grow(
    batch: Batch,
    options: argparse.Namespace,
    measured: Callable[[int, Batch, int], dict[str, Any]],
) -> dict[str, Any]:
    found = {}
    print(f"{batch.prompts} prompts x {batch.samples} of up to {batch.longest} tokens")
    for ranks in sorted(options.ranks):
        found[ranks] = measured(ranks, batch, options.steps)
        shown = ", ".join(f"{k} {v:.3f}" for k, v in found[ranks]["step_s"].items())
        print(f"  {ranks} ranks, seconds a step: {shown}", flush=True)
    few, many = (found[ranks]["step_s"] for ranks in (min(found), max(found)))
    return {
        "batch": asdict(batch),
        "ranks": {str(ranks): entry for ranks, entry in found.items()},
        "growth": {
            "ranks": max(found) / min(found),
            "step": {phase: many[phase] / few[phase] for phase in few if few[phase]},
        },
    }


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.controller")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="of 8 each")
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--steps", type=int, default=3, help="the quickest one is told by phase")
    parser.add_argument("--name", default=NAME, help="of the JSON file")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="of the JSON file")
    parser.add_argument("--smoke", action="store_true", help="a batch of a few hundred tokens")
    return parser.parse_args(list(args))


def main(args: Sequence[str]) -> int:
    """Run and write the JSON file."""
    options = _parse(args)
    path = record.write(options.name, run(args), options.folder)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
