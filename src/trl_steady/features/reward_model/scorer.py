"""Scores of completions by a reward model: the forward pass that its rollouts and its training share."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from trl_steady.core.devices import padded
from trl_steady.core.feature import Trainer
from trl_steady.features.scalar_head.model import ScalarHeadModel
from trl_steady.trl_bridge.models import text_tokenizer


class RewardScorer:
    """Computes scores with the reward model of a trainer."""

    def __init__(self, trainer: Trainer, model: ScalarHeadModel) -> None:
        self.trainer, self.model = trainer, model

    def scores(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        ends: Sequence[Sequence[int]],
        *,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return scores (N, S) at the ends of steps, 0 where a completion has fewer. S is the most steps.

        Args:
            prompt_ids: Token ids of N prompts.
            completion_ids: Token ids of N completions.
            ends: For each completion, the numbers of its tokens after which a score is read.
            batch_size: Number of sequences that go through the model together; None for all.
        """
        device = self.trainer.accelerator.device
        pad = cast(int, text_tokenizer(self.trainer).pad_token_id)
        # the score after a token is a critic's value of the next one
        longer = [[*ids, pad] for ids in completion_ids]
        samples: dict[str, Tensor] = {}
        samples["prompt_ids"], samples["prompt_mask"] = padded(prompt_ids, pad, "left", device)
        samples["completion_ids"], samples["completion_mask"] = padded(longer, pad, "right", device)
        with self.trainer.accelerator.autocast():
            values = self.trainer.values(self.model, samples, None, batch_size)
        indices, is_step = padded(ends, 0, "right", device)
        return values.gather(1, indices) * is_step
