"""Rewards as parts: checks of what reward functions return, and step rewards turned into advantages per token."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_steady.functional import advantages
from trl_steady.host.models import text_tokenizer
from trl_steady.host.part import Part, Rollout
from trl_steady.host.rewards import relog
from trl_steady.rewards.placement import Completion, spelling, token_ends
from trl_steady.rewards.returned import as_rewards, has_nan, refuse_infinite
from trl_steady.rewards.steps import StepRewards
from trl_steady.rewards.table import ScoredCompletion, StepTable, tabulate

__all__ = ["RewardsPart", "StepAdvantagesPart", "StepsPart", "log_advantages"]

_FORMULAS = {"process": advantages.process, "return_to_go": advantages.return_to_go}
_COLUMNS = ("steps/ends", "steps/rewards", "steps/advantages")


class _Returned(NamedTuple):
    """The values that the reward functions returned in a rollout."""

    rewards: Tensor  # (N, K) of all processes, steps summed up, NaN = None
    contents: list[Any]  # this and the next two: of this process only
    ids: list[list[int]]
    steps: dict[tuple[int, int], StepRewards]  # (completion, reward function) -> returned value


class RewardsPart(Part):
    """Refuses rewards that are not numbers, are infinite or would be ignored, and warns of NaN."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._returned_nan: set[int] = set()

    def read_rewards(self, function: int, returned: Any) -> list[Any]:
        """Return the rewards as a list with a number, None or `StepRewards` for each completion."""
        name = self.trainer.reward_func_names[function]
        rewards = as_rewards(name, returned)
        if has_nan(rewards):
            self._warn_of_nan(function, "Return None if you mean that, and a number otherwise.")
        if any(isinstance(reward, StepRewards) for reward in rewards):
            self._refuse_where_ignored(name)
        return rewards

    def keep_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Refuse infinite rewards, and warn of a reward model that returns NaN."""
        refuse_infinite(self.trainer.reward_func_names, rewards, len(completions))
        for function, column in enumerate(rewards.isnan().any(0).tolist()):
            is_model = isinstance(self.trainer.reward_funcs[function], torch.nn.Module)
            if column and is_model and self.trainer.accelerator.is_main_process:
                self._warn_of_nan(function, "Check the reward model: its weights, its dtype and its pad_token_id.")

    def _warn_of_nan(self, function: int, way_out: str) -> None:
        """Warn once per run and function.

        A process can check its own completions only: in the gathered rewards, TRL's None is NaN too.
        """
        if function not in self._returned_nan:
            self._returned_nan.add(function)
            warnings.warn(
                f"reward function {self.trainer.reward_func_names[function]!r} returned nan, which TRL treats as no "
                f"reward. {way_out}",
                UserWarning,
                stacklevel=2,
            )

    def _refuse_where_ignored(self, name: str) -> None:
        returned = f"reward function {name!r} returned StepRewards, but"
        if self.trainer.model.training and "rollout" not in self.trainer.reached:
            raise ValueError(
                f"{returned} {type(self.trainer).__name__} makes its rollouts without calling super(), which would "
                "turn them into advantages. Call super() in the method that makes rollouts, or return one float per "
                "completion."
            )
        why = self.trainer.why_one_advantage
        if why is not None:
            raise ValueError(f"{returned} {why} or return one float per completion.")
        aggregation = self.trainer.multi_objective_aggregation
        if aggregation != "sum_then_normalize":
            raise ValueError(
                f"{returned} multi_objective_aggregation={aggregation!r} normalises one number per completion and "
                "reward function. Set multi_objective_aggregation='sum_then_normalize'."
            )


class StepsPart(Part):
    """Keeps the `StepRewards` of reward functions for the part that turns them into advantages."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._steps: dict[tuple[int, int], StepRewards] = {}
        self._returned: _Returned | None = None
        self._last_rollout: dict[str, Tensor] | None = None

    @property
    def has_step_rewards(self) -> bool:
        """True if a rollout had `StepRewards`, on any process."""
        return self._last_rollout is not None

    @property
    def last_step_advantages(self) -> list[list[tuple[str, float]]]:
        """The loss tokens of each completion, with advantages, of this process's last rollout with step rewards.

        Each completion is a list of pairs of the token's text and its advantage, as
        `trl_steady.rewards.advantages_html` and `advantages_png` take them.
        """
        if self._last_rollout is None:
            return []
        completions = []
        for ids, mask, values in zip(*self._last_rollout.values(), strict=True):
            text, begins = spelling(text_tokenizer(self.trainer), ids[mask].tolist())
            pieces = [text[start:end] for start, end in pairwise(begins)]
            completions.append(list(zip(pieces, values[mask].tolist(), strict=True)))
        return completions

    def read_rewards(self, function: int, returned: Any) -> list[Any]:
        """Store step rewards for later, and return their sums to TRL."""
        self._steps |= {(i, function): reward for i, reward in enumerate(returned) if isinstance(reward, StepRewards)}
        return [reward.total if isinstance(reward, StepRewards) else reward for reward in returned]

    def keep_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Store the rewards until the rollout is complete, when the model's own tokens are known."""
        self._returned = _Returned(rewards, completions, completion_ids, self._steps)
        self._steps = {}

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> Iterator[None]:
        """Forget the rewards of the last rollout."""
        self._steps, self._returned = {}, None
        yield

    @property
    def has_rewards(self) -> bool:
        """True if the reward functions were asked in this rollout."""
        return self._returned is not None

    @property
    def has_steps(self) -> bool:
        """True if a reward function returned `StepRewards` in this rollout, on any process. All processes ask."""
        return self._returned is not None and any(gather_object([bool(self._returned.steps)]))

    def scored(self, mask: Tensor) -> list[ScoredCompletion]:
        """Return the data of this process's completions. `mask` (B, T) is True for the model's own tokens."""
        assert self._returned is not None
        return [self._scored(self._returned, i, row) for i, row in enumerate(mask.tolist())]

    def is_scored(self, first: int, count: int) -> Tensor:
        """Return (count,) bool, False for completions that no reward function has scored, from number `first` on."""
        assert self._returned is not None
        return ~self._returned.rewards[first : first + count].isnan().all(1)

    def table(self, completions: Sequence[ScoredCompletion], *, first: int = 0, cover: bool) -> StepTable:
        """Return the rewards of completions as steps. `first` is the number of the first one over all processes."""
        assert self._returned is not None
        rewards = self._returned.rewards[first : first + len(completions)]
        return tabulate(completions, rewards, self.trainer.reward_weights, cover=cover)

    def keep_advantages(self, rollout: Rollout, per_token: Tensor) -> None:
        """Store the advantages (B, T) of a rollout with step rewards for `last_step_advantages`."""
        last = {"ids": rollout.samples["completion_ids"], "mask": rollout.is_sampled, "advantages": per_token}
        self._last_rollout = {name: value.cpu() for name, value in last.items()}

    def log(self, table: StepTable, step_advantages: Tensor | None) -> None:
        """Add the steps of all processes to TRL's table of completions."""
        has_step = ~table.rewards.isnan().cpu()
        columns = [
            [None] * len(has_step)
            if column is None
            else [values[has].tolist() for values, has in zip(column.cpu(), has_step, strict=True)]
            for column in (table.ends, table.rewards, step_advantages)
        ]
        relog(self.trainer, len(has_step), None, dict(zip(_COLUMNS, columns, strict=True)))

    def log_none(self, count: int) -> None:
        """Keep the table's columns as long as the others after a rollout of `count` completions without steps."""
        relog(self.trainer, count, None, {name: [None] * count for name in _COLUMNS})

    def _scored(self, returned: _Returned, index: int, mask: list[bool]) -> ScoredCompletion:
        """Return the data of one completion of this process, with the ends of its steps in tokens."""
        ids = returned.ids[index]
        is_own = mask[: len(ids)]
        at_limit = len(ids) == self.trainer.max_completion_length
        limit = f" (it has reached max_completion_length={self.trainer.max_completion_length})" if at_limit else ""
        completion = Completion(index, returned.contents[index], ids, is_own, limit)
        steps = {}
        for function, name in enumerate(self.trainer.reward_func_names):
            rewards = returned.steps.get((index, function))
            if rewards is not None:
                try:
                    ends = token_ends(rewards, completion, text_tokenizer(self.trainer))
                except ValueError as error:
                    raise ValueError(f"reward function {name!r}: {error}") from error
                steps[function] = list(zip(ends, rewards.values, strict=True))
        return ScoredCompletion(len(ids), max((t + 1 for t, own in enumerate(is_own) if own), default=0), steps)


class StepAdvantagesPart(Part):
    """Turns `StepRewards` into advantages (B, T) for TRL's loss, relative to the group's other completions.

    If no reward function of any process returns `StepRewards` in a rollout, TRL's own advantages (B,) stay.
    """

    window_options = (("step_advantage", None),)

    def advantages(self, rollout: Rollout) -> Tensor | None:
        """Return advantages per token if any reward function returned `StepRewards`."""
        trainer, steps = self.trainer, self.trainer.part(StepsPart)
        if not steps.has_steps:
            steps.log_none(len(rollout.samples["advantages"]) * trainer.accelerator.num_processes)
            self._warn_without_step_rewards(steps)
            return None
        mask = rollout.is_sampled
        completions: list[ScoredCompletion] = gather_object(steps.scored(mask))
        group_size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        assert group_size is not None  # filled in by TRL's config
        self._warn_without_steps(completions, group_size)
        formula = trainer.args.step_advantage
        table = steps.table(completions, cover=formula == "return_to_go")
        step_advantages = _FORMULAS[formula](table.rewards, group_size=group_size, scale=trainer.scale_rewards)
        first = trainer.accelerator.process_index * len(mask)
        here = slice(first, first + len(mask))
        per_token = advantages.per_token(step_advantages[here], table.ends[here], mask.size(1)) * mask
        steps.keep_advantages(rollout, per_token)
        log_advantages(trainer, per_token, mask)
        steps.log(table, step_advantages)
        counts = torch.tensor([len(own) for completion in completions[here] for own in completion.steps.values()])
        trainer.metrics.pooled(means={"steps/mean_count": (counts, torch.ones_like(counts, dtype=torch.bool))})
        return per_token

    def _warn_without_step_rewards(self, steps: StepsPart) -> None:
        formula = self.trainer.args.step_advantage
        if formula != "return_to_go" and not steps.has_step_rewards and self.trainer.accelerator.is_main_process:
            warnings.warn(
                f"step_advantage={formula!r} cannot act: no reward function has returned StepRewards in this rollout. "
                "Return them, or leave step_advantage unset.",
                UserWarning,
                stacklevel=2,
            )

    def _warn_without_steps(self, completions: Sequence[ScoredCompletion], group_size: int) -> None:
        for start in range(0, len(completions), group_size):
            group = completions[start : start + group_size]
            returned = [steps for completion in group for steps in completion.steps.values()]
            if returned and not any(returned) and self.trainer.accelerator.is_main_process:
                warnings.warn(
                    f"no completion of a group of {group_size} has a step (StepRewards([], [])), so this group "
                    "trains on plain rewards only, if it has any. Check how completions are split into steps.",
                    UserWarning,
                    stacklevel=2,
                )


def log_advantages(trainer: Any, per_token: Tensor, mask: Tensor) -> None:
    """Put the mean advantage of each completion into TRL's table of completions, in place of TRL's advantages."""
    means = per_token.sum(1) / mask.sum(1).clamp(min=1)
    gathered = cast(Tensor, trainer.accelerator.gather(means)).tolist()
    relog(trainer, len(gathered), gathered, {})
