"""What a plan counts with beside the links of `mrl.resharding.hardware`: every number named.

GB are 1e9 bytes. Each assumption says where it comes from and can be given anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from mrl.resharding.hardware import GPU, GPUS, NETWORKS, Network
from mrl.tracking.flops import peak_flops

GB = 1e9


def _number(value: float, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Efficiencies, costs of the host and lengths; `--assume name=value` overrides any."""

    update: float = _number(
        0.575, "of the peak in forward and backward of a wide model; H200: 0.49 (1.5B), 0.55 (7B)"
    )
    log_prob: float = _number(
        0.61, "of the peak in a forward pass of a wide model; H200: 0.53 (1.5B), 0.59 (7B)"
    )
    narrow: float = _number(250, "hidden size at which half of the above is left (H200, 1.5B-7B)")
    experts: float = _number(0.6, "of a dense product's speed in small experts (assumed)")
    generation: float = _number(0.6, "of the roofline of decoding; good engines reach 0.5 to 0.6")
    host_step: float = _number(0.0005, "s, least time of an engine step (vLLM 0.26, H200 host)")
    host_sequence: float = _number(37e-6, "s a sequence and engine step (vLLM 0.26, H200 host)")
    host_layer: float = _number(
        0.0026, "s to start a layer's forward pass, 2.5 times that to train it (0.5B, H200 host)"
    )
    prompt: float = _number(1.0, "mean prompt, as a part of data.max_prompt_length")
    response: float = _number(1.0, "mean response, as a part of data.max_response_length")
    imbalance: float = _number(1.2, "tokens of the busiest expert-parallel rank over the mean")
    overlap: float = _number(0.7, "of gradient reduction and gather hidden, where asked for")
    offload: float = _number(0.7, "of the host link; H200: 43 of 64 GB/s out, 49 back")
    wake: float = _number(0.002, "s a GB that the engine takes back when it wakes (H200)")
    rest: float = _number(0.25, "s a step: rewards, advantages, cutting, logging (H200 host)")
    context: float = _number(1.2, "GB: CUDA context, cuBLAS (H200: 0.57 of it torch's)")
    engine_asleep: float = _number(2.0, "GB of an engine beside its budget: CUDA graphs (H200)")
    nccl: float = _number(2.5, "GB of communicators where there are several ranks (H200 x 2)")
    allocator: float = _number(0.03, "of activations lost to the allocator (H200: 0 to 0.13)")

    @classmethod
    def given(cls, gpu: str, texts: Sequence[str]) -> Assumptions:
        """Read `name=value` texts over the defaults of a GPU.

        Raises ValueError, naming the nearest known name, for an unknown name or a bad number.
        """
        known = {f.name for f in fields(cls)}
        values: dict[str, float] = dict(_OF_GPU.get(gpu, {}))
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or name not in known:
                near = get_close_matches(name, known, 1) or sorted(known)
                raise ValueError(f"--assume {text}: expected name=value; nearest name: {near[0]}")
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"--assume {text}: {value!r} is not a number") from None
            if not values[name] >= 0 or (name in _POSITIVE and not values[name] > 0):
                raise ValueError(f"--assume {text}: expected a positive number")
        return replace(cls(), **values)

    def rows(self) -> Iterator[tuple[str, float, str]]:
        """List (name, value, source)."""
        for f in fields(self):
            yield f.name, getattr(self, f.name), f.metadata["source"]


_POSITIVE = {"update", "log_prob", "generation", "prompt", "response", "offload", "experts"}
# A smaller chip is easier to feed: Megatron-LM's published runs reach 0.5 to 0.57 on A100.
_OF_GPU: Mapping[str, Mapping[str, float]] = {"a100-80": {"update": 0.6, "log_prob": 0.64}}


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs, their links and what is assumed of them."""

    name: str  # key of `GPUS`
    gpu: GPU
    network_name: str  # key of `NETWORKS`
    network: Network
    memory: float  # bytes that a process can have
    peak: float  # dense bfloat16 FLOP/s
    host_link: float  # bytes/s each way, GPU to host
    assume: Assumptions

    @classmethod
    def named(
        cls, gpu: str = "h100", network: str | None = None, assume: Sequence[str] = ()
    ) -> Machine:
        """Look up a GPU and a network (None: the one that the GPU is usually sold with).

        Raises ValueError for an unknown name.
        """
        if gpu not in GPUS:
            raise ValueError(f"--gpu {gpu}: expected one of {', '.join(GPUS)}")
        chip = GPUS[gpu]
        link = network or chip.network
        if link not in NETWORKS:
            raise ValueError(f"--network {link}: expected one of {', '.join(NETWORKS)}")
        peak = peak_flops(chip.name)
        assert peak is not None
        assumed = Assumptions.given(gpu, assume)
        host = _HOST_LINK[gpu] * assumed.offload * GB
        return cls(gpu, chip, link, NETWORKS[link], _MEMORY[gpu], peak, host, assumed)

    @property
    def nvlink_rate(self) -> float:
        """Give bytes/s between GPUs of a node."""
        return self.gpu.nvlink.bytes_per_s

    @property
    def network_rate(self) -> float:
        """Give bytes/s between nodes, a GPU."""
        return self.network.link.bytes_per_s

    @property
    def memory_rate(self) -> float:
        """Give bytes/s of the device's memory."""
        return self.gpu.memory.bytes_per_s


# What nvidia-smi shows as total, MiB.
_MEMORY = {"h100": 81559 * 2**20, "h200": 143771 * 2**20, "a100-80": 81920 * 2**20}
_HOST_LINK = {"h100": 64, "h200": 64, "a100-80": 32}  # GB/s: PCIe 5 and 4, 16 lanes
