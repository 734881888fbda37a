"""Reward functions for TRL out of what scores steps: any callable, or a process reward model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_steady.rewards.splitters import Splitter
from trl_steady.rewards.steps import StepRewards

__all__ = ["process_reward_model", "scored_steps"]

RewardFunction = Callable[..., list[StepRewards]]
Scorer = Callable[..., Sequence[Sequence[float]]]


def scored_steps(scorer: Scorer, splitter: Splitter) -> RewardFunction:
    """A reward function that splits completions and has all their steps scored in one call.

    Args:
        scorer: Called with `prompts` (B,), `steps` (B,) lists of texts, and by name whatever TRL gives to reward
            functions (columns of the dataset, `completions`, `trainer_state`, ...); returns for each completion one
            score for each of its steps.
        splitter: Of a completion, such as `by_blank_line()`.

    >>> from trl_steady.rewards import by_regex
    >>> lengths = scored_steps(lambda prompts, steps, **_: [[len(s) for s in row] for row in steps], by_regex("\\n"))
    >>> lengths(prompts=["?"], completions=["a\\nbcd"])
    [StepRewards(values=(2.0, 3.0), ends=(2, 5), unit='characters')]
    """

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[StepRewards]:
        split = [splitter(completion) for completion in completions]
        steps = [list(one.texts) for one in split]
        scores = scorer(prompts=prompts, steps=steps, completions=completions, **columns)
        return [one.rewards(row) for one, row in zip(split, scores, strict=True)]

    reward.__name__ = getattr(scorer, "__name__", type(scorer).__name__)
    return reward


def process_reward_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splitter: Splitter,
    *,
    separator: str = "\n",
    good_label: int = 1,
    batch_size: int = 8,
) -> RewardFunction:
    """A reward function from a token-classification model: how probably each step is good.

    Reads a solution as TRL's PRMTrainer (in `trl.experimental.prm` up to 1.13) prepares it for training: the prompt,
    then each step followed by the separator, whose last token carries the step's label.

    Args:
        model: `AutoModelForTokenClassification`, on the device where it is to run; set to evaluation.
        tokenizer: Its own.
        splitter: Of a completion, such as `by_blank_line()`.
        separator: What follows each step; white space around a step is left off.
        good_label: Which of the model's labels says that a step is good.
        batch_size: Solutions read at once.

    Returns:
        A reward function whose values are probabilities of `good_label`, between 0 and 1.

    Raises:
        ValueError: the model has no such label, the separator has no token, or a solution is longer than the model
            can read.
    """
    labels: Any = model.config.id2label or {}
    if good_label not in labels:
        raise ValueError(f"good_label={good_label} is no label of the model. Set it to one of them: {labels}.")
    ends_step = tokenizer.encode(separator, add_special_tokens=False)
    if not ends_step:
        raise ValueError(f"separator={separator!r} has no token. Set it to what the model was trained with.")
    longest = getattr(model.config, "max_position_embeddings", None)
    model.eval()

    def encode(prompt: Any, steps: list[str]) -> tuple[list[int], list[int]]:
        """The tokens, and where each step's label is."""
        ids: Any
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            ids = ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        labelled: list[int] = []
        for step in steps:
            ids = [*ids, *tokenizer.encode(step.strip(), add_special_tokens=False), *ends_step]
            labelled.append(len(ids) - 1)
        if longest is not None and len(ids) > longest:
            raise ValueError(
                f"a prompt with its steps has {len(ids)} tokens, and the process reward model reads {longest}. "
                "Shorten max_completion_length or the prompts, or use a model that reads more."
            )
        return ids, labelled

    @torch.inference_mode()
    def probabilities(prompts: Sequence[Any], steps: Sequence[list[str]], **_: Any) -> list[list[float]]:
        encoded = [encode(prompt, row) for prompt, row in zip(prompts, steps, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]))  # little padding in a batch
        scores: list[list[float]] = [[] for _ in encoded]
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            width = max(len(encoded[i][0]) for i in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(batch):
                ids[row, : len(encoded[i][0])] = torch.tensor(encoded[i][0], dtype=torch.long)
                mask[row, : len(encoded[i][0])] = 1
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
            good = logits.float().softmax(-1)[..., good_label].cpu()
            for row, i in enumerate(batch):
                scores[i] = good[row, encoded[i][1]].tolist()
        return scores

    probabilities.__name__ = "process_reward_model"
    return scored_steps(probabilities, splitter)
