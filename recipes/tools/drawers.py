"""The task "drawers": three calls of a tool and an answer, each of which can be checked by itself.

The question is five digits. The sum of the first two is the number of a drawer, which has a hidden digit. This digit
plus the question's next one is the number of the next drawer, and so on. The answer is the last hidden digit plus the
last digit of the question. For 38472: open(11) gives, say, 6; open(6 + 4 = 10) gives 2; open(2 + 7 = 9) gives 5; the
answer is 7.
"""

import random
import re
from collections.abc import Callable, Sequence
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
)
from trl.chat_template_utils import get_training_chat_template, qwen3_instruct_2507_chat_template

from moe.digits import DENSE, SIZE
from trl_steady import StepRewards

Message = dict[str, Any]
Reward = Callable[..., Any]

TURNS = 4  # three calls and the answer
TRAINING = 8_000
END, PAD, UNKNOWN = "<|im_end|>", "<pad>", "<unk>"
BEFORE_NUMBER, BEHIND_NUMBER = '<tool_call>\n{"name": "open", "arguments": {"drawer": ', "}}\n</tool_call>"
# what Qwen's template writes around numbers; a token each, so that a turn is short
PIECES = (
    *(BEFORE_NUMBER, BEHIND_NUMBER, "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response>"),
    *("\n<|im_start|>user\n", "\n<|im_start|>assistant\n", "\n"),
)

WORKED_STEPS, WORKED_BATCH, LEARNING_RATE = 420, 32, 3e-3
# the last examples have wrong turns, which leave something to learn
FLAWED_STEPS, MISTAKES = 60, 0.2


def hidden(question: str, drawer: Any) -> int:
    """Return the digit in a drawer. Each question has drawers of its own."""
    return random.Random(f"{question}/{drawer}").randrange(10)


class Drawers:
    """The environment. TRL makes one for each rollout, and its public methods are the tools."""

    def reset(self, question: str, **_: Any) -> None:
        """Begin with the question of a row."""
        self._question = question

    def open(self, drawer: int) -> int:
        """Open a drawer and read its digit.

        Args:
            drawer: Number of the drawer.
        """
        return hidden(self._question, drawer)


def call(drawer: int) -> Message:
    """Return the message that opens a drawer."""
    function = {"name": "open", "arguments": {"drawer": drawer}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def ask(question: str) -> list[Message]:
    """Return the prompt."""
    return [{"role": "user", "content": question}]


def worked(question: str, mistakes: float = 0.0) -> list[Message]:
    """Return a completion that is right throughout, or one whose turns are wrong with the probability `mistakes`.

    A wrong turn has any number. Half of the wrong calls are answers, which end the completion.
    """
    rng, found, messages = random.Random(question), question[0], list[Message]()
    for turn, digit in enumerate(question[1:], start=1):
        is_wrong = rng.random() < mistakes
        number = rng.randrange(19) if is_wrong else int(found) + int(digit)
        if turn == TURNS or (is_wrong and rng.random() < 0.5):
            return [*messages, {"role": "assistant", "content": str(number)}]
        found = str(hidden(question, number))
        messages += [call(number), {"role": "tool", "name": "open", "content": found}]
    return messages


def right_turns(question: str, completion: Sequence[Message]) -> list[bool]:
    """Return for each message of the assistant if it is right, given the tools' results before it.

    The first three have to be one call, of the drawer `result + digit`, and nothing else. The fourth has to be the
    number `result + digit`, and nothing else. Consequences:

    - A wrong call makes only its own turn wrong.
    - An answer before the fourth turn is wrong, whatever it says, and so is a turn with two calls.
    - No turn beyond the fourth is right.
    """
    found, right = question[0], []
    for message in completion:
        if message["role"] == "tool":
            found = message["content"]
            continue
        turn, wanted = len(right) + 1, None
        if turn <= TURNS and found.isdecimal():
            number = int(found) + int(question[turn])
            wanted = call(number) if turn < TURNS else {"content": str(number)}
        given = {name: value for name, value in message.items() if value and name != "role"}
        right.append(wanted is not None and given == {n: v for n, v in wanted.items() if v and n != "role"})
    return right


def outcome_reward(question: str, completion: Sequence[Message]) -> float:
    """Return 1 for the right answer after three right calls, and 0 otherwise."""
    right = right_turns(question, completion)
    return float(len(right) == TURNS and all(right))


def turn_rewards(question: str, completion: Sequence[Message]) -> StepRewards:
    """Give each right turn a quarter. Only a completion that is right throughout earns 1."""
    return StepRewards.per_turn([is_right / TURNS for is_right in right_turns(question, completion)])


REWARDS = {"turns": turn_rewards, "outcome": outcome_reward}


def reward(kind: str) -> Reward:
    """Return the reward function of this kind. Both log the share of right completions, and of right turns."""

    def drawers(completions: list[list[Message]], question: list[str], log_metric: Any, **_: Any) -> list[Any]:
        pairs = list(zip(question, completions, strict=True))
        log_metric("right", sum(outcome_reward(*pair) for pair in pairs) / len(pairs))
        log_metric("right_turns", sum(turn_rewards(*pair).total for pair in pairs) / len(pairs))
        return [REWARDS[kind](*pair) for pair in pairs]

    return drawers


def split(held_out: int) -> tuple[list[str], list[str], list[str]]:
    """Return questions for training, held-out ones and those of the warm start. No question is twice in them."""
    count = WORKED_STEPS * WORKED_BATCH
    drawn = [f"{number:05d}" for number in random.Random(0).sample(range(10**5), count + held_out + TRAINING)]
    return drawn[count + held_out :], drawn[count : count + held_out], drawn[:count]


def untaught() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a small Qwen3 with random weights, and a tokenizer with Qwen's chat template, which TRL can parse."""
    environment = Drawers()
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN)))
    plain.chat_template = qwen3_instruct_2507_chat_template
    system = plain.apply_chat_template(ask("1"), tools=[environment.open], tokenize=False).split(END)[0]
    pieces = [UNKNOWN, PAD, END, system, *PIECES, *"0123456789"]
    core = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    pattern = "|".join(map(re.escape, sorted(pieces, key=len, reverse=True)))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pattern}|."), "isolated")
    core.decoder = decoders.Fuse()
    special = {"eos_token": END, "pad_token": PAD, "unk_token": UNKNOWN, "padding_side": "left"}
    names = ["input_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=names, **special)
    tokenizer.chat_template = plain.chat_template
    torch.manual_seed(0)
    size = SIZE | DENSE | {"vocab_size": len(tokenizer)}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Qwen3ForCausalLM(Qwen3Config(**size, **ends)), tokenizer


def teach(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str]) -> None:
    """Train one pass over worked examples, with cross-entropy on the messages of the assistant."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = len(questions) // WORKED_BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 20, 2 - 2 * s / steps, 1))
    for step in range(steps):
        mistakes = MISTAKES if step >= steps - FLAWED_STEPS else 0.0
        batch: Any = tokenizer.apply_chat_template(
            [ask(q) + worked(q, mistakes) for q in questions[step * WORKED_BATCH : (step + 1) * WORKED_BATCH]],
            tools=[Drawers().open],
            chat_template=get_training_chat_template(tokenizer),
            padding=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        is_own = torch.as_tensor(batch.pop("assistant_masks")).bool()
        labels = batch["input_ids"].where(is_own, -100)
        loss = model(**batch.to(model.device), labels=labels.to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 25 == 0:
            print(f"warm start {step + 1:3d}/{steps}  loss {loss.item():.3f}", flush=True)


def load(start: Path) -> Any:
    """Load the model, in float32, and the tokenizer from `start`. Make them first if they are missing."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not (start / "model.safetensors").exists():
        model, tokenizer = untaught()
        teach(model.to(device), tokenizer, split(0)[2])
        tokenizer.save_pretrained(start)
        model.save_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).to(device)
    return model, AutoTokenizer.from_pretrained(start, padding_side="left")
