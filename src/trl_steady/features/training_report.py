"""The report while a run trains: a line for each log, a line when a symptom starts, and the page."""

import json
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import TRAINER_STATE_NAME

from trl_steady.config.evaluation import Functions
from trl_steady.config.shared import SharedOptions
from trl_steady.core.devices import copy_async
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.types import Rollout
from trl_steady.features.engine_check import EngineCheck
from trl_steady.report.history import RUN_FILE, History
from trl_steady.report.symptoms import diagnose, look, verdict
from trl_steady.trl_bridge.models import text_tokenizer

GROUPS = 3
"""Groups of a rollout whose answers are kept, those whose rewards differ most."""
MOST_BYTES = 1_000_000
"""Size of the answers of a run. The oldest are dropped first."""
_PACKAGES = ("trl-steady", "trl", "transformers", "torch", "peft", "accelerate")
_LARGEST_SHARE = 0.01  # of a run's time that writing its page takes, before the end
_LONGEST = 4000  # characters of a text
_COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
# name in the line -> metric, and its form
_SHOWN = {
    "reward": ("reward", "{:.2f}"),
    "held out": ("eval_reward", "{:.2f}"),
    "KL": ("kl", "{:.2g}"),
    "engine KL": ("mismatch/kl", "{:.1e}"),
    "generated": ("dynamic_sampling/generated", "{:.2g}x"),
    "cut off": ("completions/clipped_ratio", "{:.0%}"),
    "clipped": ("clip_ratio/region_mean", "{:.0%}"),
    "routes changed": ("routing/changed", "{:.1%}"),
    "explained": ("value/explained_variance", "{:.2f}"),
    "refreshes": ("ref/refreshes", "{:.0f}"),
}


class TrainingReport(Feature):
    """Saves what `trl-steady report` needs, writes the report with `training_report`, and prints `log_line`."""

    args: SharedOptions

    def __init__(self, trainer: Trainer, args: SharedOptions) -> None:
        super().__init__(trainer, args)
        self._told: set[str] = set()
        self._next_diagnosis = 0
        self._answers: list[dict[str, Any]] = []
        self._last_rollout: list[dict[str, Any]] = []  # its answers are kept if a checkpoint follows
        self._has_failed = False

    def on_init_end(self) -> None:
        """Let the clock run, and let transformers print no dictionaries."""
        args = self.args
        handler = self.trainer.callback_handler
        if args.training_report and find_spec("matplotlib") is None:
            raise ValueError(
                "training_report=True needs matplotlib. pip install 'trl-steady[report]', or leave it False."
            )
        self._is_on = args.training_report
        self._is_main = self.trainer.accelerator.is_main_process
        self.trainer.metrics.clock.is_on = self._is_on
        # when the last page was written, and how long that took: a guess before the first
        self._written = time.monotonic()
        self._seconds = 5.0
        if args.log_line:
            handler.remove_callback(PrinterCallback)
            if handler.pop_callback(ProgressCallback):
                handler.add_callback(_Bar())

    @contextmanager
    def _harmless(self) -> Generator[None]:
        """Turn an error of the report into a warning, once: no report is worth a run."""
        try:
            yield
        except Exception as error:
            if self._has_failed:
                return
            self._has_failed = True
            self.warn(f"the report failed, and the run goes on without it. {type(error).__name__}: {error}")

    # a rollout

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Measure padding, and keep some completions. All features before this one have set the advantages."""
        if not self._is_on:
            return
        trainer = self.trainer
        is_padding = ~rollout.attention_mask
        trainer.metrics.pooled(means={"padding/share": (is_padding, torch.ones_like(is_padding))})
        if self._is_main and trainer.model.training:
            with self._harmless():
                self._keep(rollout)

    def _keep(self, rollout: Rollout) -> None:
        """Keep the best, median and worst answers of the groups of a rollout that differ most."""
        trainer = self.trainer
        rewards = rollout.rewards.float().nan_to_num().cpu().numpy()
        chosen_groups = chosen(rewards, trainer.num_generations)
        rows: list[int] = []
        for group in chosen_groups:
            rows += group
        index = copy_async(torch.tensor(rows), rollout.attention_mask.device)
        columns: dict[str, dict[int, Tensor]] = {}
        for name in _COLUMNS:
            values = rollout.samples[name][index].cpu()
            columns[name] = dict(zip(rows, values, strict=True))
        groups = [self._group(columns, rewards, group) for group in chosen_groups]
        self._last_rollout = [{"step": trainer.state.global_step, "groups": groups}]

    def _group(
        self, columns: Mapping[str, Mapping[int, Tensor]], rewards: np.ndarray, group: Mapping[int, str]
    ) -> dict[str, Any]:
        """Return a prompt and its answers as text, for JSON.

        Args:
            columns: Name -> row -> values.
            rewards: (B,) rewards of the rollout.
            group: Row -> "best", "median" or "worst".
        """
        decode = text_tokenizer(self.trainer).decode
        answers: list[dict[str, Any]] = []
        for row, place in group.items():
            is_answer = columns["completion_mask"][row].bool()
            advantages = columns["advantages"][row]
            ids = columns["completion_ids"][row][is_answer].tolist()
            tokens: list[tuple[str, float]] | None = None
            if advantages.dim() and len(advantages) > 1:  # one for each token
                tokens = []
                for token, advantage in zip(ids[: _LONGEST // 4], advantages[is_answer].tolist(), strict=False):
                    tokens.append((str(decode(token)), round(advantage, 4)))
            text = str(decode(ids))[:_LONGEST]
            answers.append({"place": place, "reward": float(rewards[row]), "text": text, "tokens": tokens})
        first = next(iter(group))
        is_prompt = columns["prompt_mask"][first].bool()
        prompt = columns["prompt_ids"][first][is_prompt].tolist()
        return {"prompt": str(decode(prompt))[:_LONGEST], "answers": answers}

    # logs

    def on_log(self, logs: Mapping[str, Any]) -> None:
        """Print a line for the log, and one for each symptom that has started."""
        if self._is_main:
            with self._harmless():
                self._tell(logs)

    def _tell(self, logs: Mapping[str, Any]) -> None:
        args = self.args
        state = self.trainer.state
        is_evaluation = any(key.startswith("eval_") and key.endswith("_reward") for key in logs)
        if args.log_line and ("loss" in logs or is_evaluation):
            metrics = cast(Functions, args.eval_metrics or Functions())
            _say(log_line(logs, state.global_step, state.max_steps, metrics.names))
        rows = len(state.log_history)
        if not self._is_on or rows < self._next_diagnosis:
            return
        self._next_diagnosis = rows + 1 + rows // 20  # the time of all diagnoses is linear in the rows
        findings, _ = look(History(state.log_history, self._run(), is_over=False))
        for name, finding in findings.items():
            if name in self._told or finding.symptom.level == "note":  # more rollouts follow
                continue
            self._told.add(name)
            _say(f"trl-steady: {finding}")
            if "trackio" in (args.report_to or ()):
                import trackio  # pyright: ignore[reportMissingImports]

                level = trackio.AlertLevel.WARN
                if finding.symptom.level == "critical":
                    level = trackio.AlertLevel.ERROR
                trackio.alert(title=finding.symptom.what, text=str(finding), level=level)

    @property
    def _page(self) -> Path:
        return Path(self.args.output_dir or ".") / "report.html"

    def _history(self) -> History:
        return History(self.trainer.state.log_history, self._run())

    def _run(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for name, value in self.args.to_dict().items():
            # no dictionaries, such as model_init_kwargs: they may hold a token, and checkpoints may be pushed
            is_list_of_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
            if is_list_of_names or isinstance(value, (bool, int, float, str, NoneType)):
                settings[name] = value
        notes = list(self.args.doubts)
        for feature in self.trainer.features:
            notes += feature.notes
        run: dict[str, Any] = {"settings": settings, "notes": notes}
        formats = self.trainer.feature(EngineCheck).formats
        if formats is not None:
            run["formats"] = dict(formats)
        if self._is_on:
            run["versions"] = {package: version(package) for package in _PACKAGES}
            run["answers"] = self._answers
        return run

    # files

    def on_train_begin(self) -> None:
        """Begin anew if the trainer trains a second time, whose log is another one."""
        self._told = set()
        self._next_diagnosis = 0
        if not self.trainer.state.global_step:
            self._answers = []

    def save_state(self, checkpoint: Path) -> None:
        """Save settings, warnings and answers, and write the page if that has a small share of the run's time."""
        with self._harmless():
            if self.args.should_save:
                self._save_run(checkpoint)
            if self._is_on and self._is_main and self._seconds < _LARGEST_SHARE * (time.monotonic() - self._written):
                self._write_page()

    def load_state(self, checkpoint: Path) -> None:
        """Go on with the answers of the run."""
        self._answers = []
        file = checkpoint / RUN_FILE
        if self._is_on and file.is_file():
            with self._harmless():
                self._answers = json.loads(file.read_text()).get("answers", [])

    def on_train_end(self, best: Path | None) -> None:
        """Write the page, and print what the run shows."""
        if not self._is_main or not (self._is_on or self.args.log_line):
            return
        has_page = False
        if self._is_on:
            with self._harmless():
                self._save_files(self._page.parent)
                has_page = True
        with self._harmless():
            findings, _ = diagnose(self._history())
            _say(f"trl-steady: {verdict(findings)}")
            if has_page:
                _say(f"trl-steady: the report is in {self._page}")

    def _save_files(self, folder: Path) -> None:
        """Save the page, and the log of the run, which may have no checkpoint of its last step."""
        folder.mkdir(parents=True, exist_ok=True)
        self._save_run(folder)
        self.trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        self._write_page()

    def _save_run(self, folder: Path) -> None:
        """Save settings, warnings, and the answers of the last rollout too."""
        self._answers = limited(self._answers + self._last_rollout)
        self._last_rollout = []
        (folder / RUN_FILE).write_text(json.dumps(self._run()))

    def _write_page(self) -> None:
        from trl_steady.report.page import write  # needs matplotlib

        began = time.monotonic()
        write(self._page, self._page.parent.name, self._history())
        self._written = time.monotonic()
        self._seconds = self._written - began


def _say(text: str) -> None:
    """Print a line beside the progress bars. It is in the file of a job's output at once."""
    tqdm.write(text)
    sys.stdout.flush()


class _Bar(ProgressCallback):
    """The bar of transformers, which prints no dictionaries."""

    def on_log(self, *_: object, **__: object) -> None:
        """Print nothing."""


def log_line(logs: Mapping[str, Any], step: int, last: int, metrics: Sequence[str] = ()) -> str:
    """Return one line for a row of the log, with the usual metrics that it has, and these of evaluations."""
    numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float))}
    words = [f"step {step}/{last}"]
    for name, (key, form) in _SHOWN.items():
        if key in numbers:
            words.append(f"{name} {form.format(numbers[key])}")
    shown = tuple(f"_{metric}" for metric in ("reward", *metrics))
    for key, value in numbers.items():
        if key == "eval_reward" or "/" in key:  # the first is "held out"
            continue
        if key.startswith("eval_") and key.endswith(shown):
            words.append(f"{key} {value:.2f}")
    if "ratio/sequence_min" in numbers and "ratio/sequence_max" in numbers:
        words.append(f"ratio {numbers['ratio/sequence_min']:.3g}..{numbers['ratio/sequence_max']:.3g}")
    dropped = [value for key, value in numbers.items() if key.startswith("dropped/")]
    if dropped:
        words.append(f"dropped {max(dropped):.0%}")
    if "step_time" in numbers:
        words.append(duration(numbers["step_time"]))
    return "  ".join(words)


def duration(seconds: float) -> str:
    """Return a time such as "4.2 s", "180 s", "4 min 12 s" or "1 h 03 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    if minutes < 4:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def chosen(rewards: np.ndarray, size: int) -> list[dict[int, str]]:
    """Return the answers of a rollout to keep: for each group, row -> "best", "median" or "worst".

    Args:
        rewards: (B,) rewards.
        size: Answers to a prompt, which are consecutive. With 1, they are compared with those to other prompts.
    """
    is_single = size == 1
    if is_single or size > len(rewards):
        size = len(rewards)
    groups = np.nan_to_num(rewards)[: len(rewards) // size * size].reshape(-1, size)
    by_range = np.argsort(-np.ptp(groups, axis=1), kind="stable")
    answers: list[dict[int, str]] = []
    for group in by_range[:GROUPS]:
        order = (group * size + np.argsort(-groups[group], kind="stable")).tolist()
        places = {order[0]: "best", order[size // 2]: "median", order[-1]: "worst"}
        places[order[0]] = "best"  # also if it is the only one
        if is_single:
            answers += [{row: place} for row, place in places.items()]
        else:
            answers.append(places)
    return answers


def limited(rollouts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last of these rollouts that take at most `MOST_BYTES` together."""
    size = 0
    first = len(rollouts)
    while first > 0:
        size += len(json.dumps(rollouts[first - 1]))
        if size > MOST_BYTES:
            break
        first -= 1
    return list(rollouts[first:])
