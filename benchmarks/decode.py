"""Does the engine inside mrl generate as fast as vLLM alone, on the same prompts and sampling?

Both sides live at once and take turns, the first one changing every time. mrl's is that of a whole
job: the trainer asks its rollout group, ranks hold actor and engine, and samples come back with
text and log-probs. vLLM's is `vllm.LLM` in processes of its own, with its own defaults and the
same model, limits and shares of the prompts; it is asked twice, for tokens alone (`vllm`) and for
what mrl asks (`vllm with log-probs`). Rates are of generated tokens; the roofline counts memory
and arithmetic of decoding (`mrl plan` with nothing lost).
On one H200, then on two (set VLLM_USE_FLASHINFER_SAMPLER=0 where nothing can be compiled):
mrl bench decode --name decode_h200 --runs 0.5b_grpo 1.5b_grpo
mrl bench decode --name decode_2x_h200 --runs 7b_grpo
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.recipes import LAWS, Case, cases, configured
from benchmarks.record import environment, output_of, parser_of
from benchmarks.roofline import device_name, ideal_step
from mrl.config import Config, RunPlan, build_plan
from mrl.config.plan import spread
from mrl.data import PromptStream, RLHFDataset
from mrl.types import Prompt, SamplingParams
from mrl.workers.job import device_of, job_spec, roles_on
from mrl.workers.spmd import SpawnedPool

NAME = "decode"
_WARMUPS, _REPEATS = 1, 5
_SMOKE_REPEATS = 2
_GIB = 1 << 30
_START_LIMIT_S, _CALL_LIMIT_S, _STOP_LIMIT_S = 900.0, 900.0, 120.0
# Two engines share a device: each gets less than a recipe gives its one.
_SHARED = ("rollout.name=vllm", "rollout.gpu_memory_utilization=0.35")
_SMOKE = ("rollout.cpu_kv_cache_gib=1", "rollout.max_num_seqs=16")
# What lets the trainer leave the device, so that both engines find room.
_OFFLOAD = tuple(f"actor.megatron.{what}_offload=true" for what in ("param", "grad", "optimizer"))
_PLAIN, _ALIKE = "vllm", "vllm with log-probs"

Generate = Callable[[int], int]  # seed -> tokens


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of each side, in the order of the turns."""

    of: Mapping[str, tuple[float, ...]]

    @classmethod
    def alternate(
        cls,
        sides: Mapping[str, Generate],
        warmups: int,
        repeats: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Rates:
        """Let the sides take turns; in the next turn another one is first."""
        names, found = list(sides), {name: list[float]() for name in sides}
        for turn in range(warmups + repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                start = clock()
                tokens = sides[name](turn)
                rate = tokens / (clock() - start)
                if turn >= warmups:
                    found[name].append(rate)
        return cls({name: tuple(rates) for name, rates in found.items()})

    def a_device(self, devices: int) -> dict[str, list[float]]:
        """Give the rates of one device."""
        return {name: [rate / devices for rate in rates] for name, rates in self.of.items()}


def sampling_of(config: Config, seed: int) -> SamplingParams:
    """Give a step's sampling."""
    rollout = config.rollout
    return SamplingParams(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        seed=seed,
    )


@contextmanager
def inside(config: Config, plan: RunPlan, prompts: Sequence[Prompt]) -> Iterator[Generate]:
    """Run a job and generate through its rollout group."""
    spec = job_spec(config, plan, 1)
    pool = SpawnedPool(plan.world_size, spec, Path(config.trainer.default_local_dir) / "logs")
    try:
        rollout = roles_on(pool, config, plan, spec).rollout
        rollout.sync(0)

        def generate(seed: int) -> int:
            groups = rollout.generate(prompts, sampling_of(config, seed))
            return sum(len(sample.response_ids) for group in groups for sample in group)

        yield generate
    finally:
        pool.close()


# vLLM alone: the functions below run in processes of its own.

_llm: Any = None


def _start(devices: str | None, settings: Mapping[str, Any]) -> None:
    global _llm
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    import vllm

    _llm = vllm.LLM(**settings)


def _is_ready() -> bool:
    return _llm is not None


def _stop() -> None:
    if _llm is not None:
        _llm.llm_engine.engine_core.shutdown()  # else this process waits for it for ever


def _generate(ids: Sequence[Sequence[int]], sampling: SamplingParams, log_probs: bool) -> int:
    import vllm
    from vllm.inputs import TokensPrompt

    params = vllm.SamplingParams(
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=None,
        logprobs=0 if log_probs else None,
        flat_logprobs=log_probs,
        detokenize=False,
    )
    _llm.reset_prefix_cache()  # mrl's forgets too: every step has other weights
    prompts = [TokensPrompt(prompt_token_ids=list(row)) for row in ids]
    outputs = _llm.generate(prompts, params, use_tqdm=False)
    if log_probs:  # text too
        rows = [list(answer.token_ids) for output in outputs for answer in output.outputs]
        _llm.get_tokenizer().batch_decode(rows, skip_special_tokens=True)
    return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)


def engine_settings(config: Config, plan: RunPlan, on_gpu: bool) -> dict[str, Any]:
    """Give vLLM what bounds the work in mrl's engine; all else is its own default."""
    rollout = config.rollout
    room = {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    return {
        "model": config.model.path,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "dtype": "bfloat16" if on_gpu else "float32",
        "seed": rollout.seed,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": not on_gpu,
        **(room if on_gpu else {"kv_cache_memory_bytes": rollout.cpu_kv_cache_gib * _GIB}),
    }


def _finish(replica: ProcessPoolExecutor) -> None:
    with suppress(BrokenProcessPool):  # its cause was told already
        replica.submit(_stop).result(_STOP_LIMIT_S)


@contextmanager
def alone(
    config: Config, plan: RunPlan, prompts: Sequence[Prompt], on_gpu: bool
) -> Iterator[Mapping[str, Generate]]:
    """Start vLLM once a replica, each with a replica's share of prompts and devices."""
    counts, tp = spread(len(prompts), plan.replicas), plan.rollout_tp
    starts = [sum(counts[:i]) for i in range(plan.replicas)]
    shares = [
        [prompt.token_ids for prompt in prompts[start : start + count]]
        for start, count in zip(starts, counts, strict=True)
    ]
    settings = engine_settings(config, plan, on_gpu)
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                ProcessPoolExecutor(
                    1,
                    mp_context=get_context("spawn"),
                    initializer=_start,
                    initargs=(_devices(i * tp, tp) if on_gpu else None, settings),
                )
            )
            for i in range(plan.replicas)
        ]
        for replica in replicas:
            stack.callback(_finish, replica)
        for ready in [replica.submit(_is_ready) for replica in replicas]:
            ready.result(_START_LIMIT_S)

        def generate(log_probs: bool, seed: int) -> int:
            sampling = sampling_of(config, seed)
            asked = [
                replica.submit(_generate, share, sampling, log_probs)
                for replica, share in zip(replicas, shares, strict=True)
            ]
            return sum(answer.result(_CALL_LIMIT_S) for answer in asked)

        yield {
            _PLAIN: lambda seed: generate(False, seed),
            _ALIKE: lambda seed: generate(True, seed),
        }


def _devices(first: int, count: int) -> str:
    """Name devices among those that this process may see."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = seen.split(",") if seen else [str(i) for i in range(first + count)]
    return ",".join(known[first : first + count])


def measure(case: Case, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure one case: a step's prompts, again and again."""
    config = configured(case, folder, 1)
    plan = build_plan(config)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    dataset = RLHFDataset(config.data.train_files, tokenizer, config.data)
    stream = PromptStream(dataset, config.data.train_batch_size, False, config.data.seed)
    prompts, on_gpu = stream.next_batch(), device_of(config) == "cuda"
    with ExitStack() as stack:
        ours = stack.enter_context(inside(config, plan, prompts))
        theirs = stack.enter_context(alone(config, plan, prompts, on_gpu))
        rates = Rates.alternate({"mrl": ours, **theirs}, _WARMUPS, repeats)
    ideal = ideal_step(config, device_name(environment()), case.mean_response)
    tokens = plan.samples * case.response * case.mean_response
    return {
        "config": {
            "recipe": case.recipe,
            "law": case.law,
            "prompts": len(prompts),
            "samples": plan.samples,
            "prompt_tokens": case.prompt,
            "response_tokens": case.response,
            "engine": engine_settings(config, plan, on_gpu),
            "replicas": plan.replicas,
        },
        "tokens_per_s_per_gpu": rates.a_device(plan.world_size),
        "roofline": ideal and tokens / ideal.of("gen") / plan.world_size,
    }


def run(args: Sequence[str]) -> dict[str, Any]:
    """Measure the cases, saving after each."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--runs", nargs="+", help="as of rl_step; default: those of GRPO")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    options = parser.parse_args(list(args))
    output, known = output_of(NAME, options), cases(options.smoke)
    names = options.runs or [name for name in known if name.endswith("_grpo")]
    if unknown := set(names) - set(known):
        raise ValueError(f"--runs {sorted(unknown)}: expected {', '.join(known)}")
    overrides = (*_SHARED, *(_SMOKE if options.smoke else _OFFLOAD))
    result: dict[str, Any] = {"smoke": options.smoke, "warmups": _WARMUPS, "cases": {}}
    for name in names:
        for law in options.laws:
            known_case = known[name]
            case = replace(known_case, law=law, overrides=(*known_case.overrides, *overrides))
            repeats = _SMOKE_REPEATS if options.smoke else _REPEATS
            with tempfile.TemporaryDirectory() as folder:
                found = measure(case, Path(folder), repeats)
            result["cases"][f"{name}/{law}"] = found
            for side, rates in found["tokens_per_s_per_gpu"].items():
                shown = ", ".join(f"{rate:,.0f}" for rate in rates)
                print(f"{name}/{law} {side}: {shown} tokens/s a GPU", flush=True)
            output.write(result)
    return result
