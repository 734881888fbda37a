"""Training and measuring a reward model on examples, on all processes."""

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm

from trl_steady.core.devices import copy_async
from trl_steady.features.reward_model.examples import Example, prompt_key
from trl_steady.features.reward_model.scorer import RewardScorer
from trl_steady.features.scalar_head.optimizer import ScalarHeadOptimizer
from trl_steady.functional import reward_models
from trl_steady.trl_bridge.models import in_mode


def fit(
    scorer: RewardScorer,
    optimizer: ScalarHeadOptimizer,
    examples: Sequence[Example],
    *,
    epochs: int,
    learning_rate: float,
    generator: torch.Generator,
) -> None:
    """Train the reward model on examples, in batches as large as the policy's. Every process must call this function.

    Each of the `epochs` has another order. With `share_prompts`, completions of one prompt come together, so that a
    pass computes it once. InstructGPT (arXiv 2203.02155, section 3.5) does so too. Examples and generator are the same
    on all processes.
    """
    args, accelerator = scorer.trainer.args, scorer.trainer.accelerator
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    is_quiet = args.disable_tqdm or not accelerator.is_main_process
    bar = tqdm(total=epochs * len(examples), desc="reward model", unit="example", disable=is_quiet)
    optimizer.enable(True)
    try:
        with bar, in_mode(scorer.model.bare, is_training=True):  # also in the first step of a resumed run
            for _ in range(epochs):
                order = _random_order(examples, generator, together=args.share_prompts)
                for start in range(0, len(order), size):
                    batch = [examples[i] for i in order[start : start + size]]
                    _step(scorer, optimizer, batch, learning_rate)
                    bar.update(len(batch))
    finally:
        optimizer.enable(False)


def _random_order(examples: Sequence[Example], generator: torch.Generator, *, together: bool) -> list[int]:
    """Return the indices of the examples in a random order, those of one prompt together if asked."""
    groups: dict[object, list[int]] = {}
    for index, example in enumerate(examples):
        key = prompt_key(example) if together else index
        groups.setdefault(key, []).append(index)
    in_order = list(groups.values())
    shuffled: list[int] = []
    for i in torch.randperm(len(in_order), generator=generator).tolist():
        shuffled.extend(in_order[i])
    return shuffled


def _step(
    scorer: RewardScorer, optimizer: ScalarHeadOptimizer, batch: Sequence[Example], learning_rate: float
) -> None:
    """Take a step on a batch of all processes."""
    args, accelerator = scorer.trainer.args, scorer.trainer.accelerator
    # the optimizer takes the mean over processes, and the loss is the mean over the labels of all of them
    factor = accelerator.num_processes / sum(len(example.labels) for example in batch)
    share = batch[accelerator.process_index :: accelerator.num_processes]
    for micro_batch in _micro_batches(share, args.per_device_train_batch_size, args.token_budget):
        with scorer.trainer.until_backward():
            losses, _, _ = _losses(scorer, micro_batch)
            loss = losses.sum() * factor
            optimizer.scaler.scale(loss).backward()
        optimizer.add_loss(loss)
    optimizer.step(learning_rate, "reward model")


def _micro_batches(examples: Sequence[Example], size: int, budget: int | None) -> Iterator[Sequence[Example]]:
    """Yield micro-batches of at most `size` completions and, with `token_budget`, tokens. An example stays whole."""

    def fits(part: Sequence[Example]) -> bool:
        completions = tokens = 0
        for example in part:
            for completion in example.completions:
                completions += 1
                tokens += len(example.prompt) + len(completion) + 1  # the forward has one token more
        return completions <= size and (budget is None or tokens <= budget)

    start = 0
    for end in range(1, len(examples) + 1):
        if end == len(examples) or not fits(examples[start : end + 1]):
            yield examples[start:end]
            start = end


def _losses(scorer: RewardScorer, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (n,), logits (n,) of the labels being 1, and labels (n,)."""
    prompt_ids: list[list[int]] = []
    completion_ids: list[list[int]] = []
    ends: list[list[int]] = []
    all_labels: list[float] = []
    for example in examples:
        for completion in example.completions:
            prompt_ids.append(example.prompt.tolist())
            completion_ids.append(completion.tolist())
        ends.extend(example.ends)
        all_labels.extend(example.labels)
    scores = scorer.scores(prompt_ids, completion_ids, ends)
    labels = copy_async(torch.tensor(all_labels), scores.device)
    if len(examples[0].completions) == 2:
        right, wrong = scores[0::2, 0], scores[1::2, 0]
        return reward_models.pair_loss(right, wrong), right - wrong, labels
    step_counts = torch.tensor(list(map(len, ends)))
    is_score = torch.arange(scores.size(1)) < step_counts.unsqueeze(1)
    rows, columns = copy_async(is_score.nonzero().T, scores.device)
    logits = scores[rows, columns]
    return reward_models.verdict_loss(logits, labels), logits, labels


@torch.no_grad()
def measure(scorer: RewardScorer, examples: Sequence[Example]) -> dict[str, float]:
    """Return figures of how well the reward model knows examples, the same on all processes; none without examples.

    `accuracy` is the share of scores on the right side of 0. With pairs it is the share in which the right completion
    has the higher score. `calibration_error` is that of sigmoid(score), or of sigmoid(difference) with pairs.
    """
    if not examples:
        return {}
    accelerator = scorer.trainer.accelerator
    size = scorer.trainer.args.per_device_train_batch_size
    count = math.ceil(len(examples) / accelerator.num_processes)  # each process runs as many passes
    indices = range(accelerator.process_index, count * accelerator.num_processes, accelerator.num_processes)
    measured: list[tuple[int, Tensor]] = []  # index of an example, and losses, logits and labels (3, n)
    for start in range(0, count, size):
        batch_indices = indices[start : start + size]
        batch: list[Example] = []
        label_counts: list[int] = []
        for index in batch_indices:
            example = examples[min(index, len(examples) - 1)]
            batch.append(example)
            label_counts.append(len(example.labels))
        columns = torch.stack([column.double() for column in _losses(scorer, batch)]).cpu()
        measured += zip(batch_indices, columns.split(label_counts, dim=1), strict=True)
    in_order = sorted(gather_object(measured), key=itemgetter(0))  # the sums of means round as on one process
    losses, logits, labels = torch.cat([columns for _, columns in in_order[: len(examples)]], dim=1)
    return {
        "accuracy": ((logits > 0) == (labels > 0)).double().mean().item(),
        "calibration_error": reward_models.calibration_error(logits.sigmoid(), labels).item(),
        "loss": losses.mean().item(),
    }
