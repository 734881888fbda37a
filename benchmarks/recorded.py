"""Train a run of tests/data/runs.toml on a tiny model, and return its log."""

import itertools
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.tools import tiny
from tests.tools.nonfinite import poison_gradients

from trl_steady import StepRewards
from trl_steady.features.training_report import TrainingReport

BASE = {
    "per_device_train_batch_size": 16,
    "steps_per_generation": 1,
    "num_generations": 8,
    "max_completion_length": 12,
    "max_steps": 60,
    "learning_rate": 3e-3,
}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
CLOCKS = ("runtime", "per_second", "step_time", "total_flos", "epoch")
_random = random.Random(0)


def _share(ids: list[int], wanted: Callable[[int], bool]) -> float:
    return sum(map(wanted, ids)) / max(len(ids), 1)


def _is_even(token: int) -> bool:
    return token % 2 == 0


def _reward(name: str, of: Callable[[list[int]], Any]) -> Callable[..., list[Any]]:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        return [*map(of, completion_ids)]

    reward.__name__ = name
    return reward


def _halves(ids: list[int]) -> StepRewards:
    """Return a reward for each half of an answer."""
    ends = sorted({max(len(ids) // 2, 1), len(ids)})
    return StepRewards.at_tokens(
        [sum(map(_is_even, ids[start:end])) / len(ids) for start, end in itertools.pairwise([0, *ends])], ends
    )


def by_rows(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Judge half of the prompts, as TRL's docs show for several tasks."""
    values = REWARDS["low"](completion_ids=completion_ids)
    return [value if len(prompt) % 2 else None for prompt, value in zip(prompts, values, strict=True)]


def hacked(completion_ids: list[list[int]], held_out: list[bool], **_: Any) -> list[float]:
    """Pay for the opposite of what is wanted, which the held-out rows measure."""
    values = REWARDS["even"](completion_ids=completion_ids)
    return [abs(out - value) for out, value in zip(held_out, values, strict=True)]


def dies(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float | None]:
    """Judge until step 20."""
    return REWARDS["none" if trainer_state.global_step >= 20 else "even"](completion_ids=completion_ids)


def alternates(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pay for six tokens that are even and odd in turn. A policy that repeats one token gets half of it."""
    return [sum(_is_even(i + token) for i, token in enumerate(ids[:6])) / 6 for ids in completion_ids]


def of_prompt(prompts: list[str], **_: Any) -> list[float]:
    """Judge the prompt alone."""
    return [float(len(prompt) % 3) for prompt in prompts]


def by_prompt(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Tell right from wrong: a prompt asks for one, two or three even tokens at the start."""
    wanted = [1 + len(prompt) % 3 for prompt in prompts]
    return [
        float(len(ids) >= count and all(map(_is_even, ids[:count])))
        for count, ids in zip(wanted, completion_ids, strict=True)
    ]


def away(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float | None]:
    """Judge, but not in steps 10 to 24."""
    return REWARDS["none" if 10 <= trainer_state.global_step < 25 else "even"](completion_ids=completion_ids)


# of the ids of an answer, which are below 258; those below 40 end it
_OF_IDS: dict[str, Callable[[list[int]], Any]] = {
    "even": lambda ids: _share(ids, _is_even),
    "low": lambda ids: _share(ids, lambda token: token < 128),
    "in_turn": lambda ids: float(len(ids) > 3 and all(_is_even(i + token) for i, token in enumerate(ids[:4]))),
    "all_even": lambda ids: float(len(ids) > 1 and all(_is_even(token) and token < 128 for token in ids[:2])),
    "first_even": lambda ids: float(_is_even(ids[0])),
    "penalty": lambda ids: -3.0 * _share(ids, lambda token: not _is_even(token)) - 0.5,
    "short": lambda ids: 1 - len(ids) / 24,
    "long": lambda ids: len(ids) / 32,
    "keywords": lambda ids: float(sum(map(_is_even, ids))),
    "steps": _halves,
    "never": lambda _: 0.0,
    "always": lambda _: 1.0,
    "same": lambda _: 0.5,
    "nan": lambda _: float("nan"),
    "none": lambda _: None,
    "noise": lambda _: _random.random(),
    "arbitrary": lambda ids: float(sum(ids) % 11 - 5),
    "mostly_right": lambda ids: float(ids[0] != 100),
    "hardly_right": lambda ids: float(ids[0] == 100),
}
REWARDS: dict[str, Callable[..., list[Any]]] = {name: _reward(name, of) for name, of in _OF_IDS.items()} | {
    each.__name__: each for each in (by_rows, hacked, dies, away, alternates, of_prompt, by_prompt)
}


def sampled_by(kind: str, model: Any) -> Any:
    """Return a rollout_func.

    Args:
        kind: Who samples: the "policy", the policy of the first step ("frozen"), the policy with noise on its head
            ("noisy"), or a model with "other" weights.
        model: The policy of the first step, with weights of its own.
    """
    head, noise = model.lm_head.weight.data, 0.5 * torch.randn(model.lm_head.weight.shape)
    if kind == "other":
        head.copy_(noise)

    @torch.no_grad()
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if kind in ("policy", "noisy"):
            model.load_state_dict(trainer.model.state_dict())
            head.add_(noise, alpha=0.3 if kind == "noisy" else 0.0)
        tokenizer = trainer.processing_class
        given = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        length = trainer.args.max_completion_length
        made = model.generate(
            **given, max_new_tokens=length, do_sample=True, top_k=0, output_logits=True, return_dict_in_generate=True
        )
        new = made.sequences[:, given["input_ids"].shape[1] :]
        logps = torch.stack(made.logits, 1).log_softmax(-1).gather(-1, new[..., None])[..., 0].tolist()
        is_end = [[token in model.generation_config.eos_token_id for token in ids] for ids in new.tolist()]
        sizes = [ends.index(True) + 1 if any(ends) else len(ends) for ends in is_end]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [ids[:size] for ids, size in zip(new.tolist(), sizes, strict=True)],
            "logprobs": [row[:size] for row, size in zip(logps, sizes, strict=True)],
        }

    return rollout


def rounded(value: Any) -> Any:
    """Return a number of 5 significant digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def log(trainer: Any) -> dict[str, Any]:
    """Return "rows" of the log, and "run", what a checkpoint says of it. Times of whole steps are left out."""
    rows = [
        {key: rounded(value) for key, value in row.items() if not any(clock in key for clock in CLOCKS)}
        for row in trainer.state.log_history
    ]
    if not hasattr(trainer, "feature"):
        return {"rows": rows, "run": {"settings": {"max_steps": trainer.state.max_steps}}}
    run = trainer.feature(TrainingReport)._run()
    settings = {name: rounded(value) for name, value in run["settings"].items() if "/" not in str(value)}  # no paths
    return {"rows": rows, "run": {"settings": settings, "notes": run["notes"]}}


class _Stop(transformers.TrainerCallback):
    """Somebody stops the run at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        control.should_training_stop |= state.global_step >= self.at


def train(run: Mapping[str, Any], sets: Mapping[str, dict[str, Any]], folder: Path, seed: int = 0) -> dict[str, Any]:
    """Train a run. `sets` has options by name, `seed` is added to the run's.

    The run begins from random weights, or from the policy of another run: its options are under "first".
    """
    options = _options(run, sets)
    model = folder / "model"
    tiny.CONFIGS["wide"] = transformers.Qwen2Config(**{**tiny.SIZES, **WIDE, "initializer_range": 0.2})
    tiny.save_model(options.pop("model", "dense"), model)
    _random.seed(seed)
    first = options.pop("first", None)
    if first:
        _trained(_options(first, sets), model, folder / "first", seed).save_model(str(model))
    return log(_trained(options, model, folder / "out", seed))


def _options(run: Mapping[str, Any], sets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    options = {**BASE}
    for name in run.get("sets", ()):
        options |= sets[name]
    return options | {key: value for key, value in run.items() if key != "sets"}


def _trained(options: dict[str, Any], model: Path, folder: Path, seed: int) -> Any:
    """Return the trainer of a run that has ended."""
    take = options.pop
    is_trl, nan_at, dies, sampler = take("trl", False), take("nan_at", ()), take("dies", False), take("sampler", "")
    value, stop = take("value", float("nan")), take("stop", 0)
    rows = tiny.dataset(64).map(lambda _: {"held_out": False})
    if take("prompts", "") == "uneven":
        rows = rows.map(lambda _, i: {"prompt": "ab" * (1 if i % 8 else 40)}, with_indices=True)
    names = take("reward")
    functions = [REWARDS[name] for name in ([names] if isinstance(names, str) else names)]
    build: dict[str, Any] = {"train_dataset": rows, "reward_funcs": functions}
    if "eval_strategy" in options:
        build["eval_dataset"] = rows.select(range(16)).map(lambda _: {"held_out": True})
    if stop:
        build["callbacks"] = [_Stop(stop)]
    if sampler:
        weights = transformers.AutoModelForCausalLM.from_pretrained(model)
        build["rollout_func"] = sampled_by(sampler, weights)
        options |= {} if is_trl else {"engine_check": None if sampler == "other" else 1.0}
    options["seed"] = options.get("seed", 7) + seed  # 7: that of tests/tools/tiny.py
    trainer = tiny.trainer(model, folder, ours=not is_trl, build=build, **options)
    with suppress(*([RuntimeError] if dies else [])):
        tiny.train(poison_gradients(trainer, nan_at, value=value) if nan_at else trainer)
    return trainer
