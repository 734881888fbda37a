"""Additional metrics: means over micro-batches, as in TRL, and statistics of all samples since the last log."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import trl
from torch import Tensor

from trl_steady.functional import pooling

__all__ = ["MeasuringTrainer"]

_QUANTILES = {"q01": 0.01, "q50": 0.5, "q90": 0.9, "q99": 0.99}


class MeasuringTrainer(trl.GRPOTrainer):
    """`trl.GRPOTrainer` that logs more metrics, pooled over micro-batches.

    Every process must record the same names in the same order.
    """

    model: torch.nn.Module  # set by TRL's constructor, whose annotation allows for None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._pool: dict[str, dict[tuple[str, str], Tensor]] = {"train": {}, "eval": {}}
        super().__init__(*arguments, **keywords)

    def record_token_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Log the mean of `values` (B, T) over the loss tokens of all processes."""
        totals = torch.stack([values.detach().where(mask, 0).sum(), mask.sum().to(values.dtype)])
        total, count = self.accelerator.reduce(totals, reduction="sum")
        self._record(name, (total / count.clamp(min=1)).item())

    def record_sequence_spread(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Log min, mean and max of `values` (B, 1) over all processes' sequences that have loss tokens."""
        per_sequence = values.detach().squeeze(-1).where(mask.any(-1), torch.nan)
        gathered = cast(Tensor, self.accelerator.gather(per_sequence))
        known = gathered[~gathered.isnan()]
        for statistic in ("min", "mean", "max"):
            self._record(f"{name}_{statistic}", getattr(known, statistic)().item() if known.numel() else float("nan"))

    def record_pooled(
        self,
        *,
        means: Mapping[str, Tensor] | None = None,
        sums: Mapping[str, Tensor] | None = None,
        quantiles: Mapping[str, Tensor] | None = None,
        sample_sizes: Mapping[str, Tensor] | None = None,
        counts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add samples whose statistics over all processes and micro-batches are logged next time.

        Args:
            means: name -> (n,) values. Their mean is logged.
            sums: name -> (2,) a sum of values and their number. The mean is logged.
            quantiles: name -> (n,) values. Quantiles are logged as `name_q01` and so on.
            sample_sizes: name -> (n,) log-weights. Their effective sample size is logged.
            counts: name -> (n,) counts. Their mean is logged, and exact quantiles as `name_q50` and `name_q99`.
        """
        totals = {
            **{("mean", name): pooling.mean_totals(values.detach().cpu()) for name, values in (means or {}).items()},
            **{("mean", name): values.detach().double().cpu() for name, values in (sums or {}).items()},
            **{
                ("quantiles", name): pooling.histogram(values.detach().cpu())
                for name, values in (quantiles or {}).items()
            },
            **{
                ("size", name): pooling.sample_size_totals(w.detach().cpu())
                for name, w in (sample_sizes or {}).items()
            },
            **{("counts", name): pooling.count_totals(own.detach().cpu()) for name, own in (counts or {}).items()},
        }
        if not totals:
            return
        together = torch.cat(list(totals.values()))
        if self.accelerator.num_processes > 1:
            together = cast(
                Tensor, self.accelerator.reduce(together.to(self.accelerator.device), reduction="sum")
            ).cpu()
        pool = self._pool["train" if self.model.training else "eval"]
        for key, total in zip(totals, together.split([len(t) for t in totals.values()]), strict=True):
            pool[key] = pool[key] + total if key in pool else total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's metrics and the statistics of the samples pooled since the last log."""
        pool = self._pool["train" if self.model.training else "eval"]
        for name, value in _summary(pool):
            self._record(name, value)
        super().log(logs, start_time)
        pool.clear()

    def _record(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)


def _summary(pool: Mapping[tuple[str, str], Tensor]) -> Iterator[tuple[str, float]]:
    for (kind, name), totals in pool.items():
        if kind == "mean":
            yield name, pooling.mean(totals)
        elif kind == "size":
            yield name, pooling.effective_sample_size(totals)
        elif kind == "counts":
            yield name, pooling.count_mean(totals)
            for suffix in ("q50", "q99"):
                yield f"{name}_{suffix}", pooling.count_quantile(totals, _QUANTILES[suffix])
        else:
            for suffix, share in _QUANTILES.items():
                yield f"{name}_{suffix}", pooling.quantile(totals, share)
