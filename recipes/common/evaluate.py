"""Accuracy, pass@K and maj@K of a model, with 95 % intervals over problems: as a table, a picture and JSON."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from tqdm import tqdm
from transformers import GenerationConfig

from common.run import Results
from trl_steady.functional.answers import maj_at_k, pass_at_k
from trl_steady.report.compare import interval

KS = (1, 2, 4, 8, 16, 32, 64)
Reader = Callable[[str], Hashable | None]  # takes a completion, returns its answer, or None if it has none
METRICS = ("pass@k", "maj@k")
STYLES = {"pass@k": "--", "maj@k": "-"}


def scores(answers: Sequence[Sequence[Hashable | None]], truths: Sequence[Hashable]) -> Results:
    """Return the means of pass@k and maj@k over problems, with 95 % bootstrap intervals, for k up to n.

    Args:
        answers: (problems, n) answers. With n = 1, both are the accuracy.
        truths: (problems,) right answers.

    Returns:
        For each metric, a list of `{"k", "mean", "low", "high"}`.
    """
    found: Results = {}
    for name, metric in zip(METRICS, (pass_at_k, maj_at_k), strict=True):
        found[name] = []
        for k in (k for k in KS if k <= len(answers[0])):
            each = np.array([metric(own, truth, k) for own, truth in zip(answers, truths, strict=True)])
            low, high = interval(each)
            found[name].append({"k": k, "mean": float(each.mean()), "low": low, "high": high})
    return found


@torch.no_grad()
def completions(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    samples: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 512,
    batch: int = 64,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[list[str]]:
    """Return (prompts, samples) completions without special tokens, and show the progress.

    Args:
        model: It stays in training mode if it was. Only the end tokens of its generation settings act.
        tokenizer: With a chat template, if prompts are messages.
        prompts: Texts, or lists of messages.
        samples: Completions of each prompt. 0: one, greedy.
        temperature: The temperature of samples.
        max_new_tokens: The length of a completion.
        batch: Completions at once.
        chat_template_kwargs: Those of the training's config.
    """
    chat = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
    texts = [text if isinstance(text, str) else tokenizer.apply_chat_template(text, **chat) for text in prompts]
    asked = [text for text in texts for _ in range(max(samples, 1))]
    how = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if samples else {}
    how |= {"do_sample": bool(samples), "max_new_tokens": max_new_tokens}
    special = isinstance(prompts[0], str)  # chat templates write them
    options = {"padding": True, "padding_side": "left", "add_special_tokens": special, "return_tensors": "pt"}
    was_training, found = model.training, []
    model.eval()
    # transformers takes all that a call does not set from the model
    settings = vars(model.generation_config)
    own = dict(settings)
    settings.update(vars(GenerationConfig(eos_token_id=own["eos_token_id"])))
    try:
        for start in tqdm(range(0, len(asked), batch), unit="batch"):
            inputs = tokenizer(asked[start : start + batch], **options).to(model.device)
            out = model.generate(**inputs, **how, pad_token_id=tokenizer.pad_token_id)
            found += tokenizer.batch_decode(out[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    finally:
        settings.update(own)
        model.train(was_training)
    return np.array(found, dtype=object).reshape(len(prompts), -1).tolist()


def evaluate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    truths: Sequence[Hashable],
    readers: Mapping[str, Reader],
    **options: Any,
) -> dict[str, Results]:
    """Ask the model, and return the scores of each reader. `options` are those of `completions`."""
    asked = completions(model, tokenizer, prompts, **options)
    return {name: scores([[read(text) for text in own] for own in asked], truths) for name, read in readers.items()}


def table(found: Mapping[str, Results]) -> str:
    """Return the scores as a Markdown table."""
    lines = ["| score | k | pass@k | 95 % interval | maj@k | 95 % interval |", "|---|---|---|---|---|---|"]
    for name, own in found.items():
        for points in zip(*(own[metric] for metric in METRICS), strict=True):
            cells = [f"{p['mean']:.1%} | {p['low']:.1%} to {p['high']:.1%}" for p in points]
            lines.append(f"| {name} | {points[0]['k']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path, found: Mapping[str, Results]) -> None:
    """Save a picture of the scores over k, with bands for the intervals."""
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for index, (name, own) in enumerate(found.items()):
        for metric, style in STYLES.items():
            ks, mean, low, high = zip(*(point.values() for point in own[metric]), strict=True)
            axis.plot(ks, mean, f"o{style}", color=f"C{index}", markersize=3, label=f"{name}, {metric}")
            axis.fill_between(ks, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
            axis.vlines(ks, low, high, color=f"C{index}", alpha=0.4)
    axis.set_xscale("log", base=2)
    axis.set_xticks(KS, [str(k) for k in KS])
    axis.set_xlim(0.9, 1.1 * max(ks))
    axis.set(xlabel="k", ylabel="share of problems")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(folder: Path, found: Mapping[str, Results], **settings: Any) -> None:
    """Write `evaluation.json` and `evaluation.png`, and print the table. `settings` go into the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps({**settings, "scores": found}, indent=1))
    draw(folder / "evaluation.png", found)
    print(table(found), flush=True)
