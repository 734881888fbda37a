"""The frameworks whose logs are read: which one wrote a log, and what its names mean. `aliases.toml` has the names."""

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OUTCOMES = frozenset(
    (
        "reward", "reward_std", "frac_reward_zero_std", "kl", "loss", "entropy", "grad_norm", "mismatch/kl",
        "completions/mean_length", "completions/clipped_ratio", "clip_ratio/region_mean",
        "sampling/sampling_logp_difference/mean",
    )
)  # fmt: skip
"""Metrics of a training step. A row without any is none."""
OF_ANSWERS = OUTCOMES - {"loss", "grad_norm", "entropy", "kl"}
"""Those that only a training with sampled answers has."""
FINE = frozenset(("learning_rate", "grad_norm", "kl", "loss"))
"""Metrics for which a zero that was rounded may be any small number."""


class Alias(NamedTuple):
    """A framework's name of one of our metrics."""

    raw: str
    ours: str
    unit: str
    of: str
    """The things that are averaged, such as tokens."""
    since: str
    source: str
    scale: float = 1.0
    offset: float = 0.0
    flags: Sequence[str] = ()
    """The flag that `History` has for the values."""

    def convert(self, value: float) -> float:
        """Return a value as ours."""
        return self.offset + self.scale * value


class Framework(NamedTuple):
    """A table of aliases.toml, which explains the fields."""

    name: str
    title: str
    read: str
    signs: Sequence[re.Pattern[str]]
    form: str
    steps: Sequence[str]
    calls: Sequence[str]
    kept_only: Sequence[str]
    names: Mapping[str, Alias]
    """Raw name -> alias, best first. A "*" stands for a word."""
    never: Mapping[str, str]
    options: Mapping[str, str]
    opens: Mapping[str, str]

    def alias(self, raw: str) -> Alias | None:
        """Return what a name means, or None if it is none of ours."""
        if raw in self.never:
            return None
        if raw in self.names:
            return self.names[raw]
        for pattern, alias in self.names.items():
            if "*" not in pattern:
                continue
            match = re.fullmatch(_pattern(pattern), raw)
            if match:
                return alias._replace(raw=raw, ours=alias.ours.replace("*", match[1]))
        return None

    def shows(self, raw: str) -> bool:
        """Tell whether a name is one of a training step's."""
        alias = self.alias(raw)
        return alias is not None and alias.ours in OUTCOMES

    def rank(self, raw: str) -> int:
        """Return the place of a name in the table: of two with one meaning, the first is read."""
        for place, pattern in enumerate(self.names):
            if pattern == raw or ("*" in pattern and re.fullmatch(_pattern(pattern), raw)):
                return place
        return len(self.names)

    def is_kept_only(self, raws: Iterable[str]) -> bool:
        """Tell whether the reward is a mean over kept groups only, from the names in the log."""
        for raw in raws:
            for pattern in self.kept_only:
                if re.fullmatch(_pattern(pattern), raw):
                    return True
        return False


def _pattern(glob: str) -> str:
    return re.escape(glob).replace(r"\*", "([^/]+)")


def _framework(name: str, table: Mapping[str, Any]) -> Framework:
    names: dict[str, Alias] = {}
    for raw, about in table["names"].items():
        names[raw] = Alias(raw=raw, **about)
    return Framework(
        name=name,
        title=table["title"],
        read=table["read"],
        signs=[re.compile(sign) for sign in table["signs"]],
        form=table.get("form", ""),
        steps=table["steps"],
        calls=table.get("calls", ()),
        kept_only=table.get("kept_only", ()),
        names=names,
        never=table.get("never", {}),
        options=table.get("options", {}),
        opens=table.get("opens", {}),
    )


_TABLES = tomllib.loads(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))
FRAMEWORKS: Mapping[str, Framework] = {name: _framework(name, table) for name, table in _TABLES.items()}
TRL = FRAMEWORKS["trl"]
STEPS_OF_OWN_LOOPS = ("iteration", "iter", "update")
"""Metrics that are the optimizer step in logs of loops that somebody has written."""
STEPS = frozenset(STEPS_OF_OWN_LOOPS).union(*(framework.steps for framework in FRAMEWORKS.values()))
"""Metrics that are the optimizer step in some log."""
_BY_TITLE: Mapping[str, Framework] = {framework.title: framework for framework in FRAMEWORKS.values()}

AREAS: Mapping[str, Sequence[str]] = {
    "reward": ("reward",),
    "groups": ("frac_reward_zero_std", "reward_std"),
    "answers": ("completions/clipped_ratio", "completions/mean_length"),
    "policy": ("entropy",),
    "KL": ("kl",),
    "gradient": ("grad_norm",),
    "engine": ("mismatch/kl", "sampling/sampling_logp_difference/mean", "mismatch/effective_sample_size"),
    "time": ("time/generation", "step_time"),
    "held-out": ("eval_*", "held-out greedy accuracy"),
}
"""The areas that a report looks at, each with patterns of the metrics that show it. Without any, an area is blind."""


def of_title(title: str) -> Framework:
    """Return the framework with this title, or TRL's if there is none."""
    return _BY_TITLE.get(title, TRL)


def recognised(raws: Iterable[str], forms: Iterable[str] = ()) -> Framework:
    """Return the framework that wrote these names in lines of these forms: that with most signs, else TRL.

    Args:
        raws: Names of metrics.
        forms: Forms of lines, each with its label, such as "dict Global step".
    """
    raws = list(raws)
    forms = set(forms)
    best = TRL
    most = 0
    for framework in FRAMEWORKS.values():
        count = 0
        for raw in raws:
            count += any(sign.search(raw) for sign in framework.signs)
        is_another = _has_names_of_another(raws, framework)
        if framework.form in forms and not is_another:
            count += 1
        if count == 1 and is_another:  # a script of one's own can have one such name
            continue
        if count > most and any(framework.shows(raw) for raw in raws):
            best = framework
            most = count
    return best


def _has_names_of_another(raws: Iterable[str], framework: Framework) -> bool:
    """Tell whether a log has common names of metrics that this framework does not use, such as "KL"."""
    unread = [name for name in names_of_own_loops(raws) if framework.alias(name) is None]
    return not framework.never.keys() >= set(unread)


def todays_names(keys: Iterable[str]) -> dict[str, str]:
    """Return old name -> today's, for names of TRL before 0.16 that stand without today's."""
    keys = set(keys)
    renamed: dict[str, str] = {}
    for key in sorted(keys):
        alias = TRL.alias(key)
        if alias is None or alias.ours in keys or alias.ours in renamed.values():
            continue
        if key == "clip_ratio" and "clip_ratio/low_mean" in keys:
            continue
        renamed[key] = alias.ours
    return renamed


_OF_OWN_LOOPS: Mapping[str, str] = {
    "reward": "reward",
    "mean_reward": "reward",
    "avg_reward": "reward",
    "average_reward": "reward",
    "reward_mean": "reward",
    "total_rewards_mean": "reward",
    "loss": "loss",
    "train_loss": "loss",
    "actor_loss": "loss",
    "kl": "kl",
    "kl_ref": "kl",
    "kl_divergence": "kl",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "clip_frac": "clip_ratio/region_mean",
    "clipfrac": "clip_ratio/region_mean",
    "completion_length": "completions/mean_length",
    "avg_response_len": "completions/mean_length",
    "avg_len": "completions/mean_length",
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
}


def names_of_own_loops(keys: Iterable[str]) -> dict[str, str]:
    """Return name -> TRL's, for the log of a loop that somebody has written: "Mean reward", "KL", "Grad norm"."""
    keys = set(keys)
    plain = {key.lower().replace(" ", "_"): key for key in sorted(keys)}
    renamed: dict[str, str] = {}
    for name, ours in _OF_OWN_LOOPS.items():
        if name in plain and ours not in keys and ours not in renamed.values():
            renamed[plain[name]] = ours
    if "reward" not in {*keys, *renamed.values()} or _tasks(keys):
        return {}
    return renamed


def with_slashes(raws: Iterable[str]) -> dict[str, str]:
    """Return name -> the name that a framework logs, where the slashes of these have become "_", as some exports do.

    A few of another framework's names look so too (OpenRLHF's "actor_lr"). They do not count.
    """
    raws = set(raws)
    best: dict[str, str] = {}
    most = 2
    for framework in FRAMEWORKS.values():
        found: dict[str, str] = {}
        for raw in (*framework.names, *framework.never, *framework.steps):
            plain = raw.replace("/", "_")
            if plain != raw and plain in raws and raw not in raws:
                found[plain] = raw
        count = len(found.keys() - _PLAIN_NAMES)
        if count > most:
            best = found
            most = count
    if "completions/mean_length" in best.values():  # TRL's, which others log too
        best |= _reward_functions(raws)
    return best


def _reward_functions(raws: Iterable[str]) -> dict[str, str]:
    """Return the names of reward functions that an export has without slashes, each with TRL's."""
    found: dict[str, str] = {}
    for raw in raws:
        match = re.fullmatch(r"rewards_(.+)_(mean|std)", raw)
        if match:
            found[raw] = f"rewards/{match[1]}/{match[2]}"
    return found


_PLAIN_NAMES = frozenset(name for framework in FRAMEWORKS.values() for name in (*framework.names, *framework.never))


_OF_TASKS: Mapping[str, Sequence[str]] = {
    "DPO": ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    "a reward model": ("min_reward", "max_reward", "mean_reward", "margin"),
}
_OF_SFT = ("loss", "eval_loss", "mean_token_accuracy", "eval_mean_token_accuracy")
_BESIDE_SFT = ("grad_norm", "learning_rate", "num_tokens", "entropy", "num_input_tokens_seen", "aux_loss", "step_time")


def is_supervised(keys: Iterable[str]) -> bool:
    """Tell whether a log has a loss or a gradient norm, and nothing of answers or of their distribution."""
    shown = OUTCOMES.intersection(keys)
    return bool(shown) and shown <= {"loss", "grad_norm"}


def other_task(keys: Iterable[str]) -> str:
    """Return which log of TRL this is, if it is none of GRPO, RLOO or PPO: a sentence, or "" if it may be one."""
    metrics = {key for key in keys if not key.startswith("train_") and key not in ("epoch", "total_flos")}
    if not metrics or "reward" in metrics:
        return ""
    for task, found in _tasks(metrics).items():
        return f"This is a log of {task}: it has {', '.join(found)}."
    if not metrics.isdisjoint(OF_ANSWERS):
        return ""
    of_training = {key for key in metrics if not key.startswith("eval_")}
    if of_training <= {*_OF_SFT, *_BESIDE_SFT} and not metrics.isdisjoint(_OF_SFT):
        found = [name for name in _OF_SFT if name in metrics]
        return f"This is a log of SFT: it has {', '.join(found)} and no reward."
    shown = ", ".join(sorted(metrics)[:8])
    return f"There is no metric named reward, so this is no log of GRPO, RLOO or PPO that can be read. It has {shown}."


def _tasks(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the other tasks that have at least two of these names, with those names."""
    keys = set(keys)
    tasks: dict[str, list[str]] = {}
    for task, names in _OF_TASKS.items():
        found = [name for name in names if name in keys or f"{name}/mean" in keys]
        if len(found) >= 2:
            tasks[task] = found
    return tasks


def blind(keys: Iterable[str], framework: Framework) -> list[str]:
    """Return the areas that a log does not show, each with the option with which the framework logs it."""
    keys = set(keys)
    areas: list[str] = []
    for area, patterns in AREAS.items():
        if any(fnmatch.filter(keys, pattern) for pattern in patterns):
            continue
        if area == "reward":
            areas.append(area)
        elif area in framework.opens:
            option = framework.opens[area]
            how = f"needs {option}" if option else f"not logged by {framework.title}"
            areas.append(f"{area} ({how})")
    return areas


def can_log(metric: str, framework: Framework) -> bool:
    """Tell whether a plain run of a framework can log a metric, or one of "a | b"."""
    options = metric.split(" | ")
    if framework is TRL:
        return any(option in _PLAIN for option in options)
    known = {alias.ours for alias in framework.names.values()}
    return any(option in known for option in options)


_PLAIN = OUTCOMES - {"mismatch/kl"} | {"learning_rate"}


_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+|\b(?:beta|epsilon|epochs|StepRewards)\b")
_SENTENCE_END = re.compile(r"(?<=\.)\s+")


def in_words_of(title: str, advice: str) -> str:
    """Return advice for the users of a framework: its names of options, without sentences about options it lacks."""
    framework = of_title(title)
    if framework.name in ("trl", "log-line"):
        return advice
    options = framework.options
    known = {*options, *_OPTION.findall(" ".join(options.values()))}
    kept: list[str] = []
    for sentence in _SENTENCE_END.split(advice):
        if known.issuperset(_OPTION.findall(sentence)):
            kept.append(_OPTION.sub(lambda match: options.get(match[0], match[0]), sentence))
    return " ".join(kept)
