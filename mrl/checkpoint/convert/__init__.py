"""Convert models between Hugging Face folders and Megatron-Core distributed checkpoints.

One process does it without GPUs and without building a model: the family tables say where every
element belongs, and one tensor at a time is held.
"""

from mrl.checkpoint.convert.directions import Options, convert
from mrl.checkpoint.convert.progress import parse_size

__all__ = ["Options", "convert", "parse_size"]
