"""A CPU engine of vLLM that takes new weights as TRL sends them, as one on a GPU does by itself."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def take_weights() -> None:
    """Let engines built from now on be loaded again.

    Without it the weights of linear layers are gone once they are packed, and those of experts are packed, so that
    others in their place mean something else.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    load = RoutedExperts.load_weights

    def load_weights(self: Any, weights: Any) -> Iterator[Any]:
        for name, tensor in weights:
            parameter = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}.get(name.rsplit(".", 1)[-1])
            if parameter is None or not hasattr(self, "packed"):
                yield from load(self, [(name, tensor)])
            else:
                own = getattr(self, parameter).data
                own.copy_(cpu_prepack_moe_weight(_padded(parameter, tensor).to(own.dtype), self.packed))
                yield parameter

    def marked(process: Callable[..., None]) -> Callable[..., None]:
        def processed(self: Any, layer: Any) -> None:
            process(self, layer)
            layer.packed = self.isa  # by the instructions of this CPU: "vec", "amx"

        return processed

    utils.dispatch_cpu_unquantized_gemm = unpacked
    RoutedExperts.load_weights = load_weights
    experts: Any = CPUUnquantizedExperts
    experts.process_weights_after_loading = marked(experts.process_weights_after_loading)


def _padded(name: str, tensor: Tensor) -> Tensor:
    """The experts' inner size to a multiple of 32, as the engine has it."""
    inner = tensor.shape[1] // 2 if name == "w13_weight" else tensor.shape[2]
    more = -inner % 32
    if name == "w13_weight":
        return F.pad(tensor.unflatten(1, (2, inner)), (0, 0, 0, more)).flatten(1, 2).contiguous()
    return F.pad(tensor, (0, more)).contiguous()
