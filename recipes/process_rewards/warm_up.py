"""Training on worked problems, for a model that does not know the task yet."""

from collections.abc import Sequence
from typing import Any

import torch

BATCH = 8
LEARNING_RATE = 5e-5


def teach(model: Any, tokenizer: Any, worked: Sequence[tuple[str, str]]) -> None:
    """Train all weights with one pass over `worked`, pairs of prompt and answer, in order. The loss is on the answers.

    All prompts must have the same number of tokens.
    """
    model.float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for start in range(0, len(worked), BATCH):
        prompts, answers = zip(*worked[start : start + BATCH], strict=True)
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right").to(model.device)
        labels = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
        labels[:, : len(tokenizer(prompts[0])["input_ids"])] = -100
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"worked problems {start + len(texts):3d}/{len(worked)}  loss {loss.item():.3f}", flush=True)
