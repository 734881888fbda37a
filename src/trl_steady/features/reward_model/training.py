"""Training and measuring a reward model on examples, on all processes."""

from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm

from trl_steady.features.critic.optimizer import ScalarHeadOptimizer
from trl_steady.features.reward_model.examples import Example, tokens_of
from trl_steady.features.reward_model.feature import RewardModelPart
from trl_steady.functional import reward_models


def fit(
    part: RewardModelPart,
    learner: ScalarHeadOptimizer,
    examples: Sequence[Example],
    *,
    epochs: int,
    rate: float,
    generator: torch.Generator,
) -> None:
    """Train the reward model on examples, in batches as large as the policy's. Every process must call this.

    Each of the `epochs` has another order. With `share_prompts`, answers to one prompt come together, so that a pass
    computes it once. InstructGPT (arXiv 2203.02155, section 3.5) does so too. Examples and generator are the same on
    all processes.
    """
    args, accelerator = part.trainer.args, part.trainer.accelerator
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    quiet = args.disable_tqdm or not accelerator.is_main_process
    bar = tqdm(total=epochs * len(examples), desc="reward model", unit="example", disable=quiet)
    learner.switch(True)
    try:
        with bar, part.dropping_out(True):  # also in the first step of a resumed run
            for _ in range(epochs):
                order = _order(examples, generator, together=args.share_prompts)
                for start in range(0, len(order), batch):
                    rows = [examples[i] for i in order[start : start + batch]]
                    _step(part, learner, rows, rate)
                    bar.update(len(rows))
    finally:
        learner.switch(False)


def _order(examples: Sequence[Example], generator: torch.Generator, *, together: bool) -> list[int]:
    """Return the numbers of the examples in a random order, those of one prompt together if asked."""
    groups: dict[object, list[int]] = {}
    for number, example in enumerate(examples):
        groups.setdefault(tokens_of(example) if together else number, []).append(number)
    listed = list(groups.values())
    return [number for i in torch.randperm(len(listed), generator=generator).tolist() for number in listed[i]]


def _step(part: RewardModelPart, learner: ScalarHeadOptimizer, rows: Sequence[Example], rate: float) -> None:
    args, accelerator = part.trainer.args, part.trainer.accelerator
    # the learner takes the mean over processes, and the loss is the mean over the labels of all of them
    factor = accelerator.num_processes / sum(len(row.labels) for row in rows)
    rows = rows[accelerator.process_index :: accelerator.num_processes]
    for micro_batch in _micro_batches(rows, args.per_device_train_batch_size, args.token_budget):
        with part.trainer.until_backward():
            losses, _, _ = _losses(part, micro_batch)
            (losses.sum() * factor).backward()
    learner.step(rate)


def _micro_batches(rows: Sequence[Example], size: int, budget: int | None) -> Iterator[Sequence[Example]]:
    """Cut a batch where it has `size` answers, or where `token_budget` would be exceeded. An example stays whole."""

    def fits(cut: Sequence[Example]) -> bool:
        # one token more is scored
        lengths = [len(row.prompt) + len(completion) + 1 for row in cut for completion in row.completions]
        return len(lengths) <= size and (budget is None or sum(lengths) <= budget)

    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or not fits(rows[start : end + 1]):
            yield rows[start:end]
            start = end


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
def measure(part: RewardModelPart, examples: Sequence[Example]) -> dict[str, float]:
    """Return figures of how well the reward model knows examples, the same on all processes; none without examples.

    `accuracy` is the share of scores on the right side of 0. With pairs it is the share in which the right answer has
    the higher score. `calibration_error` is that of sigmoid(score), or of sigmoid(difference) with pairs.
    """
    if not examples:
        return {}
    accelerator, size = part.trainer.accelerator, part.trainer.args.per_device_train_batch_size
    count = -(-len(examples) // accelerator.num_processes)  # each process runs as many passes
    numbers = [i * accelerator.num_processes + accelerator.process_index for i in range(count)]
    found: list[tuple[int, Tensor]] = []  # number of an example, and losses, logits and labels (3, n)
    with part.dropping_out(False):
        for start in range(0, count, size):
            batch = numbers[start : start + size]
            rows = [examples[min(number, len(examples) - 1)] for number in batch]
            columns = torch.stack([column.double().cpu() for column in _losses(part, rows)])
            found += zip(batch, columns.split([len(row.labels) for row in rows], dim=1), strict=True)
    in_order = sorted(gather_object(found), key=itemgetter(0))  # the sums of means round as on one process
    losses, logits, labels = torch.cat([columns for _, columns in in_order[: len(examples)]], dim=1)
    return {
        "accuracy": ((logits > 0) == (labels > 0)).double().mean().item(),
        "calibration_error": reward_models.calibration_error(logits.sigmoid(), labels).item(),
        "loss": losses.mean().item(),
    }
