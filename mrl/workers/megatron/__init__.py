"""Megatron-Core roles: the only package that imports megatron."""

from __future__ import annotations

import torch.storage

# Importing megatron replaces torch's loader of pickled storages, so that every tensor pickled from
# then on names megatron: the controller would import it, for seconds, at the first reply.
_load_from_bytes = torch.storage._load_from_bytes
import megatron.core  # noqa: E402, F401

torch.storage._load_from_bytes = _load_from_bytes
