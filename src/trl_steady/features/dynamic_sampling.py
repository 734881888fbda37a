"""Dynamic sampling as a part: groups that teach nothing are replaced by groups of further prompts."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import IterableDataset
from torch import Tensor

from trl_steady.core.feature import Active, Trainer
from trl_steady.core.types import Rollout, loss_mask
from trl_steady.features.legacy import Part
from trl_steady.rewards.steps import StepRewards
from trl_steady.trl_bridge.resampling import ResampledRollout, Row
from trl_steady.trl_bridge.rollout import collate_rows

_FILE = "dynamic_sampling.json"


@dataclass
class _Group:
    """A group of completions to a prompt, whose rows may be on several processes."""

    owners: Sequence[int]
    """(G,) process of each row."""
    rows: dict[int, Row]
    """Number in the group -> row, for those of this process."""


class _Prompts:
    """The training set in seeded orders of its own, one after the other, the same on all processes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.position = (0, 0)
        """Number of the pass over the data, and the rows that were taken in it."""
        self._rows: Iterator[dict[str, Any]] | None = None

    def take(self, count: int) -> list[dict[str, Any]]:
        """Return the next rows."""
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            number, taken = self.position
            self._rows = self._from(number, taken) if self._rows is None else self._rows
            found = [*itertools.islice(self._rows, count - len(rows))]
            rows += found
            is_over = len(rows) < count
            self.position = (number + 1, 0) if is_over else (number, taken + len(found))
            self._rows = None if is_over else self._rows
        return collate_rows(self._trainer, rows)

    def go_to(self, position: Sequence[int]) -> None:
        """Go on as after a checkpoint."""
        self.position, self._rows = (position[0], position[1]), None

    def _from(self, number: int, first: int) -> Iterator[dict[str, Any]]:
        data, seed = self._trainer.train_dataset, (self._trainer.args.seed + 1) * 1_000_003 + number
        if isinstance(data, IterableDataset):
            return itertools.islice(data.shuffle(seed=seed), first, None)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        return (data[index] for index in order[first:].tolist())


class DynamicSamplingPart(Part):
    """Replaces groups that the filter rejects, with `dynamic_sampling` (DAPO, arXiv 2503.14476, section 3.2)."""

    window_options = (
        ("dynamic_sampling", None),
        ("dynamic_sampling_max_rounds", "dynamic_sampling"),
        ("dynamic_sampling_filter", "dynamic_sampling"),
    )
    _has_warned = False

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._prompts = _Prompts(trainer)
        self._seen = (math.inf, -math.inf)  # the worst and the best reward so far

    def describe(self) -> Iterable[Active]:
        """Return that groups are replaced."""
        if self.trainer.args.dynamic_sampling:
            options = ("dynamic_sampling", "dynamic_sampling_filter", "dynamic_sampling_max_rounds")
            yield Active("dynamic sampling: groups that teach nothing are replaced", options)

    def making(
        self, rollout: Rollout, make: Callable[[list[Any]], dict[str, Any]], inputs: list[Any]
    ) -> dict[str, Any]:
        """Sample rounds until the filter has kept enough groups, and make the rollout of these groups."""
        trainer, most = self.trainer, self.trainer.args.dynamic_sampling_max_rounds
        if not trainer.args.dynamic_sampling or not trainer.model.training:
            return make(inputs)
        size, processes = trainer.num_generations, trainer.accelerator.num_processes
        rounds, counts = ResampledRollout(trainer, rollout, make), Counter[str]()
        rows, keeps = self._round(rounds, inputs, counts)
        idle, spare = [slot for slot, keep in enumerate(keeps) if not keep], list[_Group]()
        while len(spare) < len(idle) and counts["rounds"] < most:
            missing = len(idle) - len(spare)
            expected = math.ceil(missing * counts["generated"] / max(counts["kept"], 1))
            step = processes // math.gcd(processes, size)  # equally many rows on each process
            wanted = math.ceil(min(len(keeps), 2 * missing, expected) / step) * step
            share = wanted * size // processes
            first, prompts = trainer.accelerator.process_index * share, self._prompts.take(wanted)
            found, are_kept = self._round(rounds, [prompts[(first + i) // size] for i in range(share)], counts)
            for start in (group * size for group, is_kept in enumerate(are_kept) if is_kept):
                owners = [(start + i) // share for i in range(size)]
                held = {i: found[start + i - first] for i in range(size) if first <= start + i < first + share}
                spare.append(_Group(owners, held))
        self._fill(rows, idle, spare)
        counts["unfilled"] = max(len(idle) - len(spare), 0)
        self._log(counts, len(keeps))
        return rounds.finish(rows)

    def _round(
        self, rounds: ResampledRollout, inputs: list[Any], counts: Counter[str]
    ) -> tuple[list[Row], list[bool]]:
        """Return the rows (n,) of this process, and which groups (J,) of all processes the filter keeps."""
        trainer, args = self.trainer, self.trainer.args
        rows, rewards, samples = rounds.sample(inputs)
        weighted = (rewards * trainer.reward_weights.to(rewards.device)).cpu()
        weighted = weighted.view(-1, trainer.num_generations, len(trainer.reward_funcs))
        totals = weighted.nansum(-1).masked_fill(weighted.isnan().all(-1), torch.nan)
        if getattr(args, "reward_clip_range", None):  # RLOO's
            totals = totals.clamp(*args.reward_clip_range)
        # GRPO may normalise each function
        is_summed = getattr(args, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"
        compared = totals.unsqueeze(-1) if is_summed else weighted
        keeps = self._keeps(rows, totals, compared, loss_mask(samples).any(1))
        low, high = lowest(totals), -lowest(-totals)
        worst, best = self._seen = min(self._seen[0], low.min().item()), max(self._seen[1], high.max().item())
        is_equal = ~keeps & (low == high) & (worst < best)
        counts.update(rounds=1, generated=len(keeps), kept=int(keeps.sum()))
        counts.update(solved=int((is_equal & (low == best)).sum()), hopeless=int((is_equal & (low == worst)).sum()))
        return rows, keeps.tolist()

    def _keeps(self, rows: list[Row], totals: Tensor, compared: Tensor, has_tokens: Tensor) -> Tensor:
        """Return (J,) bool, the same on all processes, from the rewards (J, G), and those (J, G, K) to compare.

        `has_tokens` (n,) is False for the rows of this process without loss tokens.
        """
        chosen, size = self.trainer.args.dynamic_sampling_filter, totals.size(1)
        if callable(chosen):
            of_rows = [{**row.inputs, "prompt": row.prompt, "completion": row.completion} for row in rows]
            everywhere = gather_object(of_rows)
            groups = [everywhere[start : start + size] for start in range(0, len(everywhere), size)]
            keeps = [bool(chosen(of_group, group)) for of_group, group in zip(totals, groups, strict=True)]
            return torch.tensor(broadcast_object_list([keeps])[0])  # the function may be random
        if chosen != "zero_std":
            return (totals.nanmean(1) > chosen[0]) & (totals.nanmean(1) < chosen[1])
        ranges = torch.tensor([range_of_steps(row.returned) for row in rows], device=has_tokens.device)
        gathered = self.trainer.accelerator.gather(torch.cat([ranges, has_tokens.unsqueeze(1)], dim=1))
        steps = cast(Tensor, gathered).cpu().view(-1, size, 3)
        # exact, because the deviation of equal rewards may round above 0
        differs = (-lowest(-compared) > lowest(compared)).any(-1)
        differs |= -lowest(-steps[..., 1]) > lowest(steps[..., 0])
        return differs & steps[..., 2].bool().any(1)

    def _fill(self, rows: list[Row], idle: Sequence[int], spare: Sequence[_Group]) -> None:
        """Put groups into the idle slots of a rollout, as many as there are. Every process must call this method."""
        rank, size, count = self.trainer.accelerator.process_index, self.trainer.num_generations, len(rows)
        owners = {slot: [(slot * size + i) // count for i in range(size)] for slot in idle}
        free, placed = list(spare[: len(idle)]), dict[int, _Group]()
        for may_move in (False, True):  # as few rows as possible go to another process
            for slot in idle:
                fitting = [group for group in free if may_move or group.owners == owners[slot]]
                if slot not in placed and fitting:
                    placed[slot] = fitting[0]
                    free.remove(fitting[0])
        held = [
            (owners[slot][i], slot * size + i - owners[slot][i] * count, row)
            for slot, group in placed.items()
            for i, row in group.rows.items()
        ]
        if any(group.owners != owners[slot] for slot, group in placed.items()):
            held += gather_object([each for each in held if each[0] != rank])
        for owner, place, row in held:
            if owner == rank:
                rows[place] = row

    def _log(self, counts: Counter[str], size: int) -> None:
        """Log shares of a rollout of `size` groups. Warn once if the filter has kept none."""
        totals = {"rounds": 1, "generated": size, "unfilled": size}
        self.trainer.metrics.pooled(
            sums={
                f"dynamic_sampling/{name}": torch.tensor([counts[name], totals.get(name, counts["generated"])])
                for name in ("kept", "rounds", "generated", "solved", "hopeless", "unfilled")
            }
        )
        if not counts["kept"] and not self._has_warned and self.trainer.accelerator.is_main_process:
            self._has_warned = True
            self.warn(
                f"dynamic_sampling=True: {counts['rounds']} rounds gave no group that dynamic_sampling_filter keeps, "
                "so this rollout trains as without it. Take easier or harder prompts, or more rounds."
            )

    def save(self, checkpoint: Path) -> None:
        """Save the position in the prompts of further rounds, and the rewards seen."""
        if self.trainer.args.dynamic_sampling and self.trainer.args.should_save:
            (checkpoint / _FILE).write_text(json.dumps([self._prompts.position, self._seen]))

    def load(self, checkpoint: Path) -> None:
        """Go on from there. A run without dynamic sampling has saved nothing."""
        if (checkpoint / _FILE).is_file():
            position, seen = json.loads((checkpoint / _FILE).read_text())
            self._prompts.go_to(position)
            self._seen = tuple(seen)


def lowest(values: Tensor) -> Tensor:
    """Return the minimum over dimension 1, without NaN; inf if there is nothing else."""
    return values.masked_fill(values.isnan(), torch.inf).amin(1)


def range_of_steps(returned: Sequence[Any]) -> tuple[float, float]:
    """Return the lowest and the highest step of a completion, from what each reward function returned; NaN = no steps.

    Completions with equal totals differ in their advantages if these numbers differ. With several functions a step
    also differs from 0, because their steps may end at the same token.
    """
    if not any(isinstance(reward, StepRewards) for reward in returned):
        return torch.nan, torch.nan
    values = [0.0] * (len(returned) > 1)
    for reward in returned:
        values += reward.values if isinstance(reward, StepRewards) else [] if reward is None else [float(reward)]
    return min(values, default=torch.nan), max(values, default=torch.nan)
