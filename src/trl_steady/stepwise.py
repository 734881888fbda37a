"""`trl.GRPOTrainer` whose reward functions may reward steps: from what they return to advantages per token."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl_steady.config import GRPOConfig
from trl_steady.functional import advantages
from trl_steady.host import HostTrainer
from trl_steady.rewards.placement import Completion, spelling, token_ends
from trl_steady.rewards.steps import StepRewards
from trl_steady.rewards.table import StepTable, Verdict, tabulate

__all__ = ["StepwiseTrainer"]

_FORMULAS = {"process": advantages.process, "return_to_go": advantages.return_to_go}
_COLUMNS = ("step_ends", "step_rewards", "step_advantages")


class _Returned(NamedTuple):
    """What the reward functions returned in a rollout."""

    rewards: Tensor  # (N, K) of all processes, steps summed up, NaN = None
    contents: list[Any]  # of this process, from here on
    ids: list[list[int]]
    steps: dict[tuple[int, int], StepRewards]  # completion and reward function -> what it returned


class StepwiseTrainer(HostTrainer):
    """Takes `StepRewards` from reward functions, and gives TRL's loss advantages of shape (B, T) for them.

    Where no reward function of any process returned any in a rollout, TRL's own advantages (B,) stay.
    """

    args: GRPOConfig
    _steps: dict[tuple[int, int], StepRewards]
    _returned: _Returned | None = None
    _last_rollout: dict[str, Tensor] | None = None
    _has_columns = False

    @property
    def last_step_advantages(self) -> list[list[tuple[str, float]]]:
        """Of this process's last rollout with step rewards: each completion's loss tokens with their advantages.

        Pairs of the token's text and its advantage, for `trl_steady.rewards.advantages_html` and `advantages_png`.
        """
        if self._last_rollout is None:
            return []
        rollout, tokenizer = self._last_rollout, self.text_tokenizer
        completions = []
        for ids, mask, values in zip(rollout["ids"], rollout["mask"], rollout["advantages"], strict=True):
            own = ids[mask].tolist()
            text, begin = spelling(tokenizer, own)
            pieces = [text[begin(t) : begin(t + 1)] for t in range(len(own))]
            completions.append(list(zip(pieces, values[mask].tolist(), strict=True)))
        return completions

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """That of the processor, for a model that reads more than text."""
        processor: Any = self.processing_class
        return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor

    def read_rewards(self, function: int, returned: Sequence[Any]) -> Sequence[Any]:
        """Their sums, for TRL to log."""
        rewards = list(returned)
        steps = {i: reward for i, reward in enumerate(rewards) if isinstance(reward, StepRewards)}
        if steps:
            self._refuse_where_ignored(self.reward_func_names[function])
        for completion, reward in steps.items():
            self._steps[completion, function] = reward
            rewards[completion] = reward.total
        return rewards

    def _refuse_where_ignored(self, name: str) -> None:
        returned = f"reward function {name!r} returned StepRewards, but"
        level = self.importance_sampling_level
        if not self.args.takes_token_advantages(self.loss_type, level):
            loss = "loss_type='gspo'" if self.loss_type == "gspo" else f"importance_sampling_level={level!r}"
            raise ValueError(
                f"{returned} with {loss} a sequence has one ratio, whose gradient every token shares: only the mean "
                "of its advantages would be trained on. Set loss_type='gspo_token', which keeps the sequence's ratio, "
                "or return one float a completion."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"{returned} multi_objective_aggregation={self.multi_objective_aggregation!r} normalises one number "
                "for each reward function. Set multi_objective_aggregation='sum_then_normalize'."
            )

    def keep_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """For after the rollout, when it is known which tokens are the model's own."""
        self._returned = _Returned(rewards, completions, completion_ids, self._steps)

    def rollout(self, inputs: Any) -> dict[str, Any]:
        """TRL's, with advantages per token where steps were rewarded."""
        self._steps, self._returned = {}, None
        output = super().rollout(inputs)
        mask = output["completion_mask"].bool()
        if "tool_mask" in output:
            mask = mask & output["tool_mask"].bool()
        returned = self._returned
        if returned is None:  # a subclass that rewards in a way of its own
            return output
        own_masks = enumerate(mask.tolist())
        verdicts: list[Verdict] = gather_object([self._verdict(returned, i, own) for i, own in own_masks])
        if not any(verdict.steps for verdict in verdicts):
            if self._has_columns:
                self.relog_rollout(len(verdicts), None, {name: [None] * len(verdicts) for name in _COLUMNS})
            return output
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        assert group_size is not None  # filled in by trl.GRPOConfig
        self._warn_without_steps(verdicts, group_size)
        cover = self.args.step_advantage == "return_to_go"
        table = tabulate(verdicts, returned.rewards, self.reward_weights, cover=cover)
        step_advantages = _FORMULAS[self.args.step_advantage](
            table.rewards, group_size=group_size, scale=self.scale_rewards
        )
        first = self.accelerator.process_index * len(mask)
        own = slice(first, first + len(mask))
        output["advantages"] = advantages.per_token(step_advantages[own], table.ends[own], mask.size(1)) * mask
        self._last_rollout = {"ids": output["completion_ids"], "mask": mask, "advantages": output["advantages"]}
        self._log_steps(table, step_advantages, mask, output["advantages"])
        lengths = [len(steps) for verdict in verdicts[own] for steps in verdict.steps.values()]
        self.record_pooled(means={"steps/mean_count": torch.tensor(lengths)}, quantiles={}, sample_sizes={})
        return output

    def _warn_without_steps(self, verdicts: Sequence[Verdict], group_size: int) -> None:
        for start in range(0, len(verdicts), group_size):
            returned = [steps for verdict in verdicts[start : start + group_size] for steps in verdict.steps.values()]
            if returned and not any(returned) and self.accelerator.is_main_process:
                warnings.warn(
                    f"no completion of a group of {group_size} has a step (StepRewards([], [])), so that only plain "
                    "rewards, if any, are trained on there. Check what splits completions into steps.",
                    UserWarning,
                    stacklevel=2,
                )

    def _verdict(self, returned: _Returned, index: int, mask: list[bool]) -> Verdict:
        """One completion of this process."""
        ids = returned.ids[index]
        own = mask[: len(ids)]
        cut = len(ids) == self.max_completion_length
        completion = Completion(
            index=index,
            content=returned.contents[index],
            ids=ids,
            is_own=own,
            truncated=f" (it has reached max_completion_length={self.max_completion_length})" if cut else "",
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
        return Verdict(len(ids), max((t + 1 for t, is_own in enumerate(own) if is_own), default=0), steps)

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
        self._has_columns = True
