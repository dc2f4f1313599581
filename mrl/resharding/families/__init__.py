"""Family tables: what tensors a model has, and which Megatron parameter holds each."""

from mrl.resharding.families.shape import REGISTRY, ModelShape
from mrl.resharding.families.table import Entry, Family, Logical

__all__ = ["REGISTRY", "Entry", "Family", "Logical", "ModelShape"]
