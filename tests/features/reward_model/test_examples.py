"""Examples from answers, the held-out share, and the history on disk."""

from itertools import groupby
from pathlib import Path

import pytest
import torch

from trl_steady.features.reward_model.examples import (
    Example,
    History,
    LabelledCompletion,
    hold_out,
    make_examples,
    prompt_key,
)


def answers(labels: list[list[float]], *, group: int = 4, rollout: int = 0) -> list[LabelledCompletion]:
    """Answers with numbers as tokens, `group` to a prompt."""
    return [
        LabelledCompletion(rollout, i, i // group, torch.tensor([i // group]), torch.tensor([100 + i, 7]), [2], known)
        for i, known in enumerate(labels)
    ]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def example(number: int) -> Example:
    return Example(
        torch.tensor([number], dtype=torch.int32), [torch.tensor([number, 1], dtype=torch.int32)], [[2]], [1.0]
    )


def test_a_pair_is_a_right_and_a_wrong_answer_to_one_prompt_and_no_answer_is_in_two() -> None:
    known = answers([[1.0], [0.0], [1.0], [1.0], [0.0], [0.0], [0.0], [0.0], [1.0], [0.0], [0.0], [1.0]])
    pairs = make_examples(known, "pairs", generator())
    label = {int(answer.completion[0]): answer.labels[0] for answer in known}
    group = {int(answer.completion[0]): answer.group for answer in known}
    found = [[int(completion[0]) for completion in pair.completions] for pair in pairs]
    assert [len([pair for pair in found if group[pair[0]] == number]) for number in range(3)] == [1, 0, 2]
    for right, wrong in found:
        assert label[right] == 1.0 and label[wrong] == 0.0 and group[right] == group[wrong]
    used = [number for pair in found for number in pair]
    assert len(set(used)) == len(used)
    assert all(pair.labels == [1.0] and pair.ends == [[2], [2]] for pair in pairs)


def test_rollouts_have_groups_of_their_own() -> None:
    """Group 0 of two rollouts is of two prompts."""
    both = [*answers([[1.0]], rollout=0), *answers([[0.0]], rollout=1)]
    assert make_examples(both, "pairs", generator()) == []
    assert len(make_examples(both, "pointwise", generator())) == 2


def test_answers_without_steps_teach_nothing() -> None:
    (known,) = make_examples([*answers([[]]), *answers([[1.0, 0.0]])], "steps", generator())
    assert known.labels == [1.0, 0.0]


def test_whole_prompts_are_held_out_a_tenth_of_them() -> None:
    known = answers([[1.0]] * 120)
    rest, out = hold_out(known, 0.1, generator())
    groups = [{answer.group for answer in part} for part in (rest, out)]
    assert len(groups[1]) == 3 and len(out) == 12 and not groups[0] & groups[1] and len(rest) == 108
    assert [answer.index for answer in rest] == sorted(answer.index for answer in rest)
    others = {tuple(a.group for a in hold_out(known, 0.1, generator(seed))[1]) for seed in range(5)}
    assert len(others) > 1


def test_a_prompt_that_comes_again_is_held_out_each_time() -> None:
    """Four rollouts of the same three prompts."""
    known = [answer for rollout in range(4) for answer in answers([[1.0]] * 12, rollout=rollout)]
    rest, out = hold_out(known, 0.1, generator())
    assert len(out) == 16 and len(rest) == 32
    assert len(set(map(prompt_key, out))) == 1 and not set(map(prompt_key, out)) & set(map(prompt_key, rest))


@pytest.mark.parametrize(("groups", "count"), [(0, 0), (1, 0), (2, 1), (4, 1), (25, 2)])
def test_at_least_one_prompt_is_held_out_unless_it_is_the_only_one(groups: int, count: int) -> None:
    _, out = hold_out(answers([[1.0]] * groups, group=1), 0.1, generator())
    assert len(list(groupby(out, key=lambda known: known.group))) == count


def test_the_history_is_uniform_over_all_that_it_saw() -> None:
    """100,000 kept examples, in 40 bins of arrival. A history that forgets the oldest first fails by far."""
    bins = torch.zeros(40)
    draws = generator(1)
    offered = [example(number) for number in range(4000)]
    for _ in range(50):
        history = History(2000)
        for start in (0, 2000):  # in parts, as refreshes come
            history.add(offered[start : start + 2000], draws)
        kept = torch.tensor([int(drawn.prompt) for drawn in history.draw(2000, draws)])
        assert len(kept) == len(kept.unique()) == 2000
        bins += torch.bincount(kept // 100, minlength=40)
    chi_square = ((bins - 2500) ** 2 / 2500).sum().item()
    # 39 degrees of freedom: above 72.1 once in 1,000; without replacement from 4,000, half of that is expected
    assert chi_square < 72.1


def test_the_history_is_bounded_and_survives_a_file(tmp_path: Path) -> None:
    history = History(5)
    assert history.draw(3, generator()) == []
    history.load(History(5).state())
    pair = Example(torch.tensor([1, 2]), [torch.tensor([3]), torch.tensor([4, 5])], [[1], [2]], [1.0])
    history.add([pair], generator())
    again = History(5)
    torch.save(history.state(), tmp_path / "history.pt")
    again.load(torch.load(tmp_path / "history.pt", weights_only=True))
    (found,) = again.draw(9, generator())
    assert [found.prompt.tolist(), *(tokens.tolist() for tokens in found.completions)] == [[1, 2], [3], [4, 5]]
    assert found.ends == [[1], [2]] and found.labels == [1.0]
    again.add([example(number) for number in range(100)], generator())
    assert len(again.draw(9, generator())) == 5 and again.seen == 101
    assert len(set(map(prompt_key, again.draw(2, generator())))) == 2
    kept = set(map(prompt_key, again.draw(5, generator())))
    left = again.draw(5, generator(), without=set(list(kept)[:2]))
    assert len(left) == 3 and set(map(prompt_key, left)) == kept - set(list(kept)[:2])
