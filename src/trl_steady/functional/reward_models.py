"""Losses and measures of reward models.

Sources: InstructGPT (arXiv 2203.02155), section 3.5, equation 1, for pairs; Math-Shepherd (arXiv 2312.08935) for the
losses of its outcome and process reward models, and for the labels of steps.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid


def pair_loss(right: Tensor, wrong: Tensor) -> Tensor:
    """Return -log sigmoid(r_w - r_l) for each pair, the Bradley-Terry loss.

    `right` and `wrong` are the (N,) scores of the better and the worse answers.

    >>> pair_loss(torch.tensor([1.0]), torch.tensor([1.0])).exp()  # doctest: +NUMBER
    tensor([2.0])
    """
    return -logsigmoid(right - wrong)


def verdict_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy (N,) of each score, as a logit, with its label: 1 = good, 0 = not."""
    return binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")


def step_labels(reached: Tensor) -> Tensor:
    """Return (S,) labels of steps: 1 if any continuation from the end of the step reaches the right answer.

    `reached` is (S, N) bool. Math-Shepherd (arXiv 2312.08935) calls this "hard estimation".
    """
    return reached.any(-1).float()


def calibration_error(probabilities: Tensor, labels: Tensor, *, bins: int = 10) -> Tensor:
    """Return the expected calibration error: how far stated probabilities are from what happened, on average.

    Guo et al., arXiv 1706.04599, section 2, equation 3, with bins of equal width.

    `probabilities` (N,) are those of the label 1. The result is between 0 and 1, and NaN for N = 0.
    """
    probabilities, labels = probabilities.double(), labels.double()
    index = (probabilities * bins).long().clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=torch.double, device=index.device).index_add_(0, index, probabilities - labels)
    return gaps.abs().sum() / len(labels)
