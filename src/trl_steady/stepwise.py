"""Let reward functions of `trl.GRPOTrainer` reward steps, and turn these rewards into advantages per token."""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl_steady.budgeted import BudgetedTrainer
from trl_steady.config import GRPOConfig
from trl_steady.functional import advantages
from trl_steady.rewards.placement import Completion, spelling, token_ends
from trl_steady.rewards.returned import as_rewards, has_nan, refuse_infinite
from trl_steady.rewards.steps import StepRewards
from trl_steady.rewards.table import ScoredCompletion, StepTable, tabulate

__all__ = ["StepwiseTrainer"]

_FORMULAS = {"process": advantages.process, "return_to_go": advantages.return_to_go}
_COLUMNS = ("steps/ends", "steps/rewards", "steps/advantages")


class _Returned(NamedTuple):
    """The values that the reward functions returned in a rollout."""

    rewards: Tensor  # (N, K) of all processes, steps summed up, NaN = None
    contents: list[Any]  # this and the next two: of this process only
    ids: list[list[int]]
    steps: dict[tuple[int, int], StepRewards]  # (completion, reward function) -> returned value


class StepwiseTrainer(BudgetedTrainer):
    """A trainer that turns `StepRewards` of reward functions into advantages of shape (B, T) for TRL's loss.

    If no reward function of any process returns `StepRewards` in a rollout, TRL's own advantages (B,) stay.
    """

    args: GRPOConfig
    _returned: _Returned | None = None
    _last_rollout: dict[str, Tensor] | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._steps: dict[tuple[int, int], StepRewards] = {}
        self._returned_nan: set[int] = set()
        super().__init__(*arguments, **keywords)

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
        rollout, completions = self._last_rollout, []
        for ids, mask, values in zip(rollout["ids"], rollout["mask"], rollout["advantages"], strict=True):
            own = ids[mask].tolist()
            text, begins = spelling(self.text_tokenizer, own)
            pieces = [text[start:end] for start, end in pairwise(begins)]
            completions.append(list(zip(pieces, values[mask].tolist(), strict=True)))
        return completions

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, which is part of the processor if the model reads more than text."""
        processor: Any = self.processing_class
        return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor

    def read_rewards(self, function: int, returned: Sequence[Any]) -> Sequence[Any]:
        """Store step rewards for later, and return their sums to TRL."""
        name = self.reward_func_names[function]
        rewards = as_rewards(name, returned)
        if has_nan(rewards):
            self._warn_of_nan(function, "Return None if you mean that, and a number otherwise.")
        steps = {i: reward for i, reward in enumerate(rewards) if isinstance(reward, StepRewards)}
        if steps:
            self._refuse_where_ignored(name)
        for completion, reward in steps.items():
            self._steps[completion, function] = reward
            rewards[completion] = reward.total
        return rewards

    def _warn_of_nan(self, function: int, way_out: str) -> None:
        """Warn once per run and function.

        A process can check its own completions only: in the gathered rewards, TRL's None is NaN too.
        """
        if function not in self._returned_nan:
            self._returned_nan.add(function)
            warnings.warn(
                f"reward function {self.reward_func_names[function]!r} returned nan, which TRL treats as no reward. "
                f"{way_out}",
                UserWarning,
                stacklevel=2,
            )

    def _refuse_where_ignored(self, name: str) -> None:
        returned = f"reward function {name!r} returned StepRewards, but"
        if self.model.training and "rollout" not in self.reached:
            raise ValueError(
                f"{returned} {type(self).__name__} makes its rollouts without calling super(), which would turn them "
                "into advantages. Call super() in the method that makes rollouts, or return one float per completion."
            )
        level = self.importance_sampling_level
        if not self.args.takes_token_advantages(self.loss_type, level):
            loss = "loss_type='gspo'" if self.loss_type == "gspo" else f"importance_sampling_level={level!r}"
            raise ValueError(
                f"{returned} with {loss} all tokens of a sequence share the gradient of one ratio, so only the mean "
                "of their advantages would count. Set loss_type='gspo_token', which keeps the sequence's ratio, or "
                "return one float per completion."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"{returned} multi_objective_aggregation={self.multi_objective_aggregation!r} normalises one number "
                "per completion and reward function. Set multi_objective_aggregation='sum_then_normalize'."
            )

    def keep_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Store the rewards until the rollout is complete, when the model's own tokens are known."""
        refuse_infinite(self.reward_func_names, rewards, len(completions))
        for function, column in enumerate(rewards.isnan().any(0).tolist()):
            is_model = isinstance(self.reward_funcs[function], torch.nn.Module)
            if column and is_model and self.accelerator.is_main_process:
                self._warn_of_nan(function, "Check the reward model: its weights, its dtype and its pad_token_id.")
        self._returned = _Returned(rewards, completions, completion_ids, self._steps)
        self._steps = {}

    def rollout(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's rollout, with per-token advantages if any reward function returned `StepRewards`."""
        self._steps, self._returned = {}, None
        output = super().rollout(inputs)
        returned = self._returned
        if returned is None or not any(gather_object([bool(returned.steps)])):
            count = len(output["advantages"]) * self.accelerator.num_processes
            self.relog_rollout(count, None, {name: [None] * count for name in _COLUMNS})
            self._warn_without_step_rewards()
            return output
        mask = output["completion_mask"].bool()
        if "tool_mask" in output:
            mask = mask & output["tool_mask"].bool()
        completions: list[ScoredCompletion] = gather_object(
            [self._scored(returned, i, row) for i, row in enumerate(mask.tolist())]
        )
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        assert group_size is not None  # filled in by trl.GRPOConfig
        self._warn_without_steps(completions, group_size)
        cover = self.args.step_advantage == "return_to_go"
        table = tabulate(completions, returned.rewards, self.reward_weights, cover=cover)
        step_advantages = _FORMULAS[self.args.step_advantage](
            table.rewards, group_size=group_size, scale=self.scale_rewards
        )
        first = self.accelerator.process_index * len(mask)
        here = slice(first, first + len(mask))
        output["advantages"] = advantages.per_token(step_advantages[here], table.ends[here], mask.size(1)) * mask
        last = {"ids": output["completion_ids"], "mask": mask, "advantages": output["advantages"]}
        self._last_rollout = {name: value.cpu() for name, value in last.items()}
        self._log_steps(table, step_advantages, mask, output["advantages"])
        counts = [len(steps) for completion in completions[here] for steps in completion.steps.values()]
        self.record_pooled(means={"steps/mean_count": torch.tensor(counts)})
        return output

    def _warn_without_step_rewards(self) -> None:
        formula = self.args.step_advantage
        if formula != "return_to_go" and self._last_rollout is None and self.accelerator.is_main_process:
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
            if returned and not any(returned) and self.accelerator.is_main_process:
                warnings.warn(
                    f"no completion of a group of {group_size} has a step (StepRewards([], [])), so this group "
                    "trains on plain rewards only, if it has any. Check how completions are split into steps.",
                    UserWarning,
                    stacklevel=2,
                )

    def _scored(self, returned: _Returned, index: int, mask: list[bool]) -> ScoredCompletion:
        """Return the data of one completion of this process, with the ends of its steps in tokens."""
        ids = returned.ids[index]
        is_own = mask[: len(ids)]
        at_limit = len(ids) == self.max_completion_length
        completion = Completion(
            index=index,
            content=returned.contents[index],
            ids=ids,
            is_own=is_own,
            limit=f" (it has reached max_completion_length={self.max_completion_length})" if at_limit else "",
        )
        steps = {}
        for function, name in enumerate(self.reward_func_names):
            rewards = returned.steps.get((index, function))
            if rewards is not None:
                try:
                    ends = token_ends(rewards, completion, self.text_tokenizer)
                except ValueError as error:
                    raise ValueError(f"reward function {name!r}: {error}") from error
                steps[function] = list(zip(ends, rewards.values, strict=True))
        return ScoredCompletion(len(ids), max((t + 1 for t, own in enumerate(is_own) if own), default=0), steps)

    def _log_steps(self, table: StepTable, step_advantages: Tensor, mask: Tensor, per_token: Tensor) -> None:
        means = per_token.sum(1) / mask.sum(1).clamp(min=1)
        has_step = ~table.rewards.isnan().cpu()
        columns = [
            [values[has].tolist() for values, has in zip(column.cpu(), has_step, strict=True)]
            for column in (table.ends, table.rewards, step_advantages)
        ]
        self.relog_rollout(
            len(has_step),
            cast(Tensor, self.accelerator.gather(means)).tolist(),
            dict(zip(_COLUMNS, columns, strict=True)),
        )
