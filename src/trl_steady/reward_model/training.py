"""Training and measuring a reward model on examples, on all processes."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm

from trl_steady.critic.learner import Learner
from trl_steady.functional import reward_models
from trl_steady.reward_model.examples import Example
from trl_steady.reward_model.part import RewardModelPart


class Measure(NamedTuple):
    """How well a reward model knows examples."""

    accuracy: float
    """Share of scores on the right side of 0; with pairs, of pairs in which the right answer has the higher score."""
    calibration_error: float
    """Expected calibration error of sigmoid(score), or of sigmoid(difference) with pairs."""
    loss: float


def fit(
    part: RewardModelPart,
    learner: Learner,
    examples: Sequence[Example],
    *,
    epochs: int,
    rate: float,
    generator: torch.Generator,
) -> None:
    """Train the reward model on examples, in batches as large as the policy's. Every process must call this.

    Args:
        part: The part whose reward model learns.
        learner: The learner of this reward model.
        examples: The same on all processes.
        epochs: Passes over the examples, each in another order. With `share_prompts`, answers to one prompt come
            together, so that a pass computes it once. InstructGPT (arXiv 2203.02155, section 3.5) does so too.
        rate: The learning rate.
        generator: Draws the orders. The same on all processes.
    """
    args, accelerator = part.trainer.args, part.trainer.accelerator
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    quiet = args.disable_tqdm or not accelerator.is_main_process
    bar = tqdm(total=epochs * len(examples), desc="reward model", unit="example", disable=quiet)
    with bar as progress, part.dropping_out(True):  # also in the first step of a resumed run
        learner.switch(True)
        try:
            for _ in range(epochs):
                order = _order(examples, generator, together=args.share_prompts)
                for start in range(0, len(order), batch):
                    rows = [examples[i] for i in order[start : start + batch]]
                    _step(part, learner, rows, rate)
                    progress.update(len(rows))
        finally:
            learner.switch(False)


def _order(examples: Sequence[Example], generator: torch.Generator, *, together: bool) -> list[int]:
    """Return the numbers of the examples in a random order, those of one prompt together if asked."""
    groups: dict[object, list[int]] = {}
    for number, example in enumerate(examples):
        groups.setdefault(tuple(example.prompt.tolist()) if together else number, []).append(number)
    listed = list(groups.values())
    return [number for i in torch.randperm(len(listed), generator=generator).tolist() for number in listed[i]]


def _step(part: RewardModelPart, learner: Learner, rows: Sequence[Example], rate: float) -> None:
    args, accelerator = part.trainer.args, part.trainer.accelerator
    # the learner takes the mean over processes, and the loss is the mean over the labels of all of them
    factor = accelerator.num_processes / sum(len(row.labels) for row in rows)
    rows = rows[accelerator.process_index :: accelerator.num_processes]
    for micro_batch in _micro_batches(rows, args.per_device_train_batch_size, args.token_budget):
        with part.trainer.until_backward_ends():
            losses, _, _ = _losses(part, micro_batch)
            (losses.sum() * factor).backward()
    learner.step(rate)


def _micro_batches(rows: Sequence[Example], size: int, budget: int | None) -> Iterator[list[Example]]:
    """Cut a batch where it has `size` answers, or where `token_budget` would be exceeded. An example stays whole."""
    cut: list[Example] = []
    answers = tokens = 0
    for row in rows:
        count = len(row.completions)
        length = sum(len(row.prompt) + len(completion) + 1 for completion in row.completions)  # one more is scored
        if cut and (answers + count > size or (budget is not None and tokens + length > budget)):
            yield cut
            cut, answers, tokens = [], 0, 0
        cut.append(row)
        answers, tokens = answers + count, tokens + length
    if cut:
        yield cut


def _losses(part: RewardModelPart, rows: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (n,), logits (n,) of the labels being 1, and labels (n,)."""
    completions = [completion.tolist() for row in rows for completion in row.completions]
    prompts = [row.prompt.tolist() for row in rows for _ in row.completions]
    ends = [ends for row in rows for ends in row.ends]
    scores = part.scores(prompts, completions, ends)
    labels = torch.tensor([label for row in rows for label in row.labels], device=scores.device)
    if len(rows[0].completions) == 2:
        right, wrong = scores[0::2, 0], scores[1::2, 0]
        return reward_models.pair_loss(right, wrong), right - wrong, labels
    is_score = torch.tensor([[i < len(each) for i in range(scores.size(1))] for each in ends])
    logits = scores[is_score.to(scores.device)]
    return reward_models.verdict_loss(logits, labels), logits, labels


@torch.no_grad()
def measure(part: RewardModelPart, examples: Sequence[Example]) -> Measure | None:
    """Return how well the reward model knows examples, the same on all processes; None if there are none.

    Every process must call this.
    """
    if not examples:
        return None
    accelerator, size = part.trainer.accelerator, part.trainer.args.per_device_train_batch_size
    numbers = range(accelerator.process_index, len(examples), accelerator.num_processes)
    found: list[tuple[int, Tensor]] = []  # number of an example, and losses, logits and labels (3, n)
    with part.dropping_out(False):
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            rows = [examples[number] for number in batch]
            columns = torch.stack([column.double().cpu() for column in _losses(part, rows)])
            found += zip(batch, columns.split([len(row.labels) for row in rows], dim=1), strict=True)
    in_order = sorted(gather_object(found), key=itemgetter(0))  # the sums of means round as on one process
    losses, logits, labels = torch.cat([columns for _, columns in in_order], dim=1)
    return Measure(
        accuracy=((logits > 0) == (labels > 0)).double().mean().item(),
        calibration_error=reward_models.calibration_error(logits.sigmoid(), labels).item(),
        loss=losses.mean().item(),
    )
