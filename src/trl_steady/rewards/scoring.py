"""Reward functions for TRL that score steps with any callable or a process reward model."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_steady.rewards.splitters import Splitter, Steps
from trl_steady.rewards.steps import StepRewards

__all__ = ["process_reward_model", "scored_steps"]

Rewards = list[StepRewards | None]
Scorer = Callable[..., Any]  # returns Sequence[Sequence[float] | None], or an awaitable of it


def scored_steps(
    scorer: Scorer, splitter: Splitter, *, name: str | None = None
) -> Callable[..., Rewards] | Callable[..., Awaitable[Rewards]]:
    """Return a reward function that splits completions into steps and scores all steps in one call.

    Args:
        scorer: Called with keyword arguments: `prompts` (B,), `steps` (B,) lists of texts, `completions` (B,), and
            everything else that TRL passes to reward functions (`completion_ids`, `trainer_state`, dataset columns). A
            dataset column named `steps` is not passed. For each completion, the scorer returns one score per step, or
            None for no reward. It may be async.
        splitter: Splits a completion into steps, for example `by_blank_line()`.
        name: Name under which TRL logs the reward. Default: the scorer's name.

    Returns:
        A reward function, async if the scorer is async. It raises ValueError if the scores do not fit the steps.

    >>> from trl_steady.rewards import by_regex
    >>> lengths = scored_steps(lambda prompts, steps, **_: [[len(s) for s in row] for row in steps], by_regex("\\n"))
    >>> lengths(prompts=["?"], completions=["a\\nbcd"])[0].values
    (2.0, 3.0)
    """
    name = name or getattr(scorer, "__name__", type(scorer).__name__)

    def ask(completions: Sequence[Any], columns: dict[str, Any]) -> tuple[list[Steps], Any]:
        split = [splitter(completion) for completion in completions]
        steps = [list(one.texts) for one in split]
        return split, scorer(**{**columns, "completions": completions, "steps": steps})

    def fit(split: list[Steps], scores: Any) -> Rewards:
        if not isinstance(scores, Iterable) or len(rows := list(scores)) != len(split):
            raise ValueError(f"{name} returned {scores!r}. Return {len(split)} lists, one for each completion.")
        rewards: Rewards = []
        for i, (one, row) in enumerate(zip(split, rows, strict=True)):
            if row is not None and (not isinstance(row, Iterable) or len(row := list(row)) != len(one.texts)):
                raise ValueError(
                    f"{name} returned {row!r} for the {len(one.texts)} steps of completion {i}. Return a list with a "
                    "score for each step, or None for no reward."
                )
            rewards.append(None if row is None else one.rewards(row))
        return rewards

    async def later(completions: Sequence[Any], **columns: Any) -> Rewards:
        split, scores = ask(completions, columns)
        return fit(split, await scores)

    def now(completions: Sequence[Any], **columns: Any) -> Rewards:
        return fit(*ask(completions, columns))

    function = scorer
    while isinstance(function, functools.partial):
        function = function.func
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    reward = later if is_async else now
    reward.__name__ = name
    return reward


def process_reward_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splitter: Splitter,
    *,
    separator: str = "\n",
    good_label: int = 1,
    batch_size: int = 8,
    name: str | None = None,
) -> Callable[..., Any]:
    """Return a reward function in which a token classifier scores each step by its probability of being good.

    The model reads a solution in the format that TRL's PRMTrainer prepares for training (in `trl.experimental.prm` up
    to 1.13). This is the prompt, then each step followed by the separator. The last token of the separator carries the
    step's label.

    Args:
        model: `AutoModelForTokenClassification`, on the device where it should run. It scores without dropout.
        tokenizer: Tokenizer of the model.
        splitter: Splits a completion into parts of one text, for example `by_blank_line()`.
        separator: Text after each step. White space around a step is removed.
        good_label: Label of the model for a good step.
        batch_size: Solutions per forward pass.
        name: Name under which TRL logs the reward. Default: the name of the model's folder.

    Returns:
        A reward function whose values are probabilities of `good_label`, between 0 and 1. It raises ValueError for a
        solution that is longer than the model can read.

    Raises:
        ValueError: the model has no such label, the separator has no token, or `batch_size` is below 1.
    """
    labels: Any = model.config.id2label or {}
    if good_label not in labels:
        raise ValueError(f"good_label={good_label} is not a label of the model. Set it to one of {labels}.")
    ends_step = tokenizer.encode(separator, add_special_tokens=False)
    if not ends_step:
        raise ValueError(f"separator={separator!r} has no token. Set it to the one that the model was trained with.")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is below 1. Set it to 1 or more.")
    # models like RoBERTa have more positions than they can read, and their tokenizer has the true limit
    longest = min(getattr(model.config, "max_position_embeddings", 0) or 2**31, tokenizer.model_max_length)

    def encode(prompt: Any, steps: list[str]) -> tuple[list[int], list[int]]:
        """Return the token ids, and the index of each step's label."""
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
        if len(ids) > longest:
            raise ValueError(
                f"a prompt with its steps has {len(ids)} tokens, but the process reward model reads at most "
                f"{longest}. Reduce max_completion_length, shorten the prompts, or use a model that reads more."
            )
        return ids, labelled

    @torch.inference_mode()
    def probabilities(prompts: Sequence[Any], steps: Sequence[list[str]], **_: Any) -> list[list[float]]:
        model.eval()
        encoded = [encode(prompt, row) for prompt, row in zip(prompts, steps, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]))  # similar lengths need little padding
        scores: list[list[float]] = [[] for _ in encoded]
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            rows = [torch.tensor(encoded[i][0], dtype=torch.long) for i in batch]
            ids = pad_sequence(rows, batch_first=True)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
            good = logits.float().softmax(-1)[..., good_label].cpu()
            for row, i in enumerate(batch):
                scores[i] = good[row, encoded[i][1]].tolist()
        return scores

    def one_text(completion: Any) -> Steps:
        steps = splitter(completion)
        if steps.ends is None:  # the steps of a conversation leave out tool calls and results
            raise ValueError(
                "process_reward_model cannot score turns: it reads one text. Use by_regex or by_blank_line instead of "
                "by_turn."
            )
        return steps

    folder = str(model.config.name_or_path).rstrip("/").split("/")[-1]
    return scored_steps(probabilities, one_text, name=name or folder or "process_reward_model")
