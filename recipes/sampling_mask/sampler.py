"""Compare the trainer's log-probs with the sampler's, from the scores that transformers' `generate` samples from."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from common import run
from trl_steady import GRPOConfig, GRPOTrainer


@dataclass(frozen=True)
class Drawn:
    """The sampler's data on each of the tokens that it has drawn."""

    log_probs: Tensor
    """Log-probs under the distribution that was sampled."""
    kept_mass: Tensor
    """Probability of the kept tokens under the whole vocabulary's distribution."""
    kept: Tensor
    """Number of kept tokens."""

    @classmethod
    def among(cls, tokens: Tensor, scores: Tensor, logits: Tensor, temperature: float) -> "Drawn":
        """Build an instance for (B, T) tokens from the (B, T, V) logits before and scores after all processors."""
        log_probs = scores.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        before = (logits.float() / temperature).log_softmax(-1)
        is_kept = scores > -torch.inf
        return cls(log_probs, before.exp().where(is_kept, 0).sum(-1), is_kept.sum(-1))

    def of(self, row: int, tokens: int) -> "Drawn":
        """Return the first tokens of a row."""
        return Drawn(self.log_probs[row, :tokens], self.kept_mass[row, :tokens], self.kept[row, :tokens])


_WRAPPED = "_generate_single_turn", "_get_per_token_logps_and_entropies"  # methods of TRL's trainer


class Sampler(TrainerCallback):
    """Compare the log-probs in each update's loss with those that the tokens were sampled with.

    The sampler's log-probs come from transformers' processed scores, not from the sets that `keep_sampling_mask`
    records. The run's tokens and random numbers do not change. The only allowed processors between logits and scores
    are the temperature and those that leave tokens out.

    The callback writes to the trainer's history:

    - `sampler/update`: the number of the update since the rollout.
    - `sampler/ratio_...`: the tokens' ratios of trainer to sampler.
    - `sampler/kept_mass`: the ratio that a policy with the rollout's weights has without the mask.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.drawn: dict[tuple[int, ...], Drawn] = {}
        self.seen: list[Drawn] = []
        self.log_ratios: list[Tensor] = []

    def on_train_begin(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Wrap the trainer's generation and its log-probs."""
        trainer = self.trainer
        generate, log_probs = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies

        def generate_and_keep(prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> Any:
            with _Listener(trainer.model) as listener:
                generated = generate(prompt_ids, *arguments, **keywords)
            self.keep(prompt_ids, generated[0], listener.drawn)
            return generated

        def score_and_compare(
            model: Any,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            *arguments: Any,
            **keywords: Any,
        ) -> Any:
            scores = log_probs(model, input_ids, attention_mask, logits_to_keep, *arguments, **keywords)
            if torch.is_grad_enabled():  # an update; old policy and reference are scored without gradient
                self.compare(input_ids, attention_mask.bool(), scores[0].detach())
            return scores

        wrappers = generate_and_keep, score_and_compare
        vars(trainer).update(zip(_WRAPPED, wrappers, strict=True))

    def on_train_end(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Remove the wrappers."""
        for name in _WRAPPED:
            vars(self.trainer).pop(name)

    def on_step_end(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Write the results of this update to the history."""
        log_ratios = torch.cat(self.log_ratios).double()
        ratios, masses = log_ratios.exp(), torch.cat([each.kept_mass for each in self.seen]).double()
        kept = torch.cat([each.kept for each in self.seen]).double()
        found = {
            "update": (state.global_step - 1) % run.updates_per_rollout(args) + 1,
            "ratio_mean": ratios.mean(),
            "ratio_min": ratios.min(),
            "ratio_max": ratios.max(),
            "log_ratio_mean": log_ratios.mean(),
            "log_ratio_std": log_ratios.std(),
            "kept_mass": masses.mean(),
            "kept_tokens": kept.mean(),
            "singletons": (kept == 1).double().mean(),
            "off_kept_mass": (ratios - masses).abs().max(),
            "off_one": (ratios - 1).abs().max(),
        }
        state.log_history.append({"step": state.global_step, **{f"sampler/{k}": float(v) for k, v in found.items()}})
        self.seen, self.log_ratios = [], []

    def keep(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], drawn: Drawn) -> None:
        """Store the drawn tokens of a rollout, replacing the last one. Equal answers have equal log-probs."""
        pairs = enumerate(zip(prompts, completions, strict=True))
        self.drawn = {(*prompt, *ids): drawn.of(row, len(ids)) for row, (prompt, ids) in pairs}

    def compare(self, input_ids: Tensor, is_token: Tensor, log_probs: Tensor) -> None:
        """Look up the sequences of a micro-batch, in any order, and compare their log-probs."""
        width = log_probs.size(1)
        for row, ids in enumerate(input_ids):
            drawn = self.drawn[tuple(ids[is_token[row]].tolist())]
            self.seen.append(drawn)
            self.log_ratios.append(log_probs[row, is_token[row, -width:]].cpu() - drawn.log_probs)


class _Listener:
    """Context in which `model.generate` also records the log-probs that it samples with."""

    drawn: Drawn

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> "_Listener":
        generate = self.model.generate

        def generate_and_tell(*arguments: Any, generation_config: Any, **keywords: Any) -> Tensor:
            telling = copy.deepcopy(generation_config)
            telling.return_dict_in_generate = telling.output_scores = telling.output_logits = True
            output = generate(*arguments, generation_config=telling, **keywords)
            scores, logits = (torch.stack(each, dim=1).cpu() for each in (output.scores, output.logits))
            tokens = output.sequences[:, -scores.size(1) :].cpu()
            self.drawn = Drawn.among(tokens, scores, logits, generation_config.temperature or 1.0)
            return output.sequences

        vars(self.model)["generate"] = generate_and_tell
        return self

    def __exit__(self, *_: object) -> None:
        vars(self.model).pop("generate")


def first_updates(history: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the largest distance of a token's ratio from 1, and from the kept mass, over all first updates."""
    rows = [row for row in history if row.get("sampler/update") == 1]
    return tuple(
        max((row[f"sampler/{name}"] for row in rows), default=math.nan) for name in ("off_one", "off_kept_mass")
    )
