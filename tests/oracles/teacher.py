"""Reference values for a teacher's part in group-relative RL, in float64, written from the formulas alone.

Nothing is batched or padded: a batch is a list with a tensor of its own length for each completion, so that no
convention of padding can hide a mistake. Tokens that do not count are dropped by an index and never multiplied by 0,
so that NaN is harmless there. i counts completions, t tokens.

* Groups are consecutive runs of `group_size` completions.
* A mask has 1 for the policy's own tokens and 0 for those of a tool. Models read both.

Papers: RLSD, arXiv 2604.03128, equations 13 to 15, for "weight". "add" is on-policy distillation. The ratio is PPO's.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

WEIGHT_LOW, WEIGHT_HIGH = 0.8, 1.2
Ragged = Sequence[Tensor]


def sequence_logps(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[Tensor]:
    """log p(y_t | prompt, y_<t) with logits / temperature: one forward of each sequence, in eval mode."""
    was_training = model.training
    model.eval()
    found: list[Tensor] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        logits = logits.double() / temperature
        of_tokens: list[Tensor] = []
        for t, token in enumerate(completion):
            row = logits[len(prompt) + t - 1]  # predicts completion token t
            of_tokens.append(row[token] - torch.logsumexp(row, dim=-1))
        found.append(torch.stack(of_tokens))
    model.train(was_training)
    return found


def group_advantages(rewards: Sequence[float], group_size: int, *, scale: bool) -> Tensor:
    """(N,): reward - mean of the group, with `scale` divided by (std with n - 1, + 1e-4)."""
    advantages: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = [Fraction(float(reward)) for reward in rewards[start : start + group_size]]
        mean = sum(group) / group_size
        centred = [float(reward - mean) for reward in group]  # exactly 0 for equal rewards
        if scale:
            std = float(sum((reward - mean) ** 2 for reward in group) / (group_size - 1)) ** 0.5
            centred = [value / (std + 1e-4) for value in centred]
        advantages += centred
    return torch.tensor(advantages, dtype=torch.float64)


def teacher_advantages(
    advantages: Tensor, teacher_logps: Ragged, old_logps: Ragged, mode: str, coef: float
) -> list[Tensor]:
    """The advantage of each token.

    mode "add":     A_t = A + coef (log pi_T - log pi_old)
    mode "weight":  A_t = A [(1 - coef) + coef clip(exp(sign(A) (log pi_T - log pi_old)), 0.8, 1.2)]
    """
    found: list[Tensor] = []
    for advantage, of_teacher, of_old in zip(advantages.tolist(), teacher_logps, old_logps, strict=True):
        difference = of_teacher.detach().double() - of_old.detach().double()
        if mode == "add":
            found.append(advantage + coef * difference)
        elif advantage == 0:
            found.append(torch.zeros_like(difference))
        else:
            sign = 1.0 if advantage > 0 else -1.0
            weight = torch.exp(sign * difference).clamp(WEIGHT_LOW, WEIGHT_HIGH)
            found.append(advantage * ((1.0 - coef) + coef * weight))
    return found


def token_losses(
    logps: Ragged,
    old_logps: Ragged,
    advantages: Ragged,
    masks: Sequence[Sequence[bool]],
    epsilon: float,
    ref_logps: Ragged | None = None,
    beta: float = 0.0,
) -> list[Tensor]:
    """The losses of the tokens that count: the clipped ratio's, and beta times k3 times the ratio."""
    found: list[Tensor] = []
    for i, own in enumerate(logps):
        counts = torch.tensor(masks[i])
        new, old, advantage = own[counts], old_logps[i].detach()[counts], advantages[i].detach()[counts]
        ratio = torch.exp(new - old)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1.0 - epsilon, 1.0 + epsilon) * advantage)
        if ref_logps is not None:
            x = ref_logps[i].detach()[counts] - new
            loss = loss + beta * (torch.exp(x) - x - 1.0) * ratio
        found.append(loss)
    return found


def total_loss(token_losses: Ragged, aggregation: str, max_completion_length: int = 0) -> Tensor:
    """One number.

    "grpo"     mean over each completion's tokens, then over completions
    "dapo"     sum / number of tokens
    "dr_grpo"  sum / (number of completions times `max_completion_length`)
    """
    total = torch.stack([losses.sum() for losses in token_losses])
    if aggregation == "grpo":
        return (total / torch.tensor([max(len(losses), 1) for losses in token_losses])).mean()
    if aggregation == "dapo":
        return total.sum() / sum(map(len, token_losses))
    assert aggregation == "dr_grpo"
    return total.sum() / (len(token_losses) * max_completion_length)


def teacher_kl(teacher_logps: Ragged, old_logps: Ragged, masks: Sequence[Sequence[bool]]) -> float:
    """The mean of log pi_old - log pi_T over all tokens that count."""
    total, count = 0.0, 0
    for of_teacher, of_old, mask in zip(teacher_logps, old_logps, masks, strict=True):
        differences = (of_old - of_teacher)[torch.tensor(mask)]
        total, count = total + float(differences.sum()), count + len(differences)
    return total / count


def agreement(advantages: Tensor, teacher_logps: Ragged, old_logps: Ragged, masks: Sequence[Sequence[bool]]) -> float:
    """Of the tokens that count, with A != 0 and another log-prob under the teacher: the share whose signs agree."""
    agree = eligible = 0
    for advantage, of_teacher, of_old, mask in zip(advantages.tolist(), teacher_logps, old_logps, masks, strict=True):
        for difference in (of_teacher - of_old)[torch.tensor(mask)].tolist():
            if advantage != 0 and difference != 0:
                eligible += 1
                agree += (advantage > 0) == (difference > 0)
    return agree / eligible if eligible else float("nan")
