"""A public task with a coin as a control, and the time to the same accuracy as TRL.

python recipes/public/train.py recipes/public/chain-sum.yaml [--seeds 0] [--arms TRL ours]

The other arguments are those of recipes/stress/experiment.py. Two runs at a time, each in one thread, need two cores.
"""

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))

import trl_steady
from common import run, small_model
from common import task as larger
from public.chain_sum import ChainSum
from stress import experiment
from trl_steady.report.compare import interval

LOGGED = ("reward", "grad_norm", "frac_reward_zero_std", "dynamic_sampling/generated")
KINDS = {"trl": (trl.GRPOConfig, trl.GRPOTrainer), "ours": (trl_steady.GRPOConfig, trl_steady.GRPOTrainer)}
TASKS: Mapping[str, Callable[[], Any]] = {"sums": ChainSum, "larger": lambda: larger}
SPENT = ("cpu", "wall", "generation", "generated", "read", "trained")


@dataclass(frozen=True)
class Arm:
    """The settings of one arm. The YAML file has these keys."""

    options: Mapping[str, Any]
    """Options of the `GRPOConfig` of TRL or trl_steady."""
    trainer: Literal["trl", "ours"] = "ours"
    """Whose `GRPOTrainer` and `GRPOConfig` train."""
    coin: bool = False
    """True: the reward of an answer is a fair coin."""
    task: Literal["sums", "larger"] = "sums"
    """The public task, or the larger of two numbers."""

    def __post_init__(self) -> None:
        """Refuse names that nothing knows."""
        for name, value, known in (("trainer", self.trainer, KINDS), ("task", self.task, TASKS)):
            if value not in known:
                raise ValueError(f"{name}={value!r}: it can be one of {list(known)}.")


def coin(seed: int) -> Callable[..., list[float]]:
    """Return a reward function that tosses a fair coin for each answer. It does not read the answer."""
    tosses = random.Random(f"coin {seed}")  # not the run's random numbers

    def coin_reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(tosses.getrandbits(1)) for _ in completions]

    return coin_reward


class Clock:
    """Seconds and tokens of a training loop. While it is stopped, it counts nothing.

    `spent` has the seconds of the process (`cpu`, `wall`) and the part of `cpu` that generation takes (`generation`).
    It also has tokens: `generated`, `trained` (read by passes with a gradient) and `read` (by all other passes, with
    those of the generation). Padding counts.
    """

    def __init__(self, trainer: Any) -> None:
        self.spent = dict.fromkeys(SPENT, 0.0)
        self.is_running = False
        # each pass looks up each of its tokens once, also if they are packed
        trainer.model.get_input_embeddings().register_forward_pre_hook(self._count)
        self._generate = trainer._generate
        trainer._generate = self._timed

    def start(self) -> None:
        """Go on."""
        self.is_running, self._since = True, _now()

    def stop(self) -> None:
        """Stop, and add up the seconds."""
        if self.is_running:
            cpu, wall = _now() - self._since
            self.spent["cpu"] += float(cpu)
            self.spent["wall"] += float(wall)
        self.is_running = False

    def _count(self, _: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
        if self.is_running:
            self.spent["trained" if torch.is_grad_enabled() else "read"] += arguments[0].numel()

    def _timed(self, *arguments: Any, **keywords: Any) -> Any:
        began = _now()
        generated = self._generate(*arguments, **keywords)
        self.spent["generation"] += float((_now() - began)[0])
        self.spent["generated"] += sum(map(len, generated[1]))
        return generated


def _now() -> np.ndarray:
    return np.array([time.process_time(), time.perf_counter()])


class Checks(TrainerCallback):
    """Check the policy on held-out problems. The checks change neither the run's random numbers nor its clock.

    Args:
        trainer: The trainer.
        task: The task.
        held_out: Number of held-out problems of each length.
        samples: Answers to each of them at the training temperature.
        every: Updates between two checks. There is one before training, and one at its end.
    """

    def __init__(self, trainer: Any, task: Any, held_out: int, samples: int, every: int) -> None:
        self.trainer, self.task, self.samples, self.every = trainer, task, samples, every
        self.problems = {"": task.split(held_out)[1]}
        if isinstance(task, ChainSum):
            self.problems["longer/"] = task.longer(held_out)
        self.clock = Clock(trainer)
        self.found: dict[str, dict[int, Any]] = {"clock": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the starting policy, and start the clock."""
        self._check(state.global_step)
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check after every `every` updates."""
        if state.global_step % self.every == 0:
            self._check(state.global_step)
            self.clock.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the last policy, if a run has ended between two checks."""
        if state.global_step not in self.found["clock"]:
            self._check(state.global_step)

    def _check(self, step: int) -> None:
        self.clock.stop()
        self.found["clock"][step] = {name: round(value, 3) for name, value in self.clock.spent.items()}
        with torch.random.fork_rng():
            for length, problems in self.problems.items():
                torch.manual_seed(self.trainer.args.seed)
                sampled = self._right(problems, self.samples)
                shares = {
                    "accuracy": sampled.mean(),
                    "greedy": self._right(problems, 0).mean(),
                    f"pass@{self.samples}": sampled.max(axis=1).mean(),
                }
                for name, share in shares.items():
                    self.found.setdefault(length + name, {})[step] = round(float(share), 6)

    def _right(self, problems: Sequence[Any], samples: int) -> np.ndarray:
        """Return (problems, samples) of 0 and 1."""
        size = small_model.BATCH // max(samples, 1)  # so that it prints nothing
        batches = [problems[start : start + size] for start in range(0, len(problems), size)]
        how: Any = {"samples": samples, "task": self.task}
        return np.concatenate([small_model.right_answers(self.trainer, batch, **how) for batch in batches])


def build(arm: Arm, seed: int, output: str, task: Any, held_out: int) -> Any:
    """Return the arm's trainer, TRL's own or that of trl_steady."""
    model, tokenizer = task.load(Path(output), quantised=False)
    model.generation_config.eos_token_id = [*tokenizer.encode(task.STOP), tokenizer.eos_token_id]
    config, kind = KINDS[arm.trainer]
    is_cpu = not torch.cuda.is_available()  # transformers refuses bf16 on a CPU that the script does not name
    args = config(output_dir=output, seed=seed, use_cpu=is_cpu, **arm.options)
    rows = [{"prompt": task.prompt(problem), "problem": list(problem)} for problem in task.split(held_out)[0]]
    reward = coin(seed) if arm.coin else task.reward
    return kind(model, reward, args, Dataset.from_list(rows), processing_class=tokenizer)


def train(arm: Arm, seed: int, folder: Path, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Train one arm with one seed, and return its figures.

    Args:
        arm: The arm.
        seed: Seeds the order of the problems, the answers and the coin.
        folder: Not used.
        measured: Arguments of `Checks`.
    """
    began, task = time.monotonic(), TASKS[arm.task]()
    with TemporaryDirectory() as output:
        trainer = build(arm, seed, output, task, measured["held_out"])
        trainer.remove_callback(run.PrinterCallback)
        checks = Checks(trainer, task, **measured)
        trainer.add_callback(checks)
        trainer.train()
    figures = {**checks.found, **run.logged(trainer.state.log_history, LOGGED)}
    figures["seconds"] = round(time.monotonic() - began)
    return figures


def prepare(arm: Arm, _: Path) -> None:
    """Look for the packages of the task, so that the first run does not end without them."""
    TASKS[arm.task]().split(1)


def reached(values: Sequence[float], level: float) -> int | None:
    """Return the first check from which no value is below the level; None if the last one is."""
    below = [number for number, value in enumerate(values) if value < level]
    first = below[-1] + 1 if below else 0
    return first if first < len(values) else None


def spent_until(plan: Mapping[str, Any], figures: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Return what a run has spent when it has reached the plan's level for good; None if it does not.

    Raises:
        ValueError: If the starting policy is at the level.
    """
    first = reached(list(figures[plan.get("figure", "accuracy")].values()), plan["level"])
    if first == 0:
        raise ValueError(f"level={plan['level']}: the starting policy is there. Set a higher level.")
    return None if first is None else list(figures["clock"].values())[first]


def time_table(plan: Mapping[str, Any], runs: experiment.Runs) -> str:
    """Return a table in Markdown: what the arms spend until they reach the plan's level for good.

    Means are over the seeds that reach it. A ratio to the baseline is the geometric mean over the seeds on which both
    arms reach it, with a 95 % bootstrap interval.
    """
    lines = [
        "| arm | seeds | CPU minutes | ratio (95 % interval) | tokens generated / trained on |",
        "|---|---|---|---|---|",
    ]
    spent = {arm: {seed: spent_until(plan, own) for seed, own in of_arm.items()} for arm, of_arm in runs.items()}
    for arm, own in spent.items():
        found = [each for each in own.values() if each is not None]
        cells = [arm, f"{len(found)} of {len(own)}", *[""] * 3]
        if found:
            seconds, generated, trained = (_mean(found, name) for name in ("cpu", "generated", "trained"))
            ratio = "" if arm == plan["baseline"] else _ratio(own, spent.get(plan["baseline"], {}))
            cells[2:] = f"{seconds / 60:.1f}", ratio, f"{generated:,.0f} / {trained:,.0f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(spent: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.mean([each[name] for each in spent]))


def _ratio(own: Mapping[int, Any], others: Mapping[int, Any]) -> str:
    """Return how the CPU seconds of two arms compare, seed by seed; nothing without two pairs."""
    pairs = [(spent, others[seed]) for seed, spent in own.items() if spent and others.get(seed)]
    if len(pairs) < 2:
        return ""
    logs = np.array([np.log(one["cpu"] / other["cpu"]) for one, other in pairs])
    middle, low, high = np.exp([logs.mean(), *interval(logs)])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def cost_table(runs: experiment.Runs) -> str:
    """Return a table in Markdown: where the time of whole runs goes, mean over seeds."""
    lines = [
        "| arm | CPU minutes | of them generation | tokens generated | read / trained on |",
        "|---|---|---|---|---|",
    ]
    for arm, own in runs.items():
        last = [list(figures["clock"].values())[-1] for figures in own.values()]
        spent = {name: _mean(last, name) for name in SPENT}
        minutes = f"{spent['cpu'] / 60:.1f} | {spent['generation'] / 60:.1f}"
        tokens = f"{spent['generated']:,.0f} | {spent['read']:,.0f} / {spent['trained']:,.0f}"
        lines.append(f"| {arm} | {minutes} | {tokens} |")
    return "\n".join(lines)


def gains_table(names: Sequence[str], runs: experiment.Runs) -> str:
    """Return a table in Markdown: the gains of the endpoint over the start, in points, with 95 % intervals over seeds.

    Its columns are the figures `names`.
    """
    headings = " | ".join(experiment.SHOWN[name].heading for name in names)
    lines = [f"| arm | {headings} |", "|---" * (1 + len(names)) + "|"]
    starts = {name: [_first(figures, name) for own in runs.values() for figures in own.values()] for name in names}
    lines.append(f"| before | {' | '.join(f'{np.mean(starts[name]):.1%}' for name in names)} |")
    for arm, own in runs.items():
        cells: list[str] = []
        for name in names:
            ends = [experiment.endpoint({"figure": name}, figures) for figures in own.values()]
            gains = 100 * (np.array(ends) - [_first(figures, name) for figures in own.values()])
            low, high = interval(gains)
            cells.append(f"{gains.mean():+.1f} ({low:+.1f} to {high:+.1f})")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _first(figures: Mapping[str, Any], name: str) -> float:
    return next(iter(figures[name].values()))


def draw_minutes(path: Path, plan: Mapping[str, Any], runs: experiment.Runs) -> None:
    """Draw the plan's `pictured` over CPU minutes: a thin line for each seed, a thick one for their mean."""
    names, figure_of_level = plan["pictured"], plan.get("figure", "accuracy")
    size = {"figsize": (3.9, 2.3 * len(names) + 0.6), "layout": "constrained"}
    figure, axes = plt.subplots(len(names), sharex=True, squeeze=False, **size)
    for name, axis in zip(names, axes[:, 0], strict=True):
        for number, (arm, own) in enumerate(runs.items()):
            minutes = [[spent["cpu"] / 60 for spent in figures["clock"].values()] for figures in own.values()]
            shares = [list(figures[name].values()) for figures in own.values()]
            for of_seed in zip(minutes, shares, strict=True):
                axis.plot(*of_seed, color=f"C{number}", linewidth=0.6, alpha=0.4)
            axis.plot(np.mean(minutes, axis=0), np.mean(shares, axis=0), color=f"C{number}", linewidth=2, label=arm)
        if name == figure_of_level and plan["level"] is not None:
            axis.axhline(plan["level"], color="0.2", linewidth=1, linestyle="--")
        axis.set_title(experiment.SHOWN[name].title, fontsize=10)
        axis.set_ylim(0, 1)
        axis.tick_params(labelsize=9)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("CPU minutes", fontsize=9)
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def show(picture: Path, plan: Mapping[str, Any], runs: experiment.Runs) -> None:
    """Draw the accuracy over minutes beside the picture over updates, and print the tables."""
    draw_minutes(picture.with_stem(f"{picture.stem}-minutes"), plan, runs)
    print("\n\n".join(tables(plan, runs)))
    if plan["level"] is None:
        print("The plan has no level, so there is no table of the time to it. Set level before the seeds run.")


def tables(plan: Mapping[str, Any], runs: experiment.Runs) -> list[str]:
    """Return the tables of the page: gains for each length of held-out questions, costs, time to the level."""
    lengths = dict.fromkeys(name.rpartition("/")[0] for name in plan["pictured"])
    found: list[str] = []
    for length in lengths:
        names = [name for name in plan["pictured"] if name.rpartition("/")[0] == length]
        found.append(gains_table(names, runs))
    found.append(cost_table(runs))
    if plan["level"] is not None:
        found.append(time_table(plan, runs))
    return found


PUBLIC = experiment.Kind(Arm, prepare, train, show, packages=(*run.PACKAGES, "reasoning-gym"))

if __name__ == "__main__":
    experiment.main(kind=PUBLIC)
