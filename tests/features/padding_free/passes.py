"""Passes of a model of any family, with the padding of a batch and without it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tools import families
from tests.tools.headroom import within
from trl_steady.features.padding_free.attention import PackedAttention
from trl_steady.features.padding_free.model import PaddingFreeModel
from trl_steady.features.padding_free.packing import Segment, sequence_lengths
from trl_steady.features.padding_free.support import Support

# Rounding, in float32. Of log-probs and entropies: of the largest in the batch. Of the gradient of a parameter: of its
# largest, or of a hundredth of the model's largest where all of it is rounding, such as that of the biases of keys.
OUTPUTS, GRADIENTS, FLOOR = 1e-5, 1e-4, 1e-2
# the recurrent layers of Qwen3.5 round most, by 2.8e-5 on kernels for SSE4.1
GRADIENTS_OF = {"qwen3_5": 2e-4}

# 3 columns of padding at the left and 2 at the right of all rows; the first two have the same prompt.
PROMPT_WIDTH, COMPLETION_WIDTH = 11, 15
PROMPTS, COMPLETIONS = (8, 8, 3, 5), (10, 4, 0, 13)

Batch = dict[str, Tensor]


@dataclass
class Computed:
    log_probs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]


def make_batch() -> Batch:
    mask = torch.tensor(
        [
            [0] * (PROMPT_WIDTH - prompt) + [1] * (prompt + completion) + [0] * (COMPLETION_WIDTH - completion)
            for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
        ]
    )
    ids = torch.randint(2, families.VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(0))
    ids[1, :PROMPT_WIDTH] = ids[0, :PROMPT_WIDTH]
    ids *= mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT_WIDTH] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compute(call: Callable[..., Any], model: PreTrainedModel, batch: Batch) -> Computed:
    """Of random weights, so that each place has its own share in the gradients."""
    model.zero_grad(set_to_none=True)
    outputs = call(**batch, fused_lm_head=True)
    told = batch["labels"][:, 1:] != -100
    weights = torch.randn(2, *told.shape, generator=torch.Generator().manual_seed(1))
    loss = (weights[0] * outputs.log_probs + weights[1] * outputs.entropy)[told].sum()
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return Computed(outputs.log_probs.detach()[told], outputs.entropy.detach()[told], gradients)


def without_padding(
    model: PreTrainedModel,
    of: Support,
    batch: Batch,
    *,
    share_prompts: bool = False,
    prompt_width: int = PROMPT_WIDTH,
) -> tuple[Computed, tuple[int, int]]:
    """What `PaddingFreeModel` makes of a batch, and the rows and columns of tokens that the model has seen for it."""
    seen: list[tuple[int, int]] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _module, _inputs, named: seen.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    attention = PackedAttention(model)
    with ExitStack() as until_backward:

        @contextmanager
        def attend_within(segments: Sequence[Segment]) -> Iterator[None]:
            until_backward.enter_context(attention.switched())  # checkpointing runs the layers again in the backward
            with attention.within(segments):
                yield

        shared = batch["input_ids"] if share_prompts else None
        lengths = sequence_lengths(batch["attention_mask"], prompt_width=prompt_width, input_ids=shared)
        assert lengths is not None
        unpadded = PaddingFreeModel(
            model, of, prompt_width=prompt_width, lengths=iter(lengths), attend_within=attend_within
        )
        computed = compute(unpadded, model, batch)
    hook.remove()
    return computed, seen[0]


def difference(value: Tensor, expected: Tensor, scale: float) -> float:
    assert value.isfinite().all()
    return ((value - expected).abs().max() / scale).item()


def assert_same(computed: Computed, expected: Computed, gradients: float = GRADIENTS) -> None:
    for field in ("log_probs", "entropy"):
        reference = getattr(expected, field)
        assert within(difference(getattr(computed, field), reference, reference.abs().max().item()), OUTPUTS), field
    assert computed.gradients.keys() == expected.gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    apart = {
        name: difference(computed.gradients[name], gradient, gradient.abs().max().item() + FLOOR * largest)
        for name, gradient in expected.gradients.items()
    }
    assert not {name: ratio for name, ratio in apart.items() if not within(ratio, gradients)}


def expected_shape(kind: str, batch: Batch) -> tuple[int, int]:
    """Of the tokens that go through the model."""
    mask = batch["attention_mask"]
    used = mask.any(0).nonzero().squeeze(-1).tolist()
    return {
        "packed": (1, int(mask.sum())),
        "cut": (len(mask), used[-1] + 1 - used[0]),
        "cut right": (len(mask), used[-1] + 1),
        "whole": (len(mask), mask.size(1)),
    }[kind]
