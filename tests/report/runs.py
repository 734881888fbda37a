"""A simulated healthy run, with every metric that a symptom reads."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trl_steady.report.history import History

UPDATES = 4  # for each rollout
SETTINGS: Mapping[str, Any] = {
    "loss_type": "gspo",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
    "steps_per_generation": UPDATES,
    "num_iterations": 1,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "sync_ref_model": True,
    "ref_model_sync_steps": 64,
    "max_steps": 400,
    "beta": 0.001,
    "use_vllm": True,
    "top_p": 0.95,
    "keep_sampling_mask": True,
    "off_policy_mask_threshold": 0.3,
    "router_replay": "R3",
    "trim_padding": True,
}


def healthy(seed: int, steps: int = 400) -> list[dict[str, float]]:
    """Return the rows of a run that learns: reward from 0.3 to 0.85, entropy from 0.6 to 0.15.

    The first update of each rollout has a ratio of 1. Only that row has the metrics of the rollout, as in TRL's log.
    """
    random = np.random.default_rng(seed)
    judge = np.random.default_rng(seed + 1000)

    def noisy(value: float, spread: float) -> float:
        return float(value * np.exp(spread * random.standard_normal()))

    def share(value: float, count: int = 64) -> float:
        return float(random.binomial(count, min(max(value, 0.0), 1.0)) / count)

    rows: list[dict[str, float]] = []
    for i in range(steps):
        done, update = i / max(steps, 1), i % UPDATES
        level = 0.3 + 0.55 * (1 - np.exp(-4 * done))
        row = {"step": i + 1, "loss": 0.1 * random.standard_normal(), "grad_norm": noisy(0.8, 0.7)}
        row |= {"learning_rate": 1e-5 * (1 - done), "entropy": noisy(0.15 + 0.45 * np.exp(-3 * done), 0.1)}
        row |= {"clip_ratio/region_mean": share(0.5) if update else 0.0, "kl": noisy(0.03 + 0.01 * done, 0.5)}
        far = 0.02 * update
        row |= {"ratio/sequence_max": noisy(1 + 2 * far, far), "ratio/sequence_min": noisy(1 - 2 * far, far)}
        row |= {"dropped/off_policy": share(0.01 * update), "dropped/geometric": share(0.01), "dropped/veto": 0.0}
        row |= {"mismatch/kl": noisy(1.5e-3, 0.3), "mismatch/above_2": noisy(1e-4, 0.5)}
        row |= {
            "mismatch/effective_sample_size": 1 - noisy(3e-3, 0.3),
            "value/explained_variance": share(0.2 + 0.6 * done),
            "teacher/kl": 0.4 - 0.2 * done,
        }
        row |= {
            "sampling/sampling_logp_difference/mean": noisy(0.01, 0.3),
            "routing/changed": noisy(0.005 * update, 0.4),
        }
        row |= {
            "routing/fallback": 0.0,
            "sampling_mask/kept_mass": 0.975 - 0.002 * update,
            "sampling_mask/fallback": 0.0,
        }
        row |= {"ref/refreshes": i // 64}
        if i and i % 64 == 0:
            row |= {"ref/refresh_step": i, "ref/refresh_kl": noisy(0.05, 0.2), "ref/refresh_by_kl": 0.0}
        if update == 0:
            reward = share(level)
            row |= {
                "reward": reward,
                "reward_std": noisy(0.4, 0.1),
                "frac_reward_zero_std": share(0.1 + 0.4 * done, 8),
            }
            row |= {"rewards/reward_model/mean": reward, "reward_model/true": share(level)}
            row |= {"completions/mean_length": noisy(300 + 60 * done, 0.05), "completions/clipped_ratio": share(0.05)}
            row |= {"time/generation": 12.0, "time/scoring": 2.0, "padding/share": 0.6}
        row["time/update"] = 3.0
        rows.append(row)
        if i % 40 == 39:
            right = float(judge.binomial(200, level - 0.05)) / 200
            rows.append({"step": i + 1, "eval_reward": share(level - 0.05, 200), "eval_accuracy": right})
    return rows


def history(
    rows: list[dict[str, float]], without: tuple[str, ...] = ("value/explained_variance",), **run: Any
) -> History:
    """Return the history of a run with the usual settings. PPO's metric is left out, because groups need GRPO."""
    kept = [{key: value for key, value in row.items() if key not in without} for row in rows]
    formats = {"engine": "bfloat16", "trainer": "bfloat16", "about": "weights float32, autocast bfloat16"}
    settings = {**SETTINGS, **run.pop("settings", {})}
    return History(kept, {"notes": [], "settings": settings, "formats": formats, **run})


def recorded(root: Path) -> dict[str, tuple[list[dict[str, float]], dict[str, Any]]]:
    """Return rows and settings of all recorded runs of the recipes that have rows, by file and number."""
    found = {}
    for file in sorted(root.glob("recipes/*/results/**/*.json")):
        contents = json.loads(file.read_text())
        runs = contents.get("runs", [contents])
        for number, run in enumerate(runs if isinstance(runs, list) else []):
            if "history" in run:
                checks = run.get("held-out greedy accuracy by step", {})
                if any("held-out greedy accuracy" in row for row in run["history"]):
                    checks = {}
                rows = [{"step": int(step), "held-out greedy accuracy": share} for step, share in checks.items()]
                rows = sorted([*run["history"], *rows], key=lambda row: row["step"])
                name = f"{file.relative_to(root / 'recipes').as_posix()}:{number}"
                found[name] = rows, {"settings": run.get("objective") or {}}
    return found


def constant(completions: list[Any], **_: Any) -> list[float]:
    return [0.5] * len(completions)


def nothing(completions: list[Any], **_: Any) -> list[None]:
    return [None] * len(completions)


# the options, and the symptoms of which one must be named
DEAD: dict[str, tuple[dict[str, Any], set[str]]] = {
    "learning rate 5": (
        {"learning_rate": 5.0, "max_grad_norm": math.inf},
        {"policy-collapsed", "entropy-collapses", "gradient-zero"},
    ),
    "constant reward": ({"build": {"reward_funcs": constant}}, {"reward-constant", "gradient-zero"}),
    "no reward": ({"build": {"reward_funcs": nothing}}, {"reward-missing"}),
}
