"""Replace the log-prob function inside TRL's fused LM head. This file knows its arguments and results."""

# pyright: reportIncompatibleMethodOverride=false
# an autograd function's arguments differ from those of torch's base class

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import trl.trainer.utils
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_steady.trl_bridge.patching import patched

HeadOutputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""(N,) each: log-probs, entropies, and outputs that GRPO does not use."""


@dataclass(frozen=True)
class Head:
    """Arguments of one call of the log-prob function in TRL's fused LM head, for `N` positions.

    On a GPU these are the positions with a label. Elsewhere they are all positions, with token 0 for a missing label.
    """

    hidden: Tensor
    """(N, H)"""
    weight: Tensor
    """(V, H), gathered if it is sharded."""
    bias: Tensor | None
    """(V,)"""
    targets: Tensor
    """(N,)"""
    temperature: float
    chunk_size: int
    softcap: float | None
    logit_scale: float
    others: tuple[Any, ...]
    """The other arguments in TRL's order, which only TRL reads: names of outputs, and those of later versions."""
    keywords: Mapping[str, Any]

    def trl_outputs(self) -> HeadOutputs:
        """Return what TRL computes."""
        return _TRL_LOG_PROBS.apply(
            self.hidden,
            self.weight,
            self.bias,
            self.targets,
            self.temperature,
            self.chunk_size,
            self.softcap,
            self.logit_scale,
            *self.others,
            **self.keywords,
        )


_TRL_LOG_PROBS: Any = getattr(trl.trainer.utils, "_ChunkedLogProbFunction", None)  # `names.toml` refuses its users


class _GatheredOnce(torch.autograd.Function):
    """Compute a head's outputs, and run their whole backward inside one gather of the head.

    ZeRO-3 gathers the head in forward only, so that each function that reads the head would gather it in backward.
    The number of these functions may depend on the tokens of a rank, and ranks would wait for one another in different
    collectives.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, compute: Callable[[Tensor], HeadOutputs]
    ) -> HeadOutputs:
        ctx.set_materialize_grads(False)
        ctx.hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            ctx.outputs = compute(ctx.hidden)
        ctx.save_for_backward(weight, bias)
        outputs: list[Tensor | None] = []
        without_grad: list[Tensor] = []  # they do not depend on the head's inputs, or are not floating point
        for values in ctx.outputs:
            if values is None:
                outputs.append(None)
                continue
            detached = values.detach()
            outputs.append(detached)
            if not values.requires_grad:
                without_grad.append(detached)
        ctx.mark_non_differentiable(*without_grad)
        return tuple(outputs)  # pyright: ignore[reportReturnType]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, bias = ctx.saved_tensors
        inputs = {0: ctx.hidden, 1: weight, 2: bias}
        needed = [index for index in inputs if ctx.needs_input_grad[index]]
        outputs: list[Tensor] = []
        grad_outputs: list[Tensor] = []
        for values, grad in zip(ctx.outputs, grads, strict=True):
            if grad is not None:
                outputs.append(values)
                grad_outputs.append(grad)
        grad_inputs: list[Tensor | None] = [None, None, None, None]  # the last is that of `compute`
        with trl.trainer.utils.maybe_gather_lm_head_ctx(weight, bias):
            if not outputs:  # nothing to do on this rank, but the other ranks gather
                return tuple(grad_inputs)
            # retain_graph: the outer graph decides how long this one lives; allow_unused: the bias may be unused
            computed = torch.autograd.grad(
                outputs, [inputs[index] for index in needed], grad_outputs, retain_graph=True, allow_unused=True
            )
        for index, grad in zip(needed, computed, strict=True):
            grad_inputs[index] = grad
        return tuple(grad_inputs)


def replace_head(compute: Callable[[Head], HeadOutputs]) -> AbstractContextManager[None]:
    """Compute the outputs of all fused LM heads with `compute` inside this context."""

    def apply(*arguments: Any, **keywords: Any) -> HeadOutputs:
        head = Head(*arguments[:8], others=arguments[8:], keywords=keywords)
        is_partitioned = hasattr(head.weight, "ds_id")  # by ZeRO-3
        if not (is_partitioned and torch.is_grad_enabled()):
            return compute(head)

        def compute_from(hidden: Tensor) -> HeadOutputs:
            return compute(replace(head, hidden=hidden))

        return _GatheredOnce.apply(head.hidden, head.weight, head.bias, compute_from)

    # TRL looks its function up in the module at each call
    return patched(trl.trainer.utils, {"_ChunkedLogProbFunction": SimpleNamespace(apply=apply)})


@contextmanager
def energies_as_entropies() -> Generator[None]:
    """Let TRL's fused LM heads compute 1 - 2 pi + the sum of pi^2 in place of entropies, without gradient.

    This is the squared norm of the gradient of log pi with respect to the logits. pi is of the whole vocabulary.
    """
    compute = _TRL_LOG_PROBS.apply

    def apply(*arguments: object, **keywords: object) -> HeadOutputs:
        asked = list(arguments)
        asked[8] = (*cast(tuple[str, ...], arguments[8]), "log_sum_sq_probs")  # names of outputs
        results = compute(*asked, **keywords)
        log_probs, log_sums = results[0], results[2]
        energies = 1 - 2 * log_probs.detach().exp() + log_sums.exp()
        return log_probs, energies.clamp(min=0), None, None, None

    function = SimpleNamespace(apply=apply)
    # TRL reads its module at each call, and heads of other features read this one
    in_trl = patched(trl.trainer.utils, {"_ChunkedLogProbFunction": function})
    with in_trl, patched(sys.modules[__name__], {"_TRL_LOG_PROBS": function}):
        yield


def per_token(
    model: torch.nn.Module, compute: Callable[[Head], Tensor], *, labels: Tensor, **inputs: object
) -> Tensor:
    """Return what `compute` returns (N,) in a forward of a model with TRL's fused LM head, in its own dtype.

    It is (b, l - 1), for each token after the first; 0 for those without a label. The values leave the model as its
    `log_probs`, because they must be an output of a sharded model: FSDP2 gathers in its forward what they depend on,
    and knows only from the gradient of an output that backward begins.
    """
    computed: list[Tensor] = []

    def head_outputs(head: Head) -> HeadOutputs:
        computed.append(compute(head))
        return computed[0], None, None, None, None

    with replace_head(head_outputs):
        outputs = model(labels=labels, fused_lm_head=True, **inputs)
    (values,) = computed
    output = outputs.log_probs
    if output.dtype == values.dtype:
        return output
    # FSDP2 has cast the output. Take the exact values, and the gradient of the output
    mask = labels[:, 1:] != -100
    values = values.detach()
    if values.numel() == mask.numel():
        values = values.view(mask.shape)[mask]
    exact = torch.zeros_like(output, dtype=values.dtype).masked_scatter(mask.to(values.device), values)
    return exact + (output - output.detach()).to(values.dtype)
