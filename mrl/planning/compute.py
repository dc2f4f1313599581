"""Seconds of each phase of a step: products by efficiency, decoding by roofline, links by bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from mrl.planning.hardware import GB, Machine
from mrl.planning.job import Job, Role
from mrl.planning.memory import engine_memory, kv_bytes
from mrl.resharding.families import ModelShape
from mrl.tracking.flops import forward_flops, training_flops

_PRODUCT = 0.8  # of the peak in one large matrix product: 769 to 798 of 989 TFLOP/s on an H200
_ALL_REDUCE = 12e-6  # s, of a small message inside a node
_TRAINING = 2.5  # times the host's work of a forward pass
_POINTS = 16  # of the integral over a response
_PASSES = {"actor": "old_log_prob", "critic": "values", "ref": "ref"}


@dataclass(frozen=True)
class Phase:
    """Seconds of one phase, by what takes them."""

    name: str  # as in `timing_s/<name>`
    seconds: Mapping[str, float]
    flops: float = 0.0  # model FLOPs of a GPU: no recomputation

    @property
    def total(self) -> float:
        """Sum the parts."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class StepTime:
    """One step of training as it should run."""

    phases: tuple[Phase, ...]
    tokens: float  # of the step's sequences
    gpus: int

    @property
    def total(self) -> float:
        """Give the seconds of a step."""
        return sum(phase.total for phase in self.phases)

    @property
    def throughput(self) -> float:
        """Give tokens/s of a GPU, over all GPUs of the job."""
        return self.tokens / self.total / self.gpus

    @property
    def generation_share(self) -> float:
        """Give the part of the step that generates."""
        return self.of("gen") / self.total

    def of(self, name: str) -> float:
        """Give the seconds of a phase; 0 where the step has no such phase."""
        return sum(phase.total for phase in self.phases if phase.name == name)

    def to_json(self) -> dict[str, Any]:
        """Give seconds by phase and part, and the rates."""
        return {
            "step": self.total,
            "tokens_per_s_per_gpu": self.throughput,
            "generation_share": self.generation_share,
            "tokens": self.tokens,
            "timing_s": {p.name: {"total": p.total, **p.seconds} for p in self.phases},
            "tflops_per_gpu": {
                p.name: p.flops / p.total / 1e12 for p in self.phases if p.flops and p.total
            },
        }


def plan_time(job: Job, reshard_s: float | None = None) -> StepTime:
    """Estimate a step; `reshard_s` is the weight update's time (None: from bytes alone)."""
    assume, data = job.machine.assume, job.config.data
    length = assume.prompt * data.max_prompt_length + assume.response * data.max_response_length
    trained = [role for role in reversed(job.roles) if role.settings.trained]  # the critic first
    phases = [generation(job)]
    phases += [forward(job, role, _PASSES[role.name]) for role in job.roles]
    phases += [update(job, role) for role in trained]
    seconds = _reshard(job) if reshard_s is None else reshard_s
    phases.append(Phase("reshard", {"links": seconds, **_wake(job)}))
    phases.append(Phase("rest", {"host": assume.rest}))
    host = _host_link(job)
    phases = [
        replace(p, seconds={**p.seconds, "host link": host[p.name]}) if p.name in host else p
        for p in phases
    ]
    return StepTime(tuple(phases), job.plan.samples * length, job.plan.world_size)


def _host_link(job: Job) -> dict[str, float]:
    """Give the seconds of offloading by the phase that waits for it.

    Parameters come with a role's first pass, the optimizer with its update; both leave when the
    next role, or in the end the engine, needs the memory.
    """
    moved: dict[str, float] = {}
    after = {"critic": "update_actor", "actor": "reshard"}
    for role in job.roles:
        state, m = job.state(role, 0), role.settings.megatron
        params = m.param_offload * state.params
        optimizer = m.optimizer_offload * state.optimizer
        first = _PASSES[role.name] if _asked_before(job, role) else f"update_{role.name}"
        arrivals = {first: params}
        if role.settings.trained:
            arrivals |= {f"update_{role.name}": optimizer, after[role.name]: params + optimizer}
        for phase, size in arrivals.items():
            if size:
                moved[phase] = moved.get(phase, 0.0) + size
    return {phase: size / job.machine.host_link for phase, size in moved.items()}


def _wake(job: Job) -> dict[str, float]:
    """Give the seconds in which a sleeping engine maps its weights and its cache again."""
    engine = engine_memory(job)
    woken = (engine.weights + max(engine.kv, 0.0)) / GB
    return {"wake": woken * job.machine.assume.wake} if job.sleeps else {}


def _lengths(job: Job) -> tuple[int, int]:
    """Give the mean prompt and response in tokens."""
    assume, data = job.machine.assume, job.config.data
    return (
        max(round(assume.prompt * data.max_prompt_length), 1),
        max(round(assume.response * data.max_response_length), 1),
    )


def _efficiency(job: Job, role: Role, best: float) -> float:
    shape = role.shape
    if shape.moe is not None:
        width = min(shape.moe.ffn_size, shape.hidden_size)
        best *= job.machine.assume.experts
    else:
        width = shape.hidden_size
    return best * width / (width + job.machine.assume.narrow)


def forward(job: Job, role: Role, name: str) -> Phase:
    """Estimate a pass over the rollout without gradients."""
    prompt, response = _lengths(job)
    world = job.plan.trainer_world
    head = 0 if role.name == "critic" else response
    samples = job.plan.samples * _asked_before(job, role)
    if not samples:
        return Phase(name, {})
    flops = samples * forward_flops(role.shape, [prompt + response], head) / world
    rate = job.machine.peak * _efficiency(job, role, job.machine.assume.log_prob)
    compute = flops / rate
    tokens = samples * (prompt + response) / role.plan.dp / role.plan.layout.cp
    micro = max(tokens / job.local_tokens(role, log_prob=True), 1)
    parts = {"compute": compute, "bubble": compute * _bubble(role, micro)}
    parts |= _host(job, role, micro, compute, 1.0)
    parts |= _layer_links(job, role, tokens, passes=1)
    return Phase(name, parts, flops)


def _asked_before(job: Job, role: Role) -> float:
    """Give the part of the samples that a pass before the updates scores."""
    if role.name == "actor" and job.plan.first_log_probs_from_update:
        return 1 - 1 / role.plan.optimizer_steps
    return 1.0


def update(job: Job, role: Role) -> Phase:
    """Estimate all optimizer steps of a role over the rollout."""
    prompt, response = _lengths(job)
    plan, assume, world = job.plan, job.machine.assume, job.plan.trainer_world
    head = 0 if role.name == "critic" else response
    epochs, steps = role.settings.epochs, role.plan.optimizer_steps
    samples = plan.samples * epochs
    frozen = role.name == "actor" and job.config.model.lora.rank > 0
    length = [prompt + response]
    flops = samples * training_flops(role.shape, length, head, frozen) / world
    again = role.activations.recomputed_share()
    more = again * samples * forward_flops(role.shape, length, 0) / world
    rate = job.machine.peak * _efficiency(job, role, assume.update)
    compute = flops / rate
    tokens = samples * (prompt + response) / role.plan.dp / role.plan.layout.cp
    micro = max(tokens / steps / job.local_tokens(role), 1)
    parts = {
        "compute": compute,
        "recompute": more / rate,
        "bubble": (flops + more) / rate * _bubble(role, micro),
        **_host(job, role, micro * steps, compute + more / rate, _TRAINING + again),
        **_layer_links(job, role, tokens, passes=2.5 + again),
        **_optimizer(job, role, steps),
    }
    return Phase(f"update_{role.name}", parts, flops)


def _bubble(role: Role, micro_batches: float) -> float:
    layout = role.plan.layout
    return (layout.pp - 1) / (max(ceil(micro_batches), 1) * (layout.vpp or 1))


def _host(
    job: Job, role: Role, micro_batches: float, compute: float, passes: float
) -> dict[str, float]:
    """Give the seconds by which the host that starts the kernels is slower than the device."""
    layers = role.shape.num_layers / role.plan.layout.pp
    starts = micro_batches * layers * passes * job.machine.assume.host_layer
    return {"host": starts - compute} if starts > compute else {}


def _link(machine: Machine, ranks: int, ranks_a_node: int) -> float:
    """Give bytes/s of a rank in a group of neighbours that spans so many ranks."""
    return machine.nvlink_rate if ranks <= ranks_a_node else machine.network_rate


def _layer_links(job: Job, role: Role, tokens: float, passes: float) -> dict[str, float]:
    """Give the seconds of collectives inside layers for `tokens` of a rank.

    A pass is 4 gathers or scatters of the hidden states over TP (6 in the backward pass), an
    all-to-all of q, k, v and the output over CP, dispatch and combination over EP.
    """
    shape, layout, machine = role.shape, role.plan.layout, job.machine
    node = job.config.trainer.n_gpus_per_node
    layers = shape.num_layers / layout.pp
    hidden = 2.0 * shape.hidden_size * tokens * layers * passes
    parts = {}
    if layout.tp > 1:
        rate = _link(machine, layout.tp, node)
        parts["tp"] = 4 * hidden * (layout.tp - 1) / layout.tp / rate
    if layout.cp > 1:
        rate = _link(machine, layout.tp * layout.cp, node)
        width = 2.0 * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / layout.tp
        share = (layout.cp - 1) / layout.cp
        parts["cp"] = width * tokens * layers * passes * share / rate
    if layout.ep > 1 and shape.moe is not None:
        rate = _link(machine, layout.etp * layout.ep, node)
        rows = 2 * shape.moe.top_k * hidden / layout.tp * machine.assume.imbalance
        parts["ep"] = rows * (layout.ep - 1) / layout.ep / rate
    if layout.pp > 1:
        rate = _link(machine, 2 * layout.tp * layout.cp * layout.dp, node)
        chunks = layout.vpp or 1
        parts["pp"] = hidden / layers * chunks / layout.tp / rate
    return parts


def _optimizer(job: Job, role: Role, steps: int) -> dict[str, float]:
    """Give the seconds of gradient reduction, Adam and parameter gather."""
    layout, machine, state = role.plan.layout, job.machine, job.state(role, 0)
    copies = layout.dp * layout.cp
    seconds = {"adam": steps * (2 * state.optimizer + state.grads) / machine.memory_rate}
    if copies > 1:
        rate = _link(machine, layout.tp * copies, job.config.trainer.n_gpus_per_node)
        gathered = state.params if state.grads else 0.0
        exposed = 1.0
        if role.settings.megatron.overlap_grad_reduce:
            exposed -= machine.assume.overlap
        moved = (state.grads + gathered) * (copies - 1) / copies
        seconds["dp"] = steps * exposed * moved / rate
    return seconds


def _reshard(job: Job) -> float:
    """Estimate a weight update from the bytes of one engine rank, none of them at home."""
    config = job.config
    tp, node = config.rollout.tensor_model_parallel_size, config.trainer.n_gpus_per_node
    rate = _link(job.machine, job.plan.world_size, node)
    return job.model_bytes / tp / rate


def generation(job: Job) -> Phase:
    """Estimate the engine's part by the roofline of decoding and the host's time a step.

    Responses end one by one: of B sequences B (1 - t / R)^k are left after t of R tokens, where
    k = 1 / response - 1 gives the assumed mean.
    """
    engine = _Decoder(job)
    prompt, response = _lengths(job)
    rollout, plan = job.config.rollout, job.plan
    sequences, prompts = max(plan.sequences_per_replica), max(plan.prompts_per_replica)
    batch = max(min(sequences, rollout.max_num_seqs, engine.sequences(prompt + response)), 1)
    earlier = max(sequences - batch, 0) / batch * response
    decode = earlier * engine.step(batch, prompt + response / 2)
    longest = job.config.data.max_response_length
    power = 1 / min(job.machine.assume.response, 1.0) - 1
    for point in range(_POINTS):
        done = (point + 0.5) / _POINTS
        left = max(batch * (1 - done) ** power, 1.0)
        decode += longest / _POINTS * engine.step(left, prompt + done * longest)
    read = prompts if rollout.enable_prefix_caching else sequences
    return Phase("gen", {"prefill": engine.prefill(read * prompt), "decode": decode})


class _Decoder:
    """One replica of the engine."""

    def __init__(self, job: Job) -> None:
        self._job, self._shape = job, job.shape
        self._tp = job.config.rollout.tensor_model_parallel_size
        self._head = job.shape.hidden_size * job.shape.vocab_size
        self._active = _active_elements(job.shape)
        self._kv = kv_bytes(job.shape, self._tp)
        self._cache_tokens = engine_memory(job).tokens

    def sequences(self, length: float) -> int:
        """Count sequences of a mean length that the cache holds at a time."""
        return int(self._cache_tokens / max(length, 1))

    def prefill(self, tokens: float) -> float:
        """Give the seconds of reading prompts."""
        machine = self._job.machine
        rate = machine.peak * machine.assume.log_prob * self._tp
        return 2.0 * self._active * tokens / rate

    def step(self, batch: float, context: float) -> float:
        """Give the seconds of one decoded token for each of `batch` sequences."""
        shape, machine, tp = self._shape, self._job.machine, self._tp
        weights = 2.0 * self._read_elements(batch) / tp
        moved = weights + batch * context * self._kv
        pairs = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
        flops = batch * (2.0 * (self._active + self._head) + pairs) / tp
        device = max(moved / machine.memory_rate, flops / (machine.peak * _PRODUCT))
        device /= machine.assume.generation
        if tp > 1:
            message = 2 * 2.0 * batch * shape.hidden_size * (tp - 1) / tp
            rate = _link(machine, tp, self._job.config.trainer.n_gpus_per_node)
            device += 2 * shape.num_layers * (_ALL_REDUCE + message / rate)
        assume = machine.assume
        return max(device, assume.host_step + assume.host_sequence * batch)

    def _read_elements(self, batch: float) -> float:
        """Count the parameters that a step reads: of experts those that some token chose."""
        shape = self._shape
        if shape.moe is None:
            return self._active + self._head
        moe = shape.moe
        one = 3.0 * shape.hidden_size * moe.ffn_size * len(moe.layers)
        missed = (1 - moe.top_k / moe.num_experts) ** batch
        chosen = moe.num_experts * (1 - missed)
        return self._active + self._head + one * (chosen - moe.top_k)


def _active_elements(shape: ModelShape) -> float:
    """Count the parameters that one token passes, without embedding and head."""
    one = forward_flops(shape, [1], 0) / 2
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim  # of one pair
    return one - attention / 2
