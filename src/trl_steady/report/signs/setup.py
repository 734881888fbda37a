"""Signs in settings, phases and helpers of a run: ranges, references, sampling, time, padding."""

import numpy as np

from trl_steady.report.history import History, counted
from trl_steady.report.signs.common import Found
from trl_steady.report.signs.reward import learns, learnt
from trl_steady.report.statistics import mostly_bad, noise, sixths


def nothing_clips(history: History) -> Found | None:
    """Find a range of tokens on the ratio of a sequence, or updates that are all on-policy."""
    settings = history.settings
    loss = settings.get("loss_type")
    passes = (settings["steps_per_generation"] or 1) * settings.get("num_iterations", 1)
    widest = max(settings["epsilon"] or 0, settings.get("epsilon_high") or 0)
    clipped = history.finite_values("clip_ratio/region_mean")
    share = float(clipped.mean()) if len(clipped) else 0.0
    is_on_policy = settings["gradient_accumulation_steps"] % passes == 0 and not share
    is_sequence = loss in ("gspo", "gspo_token") or settings.get("importance_sampling_level") == "sequence"
    if is_sequence and widest >= 0.1:
        text = f"epsilon {widest:g} is a range of token ratios; GSPO's are 3e-4 and 4e-4; {share:.2%} are clipped"
        return Found(1, "", text)
    if is_on_policy and (is_sequence or loss == "gmpo"):
        return Found(1, "", f"each rollout has 1 update, with loss_type {loss}, so nothing can be clipped")
    return None


def reference_never_moves(history: History) -> Found | None:
    """Find a reference that has not moved, or will not before the run ends."""
    has_moved = history["ref/refreshes"].finite.values.any()
    settings = history.settings
    every = settings.get("ref_model_sync_steps") or 512  # TRL's default
    planned = settings.get("max_steps") or 0
    if has_moved:
        return None
    evidence = f"0 in {history.last_step} steps, with ref_model_sync_steps {every}"
    if 0 < planned <= every and settings.get("ref_model_sync_kl") is None:
        return Found(1, "ref/refreshes", evidence)
    if history.last_step > every + 64:  # it waits for a rollout
        return Found(every, "ref/refreshes", evidence)
    return None


def reference_collapsed(history: History) -> Found | None:
    """Find a reference that has moved after the reward had fallen for good."""
    moves = history["ref/refresh_step"].finite.values
    steps, values = learnt(history)
    if len(values) < 12 or learns(history):
        return None
    level = sixths(values)
    where = mostly_bad(values < (level[0] + level.max()) / 2)
    is_small = level.max() - level[0] <= 2 * noise(values)
    if where is None or where.start <= values.argmax() or is_small:
        return None
    late = moves[moves >= steps[where.start]]
    if not len(late):
        return None
    evidence = f"{level.max():.3g} at best, {level[-1]:.3g} at the end, {counted(len(late), 'move')} since it fell"
    return Found(int(late[0]), "reward", evidence)


def sampling_truncated(history: History) -> Found | None:
    """Find a `top_p` that is too low."""
    top_p = history.settings["top_p"] or 1
    # docs/evidence.md: 12 % of the gradient is bias at 0.8, and 0.7 costs 8 points of accuracy, with the mask too
    if top_p >= 0.9:
        return None
    return Found(1, "", f"top_p {top_p:g}")


def generation_slow(history: History) -> Found | None:
    """Find generations that take nearly all the time from one rollout to the next."""
    history.require("time/update")
    steps, seconds = history["time/generation"].finite
    total = np.zeros(len(steps) + 1)
    for key in history.keys:
        if key.startswith("time/"):
            phase = history[key].finite
            rollout = np.searchsorted(steps, phase.steps, "right")
            np.add.at(total, rollout, phase.values)
    shares = seconds / np.maximum(total[1:], 1e-12)
    where = mostly_bad(shares > 0.8, least=8)  # verl's runs have 0.45 to 0.7
    if where is None:
        return None
    return Found(int(steps[where.start]), "time/generation", f"{np.median(shares[where]):.0%} of the time")


def padding_computed(history: History) -> Found | None:
    """Find batches that are mostly padding, where nothing trims it."""
    share = history.median("padding/share")
    if history.settings["trim_padding"] or not share > 0.5:
        return None
    return Found(1, "padding/share", f"{share:.0%}")
