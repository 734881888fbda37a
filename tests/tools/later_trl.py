"""TRL as it is after 1.16, as far as others name it: its log-prob function also takes a set of tokens for each row."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import grpo_trainer, rloo_trainer, utils

from trl_steady.trl_bridge import lm_head

ARGUMENTS = {"positional": "support_ids", "keyword": "support_ids=support_ids"}


def _log_probs(*arguments: Any, support_ids: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """TRL's function, which normalises log-probs and entropies over the tokens (N, K) of `support_ids`.

    A row is filled up with tokens that it names already.
    """
    *own, support_ids = arguments if len(arguments) == 10 else (*arguments, support_ids)
    if support_ids is None:
        return ChunkedLogProbFunction.apply(*own)
    hidden, weight, bias, targets, temperature, *_ = own
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    outside = torch.ones_like(logits, dtype=torch.bool).scatter(-1, support_ids, False)
    log_probs = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs.masked_fill(outside, 0)).sum(-1)
    return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropies, None, None, None


LATER = SimpleNamespace(apply=_log_probs)


def install(patch: pytest.MonkeyPatch, form: str) -> None:
    """Let TRL call this function with `support_ids`, which the model may get as (B, L, K)."""
    source = inspect.getsource(utils.add_fused_lm_head)
    for old, new in (
        ('        kwargs["use_cache"] = False\n', '        support_ids = kwargs.pop("support_ids", None)\n{}'),
        (
            "        with autocast_ctx, maybe_gather",
            "        if support_ids is not None:\n"
            "            support_ids = support_ids[:, 1:][mask] if compact else support_ids[:, 1:].flatten(0, 1)\n{}",
        ),
        (
            "                outputs,\n            )",
            f"                outputs,\n                {ARGUMENTS[form]},\n            )",
        ),
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new.replace("{}", old))
    found: dict[str, Any] = {}
    exec(source, vars(utils), found)
    for module in (utils, grpo_trainer, rloo_trainer):
        patch.setattr(module, "add_fused_lm_head", found["add_fused_lm_head"])
    patch.setattr(utils, "_ChunkedLogProbFunction", LATER)
    patch.setattr(lm_head, "_TRL_LOG_PROBS", LATER)
