"""Layouts by name: `tp2pp2`, `cp2,recompute`, `ep2etp1tp2,fused=false`, `config`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from mrl.config.check_model import ModelShape
from mrl.config.schema import MegatronConfig
from mrl.types import Batching

OWN = "config"  # the layout that the config itself asks for

_SIZES: dict[str, str | None] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": None,  # what is left of the ranks
}
_ONE_SIZE = re.compile(rf"({'|'.join(sorted(_SIZES, key=len, reverse=True))})(\d+)")
# What a model computes, rather than how it is spread: the same in every layout.
_KEPT = (
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "freeze_moe_router",
    "transformer_impl",
    "dtype",
)

_Fields = Mapping[str, Any]


def _switch(on: _Fields, off: _Fields) -> dict[str, _Fields]:
    return {"true": on, "false": off}


def _full(layers: int = 1) -> _Fields:
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": layers,
    }


_OFFLOADED = ("param_offload", "grad_offload", "optimizer_offload")
_OVERLAPPED = ("overlap_grad_reduce", "overlap_param_gather")
# Options of a layout: for each value the config keys that it sets; the first value is the default.
_OPTIONS: dict[str, dict[str, _Fields]] = {
    "recompute": {
        "full": _full(),
        "selective": {"recompute_granularity": "selective"},
        "false": {"recompute_granularity": None},
    },
    "offload": _switch(dict.fromkeys(_OFFLOADED, True), dict.fromkeys(_OFFLOADED, False)),
    "overlap": _switch(dict.fromkeys(_OVERLAPPED, True), dict.fromkeys(_OVERLAPPED, False)),
    "fused": _switch({"use_fused_kernels": True}, {"use_fused_kernels": False}),
    "sp": _switch({"sequence_parallel": True}, {"sequence_parallel": False}),
    "distopt": _switch({"use_distributed_optimizer": True}, {"use_distributed_optimizer": False}),
    "cp_comm": {
        "a2a": {"cp_comm_type": "a2a"},
        "p2p": {"cp_comm_type": "p2p"},
    },
    "dtype": {
        # Transformer Engine's packed attention takes half precision alone
        "float32": {"dtype": "float32", "transformer_impl": "local"},
        "bfloat16": {"dtype": "bfloat16"},
    },
    "impl": {
        "local": {"transformer_impl": "local"},
        "te": {"transformer_impl": "transformer_engine"},
    },
    "fp8": {"hybrid": {"fp8": "hybrid"}, "e4m3": {"fp8": "e4m3"}, "false": {"fp8": None}},
    "fp8_recipe": {name: {"fp8_recipe": name} for name in ("tensorwise", "blockwise", "delayed")},
}
_CUTS: dict[str, Callable[[int], Batching]] = {
    "rows": lambda size: Batching(micro_batch_size=size),
    "tokens": lambda size: Batching(max_tokens=size),
}


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """A way to spread a model over ranks, and to cut its rows."""

    name: str
    sizes: Mapping[str, int]  # by short name; those left out are 1
    options: Mapping[str, Any]  # fields of MegatronConfig
    batching: Batching | None  # None: the check's own
    is_own: bool = False  # starts from the config's layout

    def megatron(self, base: MegatronConfig) -> MegatronConfig:
        """Give the layout: plain sizes and options, but what `base` says of the model itself."""
        kept = {name: getattr(base, name) for name in _KEPT}
        start = base if self.is_own else MegatronConfig(**kept)
        sizes = {field: self.sizes[name] for name, field in _SIZES.items()
                 if field is not None and name in self.sizes}  # fmt: skip
        return replace(start, **{**sizes, **self.options})

    @property
    def world_size(self) -> int:
        """Count the ranks of a layout that is not the config's own: as few as it can have."""
        size = {name: self.sizes.get(name, 1) for name in _SIZES}
        replica = size["tp"] * size["pp"] * size["cp"]
        if "dp" in self.sizes:
            return replica * size["dp"]
        experts = self.sizes.get("etp", size["tp"]) * size["ep"] * size["pp"]
        return lcm(replica, experts) if size["ep"] > 1 or "etp" in self.sizes else replica


def parse_layout(name: str) -> NamedLayout:
    """Read a layout's name: sizes in one word, and options, separated by commas.

    Raises ValueError for what it does not know, with what there is.
    """
    words = [word.strip() for word in name.split(",") if word.strip()]
    if not words:
        raise ValueError(f"layout {name!r} is empty; {_known()}")
    sizes: dict[str, int] = {}
    options: dict[str, Any] = {}
    batching, is_own = None, False
    for word in words:
        key, given, value = word.partition("=")
        if word == OWN:
            is_own = True
        elif key in _OPTIONS:
            options |= _option(name, key, value if given else next(iter(_OPTIONS[key])))
        elif key in _CUTS:
            batching = _CUTS[key](_whole(name, word, value))
        else:
            sizes |= _sizes(name, word)
    return NamedLayout(",".join(words), sizes, options, batching, is_own)


def _option(name: str, key: str, value: str) -> _Fields:
    values = _OPTIONS[key]
    if value not in values:
        raise ValueError(
            f"layout {name!r}: {key} is {value!r}, expected one of {', '.join(values)}"
        )
    return values[value]


def _sizes(name: str, word: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    end = 0
    for match in _ONE_SIZE.finditer(word):
        if match.start() != end:
            break
        end, key = match.end(), match.group(1)
        if key in sizes:
            raise ValueError(f"layout {name!r} names {key} twice")
        sizes[key] = _whole(name, word, match.group(2))
    if end != len(word):
        near = difflib.get_close_matches(word.partition("=")[0], [*_OPTIONS, *_CUTS, OWN], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"layout {name!r}: {word!r} is not known. {hint}{_known()}")
    return sizes


def _whole(name: str, word: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"layout {name!r}: {word!r} needs a whole number of at least 1")
    return int(text)


def _known() -> str:
    options = ", ".join(f"{key}={'|'.join(values)}" for key, values in _OPTIONS.items())
    cuts = ", ".join(f"{key}=N" for key in _CUTS)
    return (
        f"A layout is {OWN!r} (the config's own), or sizes written together "
        f"({', '.join(_SIZES)}, as tp2pp2), and options after commas: {options}, {cuts}"
    )


_SPREADS = (
    "tp2", "tp4", "tp8", "pp2", "pp4", "pp2vpp2", "cp2", "cp4", "dp2", "dp4", "ep2", "ep4",
    "ep2etp1tp2", "tp2pp2", "tp2dp2", "pp2dp2", "cp2tp2", "cp2pp2", "tp2cp2pp2", "ep2tp2pp2",
)  # fmt: skip
_ONE_RANK = ("tp1,rows=1", "tp1,tokens={tokens}", "tp1,fused=false", "tp1,recompute", "tp1,offload")


def auto_layouts(shape: ModelShape | None, ranks: int, tokens: int) -> tuple[str, ...]:
    """List the layouts that are worth a look on at most `ranks` ranks; some may be impossible.

    `tokens` is the budget of a micro-batch where one is cut by tokens.
    """
    names = [OWN]
    for name in _SPREADS:
        layout = parse_layout(name)
        has_experts = shape is not None and shape.experts
        if layout.world_size <= ranks and (has_experts or "ep" not in layout.sizes):
            names.append(name)
    return (*names, *(name.format(tokens=tokens) for name in _ONE_RANK))
