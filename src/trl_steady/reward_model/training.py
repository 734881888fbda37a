"""Training and measuring a reward model on examples, on all processes."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm

from trl_steady.functional import reward_models
from trl_steady.reward_model.examples import Example
from trl_steady.reward_model.part import RewardModelPart

__all__ = ["Measure", "fit", "measure"]


class Measure(NamedTuple):
    """How well a reward model knows examples."""

    accuracy: float
    """Share of scores on the right side of 0; with pairs, of pairs in which the right answer has the higher score."""
    calibration_error: float
    """Expected calibration error of sigmoid(score), or of sigmoid(difference) with pairs."""
    loss: float


def fit(
    part: RewardModelPart,
    optimizer: torch.optim.Optimizer,
    examples: Sequence[Example],
    *,
    epochs: int,
    generator: torch.Generator,
) -> None:
    """Train the reward model on examples, in batches as large as the policy's. Every process must call this.

    Args:
        part: The part whose reward model learns.
        optimizer: An optimizer of the reward model's parameters.
        examples: The same on all processes.
        epochs: Passes over the examples, each in another order. With `share_prompts`, answers to one prompt come
            together, so that a pass computes it once. InstructGPT (arXiv 2203.02155, section 3.5) does so too.
        generator: Draws the orders. The same on all processes.
    """
    trainer = part.trainer
    args, accelerator = trainer.args, trainer.accelerator
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    assert part.model is not None
    parameters = [parameter for _, parameter in part.model.named_parameters()]
    quiet = args.disable_tqdm or not accelerator.is_main_process
    bar = tqdm(total=epochs * len(examples), desc="reward model", unit="example", disable=quiet)
    with bar as progress, part.dropping_out(True):  # also in the first step of a resumed run
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            for _ in range(epochs):
                order = _order(examples, generator, together=args.share_prompts)
                for start in range(0, len(order), batch):
                    rows = [examples[i] for i in order[start : start + batch]]
                    _step(part, optimizer, parameters, rows)
                    progress.update(len(rows))
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)
                parameter.grad = None


def _order(examples: Sequence[Example], generator: torch.Generator, *, together: bool) -> list[int]:
    """Return the numbers of the examples in a random order, those of one prompt together if asked."""
    groups: dict[Any, list[int]] = {}
    for number, own in enumerate(examples):
        groups.setdefault(tuple(own.prompt.tolist()) if together else number, []).append(number)
    listed = list(groups.values())
    return [number for i in torch.randperm(len(listed), generator=generator).tolist() for number in listed[i]]


def _step(
    part: RewardModelPart, optimizer: torch.optim.Optimizer, parameters: list[Any], rows: Sequence[Example]
) -> None:
    args, accelerator = part.trainer.args, part.trainer.accelerator
    optimizer.zero_grad()
    total = sum(len(own.labels) for own in rows)
    own = rows[accelerator.process_index :: accelerator.num_processes]
    for micro_batch in _micro_batches(own, args.per_device_train_batch_size, args.token_budget):
        with part.trainer.until_backward_ends():
            losses, _, _ = _losses(part, micro_batch)
            (losses.sum() / total).backward()
    for parameter in parameters:
        if parameter.grad is None:  # of an expert that no token has reached
            parameter.grad = torch.zeros_like(parameter)
        if accelerator.num_processes > 1:
            torch.distributed.all_reduce(parameter.grad)
    if args.max_grad_norm > 0:
        torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
    optimizer.step()


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
    texts = [
        (own.prompt, completion, ends)
        for own in rows
        for completion, ends in zip(own.completions, own.ends, strict=True)
    ]
    scores = part.scores(*(list(column) for column in zip(*texts, strict=True)))
    labels = torch.tensor([label for own in rows for label in own.labels], device=scores.device)
    if len(rows[0].completions) == 2:
        logits = scores[0::2, 0] - scores[1::2, 0]
        return reward_models.pair_loss(scores[0::2, 0], scores[1::2, 0]), logits, labels
    is_score = torch.tensor([[i < len(ends) for i in range(scores.size(1))] for _, _, ends in texts])
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
    count = -(-len(examples) // accelerator.num_processes)  # each process runs the same number of passes
    own = [
        examples[min(i * accelerator.num_processes + accelerator.process_index, len(examples) - 1)]
        for i in range(count)
    ]
    found: list[Tensor] = []
    with part.dropping_out(False):
        for start in range(0, count, size):
            rows = own[start : start + size]
            columns = torch.stack([column.double().cpu() for column in _losses(part, rows)])
            found += columns.split([len(row.labels) for row in rows], dim=1)
    gathered = gather_object(found)
    in_order = [gathered[process * count + i] for i in range(count) for process in range(accelerator.num_processes)]
    losses, logits, labels = torch.cat(in_order[: len(examples)], dim=1)
    return Measure(
        accuracy=((logits > 0) == (labels > 0)).double().mean().item(),
        calibration_error=reward_models.calibration_error(logits.sigmoid(), labels).item(),
        loss=losses.mean().item(),
    )
