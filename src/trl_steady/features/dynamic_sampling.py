"""Dynamic sampling: groups that teach nothing are replaced by groups of further prompts."""

import copy
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from datasets import IterableDataset
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.types import Rollout, loss_mask
from trl_steady.functional.advantages import all_equal, group_variances, least_variance, total_rewards
from trl_steady.rewards.steps import StepRewards
from trl_steady.trl_bridge.generation import collate_rows
from trl_steady.trl_bridge.resampling import CompletionRecord, ResampledRollout

_FILE = "dynamic_sampling.json"
_Draw = Callable[[], dict[str, Any]]


@dataclass
class _Group:
    """A group of completions to a prompt, which may be on several processes."""

    owners: list[int]
    """(G,) process of each completion."""
    own: dict[int, CompletionRecord]
    """Number in the group -> completion, for those of this process."""


class _Prompts:
    """The training set in seeded orders of its own, one after the other, the same on all processes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.go_to((0, 0))

    def go_to(self, position: Sequence[int]) -> None:
        """Go on as after a checkpoint: from the number of a pass over the data, and the rows that were taken in it."""
        self.position = (position[0], position[1])
        self._rows = self._passes()

    def take(self, count: int) -> list[_Draw]:
        """Return the next rows, as functions that read them."""
        before = self.position
        try:
            return list(itertools.islice(self._rows, count))
        except BaseException:
            self.go_to(before)  # an error ends a generator, and the script may train on
            raise

    def _passes(self) -> Iterator[_Draw]:
        number, taken = self.position
        while True:
            for draw in self._pass_from(number, taken):
                taken += 1
                self.position = (number, taken)
                yield draw
            if not taken:
                raise ValueError(
                    "dynamic_sampling=True: a pass over train_dataset gave no row. Use a data set that can be read "
                    "more than once, or set dynamic_sampling=False."
                )
            number += 1
            taken = 0

    def _pass_from(self, number: int, first: int) -> Iterator[_Draw]:
        """Yield the rows of one pass over the data, without the first ones."""
        data = self._trainer.train_dataset
        seed = (self._trainer.args.seed + 1) * 1_000_003 + number
        if isinstance(data, IterableDataset):
            for row in itertools.islice(data.shuffle(seed=seed), first, None):
                yield functools.partial(copy.deepcopy, row)  # as TRL repeats it
            return
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        for index in order[first:].tolist():
            yield functools.partial(data.__getitem__, index)


class DynamicSampling(Feature):
    """Replaces groups that the filter rejects, with `dynamic_sampling` (DAPO, arXiv 2503.14476, section 3.2)."""

    args: SharedOptions
    _has_warned = False

    def __init__(self, trainer: Trainer, args: SharedOptions) -> None:
        super().__init__(trainer, args)
        self._prompts = _Prompts(trainer)
        self._worst, self._best = math.inf, -math.inf  # rewards so far
        self._least_variance: Tensor | None = None  # of a group that the filter keeps in this rollout

    def around_rollout(self, rollout: Rollout, call_next: Callable[[Rollout], dict[str, Any]]) -> dict[str, Any]:
        """Sample rounds until the filter has kept enough groups, and make the rollout of these groups.

        It calls `call_next` once for each round, and once more at the end.
        """
        if not self.args.dynamic_sampling or not self.trainer.model.training:
            return call_next(rollout)
        self._least_variance = None
        resampled = ResampledRollout(self.trainer, rollout, call_next)
        counts = Counter[str]()
        completions, are_kept = self._round(resampled, rollout.inputs, counts)
        rejected = [slot for slot, is_kept in enumerate(are_kept) if not is_kept]
        spare: list[_Group] = []
        while len(spare) < len(rejected) and counts["rounds"] < self.args.dynamic_sampling_max_rounds:
            missing = len(rejected) - len(spare)
            expected = math.ceil(missing * counts["generated"] / max(counts["kept"], 1))
            spare += self._further_round(resampled, min(len(are_kept), 2 * missing, expected), counts)
        self._fill(completions, rejected, spare)
        counts["unfilled"] = max(len(rejected) - len(spare), 0)
        self._log(counts, len(are_kept))
        return resampled.finish(completions)

    def _further_round(self, resampled: ResampledRollout, least: int, counts: Counter[str]) -> list[_Group]:
        """Sample at least `least` further prompts, and return the groups of all processes that the filter keeps."""
        accelerator = self.trainer.accelerator
        size = self.trainer.num_generations
        step = accelerator.num_processes // math.gcd(accelerator.num_processes, size)
        wanted = math.ceil(least / step) * step  # equally many completions on each process
        share = wanted * size // accelerator.num_processes
        first = accelerator.process_index * share  # number of this process's first completion
        prompts = self._prompts.take(wanted)
        # a row for each, as from TRL's data loader: a reward function or an environment may use up what is in it
        rows = [prompts[number // size]() for number in range(first, first + share)]
        completions, are_kept = self._round(resampled, collate_rows(self.trainer, rows), counts)
        groups: list[_Group] = []
        for slot, is_kept in enumerate(are_kept):
            if not is_kept:
                continue
            group = _Group([], {})
            for i in range(size):
                number = slot * size + i
                owner = number // share
                group.owners.append(owner)
                if owner == accelerator.process_index:
                    group.own[i] = completions[number - first]
            groups.append(group)
        return groups

    def _round(
        self, resampled: ResampledRollout, inputs: list[Any], counts: Counter[str]
    ) -> tuple[list[CompletionRecord], list[bool]]:
        """Return the completions (n,) of this process, and which groups (J,) of all processes the filter keeps."""
        completions, rewards, samples = resampled.sample(inputs)
        totals, compared = self._compared(rewards)
        are_kept = self._are_kept(completions, totals, compared, loss_mask(samples).any(1))
        self._count(totals, are_kept, counts)
        return completions, are_kept.tolist()

    def _compared(self, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rewards (J, G) of all groups, and (J, G, K) what must differ within a group for a gradient."""
        trainer = self.trainer
        args = self.args
        grouped = rewards.cpu().view(-1, trainer.num_generations, len(trainer.reward_funcs))
        weights = trainer.reward_weights.cpu()
        totals = total_rewards(grouped, weights)
        clip_range = getattr(args, "reward_clip_range", None)  # RLOO's
        if clip_range:
            low, high = clip_range
            totals = totals.clamp(low, high)
        if getattr(args, "multi_objective_aggregation", "sum_then_normalize") != "sum_then_normalize":
            return totals, grouped * weights  # GRPO normalises each function
        return totals, totals.unsqueeze(-1)

    def _count(self, totals: Tensor, are_kept: Tensor, counts: Counter[str]) -> None:
        """Count the groups of a round by their rewards (J, G). Best and worst are those of the run so far."""
        is_scored = ~totals.isnan()
        lowest = totals.where(is_scored, torch.inf).amin(1)
        highest = totals.where(is_scored, -torch.inf).amax(1)
        self._worst = min(self._worst, lowest.min().item())
        self._best = max(self._best, highest.max().item())
        is_equal = ~are_kept & (lowest == highest) & (self._worst < self._best)
        is_solved = is_equal & (lowest == self._best)
        is_hopeless = is_equal & (lowest == self._worst)
        counts["rounds"] += 1
        counts["generated"] += len(are_kept)
        counts["kept"] += int(are_kept.sum())
        counts["solved"] += int(is_solved.sum())
        counts["hopeless"] += int(is_hopeless.sum())

    def _are_kept(
        self, completions: list[CompletionRecord], totals: Tensor, compared: Tensor, has_tokens: Tensor
    ) -> Tensor:
        """Return (J,) bool, the same on all processes, from the rewards (J, G), and those (J, G, K) to compare.

        `has_tokens` (n,) is False for the completions of this process without loss tokens.
        """
        chosen = self.args.dynamic_sampling_filter
        size = totals.size(1)
        if callable(chosen):
            own_rows: list[dict[str, Any]] = []
            for completion in completions:
                own_rows.append(
                    {**completion.inputs, "prompt": completion.prompt, "completion": completion.completion}
                )
            rows: list[dict[str, Any]] = gather_object(send_to_device(own_rows, "cpu"))
            answers: list[bool] = []
            for slot, rewards in enumerate(totals.clone()):
                answers.append(bool(chosen(rewards, rows[slot * size : (slot + 1) * size])))
            return torch.tensor(broadcast_object_list([answers])[0])  # the function may be random
        if not isinstance(chosen, str):
            low, high = chosen
            return (totals.nanmean(1) > low) & (totals.nanmean(1) < high)
        step_ranges = [step_range(completion.returned) for completion in completions]
        ranges = torch.tensor(step_ranges, device=has_tokens.device)
        columns = torch.cat([ranges, has_tokens.unsqueeze(1)], dim=1)
        gathered = cast(Tensor, self.trainer.accelerator.gather(columns)).cpu().view(-1, size, 3)
        step_extremes = gathered[..., :2].flatten(1)
        group_has_tokens = gathered[..., 2].bool().any(1)
        if chosen == "reward_variance":
            variances = group_variances(totals).where(group_has_tokens, 0)
            if self._least_variance is None:  # the first round is a rollout; groups of later rounds replace its own
                self._least_variance = least_variance(variances)
            return (variances >= self._least_variance) & (variances > 0)
        differs = ~all_equal(compared, 1).all(-1) | ~all_equal(step_extremes, 1)
        return differs & group_has_tokens

    def _fill(self, completions: list[CompletionRecord], rejected: Sequence[int], spare: Sequence[_Group]) -> None:
        """Put groups into the slots of rejected ones, as many as there are. Every process must call this method.

        The first slots are filled, so that the rejected groups that stay are the same on any number of processes.
        """
        rank = self.trainer.accelerator.process_index
        size = self.trainer.num_generations
        count = len(completions)
        owners_of_slot: dict[int, list[int]] = {}
        for slot in rejected[: len(spare)]:
            owners_of_slot[slot] = [number // count for number in range(slot * size, (slot + 1) * size)]

        # first the groups whose completions need not go to another process
        free = list(spare[: len(rejected)])
        placed: dict[int, _Group] = {}
        for slot, owners in owners_of_slot.items():
            fitting = [group for group in free if group.owners == owners]
            if fitting:
                placed[slot] = fitting[0]
                free.remove(fitting[0])
        for slot in owners_of_slot:
            if slot not in placed:
                placed[slot] = free.pop(0)

        moves: list[tuple[int, int, CompletionRecord]] = []  # process, number there, completion
        moves_to_others: list[tuple[int, int, CompletionRecord]] = []
        is_exchanged = False  # the same on all processes
        for slot, group in placed.items():
            owners = owners_of_slot[slot]
            if group.owners != owners:
                is_exchanged = True
            for i, completion in group.own.items():
                move = (owners[i], slot * size + i - owners[i] * count, completion)
                moves.append(move)
                if owners[i] != rank:  # another process may not see this GPU
                    moves_to_others.append((*move[:2], completion.on("cpu")))
        if is_exchanged:
            device = self.trainer.accelerator.device
            for owner, index, completion in gather_object(moves_to_others):
                moves.append((owner, index, completion.on(device)))
        for owner, index, completion in moves:
            if owner == rank:
                completions[index] = completion

    def _log(self, counts: Counter[str], size: int) -> None:
        """Log shares of a rollout of `size` groups. Warn once if rejected groups fill most of it."""
        generated = counts["generated"]
        shares = {
            "dynamic_sampling/kept": (counts["kept"], generated),
            "dynamic_sampling/rounds": (counts["rounds"], 1),
            "dynamic_sampling/generated": (generated, size),
            "dynamic_sampling/solved": (counts["solved"], generated),
            "dynamic_sampling/hopeless": (counts["hopeless"], generated),
            "dynamic_sampling/unfilled": (counts["unfilled"], size),
        }
        sums = torch.tensor(list(shares.values()), device=self.trainer.accelerator.device)
        self.trainer.metrics.pooled(sums=dict(zip(shares, sums, strict=True)))
        is_mostly_rejected = counts["unfilled"] > size / 2
        if is_mostly_rejected and not self._has_warned and self.trainer.accelerator.is_main_process:
            self._has_warned = True
            self.warn(self._why_mostly_rejected(counts, size))

    def _why_mostly_rejected(self, counts: Counter[str], size: int) -> str:
        rounds = counts["rounds"]
        if not counts["kept"]:
            return (
                f"dynamic_sampling=True: {rounds} rounds gave no group that dynamic_sampling_filter keeps, "
                "so this rollout trains as without it. Take easier or harder prompts, or more rounds."
            )
        found = (
            f"dynamic_sampling=True: after {rounds} rounds, {counts['unfilled']} of the {size} groups of a rollout "
            "are still ones that dynamic_sampling_filter rejects."
        )
        if self.args.dynamic_sampling_filter == "reward_variance":
            return (
                f"{found} Few groups hold 90 % of the reward variance. Bound the rewards, or set "
                "dynamic_sampling_filter='zero_std'."
            )
        return f"{found} Take easier or harder prompts, more rounds, or a wider filter."

    def save_state(self, checkpoint: Path) -> None:
        """Save the position in the prompts of further rounds, and the rewards seen."""
        if self.args.dynamic_sampling and self.args.should_save:
            (checkpoint / _FILE).write_text(json.dumps([self._prompts.position, [self._worst, self._best]]))

    def load_state(self, checkpoint: Path) -> None:
        """Go on from there. A run without dynamic sampling has saved nothing."""
        if (checkpoint / _FILE).is_file():
            position, (worst, best) = json.loads((checkpoint / _FILE).read_text())
            self._prompts.go_to(position)
            self._worst, self._best = worst, best


def step_range(returned: Sequence[Any]) -> tuple[float, float]:
    """Return the lowest and the highest step of a completion, from what each reward function returned; NaN = no steps.

    Completions with equal totals differ in their advantages if these numbers differ. With several functions a step
    also differs from 0, because their steps may end at the same token.
    """
    if not any(isinstance(reward, StepRewards) for reward in returned):
        return torch.nan, torch.nan
    values: list[float] = []
    if len(returned) > 1:
        values.append(0.0)
    for reward in returned:
        if isinstance(reward, StepRewards):
            values += reward.values
        elif reward is not None:
            values.append(float(reward))
    return min(values, default=torch.nan), max(values, default=torch.nan)
