"""`StepRewards` that reward functions return become advantages of tokens."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.processes import own_rows
from trl_steady.core.types import Rollout
from trl_steady.features.step_rewards.alignment import Completion, text_and_offsets, token_ends
from trl_steady.features.step_rewards.table import RewardedCompletion, StepTable, tabulate
from trl_steady.functional import advantages
from trl_steady.rewards.steps import StepRewards
from trl_steady.trl_bridge.models import text_tokenizer

_FORMULAS = {"process": advantages.process, "return_to_go": advantages.return_to_go}


class _Returned(NamedTuple):
    """The values that the reward functions returned in a rollout."""

    rewards: Tensor
    """(N, K) of all processes, steps summed up, NaN = None."""
    completions: list[Any]
    """Texts or conversations of this process."""
    completion_ids: list[list[int]]
    steps: dict[tuple[int, int], StepRewards]
    """(completion of this process, reward function) -> returned value."""


_NOTHING = _Returned(torch.empty(0, 0), [], [], {})


class StepRewardsFeature(Feature):
    """Takes `StepRewards` from reward functions, and refuses rewards that are infinite or would be ignored.

    Rewards pass `process_rewards`, then TRL, then `on_rewards`. In GRPO, `features/advantages.py` asks for
    `group_advantages` when the rollout is complete. In PPO the critic asks for `own_steps`. RLOO has one advantage per
    sequence, and refuses steps.
    """

    args: SharedOptions

    def __init__(self, trainer: Trainer, args: SharedOptions) -> None:
        super().__init__(trainer, args)
        self._steps: dict[tuple[int, int], StepRewards] = {}  # until all reward functions have returned
        self._returned = _NOTHING
        self.rollout_with_steps: tuple[Tensor, ...] = ()
        """Ids, mask and advantages (B, T) of the last rollout in which any process got `StepRewards`. Empty before."""
        self._none_count: dict[int, int] = {}  # reward function -> completions for which it returned None
        self._returned_nan: set[int] = set()

    @property
    def last_step_advantages(self) -> list[list[tuple[str, float]]]:
        """See the property of `GRPOTrainer`."""
        completions: list[list[tuple[str, float]]] = []
        for ids, mask, values in zip(*self.rollout_with_steps, strict=True):
            text, offsets = text_and_offsets(text_tokenizer(self.trainer), ids[mask].tolist())
            pieces = [text[start:end] for start, end in pairwise(offsets)]
            completions.append(list(zip(pieces, values[mask].tolist(), strict=True)))
        return completions

    def any_steps(self) -> bool:
        """Return True if a reward function of any process has returned `StepRewards`. All processes must ask."""
        return any(gather_object([bool(self._returned.steps)]))

    def on_rollout_begin(self, rollout: Rollout) -> None:
        """Forget the rewards of the last rollout."""
        self._steps = {}
        self._returned = _NOTHING

    def process_rewards(self, function: int, returned: Iterable[Any]) -> list[Any]:
        """Store step rewards until all functions have returned, and return their sums to TRL."""
        rewards = list(returned)
        steps: dict[tuple[int, int], StepRewards] = {}
        for index, reward in enumerate(rewards):
            if isinstance(reward, StepRewards):
                steps[index, function] = reward
        if steps:
            self._refuse_where_ignored(function)
        self._steps.update(steps)
        self._none_count[function] = sum(reward is None for reward in rewards)
        for (index, _), reward in steps.items():
            rewards[index] = reward.total
        return rewards

    def on_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Store the rewards until the rollout is complete, when the tokens that the policy sampled are known.

        Refuse infinite rewards, and warn once per function of NaN, which TRL takes as no reward.
        """
        names = self.trainer.reward_func_names
        count = len(completions)
        on_host = rewards.cpu()
        own = own_rows(self.trainer.accelerator, count)
        if on_host.isinf().any():  # the weights would become NaN; all processes see it and stop
            row, function = on_host.isinf().nonzero()[0].tolist()
            raise ValueError(
                f"the reward of {names[function]!r} is {on_host[row, function].item()} (in float32) for completion "
                f"{row % count} of process {row // count}. Return a finite number, or None for no reward."
            )
        for function, missing in enumerate(on_host[own].isnan().sum(0).tolist()):
            # TRL has made NaN of None
            if missing > self._none_count.get(function, 0) and function not in self._returned_nan:
                self._returned_nan.add(function)
                self.warn(
                    f"the reward of {names[function]!r} is nan, which TRL treats as no reward. Return None if you "
                    "mean that. Check the weights, the dtype and the pad_token_id of a reward model."
                )
        received = on_host[own].tolist()
        for (row, function), steps in self._steps.items():
            total = received[row][function]
            # TRL rounds to float32. NaN is no reward, for steps too
            if math.isnan(total) or total == torch.tensor(steps.total, dtype=torch.float32).item():
                continue
            if len(steps.values) != 1:
                self.refuse(
                    f"{type(self.trainer).__name__}._calculate_rewards",
                    f"it changed a reward of {names[function]!r}, with {len(steps.values)} steps, to {total}",
                    "Change the values of the steps in the reward function.",
                )
            self._steps[row, function] = replace(steps, values=(total,))
        self._returned = _Returned(rewards, completions, completion_ids, self._steps)
        self._steps = {}

    def _refuse_where_ignored(self, function: int) -> None:
        trainer = self.trainer
        why = trainer.why_one_advantage
        if trainer.is_in_train and trainer.model.training and trainer.rollout_in_progress is None:
            why = f"{type(trainer).__name__} makes its rollouts without calling super(). Call super() there,"
        elif why is None and trainer.multi_objective_aggregation != "sum_then_normalize":  # which RLOO does not have
            why = (
                f"multi_objective_aggregation={trainer.multi_objective_aggregation!r} normalises one number per "
                "completion. Set multi_objective_aggregation='sum_then_normalize',"
            )
        if why is not None:
            raise ValueError(
                f"reward function {trainer.reward_func_names[function]!r} returned StepRewards, but {why} or return "
                "one float per completion."
            )

    def warn_without_steps(self, formula: str) -> None:
        """Warn that `step_advantage` has no effect, if no rollout so far had steps."""
        if not self.rollout_with_steps and self.trainer.accelerator.is_main_process:
            self.warn(
                f"step_advantage={formula!r} has no effect in this rollout, because no reward function returned "
                "StepRewards. Return them, or leave step_advantage unset."
            )

    def group_advantages(self, rollout: Rollout, formula: str) -> Tensor:
        """Return advantages (B, T) of the sampled tokens, relative to the group's other completions."""
        trainer, mask = self.trainer, rollout.is_sampled
        completions: list[RewardedCompletion] = gather_object(self._completions(mask))
        cover = formula == "return_to_go"  # it needs each token in a step
        # (N, S) weighted sums over the reward functions, and the ends of the steps
        table = tabulate(completions, self._returned.rewards, trainer.reward_weights, cover=cover)
        scale = trainer.scale_rewards
        if scale == "mean":  # `Advantages` divides by the mean afterwards
            scale = "none"
        step_advantages = _FORMULAS[formula](table.rewards, group_size=rollout.group_rewards.size(1), scale=scale)
        own = own_rows(trainer.accelerator, len(mask))
        counts: list[int] = []
        for completion in completions[own]:
            counts += map(len, completion.steps.values())
        trainer.metrics.pooled(sums={"steps/mean_count": torch.tensor([sum(counts), len(counts)])})
        # a token gets the advantage of the step in which it begins
        return advantages.per_token(step_advantages[own], table.ends[own], mask.size(1)) * mask

    def own_steps(self, mask: Tensor) -> StepTable:
        """Return the steps of this process's completions. `mask` (B, T) is True for tokens that the policy sampled."""
        rewards = self._returned.rewards[own_rows(self.trainer.accelerator, len(mask))]
        return tabulate(self._completions(mask), rewards, self.trainer.reward_weights, cover=False)

    def keep_advantages(self, rollout: Rollout) -> None:
        """Keep the advantages of a rollout with steps for `last_step_advantages`."""
        values = rollout.advantages
        if values.dim() == 1:
            values = values.unsqueeze(1)
        per_token = values * rollout.is_sampled
        self.rollout_with_steps = rollout.samples["completion_ids"].cpu(), rollout.is_sampled.cpu(), per_token.cpu()

    def _completions(self, mask: Tensor) -> list[RewardedCompletion]:
        """Return this process's completions, with the number of tokens that begin before the end of each step."""
        return [self._completion(index, row) for index, row in enumerate(mask.tolist())]

    def _completion(self, index: int, mask: list[bool]) -> RewardedCompletion:
        content = self._returned.completions[index]
        ids = self._returned.completion_ids[index]
        is_sampled = mask[: len(ids)]
        sampled_end = max((t + 1 for t, counts in enumerate(is_sampled) if counts), default=0)
        steps: dict[int, list[tuple[int, float]]] = {}
        for function, name in enumerate(self.trainer.reward_func_names):
            rewards = self._returned.steps.get((index, function))
            if rewards is not None:
                completion = Completion(f"completion {index} of reward function {name!r}", content, ids, is_sampled)
                ends = token_ends(rewards, completion, text_tokenizer(self.trainer))
                steps[function] = list(zip(ends, rewards.values, strict=True))
        return RewardedCompletion(len(ids), sampled_end, steps)
