"""The task "sort ten digits", and the small models that learn it and nothing else: a mixture of experts, a dense one.

An answer is easy to verify, and each digit is one token.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from common import run

Problem = Sequence[int]

DIGITS = 10  # per problem, so that all prompts have the same number of tokens
TRAINING = 4_000
BEGIN, END, PAD = "<s>", "</s>", "<pad>"
VOCABULARY = {token: i for i, token in enumerate([PAD, BEGIN, END, ":", *"0123456789"])}
TOKENS = list(VOCABULARY)
SIZE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,  # as in Qwen3-30B-A3B
}
DENSE = {"intermediate_size": 128}  # as many weights as a token meets in the mixture

# the warm start stops while there is something left to learn
WORKED_STEPS, WORKED_BATCH, LEARNING_RATE = 100, 128, 3e-3


def answer(problem: Problem) -> str:
    """Return the digits in ascending order, and the end-of-sequence token."""
    return "".join(map(str, sorted(problem))) + END


def draw(count: int) -> list[tuple[int, ...]]:
    """Return the first `count` of an endless list of problems. No two of them have the same digits, in any order."""
    rng, drawn = random.Random(0), {}
    while len(drawn) < count:
        problem = tuple(rng.choices(range(10), k=DIGITS))
        drawn.setdefault(tuple(sorted(problem)), problem)
    return list(drawn.values())


def untaught(*, dense: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a small Qwen3-MoE, or Qwen3, with random weights, and a tokenizer for it."""
    core = Tokenizer(WordLevel(VOCABULARY, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    ends = {"bos_token_id": VOCABULARY[BEGIN], "eos_token_id": VOCABULARY[END], "pad_token_id": VOCABULARY[PAD]}
    torch.manual_seed(0)
    if dense:
        return Qwen3ForCausalLM(Qwen3Config(**SIZE, **DENSE, **ends)), tokenizer
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE, **EXPERTS, **ends)), tokenizer


def teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    worked: Sequence[tuple[str, str]],
    *,
    balanced: bool = True,
    batch: int | None = None,
) -> None:
    """Train one pass over `worked`, pairs of prompt and answer, with cross-entropy on the answers.

    A `balanced` mixture has Qwen's load-balancing loss (`router_aux_loss_coef`, 0.001), because one that uses few of
    its experts would have few routes to change. A step has `batch` pairs (`WORKED_BATCH`).
    """
    extra = {"output_router_logits": True} if balanced and hasattr(model.config, "router_aux_loss_coef") else {}
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    batch = batch or WORKED_BATCH
    steps = len(worked) // batch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 20, 1))
    for step in range(steps):
        pairs = worked[step * batch : (step + 1) * batch]
        texts = [prompt + end for prompt, end in pairs]
        inputs = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)  # on the left
        if inputs["attention_mask"].all():
            del inputs["attention_mask"]
        labels = inputs["input_ids"].clone()
        for row, (_, end) in zip(labels, pairs, strict=True):
            row[: -len(tokenizer(end)["input_ids"])] = -100
        loss = model(**inputs, labels=labels, **extra).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 10 == 0:
            print(f"warm start {step + 1:3d}/{steps}  loss {loss.item():.3f}", flush=True)


def load_taught(
    start: Path, folder: Path, worked: Callable[[], Sequence[tuple[str, str]]], *, dense: bool, **how: Any
) -> tuple[Any, Any]:
    """Load a model in float32, and its tokenizer. If `start` has none, teach one with `worked()`, and save it there.

    `folder` is that of `common.run.starting_model`, and `how` has keywords of `teach`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def warm_up(model: Any, tokenizer: Any) -> None:
        teach(model.to(device), tokenizer, worked(), **how)

    start = run.starting_model(start, folder, lambda: untaught(dense=dense), warm_up)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).to(device)
    return model, AutoTokenizer.from_pretrained(start, padding_side="left")


@dataclass
class Digits:
    """The task, with the interface of `common.small_model.Task`.

    Args:
        start: Folder of the model after its warm start. If it has no model, `load` makes one.
        dense: Make a dense model, not a mixture of experts.
        balanced: Balance the experts' load in the warm start of a mixture.
        share: Part of the worked examples that the warm start reads.
    """

    start: Path
    dense: bool = False
    balanced: bool = True
    share: float = 1.0

    PREAMBLE = BEGIN
    STOP = ""

    def prompt(self, problem: Problem) -> str:
        """Return the digits and a colon."""
        return f"{BEGIN}{''.join(map(str, problem))}:"

    def is_right(self, problem: Problem, completion: str) -> bool:
        """Return True if the completion begins with the exact answer, including its end-of-sequence token."""
        return completion.startswith(answer(problem))

    def reward(
        self, completions: list[str], problem: list[list[int]], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """Return 1 for a right answer. Read the tokens, because the texts do not show if an answer has ended."""
        texts = ("".join(TOKENS[i] for i in ids) for ids in completion_ids)
        return [float(self.is_right(p, text)) for p, text in zip(problem, texts, strict=True)]

    def worked(self) -> list[tuple[str, str]]:
        """Return the worked examples that the warm start reads, pairs of prompt and answer."""
        worked = draw(WORKED_STEPS * WORKED_BATCH)
        read = worked[: round(self.share * len(worked))]
        return [(self.prompt(problem), answer(problem)) for problem in read]

    def load(self, folder: Path, quantised: bool) -> Any:
        """Load the model from `start`, in float32. Make it first if it is missing."""
        return load_taught(self.start, folder, self.worked, dense=self.dense, balanced=self.balanced)

    def split(self, held_out: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return training and held-out problems, the same for every seed. The warm start uses none of them."""
        worked = WORKED_STEPS * WORKED_BATCH
        problems = draw(worked + held_out + TRAINING)[worked:]
        return problems[held_out:], problems[:held_out]
