"""GSM8K with math-verify's reward, for a 7B model on a GPU. Questions and model come from the hub."""

import time
from typing import Any

from datasets import Dataset, load_dataset
from trl.rewards import accuracy_reward

from common import run, smollm2
from trl_steady import GRPOConfig, GRPOTrainer

# follows each question; the models of the configs know this instruction (DeepSeekMath's model card has it)
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def example(row: dict[str, str]) -> dict[str, Any]:
    """Return the prompt as messages, and the number at the end of the answer."""
    message = {"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}
    return {"prompt": [message], "solution": row["answer"].split("####")[-1].strip()}


def questions(split: str) -> Dataset:
    """Load GSM8K's questions: 7,473 in `train` and 1,319 in `test`."""
    rows = load_dataset("openai/gsm8k", "main", split=split)
    return rows.map(example, remove_columns=rows.column_names)


def train(
    recipe: Any, args: GRPOConfig, callbacks: run.Callbacks, *, reward: Any = None
) -> tuple[GRPOTrainer, run.Results]:
    """Train. TRL evaluates on `held_out` test questions, as often as the config says.

    `reward` replaces math-verify's reward.
    """
    started = time.monotonic()
    accuracy_reward([], [])  # if math-verify is missing, fail before the weights are loaded
    problems, test = questions("train"), questions("test")
    test = test.select(range(min(recipe.held_out, len(test))))
    trainer = GRPOTrainer(
        recipe.model_name,
        reward or accuracy_reward,
        args,
        problems,
        test,
        quantization_config=smollm2.nf4() if recipe.quantised else None,
        peft_config=recipe.adapter,
    )
    run.train(trainer, callbacks(trainer))
    return trainer, {
        "problems": {"training": len(problems), "held out": len(test)},
        "seconds": {"in all": round(time.monotonic() - started)},
    }
