"""Family tables: what tensors a model has, and which parameters hold each on both sides."""

from mrl.resharding.families.numbers import MLAShape, MoEShape
from mrl.resharding.families.shape import REGISTRY, ModelShape
from mrl.resharding.families.table import Entry, Family, Logical

__all__ = ["REGISTRY", "Entry", "Family", "Logical", "MLAShape", "MoEShape", "ModelShape"]
