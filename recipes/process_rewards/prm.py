"""A reward function that scores steps with a process reward model, as TRL's PRMTrainer makes them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_steady.rewards import Splitter, Steps, scored_steps


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
    """
    ends_step = tokenizer.encode(separator, add_special_tokens=False)
    if not ends_step:
        raise ValueError(f"separator={separator!r} has no token. Set it to the one that the model was trained with.")
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
