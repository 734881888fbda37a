"""The one order of features: what would train otherwise in silence if somebody moved a line."""

import pytest

import trl_steady
from trl_steady.core.feature import Feature
from trl_steady.features.dynamic_sampling import DynamicSampling
from trl_steady.features.padding_free.feature import PaddingFree

TRAINERS = pytest.mark.parametrize("kind", [trl_steady.GRPOTrainer, trl_steady.RLOOTrainer, trl_steady.PPOTrainer])


def acting(features: tuple[type[Feature], ...], hook: str) -> list[type[Feature]]:
    return [feature for feature in features if getattr(feature, hook) is not getattr(Feature, hook)]


@TRAINERS
def test_nothing_after_dynamic_sampling_is_around_a_rollout(kind: type) -> None:
    """It runs the rest several times, and a record that begins anew in each round would lose the rounds before."""
    after = kind.FEATURES[kind.FEATURES.index(DynamicSampling) + 1 :]
    assert not acting(after, "around_rollout")


@TRAINERS
def test_padding_is_the_outermost_of_forward_passes_and_losses(kind: type) -> None:
    for hook in ("around_forward", "around_loss"):
        assert acting(kind.FEATURES, hook)[0] is PaddingFree


@TRAINERS
def test_readers_of_advantages_come_after_those_who_change_them(kind: type) -> None:
    names = [feature.__name__ for feature in acting(kind.FEATURES, "on_rollout_end")]
    assert names[-1] == "TrainingReport"
