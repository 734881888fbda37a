"""Samplers that are not the policy: its weights rounded, or its weights of some rollouts ago."""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trl_steady import GRPOTrainer

__all__ = ["ROUNDINGS", "Sampler"]

WORTH = 16  # tokens that are worth a pass of their own, if all prompts begin with them
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitudes of e2m1


def _scaled(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return a weight (rows, columns) whose rows have this largest magnitude, and the scales (rows, 1)."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / largest
    return weight / scale, scale


def _integers(weight: Tensor, *, largest: int) -> Tensor:
    scaled, scale = _scaled(weight, largest)
    return scaled.round() * scale


def _e2m1(weight: Tensor) -> Tensor:
    scaled, scale = _scaled(weight, 6.0)
    magnitudes = FP4.to(weight.device)
    nearest = (scaled.abs()[..., None] - magnitudes).abs().argmin(dim=-1)
    return magnitudes[nearest] * scaled.sign() * scale


def _e4m3(weight: Tensor) -> Tensor:
    scaled, scale = _scaled(weight, 448.0)
    return scaled.to(torch.float8_e4m3fn).float() * scale


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda weight: weight,
    "bf16": lambda weight: weight.bfloat16().float(),
    "e4m3": _e4m3,
    "e2m1": _e2m1,
    **{f"{2 * n + 1} levels": (lambda w, n=n: _integers(w, largest=n)) for n in (127, 31, 15, 7, 3, 2, 1)},
}
"""Each rounds a weight (rows, columns), with one scale for a row. "255 levels" is int8, "15 levels" int4."""


class Sampler:
    """A `rollout_func` that samples with a copy of the policy: taken `lag` rollouts ago, rounded, in a number format.

    Matrices of linear layers are rounded; embeddings, the head and norms are not, as in engines. The log-probs it
    returns are those of the distribution it sampled from.

    Args:
        rounding: A key of `ROUNDINGS`.
        lag: Age of the copy in rollouts. Before that many rollouts, it is the policy that the run began with.
        dtype: The number format of the copy's weights and passes, as `dtype` of vLLM.
    """

    def __init__(self, rounding: str = "none", lag: int = 0, dtype: str = "float32") -> None:
        self.rounding, self.past = ROUNDINGS[rounding], deque[dict[str, Tensor]](maxlen=lag + 1)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.model: PreTrainedModel | None = None

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Sync, and return one completion for each prompt with the log-probs of its tokens."""
        self.past.append({name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()})
        if self.model is None:  # a deepcopy would share the forward that TRL has patched
            config = copy.deepcopy(trainer.model.config)
            copied: Any = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
            self.model = copied.to(trainer.model.device).eval()
        self.model.load_state_dict(self.past[0])
        with torch.no_grad():
            for name, module in self.model.named_modules():
                if isinstance(module, torch.nn.Linear) and name != "lm_head":
                    module.weight.copy_(self.rounding(module.weight))
        return sampled(self.model, trainer, prompts)


@torch.no_grad()
def sampled(model: PreTrainedModel, trainer: GRPOTrainer, prompts: Sequence[str]) -> dict[str, Any]:
    """Sample a completion of each prompt at the trainer's temperature, from the whole vocabulary."""
    tokenizer: Any = trainer.processing_class
    ends: list[int] = trainer.model.generation_config.eos_token_id
    inputs = tokenizer(list(prompts), return_tensors="pt").to(model.device)
    output: Any = model.generate(
        **inputs,
        **_read(model, inputs["input_ids"]),
        do_sample=True,
        temperature=trainer.args.temperature,
        top_k=0,
        max_new_tokens=trainer.args.max_completion_length,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    completions = output.sequences[:, inputs["input_ids"].size(1) :]
    log_probs = torch.stack(output.scores, dim=1).float().log_softmax(-1)
    log_probs = log_probs.gather(-1, completions[..., None])[..., 0].cpu()
    is_end = torch.isin(completions, torch.tensor(ends, device=completions.device))
    lengths = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, completions.size(1)).tolist()
    return {
        "prompt_ids": inputs["input_ids"].tolist(),
        "completion_ids": [ids[:n] for ids, n in zip(completions.tolist(), lengths, strict=True)],
        "logprobs": [own[:n] for own, n in zip(log_probs.tolist(), lengths, strict=True)],
    }


def _read(model: PreTrainedModel, prompts: Tensor) -> dict[str, Any]:
    """Read what all prompts (number, tokens) begin with, such as solved examples, only once."""
    is_same = (prompts == prompts[0]).all(dim=0)[:-1]
    length = int(is_same.cumprod(dim=0).sum())
    if length < WORTH:
        return {}
    cache: Any = model(input_ids=prompts[:1, :length], use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(prompts))
    return {"past_key_values": cache, "use_cache": True}  # transformers' Trainer sets False
