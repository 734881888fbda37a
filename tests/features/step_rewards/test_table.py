"""Scalars and steps of several reward functions in one table, by hand."""

import torch

from trl_steady.features.step_rewards.table import RewardedCompletion, tabulate


def test_by_hand_and_with_a_step_for_every_loss_token_where_that_is_asked() -> None:
    """The step ends with the last loss token, not with the last token."""
    beyond, nan = torch.iinfo(torch.int64).max, torch.nan
    # two reward functions with weights 1 and 10; six completions of five tokens, of which the last is not the model's
    verdicts = [
        RewardedCompletion(5, 4, {0: [(2, 1.0), (4, 2.0)]}),  # steps, and a scalar
        RewardedCompletion(5, 4, {0: [(3, 1.0), (3, 0.5)], 1: [(3, 0.25)]}),  # steps of both that end inside one token
        RewardedCompletion(5, 4, {1: [(1, 1.0)]}),  # one function is silent
        RewardedCompletion(5, 4, {0: []}),  # no step, which is not no verdict
        RewardedCompletion(5, 4, {}),  # no verdict
        RewardedCompletion(5, 4, {}),  # scalars only
    ]
    scalars = torch.tensor([[3.0, 0.5], [1.5, 0.25], [nan, 1.0], [0.0, nan], [nan, nan], [7.0, 0.125]])
    weights = torch.tensor([1.0, 10.0])

    def rows(cover: bool) -> list[dict[int, float]]:
        table = tabulate(verdicts, scalars, weights, cover=cover)
        assert (table.ends.diff(dim=1)[~table.rewards[:, 1:].isnan()] > 0).all()
        assert torch.equal(table.ends == beyond, table.rewards.isnan())
        return [
            {end: reward for end, reward in zip(*pair, strict=True) if end != beyond}
            for pair in zip(table.ends.tolist(), table.rewards.tolist(), strict=True)
        ]

    assert rows(cover=False) == [{2: 1.0, 4: 2.0, 5: 5.0}, {3: 4.0}, {1: 10.0}, {}, {}, {5: 8.25}]
    rest = {4: 0.0}
    covered = [{2: 1.0, 4: 2.0, 5: 5.0}, {3: 4.0, **rest}, {1: 10.0, **rest}, rest, {}, {5: 8.25}]
    assert rows(cover=True) == covered


def test_a_completion_that_is_masked_out_still_has_its_return() -> None:
    masked_out = [RewardedCompletion(5, 0, {0: []}), RewardedCompletion(5, 0, {0: [(2, 1.0)]})]
    table = tabulate(masked_out, torch.zeros(2, 1), torch.ones(1), cover=True)
    assert table.rewards.tolist() == [[0.0], [1.0]] and table.ends.tolist() == [[0], [2]]
