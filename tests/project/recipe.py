"""Recipes in tests: their files, their settings, and tiny models and data in place of theirs."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
import trl
import yaml
from trl.scripts import grpo as launched

import trl_steady
from tests.tools import tiny

FOLDER = Path(__file__).parents[2] / "recipes"


def is_experiment(path: Path) -> bool:
    """Return True if a YAML file is an experiment with arms, and no recipe of one run."""
    return bool({"arms", "grid"} & yaml.safe_load(path.read_text()).keys())


YAMLS = {
    f"{path.parent.name}/{path.stem}": path
    for path in sorted(FOLDER.glob("**/*.yaml"))
    # these have tests of their own
    if path.parent.name != "accelerate" and not is_experiment(path)
}
SCRIPTS = {"gsm8k": "iterative_grpo"}  # of a folder that has none
WITHOUT_SCRIPT = [name for name, path in YAMLS.items() if "reward_funcs" in yaml.safe_load(path.read_text())]
GSM8K = [
    {"question": f"What is 1,000 + {i}?", "answer": f"One thousand and {i}.\n#### {1000 + i:,}"} for i in range(8)
]
GSM8K_FOLDER = os.environ.get("TRL_STEADY_GSM8K")
needs_gsm8k = pytest.mark.skipif(
    not GSM8K_FOLDER, reason="TRL_STEADY_GSM8K does not name the folder of GSM8K's questions"
)
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def script(recipes: Any, name: str) -> Any:
    """Return the module of the script that runs a recipe."""
    folder = name.split("/")[0]
    return getattr(recipes, SCRIPTS.get(folder, folder))


def dataclasses(recipes: Any, name: str) -> tuple[Any, ...]:
    """Return the dataclasses of the script that reads the recipe, ours or TRL's."""
    if name in WITHOUT_SCRIPT:
        return launched.GRPOScriptArguments, trl_steady.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig
    is_ppo = name.startswith("ppo/") and not name.endswith("-grpo")
    config = trl_steady.PPOConfig if is_ppo else trl_steady.GRPOConfig
    return script(recipes, name).RecipeArguments, config


def parse(recipes: Any, name: str, kinds: tuple[Any, ...] | None = None, **options: Any) -> tuple[Any, ...]:
    """Parse the YAML file of this name, with options of the command line, for a CPU."""
    options = {"use_cpu": True, "bf16": False, **options}
    command = [part for option, value in options.items() for part in (f"--{option}", str(value))]
    parser = trl.TrlParser(kinds or dataclasses(recipes, name))
    return parser.parse_args_and_config(["--config", str(YAMLS[name]), *command])


def run(recipes: Any, name: str, output: Path, **options: Any) -> Any:
    """Run the script of a recipe on few problems, and return its results."""
    few = {"per_device_train_batch_size": 8, "held_out": 10, "samples": 2, "output_dir": output, **options}
    return script(recipes, name).main(*parse(recipes, name, **few))


def moved(adapter: Path, model: Path) -> bool:
    """Return whether an adapter does anything; it is loaded as a user would."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    found = peft.PeftModel.from_pretrained(plain, str(adapter))
    return any(value.abs().max() > 0 for name, value in found.named_parameters() if "lora_B" in name)


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def chatty(model: Path, folder: Path) -> Path:
    """Return a copy of a tiny model, with a chat template."""
    shutil.copytree(model, folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def by_length(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """A random model is never right, and without a difference in reward there is nothing to learn."""
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def without_spaces(page: Path) -> str:
    """Return a page whose percentages are written as Python writes them."""
    return re.sub(r" %", "%", page.read_text())
