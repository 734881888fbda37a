"""Rewards as parts: what reward functions return, and step rewards turned into advantages per token."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_steady.core.feature import Active, Trainer
from trl_steady.core.types import Rollout
from trl_steady.features.legacy import Part
from trl_steady.features.step_rewards.alignment import Completion, text_and_offsets, token_ends
from trl_steady.features.step_rewards.table import ScoredCompletion, StepTable, tabulate
from trl_steady.functional import advantages
from trl_steady.rewards.steps import StepRewards
from trl_steady.trl_bridge.models import text_tokenizer
from trl_steady.trl_bridge.rollout import log_token_advantages

_FORMULAS = {"process": advantages.process, "return_to_go": advantages.return_to_go}


class RewardedTrainer(Trainer, Protocol):
    """A trainer whose reward functions may return `StepRewards`."""

    num_generations_eval: int
    scale_rewards: str
    multi_objective_aggregation: str
    why_one_advantage: str | None


class _Returned(NamedTuple):
    """The values that the reward functions returned in a rollout."""

    rewards: Tensor  # (N, K) of all processes, steps summed up, NaN = None
    contents: list[Any]  # this and the next two: of this process only
    ids: list[list[int]]
    steps: dict[tuple[int, int], StepRewards]  # (completion, reward function) -> returned value


_NOTHING = _Returned(torch.empty(0, 0), [], [], {})


class RewardsPart(Part):
    """Keeps the `StepRewards` of reward functions, and refuses rewards that are infinite or would be ignored."""

    trainer: RewardedTrainer

    def __init__(self, trainer: RewardedTrainer) -> None:
        super().__init__(trainer)
        self._steps: dict[tuple[int, int], StepRewards] = {}
        self._returned = _NOTHING
        self.last_rollout: tuple[Tensor, ...] = ()
        """Ids, mask and advantages (B, T) of the last rollout with `StepRewards`, on any process."""
        self._without: dict[int, int] = {}  # reward function -> completions of this process for which it returned None
        self._returned_nan: set[int] = set()

    @property
    def last_step_advantages(self) -> list[list[tuple[str, float]]]:
        """See the property of `GRPOTrainer`."""
        completions = []
        for ids, mask, values in zip(*self.last_rollout, strict=True):
            text, offsets = text_and_offsets(text_tokenizer(self.trainer), ids[mask].tolist())
            pieces = [text[start:end] for start, end in pairwise(offsets)]
            completions.append(list(zip(pieces, values[mask].tolist(), strict=True)))
        return completions

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> Iterator[None]:
        """Forget the rewards of the last rollout."""
        self._steps, self._returned = {}, _NOTHING
        yield

    def read_rewards(self, function: int, returned: Iterable[Any]) -> list[Any]:
        """Store step rewards for later, and return their sums to TRL."""
        rewards = list(returned)
        steps = {(i, function): reward for i, reward in enumerate(rewards) if isinstance(reward, StepRewards)}
        if steps:
            self._refuse_where_ignored(function)
        self._steps |= steps
        self._without[function] = sum(reward is None for reward in rewards)
        return [reward.total if isinstance(reward, StepRewards) else reward for reward in rewards]

    def keep_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Store the rewards until the rollout is complete, when the model's own tokens are known.

        Refuse infinite rewards, and warn once per function of NaN, which TRL takes as no reward.
        """
        names, count = self.trainer.reward_func_names, len(completions)
        if rewards.isinf().any():  # the weights would become NaN; all processes see it and stop
            row, function = rewards.isinf().nonzero()[0].tolist()
            raise ValueError(
                f"reward function {names[function]!r} returned {rewards[row, function].item()} (in float32) for "
                f"completion {row % count} of process {row // count}. Return a finite number, or None for no reward."
            )
        # among the gathered rewards, None is NaN too
        first = self.trainer.accelerator.process_index * count
        for function, missing in enumerate(rewards[first : first + count].isnan().sum(0).tolist()):
            if missing > self._without.get(function, 0) and function not in self._returned_nan:
                self._returned_nan.add(function)
                warnings.warn(
                    f"reward function {names[function]!r} returned nan, which TRL treats as no reward. Return None if "
                    "you mean that. Check the weights, the dtype and the pad_token_id of a reward model.",
                    stacklevel=2,
                )
        self._returned = _Returned(rewards, completions, completion_ids, self._steps)
        self._steps = {}

    def _refuse_where_ignored(self, function: int) -> None:
        trainer, why = self.trainer, self.trainer.why_one_advantage
        if trainer.model.training and trainer.rollout_in_progress is None:
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

    @property
    def has_steps(self) -> bool:
        """True if a reward function returned `StepRewards` in this rollout, on any process. All processes ask."""
        return any(gather_object([bool(self._returned.steps)]))

    def scored(self, mask: Tensor) -> list[ScoredCompletion]:
        """Return the data of this process's completions. `mask` (B, T) is True for the model's own tokens."""
        return [self._scored(index, row) for index, row in enumerate(mask.tolist())]

    def is_scored(self, first: int, count: int) -> Tensor:
        """Return (count,) bool, False for completions that no reward function has scored, from number `first` on."""
        return ~self._returned.rewards[first : first + count].isnan().all(1)

    def table(self, completions: Sequence[ScoredCompletion], *, first: int = 0, cover: bool) -> StepTable:
        """Return the rewards of completions as steps. `first` is the number of the first one over all processes."""
        rewards = self._returned.rewards[first : first + len(completions)]
        return tabulate(completions, rewards, self.trainer.reward_weights, cover=cover)

    def keep_advantages(self, rollout: Rollout, per_token: Tensor) -> None:
        """Store the advantages (B, T) of a rollout with step rewards for `last_step_advantages`."""
        self.last_rollout = rollout.samples["completion_ids"].cpu(), rollout.is_sampled.cpu(), per_token.cpu()

    def _scored(self, index: int, mask: list[bool]) -> ScoredCompletion:
        """Return the data of one completion of this process, with the ends of its steps in tokens."""
        content, ids = self._returned.contents[index], self._returned.ids[index]
        is_own = mask[: len(ids)]
        own_end = max((t + 1 for t, is_counted in enumerate(is_own) if is_counted), default=0)
        steps = {}
        for function, name in enumerate(self.trainer.reward_func_names):
            rewards = self._returned.steps.get((index, function))
            if rewards is not None:
                completion = Completion(f"completion {index} of reward function {name!r}", content, ids, is_own)
                ends = token_ends(rewards, completion, text_tokenizer(self.trainer))
                steps[function] = list(zip(ends, rewards.values, strict=True))
        return ScoredCompletion(len(ids), own_end, steps)


class StepAdvantagesPart(Part):
    """Turns `StepRewards` into advantages (B, T) for TRL's loss, relative to the group's other completions.

    If no reward function of any process returns `StepRewards` in a rollout, TRL's own advantages (B,) stay.
    """

    window_options = (("step_advantage", None),)
    trainer: RewardedTrainer

    def describe(self) -> Iterable[Active]:
        """Return the formula of step rewards, if it is not the default."""
        if self.trainer.args.step_advantage != "return_to_go":
            yield Active("step rewards (StepRewards), process supervision", ("step_advantage",))

    def advantages(self, rollout: Rollout) -> Tensor | None:
        """Return advantages per token if any reward function returned `StepRewards`."""
        trainer, rewards, formula = self.trainer, self.trainer.part(RewardsPart), self.trainer.args.step_advantage
        if not rewards.has_steps:
            if formula != "return_to_go" and not rewards.last_rollout and trainer.accelerator.is_main_process:
                warnings.warn(
                    f"step_advantage={formula!r} cannot act: no reward function has returned StepRewards in this "
                    "rollout. Return them, or leave step_advantage unset.",
                    stacklevel=2,
                )
            return None
        mask = rollout.is_sampled
        completions: list[ScoredCompletion] = gather_object(rewards.scored(mask))
        group_size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        table = rewards.table(completions, cover=formula == "return_to_go")
        step_advantages = _FORMULAS[formula](table.rewards, group_size=group_size, scale=trainer.scale_rewards)
        first = trainer.accelerator.process_index * len(mask)
        rows = slice(first, first + len(mask))
        per_token = advantages.per_token(step_advantages[rows], table.ends[rows], mask.size(1)) * mask
        rewards.keep_advantages(rollout, per_token)
        log_token_advantages(trainer, per_token, mask)
        counts = [len(ends) for completion in completions[rows] for ends in completion.steps.values()]
        trainer.metrics.pooled(sums={"steps/mean_count": torch.tensor([sum(counts), len(counts)])})
        return per_token
