"""vLLM in the worker process: one engine a rank, replicas by its external launcher."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import vllm
import vllm._custom_ops
from torch import Tensor
from torch.distributed import distributed_c10d
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import (
    CpuCommunicator,
    _CPUSHMDistributed,
)
from vllm.inputs import TokensPrompt
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import replace_submodule
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

from mrl.config.check_lora import engine_rank
from mrl.resharding.families import ModelShape
from mrl.resharding.layout import Layout, TensorInfo
from mrl.resharding.lora import adapted_modules
from mrl.resharding.vllm import (
    addresses,
    check_addresses,
    constants,
    engine_layout,
    live_params,
    refresh_derived,
    restore_constants,
)
from mrl.types import Sample, SamplingParams
from mrl.workers.rollout import Request
from mrl.workers.rollout_routing import RoutingReader
from mrl.workers.rollout_scheduler import WholeResponses
from mrl.workers.specs import RolloutSpec

_GIB = 1024**3
_FINISHED = ("stop", "length")
_SHOWN = 8  # prompts that a message names
# The one adapter, which is never read from a path: its tensors are handed over in memory.
_ADAPTER = LoRARequest("actor", 1, lora_path="in memory")


class VLLMEngine:
    """A vLLM engine whose parameters are written in place."""

    def __init__(self, spec: RolloutSpec, device: torch.device) -> None:
        """Start the engine with unset weights; the first sync brings them."""
        config = spec.config
        on_gpu = device.type == "cuda"
        self.dtype = "bfloat16" if on_gpu else "float32"
        self._sleeps = on_gpu and config.free_cache_engine
        self._asleep = False
        threads = torch.get_num_threads()
        if not on_gpu:
            _use_live_cpu_weights()
        with _rank_order(spec.slots):
            self.llm = vllm.LLM(
                model=spec.path,
                tokenizer=spec.tokenizer_path,
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=config.tensor_model_parallel_size,
                enable_expert_parallel=config.enable_expert_parallel,
                # The other kernels lay experts out anew, out of reach of an in-place write.
                moe_backend="triton" if on_gpu else "auto",
                load_format="dummy",
                dtype=self.dtype,
                seed=config.seed,
                trust_remote_code=spec.trust_remote_code,
                max_model_len=spec.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=_step_tokens(spec),
                gpu_memory_utilization=config.gpu_memory_utilization,
                kv_cache_memory_bytes=None if on_gpu else config.cpu_kv_cache_gib * _GIB,
                enforce_eager=config.enforce_eager or not on_gpu,
                enable_prefix_caching=config.enable_prefix_caching,
                enable_chunked_prefill=config.enable_chunked_prefill,
                enable_sleep_mode=self._sleeps,
                logprobs_mode="processed_logprobs",  # temperature applied, as the trainer does
                disable_log_stats=True,
                enable_return_routed_experts=spec.returns_routing,
                # vLLM's own tells token by token where their experts are
                scheduler_cls=None if spec.returns_routing else WholeResponses,
                **_adapter_settings(spec),
            )
        torch.set_num_threads(threads)
        self.tokenizer = self.llm.get_tokenizer()
        self.model = self.llm.apply_model(lambda model: model)[0]
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._lora = spec.lora
        self._routing = RoutingReader(self.model) if spec.returns_routing else None
        self._addresses = addresses(self.model)
        self._constants = constants(self.model) if self._sleeps else {}

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, policy_version: int
    ) -> list[tuple[Sample, ...]]:
        """Draw `sampling.n` responses a request, in order."""
        # What earlier calls left there would change how requests are batched, and so the draw.
        self._forget_prefixes()
        params = vllm.SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            logprobs=0,  # of the sampled token alone
            # Text token by token, and a dict a token, cost more than the model's own step at
            # small sizes: text is decoded once at the end instead.
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
        )
        prompts = [TokensPrompt(prompt_token_ids=list(ids)) for _, ids in requests]
        adapter = _ADAPTER if self._lora is not None else None
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        answers = _answers(requests, outputs, sampling.n)
        log_probs = [self._log_probs(o, answer) for o in outputs for answer in o.outputs]
        texts = [answer.text for answer in answers]
        if not sampling.stop:
            ids = [list(answer.token_ids) for answer in answers]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        owners = [request for request in requests for _ in range(sampling.n)]
        samples = [
            Sample(
                uid,
                prompt,
                tuple(answer.token_ids),
                own_log_probs,
                text,
                str(answer.finish_reason),
                policy_version,
                self._routing.read(answer, len(prompt) + len(answer.token_ids))
                if self._routing is not None
                else None,
            )
            for (uid, prompt), answer, text, own_log_probs in zip(
                owners, answers, texts, log_probs, strict=True
            )
        ]
        n = sampling.n
        return [tuple(samples[i : i + n]) for i in range(0, len(samples), n)]

    def _log_probs(
        self, output: vllm.RequestOutput, answer: vllm.outputs.CompletionOutput
    ) -> Sequence[float]:
        """Give the log-probs of an answer's tokens."""
        if isinstance(self._scheduler, WholeResponses):
            # as vLLM calls the requests that it makes of one for several answers
            name = f"{answer.index}_{output.request_id}" if len(output.outputs) > 1 else None
            found = self._scheduler.log_probs.pop(name or output.request_id, None)
            if found is not None:
                return found
        return answer.logprobs.logprobs

    def params(self) -> Mapping[str, Tensor]:
        """Give the live parameters, without those of adapters."""
        with self._unwrapped():
            return live_params(self.model)

    def layout(self, tensors: Mapping[str, TensorInfo], rank: int) -> Layout:
        """Trace vLLM's own loader on this rank."""
        with self._unwrapped():
            return engine_layout(self.model, tensors, rank)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole checkpoint tensors through vLLM's own loader, in place."""
        with torch.no_grad(), self._unwrapped():
            self.model.load_weights(weights)

    def adapt(self, adapter: Mapping[str, Tensor]) -> None:
        """Take an adapter in place of the last one, through vLLM's own manager of adapters."""
        assert self._lora is not None
        model = LoRAModel.from_lora_tensors(
            _ADAPTER.lora_int_id,
            dict(adapter),
            PEFTHelper(
                r=self._lora.rank,
                lora_alpha=self._lora.alpha,
                target_modules=[],  # unread: the tensors' names say it
            ),
            device=next(iter(adapter.values())).device,
            dtype=getattr(torch, self.dtype),
        )
        manager = self.model.lora_manager
        manager.remove_adapter(model.id)
        manager.add_adapter(model)
        manager.activate_adapter(model.id)
        # Who takes which adapter is on the device too, and lost in a sleep.
        manager._last_mapping = None

    @contextmanager
    def _unwrapped(self) -> Iterator[None]:
        """Show the model as its loader knows it: without the layers that vLLM wraps for adapters.

        Only names differ; every parameter is the same tensor.
        """
        if self._lora is None:
            yield
            return
        wrapped = dict(self.model.lora_manager.modules)
        for name, module in wrapped.items():
            replace_submodule(self.model, name, module.base_layer)
        try:
            yield
        finally:
            for name, module in wrapped.items():
                replace_submodule(self.model, name, module)

    def sleep(self) -> None:
        """Drop weights and cache (level 2: nothing is saved to the host)."""
        if self._sleeps and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep = True

    def wake_weights(self) -> None:
        """Take the memory of the weights again, at the same addresses."""
        if self._asleep:
            self.llm.wake_up(tags=["weights"])
            restore_constants(self.model, self._constants)

    def written(self) -> None:
        """Rebuild what vLLM derives from its weights.

        Raises RuntimeError when a tensor is not where CUDA graphs were captured with it.
        """
        refresh_derived(self.model, getattr(torch, self.dtype))
        check_addresses(self.model, self._addresses)

    def wake_cache(self) -> None:
        """Take the memory of the cache again; forget all that was computed with old weights.

        Raises RuntimeError when vLLM refuses to reset the prefix cache.
        """
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._forget_prefixes()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def _forget_prefixes(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(f"rank {dist.get_rank()}: vLLM refused to reset its prefix cache")

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()


def _answers(
    requests: Sequence[Request], outputs: Sequence[vllm.RequestOutput], n: int
) -> list[vllm.outputs.CompletionOutput]:
    """List `n` answers a request, in order.

    Raises RuntimeError, naming the prompts, when vLLM gave some up or answered others: a group
    that lacks a response would be compared with itself.
    """
    if [list(ids) for _, ids in requests] != [list(o.prompt_token_ids or ()) for o in outputs]:
        answered = {tuple(output.prompt_token_ids or ()) for output in outputs}
        lost = [uid for uid, ids in requests if tuple(ids) not in answered]
        raise RuntimeError(
            f"vLLM answered {len(outputs)} of {len(requests)} prompts, or in another order; "
            f"without an answer: {', '.join(lost[:_SHOWN]) or 'none'}"
        )
    failed = [
        f"{uid} ({len(output.outputs)} of {n}: "
        f"{', '.join(sorted({str(a and a.finish_reason) for a in output.outputs}))})"
        for (uid, _), output in zip(requests, outputs, strict=True)
        if len(output.outputs) != n
        or any(a is None or a.finish_reason not in _FINISHED for a in output.outputs)
    ]
    if failed:
        raise RuntimeError(
            f"vLLM did not finish {len(failed)} of {len(requests)} prompts: "
            f"{', '.join(failed[:_SHOWN])}"
        )
    return [answer for output in outputs for answer in output.outputs]


def _step_tokens(spec: RolloutSpec) -> int:
    """Give the tokens that a step takes at most: what the longest sequences together have.

    With more vLLM warms up sequences longer than its own table of their blocks, whose last row it
    then reads beyond the end: an illegal access or none, by what lies there.
    """
    config = spec.config
    return min(config.max_num_batched_tokens, config.max_num_seqs * spec.max_model_len)


def _adapter_settings(spec: RolloutSpec) -> dict[str, Any]:
    """Say what vLLM has to know of the adapter when it builds its model."""
    if spec.lora is None:
        return {}
    shape = ModelShape.from_folder(Path(spec.path))
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": engine_rank(spec.lora.rank),
        "lora_target_modules": list(adapted_modules(shape, spec.lora.target_modules)),
    }


def _use_live_cpu_weights() -> None:
    """Keep vLLM's CPU kernels from packing weights where an in-place write never reaches them."""
    vllm._custom_ops._supports_onednn = False
    os.environ |= {"VLLM_CPU_SGL_KERNEL": "0", "VLLM_ZENTORCH_WEIGHT_PREPACK": "0"}
    CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")
    CPUFusedMOE.init_moe_torch = _init_local_experts
    _CPUSHMDistributed.make_group_name = staticmethod(_own_group_name)


_group_name = _CPUSHMDistributed.make_group_name


def _own_group_name(communicator: CpuCommunicator) -> str:
    """Name a group's shared memory, the same on its ranks and another each time.

    vLLM's own name is the same in every job on a host: one beside it, or the memory that a killed
    one left, would be met.
    """
    names = [f"/{uuid4().hex[:8]}{_group_name(communicator).strip('/')}"]
    first = communicator.ranks[0]
    dist.broadcast_object_list(names, src=first, group=communicator.device_group)
    return names[0]


_init_all_experts = CPUFusedMOE.init_moe_torch


def _init_local_experts(kernel: CPUFusedMOE, layer: Any) -> None:
    """Let the experts of other ranks add nothing: vLLM's CPU kernel takes all for local."""
    _init_all_experts(kernel, layer)
    if layer.expert_map is None:
        return
    _, gate_and_up, hidden = layer.w13_weight.shape
    for name, width in (("gate_up_linear", gate_and_up), ("down_linear", hidden)):
        local = vars(layer)[name]
        absent = partial(_zeros, width)
        vars(layer)[name] = [local[i] if i >= 0 else absent for i in layer.expert_map.tolist()]


def _zeros(width: int, tokens: Tensor) -> Tensor:
    return tokens.new_zeros(len(tokens), width)


@contextmanager
def _rank_order(slots: Sequence[int] | None) -> Iterator[None]:
    """Let vLLM build its groups so that the i-th rank takes slot `slots[i]`.

    A slot is replica * tp + tp_rank. vLLM 0.26 makes every group from consecutive ranks by
    `init_model_parallel_group`; here each list names the ranks of those slots instead. Raises
    RuntimeError where torch's order in a group is not vLLM's: collectives would swap shards.
    """
    if slots is None:
        yield
        return
    rank_of_slot = [slots.index(slot) for slot in range(len(slots))]
    make = parallel_state.init_model_parallel_group

    def in_order(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        moved = [[rank_of_slot[slot] for slot in group] for group in group_ranks]
        # torch sorts the ranks of a new group, for which it finds this before the builtin
        distributed_c10d.sorted = list
        try:
            group = make(moved, *args, **kwargs)
        finally:
            del distributed_c10d.sorted
        found = dist.get_process_group_ranks(group.device_group)
        if found != group.ranks:
            raise RuntimeError(f"torch orders a group of ranks {group.ranks} as {found}")
        return group

    parallel_state.init_model_parallel_group = in_order
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = make
