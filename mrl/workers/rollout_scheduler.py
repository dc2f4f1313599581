"""A scheduler for responses that nobody reads before they end.

With hundreds of sequences vLLM's host work a token, about 80 us of a laptop's core, is longer than
a small model's own step on a GPU. 40 % of it tells a front end of every token and asks for cache
blocks that are there already: this is what is left out here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


@dataclass(slots=True)
class _Response:
    """A response in the making."""

    request: Request
    ends: frozenset[int]  # tokens that end it
    longest: int  # tokens
    log_probs: list[float] = field(default_factory=list)


class WholeResponses(AsyncScheduler):
    """Tells of a response once, when it ends: all tokens in the output, log-probs in `log_probs`.

    What has stop strings, or bounds of another kind, is told token by token as vLLM does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_probs: dict[str, list[float]] = {}  # by the id that `response_id` gives
        self._open: dict[str, _Response] = {}
        self._column: list[float] = []  # of the step at hand: a sampled token's by row
        self._rows: dict[str, int] = {}
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) == 1 and type(managers[0]) is FullAttentionManager:
            self._blocks, self._block_size = managers[0].req_to_blocks, managers[0].block_size
            self._allocate = self.kv_cache_manager.allocate_slots
            self.kv_cache_manager.allocate_slots = self._allocate_when_full

    def add_request(self, request: Request) -> None:
        """Take a request."""
        super().add_request(request)
        params = request.sampling_params
        if params is not None and _is_plain(params):
            ends = {params.eos_token_id, *(params.stop_token_ids or ())}
            longest = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
            self._open[request.request_id] = _Response(request, frozenset(ends), longest)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Give requests up."""
        given_up = super().finish_requests(*args, **kwargs)
        self._open = {name: found for name, found in self._open.items() if name in self.requests}
        return given_up

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a step's tokens; gives outputs of the responses that end with it."""
        found = model_runner_output.logprobs
        # else a request's row is another: with speculative decoding, which no engine here has
        assert found is None or found.cu_num_generated_tokens is None
        self._rows = model_runner_output.req_id_to_index
        self._column = [] if found is None else found.logprobs[:, 0].tolist()
        sampled = model_runner_output.sampled_token_ids
        scheduler_output.num_scheduled_tokens = {
            name: count
            for name, count in scheduler_output.num_scheduled_tokens.items()
            if not (sampled and self._goes_on(name, count, sampled))
        }
        told = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in told.values():
            outputs.outputs = [output for output in outputs.outputs if self._is_due(output)]
        return told

    def _goes_on(self, name: str, scheduled: int, sampled: list[list[int]]) -> bool:
        """Take the token of a response that it does not end; all else is vLLM's own to do."""
        response = self._open.get(name)
        if response is None:
            return False
        request = response.request
        if request.status is not RequestStatus.RUNNING or request.async_tokens_to_discard:
            return False
        row = self._rows[name]
        tokens = sampled[row]
        if (
            len(tokens) != 1
            or tokens[0] in response.ends
            or len(request._output_token_ids) + 1 >= response.longest
        ):
            return False
        request.num_in_flight_tokens -= scheduled
        request.append_output_token_ids(tokens[0])
        request.num_output_placeholders -= 1
        response.log_probs.append(self._column[row])
        computed = request.num_computed_tokens - request.num_output_placeholders
        if computed % self.block_size == 0:
            self.kv_cache_manager.cache_blocks(request, computed)
        return True

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int]
    ) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(request, new_token_ids)
        response = self._open.get(request.request_id)
        if response is not None:
            row = self._rows[request.request_id]
            response.log_probs += self._column[row : row + len(tokens)]
        return tokens, stopped

    def _is_due(self, output: EngineCoreOutput) -> bool:
        """Complete the output of a response that ended; say if a front end is to have it."""
        response = self._open.get(output.request_id)
        if response is None:
            return True
        if not output.finished:
            return False
        del self._open[output.request_id]
        output.new_token_ids = list(response.request.output_token_ids)
        output.new_logprobs = None
        self.log_probs[response_id(output.request_id)] = response.log_probs
        return True

    def _allocate_when_full(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Ask for cache blocks when a sequence's own are full."""
        if num_new_tokens == 1 and request.status is RequestStatus.RUNNING:
            room = len(self._blocks[request.request_id]) * self._block_size
            if request.num_computed_tokens + self.num_lookahead_tokens < room:
                return self.kv_cache_manager.empty_kv_cache_blocks
        return self._allocate(request, num_new_tokens, *args, **kwargs)


def response_id(request_id: str) -> str:
    """Give a response's id, INDEX_REQUEST or REQUEST, without the random part that vLLM adds."""
    return request_id.rpartition("-")[0] or request_id


def _is_plain(params: SamplingParams) -> bool:
    """Say whether only tokens and lengths end a response, and its log-probs are of one token."""
    return (
        params.logprobs == 0
        and not params.detokenize
        and not params.min_tokens
        and params.repetition_detection is None
        and params.structured_outputs is None
        and params.prompt_logprobs is None
    )
