"""A tiny model that calls tools: a Qwen3 chat template of TRL's, two tools, and transcripts learned by heart.

`python -m tests.tools.agent` trains the model and writes `WEIGHTS`, from which the tests take it.
The model samples: some prompts are answered at once, after one tool or after two, others by two calls in one turn.
"""

import asyncio
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen2Config
from trl import chat_template_utils

from tests.tools import tiny
from trl_steady import StepRewards

Message = dict[str, Any]
Calls = list[tuple[str, Any]]

WEIGHTS = Path(__file__).parents[1] / "data/agent.safetensors"
TURN_END, PAD = "<|im_end|>", "<|endoftext|>"
# between two turns of the model, whose last token is TURN_END
TOOL_RESULT = "\n<|im_start|>user\n<tool_response>\n"
NEXT_TURN = f"\n</tool_response>{TURN_END}\n<|im_start|>assistant\n"
# ordinary text as far as decoding goes, but one token each: a call is short
_PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_PIECES += ['{"name": "', '", "arguments": {"', '": ']


class Calculator:
    """An environment whose methods are the tools; it knows of the calls only, and takes each for a turn."""

    calls: Calls

    def __init__(self) -> None:
        self.calls = []

    def reset(self, **_: Any) -> None:
        self.calls = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.calls.append(("add", (a, b)))
        return a + b

    def double(self, x: int) -> int:
        """Double a number.

        Args:
            x: It.
        """
        self.calls.append(("double", x))
        return 2 * x

    def get_reward(self) -> StepRewards:
        return StepRewards.per_turn(by_calls(self.calls))


class AsyncCalculator(Calculator):
    """The same, to be awaited."""

    async def add(self, a: int, b: int) -> int:
        await asyncio.sleep(0)
        return super().add(a, b)

    async def double(self, x: int) -> int:
        await asyncio.sleep(0)
        return super().double(x)

    async def get_reward(self) -> StepRewards:
        await asyncio.sleep(0)
        return super().get_reward()

    add.__doc__, double.__doc__ = Calculator.add.__doc__, Calculator.double.__doc__


def by_calls(calls: Calls) -> list[float]:
    """What the turns that end in these calls, and the answer after them, are worth: arbitrary, exact in float32."""
    return [*(worth({"call": call}, number) for number, call in enumerate(calls)), len(calls) - 0.75]


def tools(calls: Calls) -> list[Callable[..., int]]:
    """Two tools that note their calls, standing by themselves."""
    calculator = Calculator()
    calculator.calls = calls
    return [calculator.add, calculator.double]


SUMS = [(1, 2), (2, 3), (3, 4), (4, 2)]


def one_by_one(a: int, b: int) -> list[Message]:
    """A prompt that is answered with 0, 1 or 2 calls, one a turn."""
    return [{"role": "user", "content": f"{a}+{b}"}]


def both_at_once(a: int, b: int) -> list[Message]:
    """A prompt that is answered at once or with two calls in one turn."""
    return [{"role": "user", "content": f"both {a}+{b}"}]


def dataset(*kinds: Callable[[int, int], list[Message]], rows: int = 8) -> Dataset:
    prompts = [kind(*numbers) for numbers in SUMS for kind in kinds]
    return Dataset.from_dict({"prompt": (prompts * rows)[:rows]})


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, but for special tokens and some pieces, one of which is all that is said of the tools."""
    made = tiny.tokenizer()
    special = {"eos_token": TURN_END, "pad_token": PAD, "additional_special_tokens": ["<|im_start|>"]}
    made.add_special_tokens(special)
    made.chat_template = chat_template_utils.qwen3_instruct_2507_chat_template
    system = made.apply_chat_template(one_by_one(1, 2), tools=tools([]), tokenize=False).split(TURN_END)[0]
    made.add_tokens([AddedToken(piece, normalized=False) for piece in (*_PIECES, system.removeprefix("<|im_start|>"))])
    return made


def _call(*names_and_arguments: tuple[str, dict[str, int]], say: str = "") -> Message:
    calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in names_and_arguments]
    return {"role": "assistant", "content": say, "tool_calls": calls}


def _result(name: str, value: int) -> Message:
    return {"role": "tool", "name": name, "content": str(value)}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def transcripts() -> list[list[Message]]:
    scripts = []
    for a, b in SUMS:
        added = [_call(("add", {"a": a, "b": b})), _result("add", a + b)]
        doubled = [_call(("double", {"x": a + b}), say="Twice."), _result("double", 2 * (a + b))]
        at_once = [_call(("add", {"a": a, "b": b}), ("double", {"x": a})), _result("add", a + b)]
        at_once.append(_result("double", 2 * a))
        ask, ask_both = one_by_one(a, b), both_at_once(a, b)
        scripts += [
            [*ask, _answer("No.")],
            [*ask, *added, _answer(f"It is {a + b}.")],
            [*ask, *added, *doubled, _answer(f"So {2 * (a + b)}.")],
            [*ask_both, _answer("I pass.")],
            [*ask_both, *at_once, _answer(f"{a + b}, {2 * a}.")],
        ]
    return scripts


def texts(reader: PreTrainedTokenizerFast) -> list[str]:
    """The transcripts, as the chat template writes them."""
    return [reader.apply_chat_template(t, tools=tools([]), tokenize=False).rstrip("\n") for t in transcripts()]


def save_model(folder: Path) -> Path:
    """Save the model of `WEIGHTS`, which knows the transcripts by heart, with its tokenizer."""
    reader = tokenizer()
    model = transformers.AutoModelForCausalLM.from_config(config(reader), dtype=torch.float32)
    # stored in bfloat16 and without the embedding's copy, the head
    model.load_state_dict(load_file(WEIGHTS), strict=False)
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


def config(
    reader: PreTrainedTokenizerFast, kind: type[PreTrainedConfig] = Qwen2Config, **more: Any
) -> PreTrainedConfig:
    return kind(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(reader),
        max_position_embeddings=512,
        eos_token_id=reader.eos_token_id,
        pad_token_id=reader.pad_token_id,
        tie_word_embeddings=True,
        **more,
    )


def train_model(folder: Path, steps: int = 300, **architecture: Any) -> Path:
    """Train on the transcripts, and on nothing else; after 240 steps they are known by heart."""
    reader = tokenizer()
    batch = reader(texts(reader), padding=True, padding_side="right", return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    targets = ids.where(mask.bool(), -100)[:, 1:]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(reader, **architecture))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
        for _ in range(steps):
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


@functools.cache
def _reader() -> PreTrainedTokenizerFast:
    return tokenizer()


def unpadded(ids: list[int]) -> list[int]:
    """A completion without what TRL has put behind it."""
    pad = _reader().pad_token_id
    return ids[: ids.index(pad)] if pad in ids else ids


def turns(ids: list[int]) -> list[tuple[int, int]]:
    """[start, end) of each turn of the model in a completion, from its tokens alone.

    A turn goes up to its first TURN_END; behind a tool's result the next one begins with what follows NEXT_TURN.
    """
    result, onwards = (_reader()(text)["input_ids"] for text in (TOOL_RESULT, NEXT_TURN))
    turn_end, spans, start = _reader().eos_token_id, [], 0
    while start < len(ids):
        end = ids.index(turn_end, start) + 1 if turn_end in ids[start:] else len(ids)
        spans.append((start, end))
        if end == len(ids):
            break
        assert ids[end : end + len(result)] == result, _reader().decode(ids)
        start = next(i for i in range(end, len(ids) + 1) if ids[i - len(onwards) : i] == onwards)
    return spans


def worth(message: Message, number: int) -> float:
    """Of a turn: arbitrary, deterministic, exact in float32."""
    return (sum(json.dumps(message, sort_keys=True).encode()) % 13 - 5) / 4 + number


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as trained:
        parameters = load_file(train_model(Path(trained)) / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in parameters.items()}, WEIGHTS)
