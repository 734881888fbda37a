"""Checks of a policy during a run: its accuracy, and its distance to the optimum of the objective with a KL."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from common import small_model
from moe.digits import Digits, Problem, answer
from sampling_mask.train import asked_with
from trl_steady import GRPOTrainer

__all__ = ["Checks", "distance", "scored"]


def scored(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """Return the log-probs (answers, tokens, vocabulary) of all tokens at the places after the prompt."""
    return model(input_ids=ids[:, :-1]).logits[:, prompt - 1 :].double().log_softmax(-1)


@torch.no_grad()
def distance(
    policy: Any, start: Any, tokenizer: Any, task: Digits, problems: Sequence[Problem], *, samples: int, beta: float
) -> float:
    """Return the KL of the policy to the optimum, in nats per answer, mean over problems.

    The objective is J = E[reward] - beta KL(policy | start), over whole answers, with a reward of 1 for the one right
    answer. Its optimum is proportional to start * exp(reward / beta), where J is beta log(1 - p + p exp(1 / beta)).
    Here p is the start's probability of the right answer. The J of any other policy is smaller, by beta times its KL
    to the optimum. Only KL(policy | start) is estimated: from `samples` answers to each problem, with a sum over the
    vocabulary at each token.
    """
    inputs = tokenizer([task.prompt(problem) for problem in problems], return_tensors="pt").to(policy.device)
    prompt = inputs["input_ids"].size(1)
    right = tokenizer([answer(problem) for problem in problems], return_tensors="pt")["input_ids"].to(policy.device)
    given = torch.cat([inputs["input_ids"], right], dim=1)
    of_right = [
        scored(model, given, prompt).gather(-1, right[..., None])[..., 0].sum(1).exp() for model in (policy, start)
    ]
    asked = {name: value.repeat_interleave(samples, 0) for name, value in inputs.items()}
    ids = policy.generate(**asked, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=right.size(1))
    is_token = torch.ones_like(ids[:, prompt:], dtype=torch.bool)
    is_token[:, 1:] = (ids[:, prompt:-1] == tokenizer.eos_token_id).cumsum(1) == 0  # up to and including the end
    own, first = (scored(model, ids, prompt) for model in (policy, start))
    kl = ((own.exp() * (own - first)).sum(-1) * is_token).sum(1).mean().item()
    best = (1 + of_right[1] * math.expm1(1 / beta)).log().mean().item()
    return best - of_right[0].mean().item() / beta + kl


class Checks(TrainerCallback):
    """Check the policy on held-out problems, without changing the run's random numbers.

    Args:
        trainer: The trainer.
        task: The task.
        held_out: Number of held-out problems.
        samples: Answers to each of them.
        every: Updates between two checks. There is one before training, and one at its end.
        top_p: Also sample answers with it. "own": that of the training.
        beta: Also measure the distance to the optimum of the objective with this weight of the KL.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        task: Digits,
        held_out: int,
        samples: int,
        every: int,
        top_p: float | str | None = None,
        beta: float | None = None,
    ) -> None:
        self.trainer, self.task, self.samples, self.every = trainer, task, samples, every
        self.top_p = trainer.args.top_p if top_p == "own" else top_p
        self.beta = beta
        _, self.problems = task.split(held_out)
        if beta is not None:
            self.start = copy.deepcopy(trainer.ref_model).eval()
        self.found: dict[str, dict[int, float]] = {}
        """By figure and update: `accuracy`, `truncated` (with `top_p`) and `distance`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the untrained policy."""
        self._check(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check after every `every` updates."""
        if state.global_step % self.every == 0:
            self._check(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the last policy, if a run has ended between two checks."""
        if state.global_step not in self.found["accuracy"]:
            self._check(state.global_step)

    def _check(self, step: int) -> None:
        own, seed = {}, self.trainer.args.seed
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            own["accuracy"] = self._right()
            if self.top_p is not None:
                torch.manual_seed(seed)
                with asked_with(self.trainer.model, self.top_p):
                    own["truncated"] = self._right()
            if self.beta is not None:
                torch.manual_seed(seed)
                own["distance"] = self._distance(self.beta)
        for name, value in own.items():
            self.found.setdefault(name, {})[step] = round(value, 6)

    def _right(self) -> float:
        how: Any = {"samples": self.samples, "task": self.task}
        return float(small_model.right_answers(self.trainer, self.problems, **how).mean())

    def _distance(self, beta: float) -> float:
        policy = self.trainer.model.eval()
        asked = policy, self.start, self.trainer.processing_class, self.task, self.problems
        found = distance(*asked, samples=self.samples, beta=beta)
        policy.train()
        return found
