"""A few lines at the end of training: what a reader of the log looks for first."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from transformers import TrainerCallback, TrainerState

__all__ = ["ResultsCallback", "results"]

# TRL's names: of the losses that clip ratios, and of CISPO
_CLIPPED = ("clip_ratio/region_mean", "cispo_clip_ratio")
_DROPPED = "dropped/"


class ResultsCallback(TrainerCallback):
    """Print `results` on the main process at the end of training.

    Args:
        show: Prints a text, as `Accelerator.print` does.
    """

    def __init__(self, show: Callable[..., Any]) -> None:
        self._show = show

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Print the lines."""
        if state.is_world_process_zero:  # Accelerator.print alone would print on each machine
            self._show(results(state.global_step, state.log_history), flush=True)


def results(steps: int, logs: Sequence[Mapping[str, Any]]) -> str:
    """Return lines with the reward, the KL, and the shares that were clipped and dropped.

    Args:
        steps: Optimizer steps so far.
        logs: `TrainerState.log_history`. A resumed run has the logs before the resume too.
    """
    lines = [f"trl-steady: training ended at optimizer step {steps}"]
    if rewards := _values(logs, "reward"):
        lines.append(f"  reward   {rewards[0]:.4g} in the first log, {rewards[-1]:.4g} in the last")
    if kls := _values(logs, "kl"):
        lines.append(f"  KL       {kls[-1]:.4g} in the last log")
    for name in _CLIPPED:
        if shares := _values(logs, name):
            lines.append(f"  clipped  {fmean(shares):.1%}, mean of all logs")
    masks = dict.fromkeys(name for log in logs for name in log if name.startswith(_DROPPED))
    if masks:
        shares = [f"{name.removeprefix(_DROPPED)} {fmean(_values(logs, name)):.1%}" for name in masks]
        lines.append(f"  dropped  {', '.join(shares)}, mean of all logs")
    return "\n".join(lines)


def _values(logs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [log[name] for log in logs if log.get(name) is not None]
