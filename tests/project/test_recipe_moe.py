"""The recipe of routing replay: its task, its probe beside the package's own replay, a small run of each variant."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.project import recipe
from tests.tools.headroom import within
from trl_steady.features.router_replay.replay import Routers


def test_an_answer_is_all_digits_in_order_and_the_end(recipes: Any) -> None:
    task, vocabulary = recipes.digits.Digits(Path()), recipes.digits.VOCABULARY
    problem = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
    assert task.prompt(problem) == "<s>3141592653:"
    for completion, right in {
        "1123345569</s>": True,
        "1123345569</s><pad>": True,  # what generation fills up with
        "1123345569": False,  # has not ended
        "112334556</s>": False,
        "1123345596</s>": False,
        "": False,
    }.items():
        assert task.is_right(problem, completion) is right
        names = completion.replace("</s>", "e").replace("<pad>", "p")
        ids = [vocabulary[{"e": "</s>", "p": "<pad>"}.get(name, name)] for name in names]
        # the text is what TRL hands over, without special tokens
        text = names.replace("e", "").replace("p", "")
        assert task.reward([text], problem=[list(problem)], completion_ids=[ids]) == [float(right)]


def test_warm_start_training_and_held_out_problems_have_no_digits_in_common(recipes: Any) -> None:
    digits = recipes.digits
    worked = digits.draw(digits.WORKED_STEPS * digits.WORKED_BATCH)
    train, test = digits.Digits(Path()).split(200)
    assert (len(train), len(test)) == (digits.TRAINING, 200)
    parts = [{tuple(sorted(problem)) for problem in part} for part in (worked, train, test)]
    assert len(set.union(*parts)) == len(worked) + len(train) + len(test)
    assert digits.Digits(Path()).split(200) == (train, test)


def test_the_probe_replays_as_the_package_does(digits: Any) -> None:
    model, tokenizer = digits.digits.untaught()
    ids = tokenizer(["<s>3141592653:11"] * 2 + ["<s>2718281828:11"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        with digits.probe.routed(model) as chosen:
            plain = model(input_ids=ids).logits
        with digits.probe.routed(model, chosen):
            assert torch.equal(model(input_ids=ids).logits, plain)
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        with digits.probe.routed(model, chosen):
            replayed = model(input_ids=ids).logits
        with digits.probe.routed(model) as live:
            moved = model(input_ids=ids).logits
        with Routers(model).replay(torch.stack(chosen, dim=1)):
            theirs = model(input_ids=ids).logits
    assert digits.probe.changed(chosen, live, torch.ones(ids.shape, dtype=torch.bool)) > 0
    torch.testing.assert_close(replayed, theirs)
    assert not within((moved - replayed).abs(), 1e-4)


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    """The cells of the page have each seed and the mean, or the mean."""
    folder = recipe.FOLDER / "moe"
    readme = (folder / "README.md").read_text().replace("%", "")
    runs = [json.loads(file.read_text()) for file in (folder / "results").glob("*.json")]
    rows = [line[2:-2].split(" | ") for line in recipes.variants.table(runs).replace("%", "").splitlines()]
    for label in ("GRPO", "GRPO, R2", "GRPO, R3", "GSPO"):
        *seeds, mean = (row[2:] for row in rows if row[0] == label)
        ways = [f"{', '.join(row[way] for row in seeds)} ({mean[way]})" for way in (0, 1)]
        cells = [*ways, mean[3], f"{mean[4]}, {mean[5]}"]
        assert f"| {label} | {' | '.join(cells)} |" in readme
