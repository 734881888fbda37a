"""One run of an experiment: GRPO on the digit-sorting task, with something disturbed.

`experiment.py` starts these runs.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import half, run, small_model
from common import task as larger
from moe.digits import Digits
from moe.probe import Probe
from stress.checks import Checks, scored
from stress.engine import Engine
from stress.longer import Chain, Free
from stress.samplers import Sampler
from trl_steady import GRPOConfig, GRPOTrainer

__all__ = ["Arm", "Stressed", "task_of", "train"]

OUTSIDE = 0.2  # a ratio is far off if it is not within this of 1
GENERATED = "dynamic_sampling/generated"
LOGGED = (
    *("reward", "grad_norm", "clip_ratio/region_mean", "kl", "ratio/sequence_max", "sampling_mask/kept_mass"),
    *("frac_reward_zero_std", GENERATED, "dynamic_sampling/unfilled"),
    *("dropped/dppo_low", "dropped/dppo_high", "dropped/m2po"),
)
PROBED = {"probe/changed": "changed", "probe/live/log_ratio_std": "log_ratio_std"}
PROBLEMS = 50  # held-out ones that the probe answers
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("start", {"dense": True}),
    "beginner": ("start-beginner", {"dense": True, "share": 0.5}),
    "mixture": ("start-mixture", {"balanced": False}),
}
"""Folder of the starting model, and arguments of `Digits`."""
TASKS = {"free": Free, "chain": Chain}
OTHERS = (*TASKS, "smollm2")


@dataclass(frozen=True)
class Arm:
    """The settings of one arm. The YAML file of an experiment has these keys."""

    options: Mapping[str, Any]
    """Options of `GRPOConfig`."""
    sampler: Mapping[str, Any] | None = None
    """Arguments of `Sampler`; None: the policy samples, through TRL."""
    engine: Mapping[str, Any] | None = None
    """Arguments of `Engine`; None: TRL gets no log-probs of what the policy samples."""
    correction: str | None = None
    """TRL's `vllm_importance_sampling_mode`, with its default limit; None: no correction for the engine."""
    old: str = "policy"
    """The model that gives the old log-probs: the "policy", which scores each rollout again, or the "sampler"."""
    unmasked: Sequence[str] = ()
    """Log-probs that are of all tokens, with `keep_sampling_mask`: "old", "ref" (the reference)."""
    model: str = "dense"
    """A key of `MODELS`, for the task "sort ten digits", one of `TASKS`, or "smollm2": the larger of two numbers."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `TASKS[model]`."""
    router_rate: float = 1.0
    """Multiplies the learning rate of the mixture's routers."""
    away: float = 0.0
    """The policy begins away from the reference: normal noise of this size, in standard deviations of each matrix."""
    rollouts: float | None = None
    """With dynamic sampling: end with the rollout that has used up the answers of so many rollouts without it."""

    def __post_init__(self) -> None:
        """Refuse what would have no effect."""
        for name, given, known in (
            ("old", {self.old}, {"policy", "sampler"}),
            ("unmasked", {*self.unmasked}, {"old", "ref"}),
            ("model", {self.model}, {*MODELS, *OTHERS}),
        ):
            if given - known:
                raise ValueError(f"{name}={getattr(self, name)!r}: it can have {sorted(known)}.")
        if self.router_rate != 1 and self.model != "mixture":
            raise ValueError(
                f"router_rate={self.router_rate}: model={self.model!r} has no routers. Set model: mixture."
            )
        has_sampler = self.sampler is not None or self.engine is not None
        if not has_sampler and (self.correction is not None or self.old == "sampler"):
            raise ValueError(
                f"correction={self.correction!r} and old={self.old!r} need the log-probs of a sampler, and TRL's own "
                "generation gives none. Set sampler or engine, for example to {}."
            )
        if self.sampler is not None and self.engine is not None:
            raise ValueError(
                f"sampler={self.sampler!r} and engine={self.engine!r}: only one can sample. Leave one out."
            )
        if self.task and self.model not in TASKS:
            raise ValueError(f"task={self.task!r}: model={self.model!r} has no arguments. Set model to {[*TASKS]}.")
        if self.unmasked and not self.options.get("keep_sampling_mask"):
            raise ValueError(f"unmasked={self.unmasked!r} needs keep_sampling_mask=True in the options.")
        if self.rollouts is not None and not self.options.get("dynamic_sampling"):
            raise ValueError(f"rollouts={self.rollouts}: without dynamic_sampling, set max_steps in the options.")


class Budget(run.TrainerCallback):
    """End a run with the rollout that has used up a number of generated answers, counted in whole rollouts."""

    def __init__(self, rollouts: float) -> None:
        self.left = rollouts

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Count the answers, which are logged with the first update of a rollout."""
        self.left -= (logs or {}).get(GENERATED, 0)
        if self.left <= 0 and state.global_step % run.updates_per_rollout(args) == 0:
            control.should_training_stop = True


class Stressed(GRPOTrainer):
    """A trainer whose rollouts come from a `Sampler` or an `Engine`. It notes how far that and the policy are apart.

    TRL corrects for an engine only with `use_vllm`. There is no vLLM here, so this class switches `use_vllm` on after
    the completions were made, where TRL reads it to compute the correction.
    """

    rerouted: float | None = None
    vllm_generation = None  # features ask TRL's engine how it gets the weights

    def __init__(self, arm: Arm, *arguments: Any, **keywords: Any) -> None:
        self.arm, self.sampler = arm, None if arm.sampler is None else Sampler(**arm.sampler)
        self.engine = None if arm.engine is None else Engine(**arm.engine)
        self.apart: list[dict[str, float]] = []
        """For each rollout: `outside`, the share of tokens whose ratio of policy to sampler is not in 0.8 to 1.2,
        `ess`, the effective sample size of the answers' ratios, as a share of their number, and `weight`, the mean of
        TRL's correction. If routers differ: `rerouted`, the share of its experts that are not the policy's."""
        super().__init__(*arguments, rollout_func=None if arm.sampler is None else self._sampled, **keywords)
        if arm.correction is not None:
            self.vllm_importance_sampling_mode = arm.correction

    def _sampled(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        assert self.sampler is not None
        completions = self.sampler(prompts, trainer)
        self.use_vllm = self.arm.correction is not None
        return completions

    def _generate_single_turn(self, prompt_ids: Any, *others: Any, **keywords: Any) -> Any:
        """Let the engine generate."""
        if self.engine is None:
            return super()._generate_single_turn(prompt_ids, *others, **keywords)
        seed = self.args.seed * 1_000_003 + self.state.global_step
        with self.engine.running(self.model, seed), self.engine.scoring(self.model) as scores:
            answers, _ = super()._generate_single_turn(prompt_ids, *others, **keywords)
        if self.engine.routes_otherwise:
            self.rerouted = self.engine.rerouted(self.model, seed, prompt_ids, answers)
        self.use_vllm = self.arm.correction is not None
        return answers, scores.of(answers)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Make a rollout with the sampler or the engine."""
        self.use_vllm = False  # TRL would send weights to vLLM
        samples = super()._generate_and_score_completions(inputs)
        if self.sampler is not None or self.engine is not None:
            sampler = samples["sampling_per_token_logps"]
            if "old_per_token_logps" in samples:  # TRL has none with one update per rollout
                apart = (samples["old_per_token_logps"] - sampler).double()
                self.apart.append(_apart(apart, samples["completion_mask"].bool()))
                if self.rerouted is not None:
                    self.apart[-1]["rerouted"] = self.rerouted
                if "importance_sampling_ratio" in samples:
                    self.apart[-1]["weight"] = _mean_weight(samples)
            if self.arm.old == "sampler":
                samples["old_per_token_logps"] = sampler
        for name in self.arm.unmasked:
            model = self.model if name == "old" else self.ref_model
            samples[f"{name}_per_token_logps"] = _of_all_tokens(model, samples)
        return samples


@torch.no_grad()
def _of_all_tokens(model: Any, samples: Mapping[str, Any]) -> Tensor:
    """Score the completions among all tokens. The prompts have no padding, and padding behind an end is not read."""
    completions = samples["completion_ids"]
    ids = torch.cat([samples["prompt_ids"], completions], dim=1)
    log_probs = scored(model, ids, samples["prompt_ids"].size(1))
    return log_probs.gather(-1, completions[..., None])[..., 0].float()


def _apart(log_ratios: Tensor, is_token: Tensor) -> dict[str, float]:
    ratios = log_ratios[is_token].exp()
    weights = (log_ratios * is_token).sum(dim=1).exp()
    return {
        "outside": ((ratios - 1).abs() > OUTSIDE).double().mean().item(),
        "ess": (weights.sum().square() / weights.square().sum() / len(weights)).item(),
    }


def _mean_weight(samples: Mapping[str, Any]) -> float:
    """Return the mean over tokens of what TRL's correction multiplies their loss by."""
    weights, mask = samples["importance_sampling_ratio"].double(), samples["completion_mask"]
    return float((weights * mask).sum() / mask.sum())


def task_of(arm: Arm, folder: Path) -> small_model.Task:
    """Return the task with the arm's model. Starting models are in `folder`, made if they are missing."""
    if arm.model == "smollm2":
        return larger
    if arm.model in TASKS:
        made_by = {name: value for name, value in arm.task.items() if name not in ("rewards", "pays_end")}
        name = "-".join(f"{key}{value}" for key, value in sorted(made_by.items()))
        return TASKS[arm.model](folder / f"start-{arm.model}-{name}", **arm.task)
    name, arguments = MODELS[arm.model]
    return Digits(folder / name, **arguments)


def train(arm: Arm, seed: int, folder: Path, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Train one arm with one seed, and return its figures.

    Args:
        arm: The arm.
        seed: Seeds the order of the problems and the answers. Arms with the same sampler begin with the same rollout.
        folder: Folder of the starting models.
        measured: Arguments of `Checks`.
    """
    began, task = time.monotonic(), task_of(arm, folder)
    problems, held_out = task.split(measured["held_out"])
    with TemporaryDirectory() as output, half.fp16_on_cpu():
        model, tokenizer = task.load(Path(output), quantised=False)
        model.generation_config.eos_token_id = [*tokenizer.encode(task.STOP), tokenizer.eos_token_id]
        _move(model, arm.away)
        is_cpu = not torch.cuda.is_available()  # transformers refuses bf16 on a CPU that the script does not name
        args = GRPOConfig(output_dir=output, seed=seed, use_cpu=is_cpu, **arm.options)
        rows = [{"prompt": task.prompt(problem), "problem": list(problem)} for problem in problems]
        trainer = Stressed(
            *(arm, model, task.reward, args, Dataset.from_list(rows)),
            processing_class=tokenizer,
            optimizers=(_optimizer(model, args.learning_rate, arm.router_rate), None),
        )
        trainer.remove_callback(run.PrinterCallback)
        checks = Checks(trainer, task, **measured)
        trainer.add_callback(checks)
        if arm.rollouts is not None:
            trainer.add_callback(Budget(arm.rollouts))
        if arm.model == "mixture":
            trainer.add_callback(Probe(trainer, held_out[:PROBLEMS], task))
        trainer.train()
    history, each = trainer.state.log_history, run.updates_per_rollout(args)
    updates = [row for row in history if "loss" in row]
    rollouts = [updates[i : i + each] for i in range(0, len(updates), each)]
    figures: dict[str, Any] = dict(checks.found)
    for name in LOGGED:
        if any(name in row for row in updates):
            figures[name] = _rounded([_last(row.get(name) for row in own) for own in rollouts])
    for name in _names(trainer.apart):
        figures[name] = _rounded([own[name] for own in trainer.apart])
    if arm.model == "mixture":
        for key, name in PROBED.items():
            figures[name] = _rounded([row[key] for row in history if key in row])
    figures["seconds"] = round(time.monotonic() - began)
    return figures


@torch.no_grad()
def _move(model: torch.nn.Module, size: float) -> None:
    """Add the same noise for every seed. TRL loads the reference from the starting model's folder, without it."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1 and size:
            weight.add_(torch.randn(weight.shape, generator=generator).to(weight.device) * size * weight.std())


def _optimizer(model: torch.nn.Module, rate: float, of_routers: float) -> torch.optim.Optimizer | None:
    """Return transformers' default optimizer with another rate for routers; None: the default will do."""
    if of_routers == 1:
        return None
    routers = [value for name, value in model.named_parameters() if name.endswith("mlp.gate.weight")]
    others = [value for name, value in model.named_parameters() if not name.endswith("mlp.gate.weight")]
    groups = [{"params": others}, {"params": routers, "lr": of_routers * rate}]
    return torch.optim.AdamW(groups, lr=rate, weight_decay=0.0, fused=True)


def _names(rows: Sequence[Mapping[str, float]]) -> list[str]:
    return list(rows[0]) if rows else []


def _last(values: Iterable[Any]) -> Any:
    """Return the last value of a rollout that was logged. Some figures are logged with its first update only."""
    return next((value for value in reversed([*values]) if value is not None), None)


def _rounded(values: list[Any]) -> list[Any]:
    """Four digits, to keep the files small."""
    return [None if value is None else float(f"{value:.4g}") for value in values]
