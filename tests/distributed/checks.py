"""Comparisons of a run on one process with the same run on two."""

from typing import Any

import pytest
import torch

from tests.distributed import train
from tests.tools import resumable

COMPARED = ("kl", "ratio/sequence", "reward", "dropped", "steps", "sampling_mask", "routing", "teacher")


def marked(request: pytest.FixtureRequest, setup: str = "DDP") -> set[str]:
    """The features that a test says it shows in a setup."""
    marks = [mark for mark in request.node.iter_markers("supports") if setup in mark.kwargs["on"]]
    return {feature for mark in marks for feature in mark.args}


def check_close(run: str, one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():  # sums are taken in another order; a step is of the order of 1e-2
        assert torch.allclose(two[name], value, rtol=1e-4, atol=1e-5), (run, name)


def check_histories(one: list[dict[str, float]], two: list[dict[str, float]]) -> None:
    assert len(one) == len(two) >= 7
    for row_one, row_two in zip(one, two, strict=True):
        assert row_one.keys() == row_two.keys()
        for metric, value in row_one.items():
            if metric.startswith(COMPARED):
                if metric == "routing/bytes":  # each pads to its own longest
                    continue
                assert row_two[metric] == pytest.approx(value, rel=1e-3, abs=1e-6), metric
            # to a bin of the histogram, and to the rounding of log-probs of some 6 nats, which are 0.5e-6 apart
            if metric.startswith(("off_policy", "mismatch")):
                assert row_two[metric] == pytest.approx(value, rel=0.05, abs=1e-5), metric


def check_references(run: str, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """The reference of every step: of both processes bit for bit, and that of one process."""
    assert two[0]["refreshes"] == two[1]["refreshes"]  # the KL that decided too
    assert [(step, rule) for step, _, rule in two[0]["refreshes"]] == [(s, rule) for s, _, rule in one["refreshes"]]
    assert resumable.differences(two[0]["references"], two[1]["references"]) == []
    assert (
        len(one["references"]) == len(two[0]["references"]) == (train.FIXED | train.RLOO | train.PPO)[run]["max_steps"]
    )
    for expected, found in zip(one["references"], two[0]["references"], strict=True):
        check_close(run, expected, found)
    changes = [
        step
        for step, (before, after) in enumerate(zip(one["references"], one["references"][1:], strict=False), 1)
        if resumable.differences(before, after)
    ]
    assert changes == [step for step, _, _ in one["refreshes"]]
