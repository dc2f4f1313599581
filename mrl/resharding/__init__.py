"""Moving a model between checkpoint files, Megatron ranks and vLLM ranks.

Layouts say where each element lives, one planner lists the copies between two of them, and
transports run the list. What is imported here needs no torch.
"""

from mrl.resharding.families import ModelShape
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import FILE_RANK, Layout, Piece, TensorInfo
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.planner import ReshardPlan, plan

__all__ = [
    "FILE_RANK",
    "Layout",
    "MegatronLayout",
    "ModelShape",
    "Piece",
    "ReshardPlan",
    "TensorInfo",
    "hf_layout",
    "plan",
]
