"""The report while a run trains: a line for each log, a line when a symptom starts, and the page."""

import json
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import TRAINER_STATE_NAME

from trl_steady.config.shared import SharedOptions
from trl_steady.core.devices import copy_async
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.types import Rollout
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
    "clipped": ("clip_ratio/region_mean", "{:.0%}"),
    "routes changed": ("routing/changed", "{:.1%}"),
    "explained": ("value/explained_variance", "{:.2f}"),
    "refreshes": ("ref/refreshes", "{:.0f}"),
}
_RATIO = ("ratio/sequence_min", "ratio/sequence_max")


class TrainingReport(Feature):
    """Saves what `trl-steady report` needs, writes the report with `training_report`, and prints `log_line`."""

    args: SharedOptions

    def __init__(self, trainer: Trainer, args: SharedOptions) -> None:
        super().__init__(trainer, args)
        self._told: set[str] = set()
        self._next_diagnosis = 0
        self._answers: list[dict[str, Any]] = []
        self._last_rollout: list[dict[str, Any]] = []  # its answers are kept if a checkpoint follows

    def on_init_end(self) -> None:
        """Let the clock run, and let transformers print no dictionaries."""
        args, handler = self.args, self.trainer.callback_handler
        if args.training_report and find_spec("matplotlib") is None:
            raise ValueError(
                "training_report=True needs matplotlib. pip install 'trl-steady[report]', or leave it False."
            )
        self._is_on, self._is_main = args.training_report, self.trainer.accelerator.is_main_process
        self.trainer.metrics.clock.is_on = self._is_on
        self._written, self._seconds = time.monotonic(), 5.0  # of a page, before the first has been written
        if args.log_line:
            handler.remove_callback(PrinterCallback)
            if handler.pop_callback(ProgressCallback):
                handler.add_callback(_Bar())

    # a rollout

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Measure padding, and keep some completions. All features before this one have set the advantages."""
        if not self._is_on:
            return
        trainer, is_padding = self.trainer, ~rollout.attention_mask
        trainer.metrics.pooled(means={"padding/share": (is_padding, torch.ones_like(is_padding))})
        if self._is_main and trainer.model.training:
            rewards = rollout.rewards.float().nan_to_num().cpu().numpy()
            kept = chosen(rewards, trainer.num_generations)
            rows = [row for group in kept for row in group]
            index = copy_async(torch.tensor(rows), is_padding.device)
            columns = {name: dict(zip(rows, rollout.samples[name][index].cpu(), strict=True)) for name in _COLUMNS}
            groups = [self._group(columns, rewards, group) for group in kept]
            self._last_rollout = [{"step": trainer.state.global_step, "groups": groups}]

    def _group(self, samples: Mapping[str, Any], rewards: np.ndarray, group: Mapping[int, str]) -> dict[str, Any]:
        """Return a prompt and its answers as text, for JSON."""
        decode, answers = text_tokenizer(self.trainer).decode, list[dict[str, Any]]()
        for row, place in group.items():
            is_answer, advantages = samples["completion_mask"][row].bool(), samples["advantages"][row]
            ids, tokens = samples["completion_ids"][row][is_answer].tolist(), None
            if advantages.dim() and len(advantages) > 1:  # one for each token
                pairs = zip(ids[: _LONGEST // 4], advantages[is_answer].tolist(), strict=False)
                tokens = [(str(decode(token)), round(advantage, 4)) for token, advantage in pairs]
            text = str(decode(ids))[:_LONGEST]
            answers.append({"place": place, "reward": float(rewards[row]), "text": text, "tokens": tokens})
        first = next(iter(group))
        prompt = samples["prompt_ids"][first][samples["prompt_mask"][first].bool()].tolist()
        return {"prompt": str(decode(prompt))[:_LONGEST], "answers": answers}

    # logs

    def on_log(self, logs: Mapping[str, Any]) -> None:
        """Print a line for the log, and one for each symptom that has started."""
        state, args = self.trainer.state, self.args
        if not self._is_main:
            return
        if args.log_line and ("loss" in logs or "eval_reward" in logs):
            tqdm.write(log_line(logs, state.global_step, state.max_steps))
        rows = len(state.log_history)
        if not self._is_on or rows < self._next_diagnosis:
            return
        self._next_diagnosis = rows + 1 + rows // 20  # the time of all diagnoses is linear in the rows
        for name, finding in look(History(state.log_history, self._run(), is_over=False))[0].items():
            if name not in self._told:
                self._told.add(name)
                tqdm.write(f"trl-steady: {finding}")
                if "trackio" in (args.report_to or ()):
                    import trackio  # pyright: ignore[reportMissingImports]

                    levels, is_critical = trackio.AlertLevel, finding.symptom.level == "critical"
                    level = levels.ERROR if is_critical else levels.WARN
                    trackio.alert(title=finding.symptom.what, text=str(finding), level=level)

    @property
    def _page(self) -> Path:
        return Path(self.args.output_dir or ".") / "report.html"

    def _history(self) -> History:
        return History(self.trainer.state.log_history, self._run())

    def _run(self) -> dict[str, Any]:
        args = self.args
        # dictionaries, such as model_init_kwargs, may hold a token, and checkpoints may be pushed
        kinds = (bool, int, float, str, NoneType)
        run: dict[str, Any] = {
            "settings": {name: value for name, value in args.to_dict().items() if isinstance(value, kinds)},
            "notes": [*args.doubts, *(note for feature in self.trainer.features for note in feature.notes)],
        }
        if self._is_on:
            run |= {"versions": {package: version(package) for package in _PACKAGES}, "answers": self._answers}
        return run

    # files

    def on_train_begin(self) -> None:
        """Begin anew if the trainer trains a second time, whose log is another one."""
        self._told, self._next_diagnosis = set(), 0
        if not self.trainer.state.global_step:
            self._answers = []

    def save_state(self, checkpoint: Path) -> None:
        """Save settings, warnings and answers, and write the page if that has a small share of the run's time."""
        if self.args.should_save:
            self._save_run(checkpoint)
        if self._is_on and self._is_main and self._seconds < _LARGEST_SHARE * (time.monotonic() - self._written):
            self._write_page()

    def load_state(self, checkpoint: Path) -> None:
        """Go on with the answers of the run."""
        file = checkpoint / RUN_FILE
        self._answers = json.loads(file.read_text()).get("answers", []) if self._is_on and file.is_file() else []

    def on_train_end(self, best: Path | None) -> None:
        """Write the page, and print what the run shows."""
        if not self._is_main or not (self._is_on or self.args.log_line):
            return
        state = self.trainer.state
        if self._is_on:
            folder = self._page.parent
            folder.mkdir(parents=True, exist_ok=True)
            self._save_run(folder)  # a run may have no checkpoint of its last step
            state.save_to_json(str(folder / TRAINER_STATE_NAME))
            self._write_page()
        tqdm.write(f"trl-steady: {verdict(diagnose(self._history())[0])}")
        if self._is_on:
            tqdm.write(f"trl-steady: the report is in {self._page}")

    def _save_run(self, folder: Path) -> None:
        """Save settings, warnings, and the answers of the last rollout too."""
        self._answers = limited([*self._answers, *self._last_rollout])
        self._last_rollout = []
        (folder / RUN_FILE).write_text(json.dumps(self._run()))

    def _write_page(self) -> None:
        from trl_steady.report.page import write  # needs matplotlib

        began = time.monotonic()
        write(self._page, self._page.parent.name, self._history())
        self._written = time.monotonic()
        self._seconds = self._written - began


class _Bar(ProgressCallback):
    """The bar of transformers, which prints no dictionaries."""

    def on_log(self, *_: object, **__: object) -> None:
        """Print nothing."""


def log_line(logs: Mapping[str, Any], step: int, last: int) -> str:
    """Return one line for a row of the log, with the usual metrics that it has."""
    known = {key: value for key, value in logs.items() if isinstance(value, (int, float))}
    words = [f"step {step}/{last}"]
    words += [f"{name} {form.format(known[key])}" for name, (key, form) in _SHOWN.items() if key in known]
    if known.keys() >= {*_RATIO}:
        words.append("ratio {:.3g}..{:.3g}".format(*(known[key] for key in _RATIO)))
    if dropped := [value for key, value in known.items() if key.startswith("dropped/")]:
        words.append(f"dropped {max(dropped):.0%}")
    if "step_time" in known:
        words.append(duration(known["step_time"]))
    return "  ".join(words)


def duration(seconds: float) -> str:
    """Return a time such as "4.2 s", "180 s", "4 min 12 s" or "1 h 03 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 4:
        return f"{seconds:.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def chosen(rewards: np.ndarray, size: int) -> list[dict[int, str]]:
    """Return the answers of a rollout to keep: for each group, row -> "best", "median" or "worst".

    Args:
        rewards: (B,) rewards.
        size: Answers to a prompt, which are consecutive. With 1, they are compared with those to other prompts.
    """
    is_single, size = size == 1, min(size, len(rewards)) if size > 1 else len(rewards)
    groups = np.nan_to_num(rewards)[: len(rewards) // size * size].reshape(-1, size)
    found: list[dict[int, str]] = []
    for group in np.argsort(-np.ptp(groups, axis=1), kind="stable")[:GROUPS]:
        order = (group * size + np.argsort(-groups[group], kind="stable")).tolist()
        found.append({order[0]: "best", order[size // 2]: "median", order[-1]: "worst"} | {order[0]: "best"})
    return [{row: place} for group in found for row, place in group.items()] if is_single else found


def limited(rollouts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last of these rollouts that take at most `MOST_BYTES` together."""
    sizes = np.cumsum([len(json.dumps(rollout)) for rollout in reversed(rollouts)])
    return list(rollouts[len(rollouts) - int((sizes <= MOST_BYTES).sum()) :])
