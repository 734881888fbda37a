"""Signs of an engine that samples something else than what the policy is trained on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trl_steady.report.history import History
from trl_steady.report.signs.common import Found, beyond, exceeds
from trl_steady.report.statistics import blocks

_NATS = "nats per token"
_KL = "mismatch/kl"
_DIFFERENCE = "sampling/sampling_logp_difference/mean"
_ADAPTER_LIMIT = 0.1
"""The value that the default of `engine_check` counts as where vLLM gets the adapter alone."""
_KL_OF_FORMATS = 0.01
"""Nats per token: five times what rounding to bf16 gives (docs/figures/evidence/precision.json)."""
# ESS is about 1 / (1 + 2 kl). 0.9 is a kl of 0.055, 37 times that of the R3 paper's mixture of experts. There, the run
# that collapsed had 10 % above 2. A mean difference of 0.1 puts a tenth of the ratios outside 0.8 to 1.2.
_DISAGREES: Sequence[Mapping[str, Any]] = (
    {"key": "mismatch/effective_sample_size", "limit": 0.9, "below": True, "q": 0.5},
    {"key": "mismatch/above_2", "limit": 0.01},
    {"key": _KL, "limit": 0.055, "unit": _NATS},
    {"key": _DIFFERENCE, "limit": 0.1, "unit": _NATS},
)


def engine_other_policy(history: History) -> Found | None:
    """Find an engine that serves another policy. The limits are those of `engine_check`."""
    asked = history.settings.get("engine_check") or 0.0
    limit = max(asked, 1.0)
    found = beyond(history, [{"key": key, "limit": limit, "unit": _NATS} for key in (_KL, _DIFFERENCE)])
    gets_adapter = history.settings.get("use_vllm") and history.settings.get("vllm_adapter_sync")
    if found is not None or asked > 1 or not gets_adapter or _KL not in history.keys:
        return found
    found = exceeds(history, _KL, _ADAPTER_LIMIT, _NATS)
    if found is None or found.since > _first_step(history, _KL):
        return None
    return found


def formats_differ(history: History) -> Found | None:
    """Find an engine that computes in another number format than the trainer.

    Raises KeyError if it is not known in which they compute.
    """
    engine, trainer = _formats(history)
    if not engine or not trainer:
        raise KeyError("number formats of engine and trainer")
    if engine == trainer:
        return None
    evidence = f"engine {engine}, trainer {trainer}"
    is_more = False
    values = history.finite_values(_KL)
    if len(values):
        kl = float(np.median(values))
        evidence = f"{evidence}, {_KL} {kl:.2g} {_NATS}"
        is_more = kl > _KL_OF_FORMATS
    return Found(0, "", evidence, {"more_than_formats": is_more, "trainer_float16": trainer == "float16"})


def _formats(history: History) -> tuple[str, str]:
    """Return the number formats of engine and trainer, "" where they are not known."""
    formats = history.run.get("formats", {})
    return formats.get("engine") or "", formats.get("trainer") or ""


def engine_falls_behind(history: History) -> Found | None:
    """Find an engine that agrees with the trainer at first, and not later."""
    found = _disagreement(history)
    if found is None or found.since <= _first_step(history, found.metric):
        return None
    return found


def engine_differs(history: History) -> Found | None:
    """Find an engine that differs from the trainer from the start."""
    found = _disagreement(history)
    if found is None or found.since > _first_step(history, found.metric):
        return None
    engine, trainer = _formats(history)
    one_format = bool(engine) and engine == trainer
    return found._replace(facts={"one_format": one_format, "one_bfloat16": one_format and engine == "bfloat16"})


def _disagreement(history: History) -> Found | None:
    """Find an engine that differs from the trainer, but serves the policy, as far as the log shows that."""
    found = beyond(history, _DISAGREES)
    means = [key for key in (_KL, _DIFFERENCE) if key in history.keys and not history.is_flagged(key, "sum")]
    if found is None or (means and engine_other_policy(history) is not None):
        return None
    return found


def _first_step(history: History, key: str) -> int:
    return int(blocks(history, key).steps[0])
