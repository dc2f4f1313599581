"""GPUs and networks by name: the rates behind `mrl reshard`'s estimate of the time.

Each number says where it comes from. GB are 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """A bandwidth as specified, and the part of it that large transfers reach."""

    nominal: float  # GB/s
    reached: float  # fraction
    source: str

    @property
    def bytes_per_s(self) -> float:
        """Give the rate that an estimate counts with."""
        return self.nominal * self.reached * 1e9


@dataclass(frozen=True, slots=True)
class GPU:
    """An accelerator in a node whose GPUs are all joined by NVLink switches."""

    name: str
    memory: Rate  # HBM, bytes read plus bytes written
    nvlink: Rate  # one GPU to others of its node, each way
    network: str  # the key of `NETWORKS` that it is usually sold with


@dataclass(frozen=True, slots=True)
class Network:
    """A network between nodes with one adapter a GPU."""

    name: str
    link: Rate  # one adapter, each way


@dataclass(frozen=True, slots=True)
class Latency:
    """Time that passes whatever the size."""

    seconds: float
    source: str


# Copies on an H200 moved 4.3 TB/s of the specified 4.8.
_COPY = 0.9
# An NCCL all-gather over the 450 GB/s of an H100 is seen at 360 to 375.
_NCCL_NVLINK = 0.8
# Large RDMA messages, protocol headers taken off.
_NCCL_NETWORK = 0.9

GPUS: Mapping[str, GPU] = {
    "h100": GPU(
        "H100 SXM 80 GB",
        Rate(3350, _COPY, "NVIDIA H100 datasheet, HBM3"),
        Rate(450, _NCCL_NVLINK, "NVIDIA H100 datasheet: 900 GB/s both ways, 18 links"),
        "ndr",
    ),
    "h200": GPU(
        "H200 SXM 141 GB",
        Rate(4800, _COPY, "NVIDIA H200 datasheet, HBM3e"),
        Rate(450, _NCCL_NVLINK, "NVIDIA H200 datasheet: 900 GB/s both ways, 18 links"),
        "ndr",
    ),
    "a100-80": GPU(
        "A100 SXM 80 GB",
        Rate(2039, _COPY, "NVIDIA A100 datasheet, HBM2e"),
        Rate(300, _NCCL_NVLINK, "NVIDIA A100 datasheet: 600 GB/s both ways, 12 links"),
        "hdr",
    ),
}

NETWORKS: Mapping[str, Network] = {
    "hdr": Network("InfiniBand HDR", Rate(25, _NCCL_NETWORK, "200 Gb/s an adapter")),
    "ndr": Network("InfiniBand NDR", Rate(50, _NCCL_NETWORK, "400 Gb/s an adapter")),
    "xdr": Network("InfiniBand XDR", Rate(100, _NCCL_NETWORK, "800 Gb/s an adapter")),
    "roce-100": Network("RoCE 100 GbE", Rate(12.5, _NCCL_NETWORK, "100 Gb/s an adapter")),
    "roce-400": Network("RoCE 400 GbE", Rate(50, _NCCL_NETWORK, "400 Gb/s an adapter")),
}

# One grouped exchange or collective: enqueue on the host, start on the device, first byte.
LAUNCH = Latency(50e-6, "assumed for a grouped NCCL call with its packing kernels")
