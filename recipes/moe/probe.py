"""Measure how experts and ratios change between a rollout and the last of its updates."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from common import run
from moe.digits import Digits, Problem
from trl_steady import GRPOConfig, GRPOTrainer


@contextlib.contextmanager
def routed(model: torch.nn.Module, routes: Sequence[Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Collect the experts that each layer chooses while the context is open: (tokens, experts per token) per layer.

    Args:
        model: A Qwen3-MoE.
        routes: Experts that replace the choices. Their weights come from the live router.
    """
    chosen: list[Tensor] = []

    def hook(router: Qwen3MoeTopKRouter, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, experts = output
        if routes is not None:
            experts = routes[len(chosen)]
            weights = logits.softmax(-1, torch.float).gather(-1, experts)
            weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)
        chosen.append(experts)
        return logits, weights, experts

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, Qwen3MoeTopKRouter):
                hooks.callback(module.register_forward_hook(hook).remove)
        yield chosen


def changed(before: Sequence[Tensor], after: Sequence[Tensor], tokens: Tensor) -> float:
    """Return the share of experts in `after` that are not in `before`, over `tokens` and all layers, in any order."""
    differs = [(new[..., None] != old[..., None, :]).all(-1) for old, new in zip(before, after, strict=True)]
    return torch.stack([layer[tokens.flatten()].float().mean() for layer in differs]).mean().item()


def spread(log_ratios: Tensor) -> dict[str, float]:
    """Return the standard deviation of the log-ratios, and the share of ratios above 2 or below 1/2."""
    beyond = (log_ratios.abs() > torch.tensor(2.0).log()).float().mean()
    return {"log_ratio_std": log_ratios.std().item(), "beyond_2": beyond.item()}


class Probe(TrainerCallback):
    """Measure changed experts and ratios in the same way for every run. The probe does not change the training.

    Before the first update of a rollout, the policy answers held-out problems, and the probe stores its routes and
    log-probs. Before the last update, it scores the same tokens twice: with the stored routes and with live routes.
    It writes the results to the trainer's history: `probe/changed`, `probe/live/...` and `probe/replayed/...`.
    """

    def __init__(self, trainer: GRPOTrainer, problems: Sequence[Problem], task: Digits) -> None:
        self.trainer, self.problems, self.task = trainer, problems, task

    @torch.no_grad()
    def on_step_begin(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Answer before the first update of a rollout, and score again before the last."""
        updates = run.updates_per_rollout(args)
        if state.global_step % updates == 0:
            self._answer(state.global_step)
            self.routes, self.log_probs = self._score(None)
        if state.global_step % updates == updates - 1:
            routes, live = self._score(None)
            _, replayed = self._score(self.routes)
            found = {"probe/changed": changed(self.routes, routes, self.mask[:, 1:])}
            for name, scored in (("live", live), ("replayed", replayed)):
                found |= {f"probe/{name}/{key}": value for key, value in spread(scored - self.log_probs).items()}
            state.log_history.append({"step": state.global_step + 1, **found})

    def _answer(self, seed: int) -> None:
        """Sample answers in the same way in every run, without changing the run's random numbers."""
        model, tokenizer = self.trainer.model, self.trainer.processing_class
        inputs = tokenizer([self.task.prompt(problem) for problem in self.problems], return_tensors="pt")
        self.prompt = inputs["input_ids"].size(1)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            how = {"do_sample": True, "temperature": self.trainer.args.temperature, "top_k": 0}
            longest = self.trainer.args.max_completion_length
            self.ids = model.generate(**inputs.to(model.device), max_new_tokens=longest, **how)
        ended = self.ids[:, self.prompt :] == tokenizer.eos_token_id
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)
        self.mask[:, self.prompt + 1 :] = ended.cumsum(1)[:, :-1] == 0  # up to and including the end

    def _score(self, routes: Sequence[Tensor] | None) -> tuple[list[Tensor], Tensor]:
        """Return the routes of all tokens except the last, and the log-probs of the answers' tokens."""
        with routed(self.trainer.model, routes) as chosen:
            logits = self.trainer.model(input_ids=self.ids[:, :-1]).logits[:, self.prompt - 1 :]
        answers = self.ids[:, self.prompt :]
        log_probs = logits.float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        return chosen, log_probs[self.mask[:, self.prompt :]]
