"""Which experts vLLM chose for the tokens of a sample, for training to replay (R3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import MoERunner


class RoutingReader:
    """Reads the routing of vLLM's answers, started with `enable_return_routed_experts`."""

    def __init__(self, model: nn.Module) -> None:
        """Find the layers with experts of a live model; on a CPU make them report as well."""
        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        self.layers = sorted(runner.layer_id for runner in runners)
        for runner in runners:
            method = runner.routed_experts.quant_method
            if method.is_monolithic:
                # vLLM's CPU kernel chooses by itself and tells nobody
                kernel = method.cpu_fused_moe
                kernel.forward_method = _reporting(runner.router, kernel.forward_method)

    def read(self, answer: Any, num_tokens: int) -> Tensor:
        """Give the choices [P + R, layers with experts, K], uint8 or int32, of an answer.

        The last token was sampled and never routed; it predicts nothing, so it may go where the
        one before it went. vLLM keeps routing by cache block: a prompt found in the prefix cache
        has that of the pass that filled it, by the same weights. Raises RuntimeError when vLLM
        reports another number of tokens.
        """
        found = answer.routed_experts
        count = 0 if found is None else len(found)
        if count != num_tokens - 1:
            raise RuntimeError(
                f"vLLM gave the routing of {count} tokens for a sample of {num_tokens}, expected "
                f"{num_tokens - 1}: all but the last"
            )
        dtype = np.uint8 if found.dtype == np.uint8 else np.int32
        chosen = torch.from_numpy(found[:, self.layers].astype(dtype))
        return torch.cat((chosen, chosen[-1:]))


def _reporting(router: Any, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reporting(
        layer: Any, hidden: Tensor, weights: Tensor, chosen: Tensor, *rest: Any
    ) -> Tensor:
        router.capture_fn(chosen)
        return forward(layer, hidden, weights, chosen, *rest)

    return reporting
