"""vLLM in the worker process: one engine a rank, replicas by its external launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import vllm
import vllm._custom_ops
from torch import Tensor
from vllm.inputs import TokensPrompt

from mrl.resharding.layout import Layout, TensorInfo
from mrl.resharding.transports import Distributed
from mrl.resharding.vllm import engine_layout, live_params
from mrl.types import Sample, SamplingParams
from mrl.workers.rollout import Request
from mrl.workers.specs import RolloutSpec

_GIB = 1024**3


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
            # The CPU backend would pack weights into buffers that an in-place write never
            # reaches, and leave the parameters empty.
            vllm._custom_ops._supports_onednn = False
        self.llm = vllm.LLM(
            model=spec.path,
            tokenizer=spec.tokenizer_path,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=config.tensor_model_parallel_size,
            load_format="dummy",
            dtype=self.dtype,
            seed=config.seed,
            trust_remote_code=spec.trust_remote_code,
            max_model_len=spec.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_memory_bytes=None if on_gpu else config.cpu_kv_cache_gib * _GIB,
            enforce_eager=config.enforce_eager or not on_gpu,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_sleep_mode=self._sleeps,
            logprobs_mode="processed_logprobs",  # temperature applied, as the trainer does
            disable_log_stats=True,
        )
        torch.set_num_threads(threads)
        self.tokenizer = self.llm.get_tokenizer()
        self.model = self.llm.apply_model(lambda model: model)[0]

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
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        answers = [answer for output in outputs for answer in output.outputs]
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
                tuple(answer.logprobs.logprobs),
                text,
                str(answer.finish_reason),
                policy_version,
            )
            for (uid, prompt), answer, text in zip(owners, answers, texts, strict=True)
        ]
        n = sampling.n
        return [tuple(samples[i : i + n]) for i in range(0, len(samples), n)]

    def params(self) -> Mapping[str, Tensor]:
        """Give the live parameters."""
        return live_params(self.model)

    def layout(self, tensors: Mapping[str, TensorInfo]) -> Layout:
        """Trace vLLM's own loader on every rank."""
        return engine_layout(self.model, tensors, dist.get_rank(), Distributed(), {})

    def sleep(self) -> None:
        """Drop weights and cache (level 2: nothing is saved to the host)."""
        if self._sleeps and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep = True

    def wake_weights(self) -> None:
        """Take the memory of the weights again, at the same addresses."""
        if self._asleep:
            self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Take the memory of the cache again; forget every cached prefix.

        Raises RuntimeError when vLLM refuses to reset the prefix cache.
        """
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(f"rank {dist.get_rank()}: vLLM refused to reset its prefix cache")

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()
