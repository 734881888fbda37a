"""TRL's fused LM head on a GPU, where it scores the tokens with a label by Triton's kernels, gives what the CPU gives.

`make test-triton` runs the kernels. In `make test`, loops in torch stand for them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import trl.trainer.utils
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from tests.tools import tiny
from tests.tools.devices import CUDA, HAS_INTERPRETER, pretended_gpu, to_gpu
from tests.tools.headroom import within
from tests.tools.sets import candidate_sets
from trl_steady.features.sampling_mask.model import SamplingMaskModel
from trl_steady.trl_bridge.lm_head import per_token

VOCABULARY, BATCH, WIDTH = tiny.SIZES["vocab_size"], 3, 6
FAMILIES: dict[str, PretrainedConfig] = {
    "plain": tiny.CONFIGS["dense"],
    "softcapped": transformers.Gemma2Config(**tiny.SIZES, head_dim=8, final_logit_softcapping=3.0),
    "scaled": transformers.CohereConfig(**tiny.SIZES, logit_scale=0.3),
    "biased": transformers.PhiConfig(**tiny.SIZES, resid_pdrop=0.0),
}
Run = Callable[[PreTrainedModel, Tensor, Tensor], list[Tensor]]
"""A feature asks the head for this: a model, token ids and labels (B, L) give tensors (B, L - 1)."""


def build(family: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).to(dtype)
    bias = model.get_output_embeddings().bias
    assert (bias is not None) == (family == "biased")
    if bias is not None:
        torch.nn.init.normal_(bias)
    add_fused_lm_head(model, 0.8, outputs=("log_probs", "entropy"))
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Token ids, and labels without those of the prompts and of an end."""
    ids = torch.randint(VOCABULARY, (BATCH, WIDTH), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, :2], labels[1, 4:] = -100, -100
    return ids, labels


def policy(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> list[Tensor]:
    outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    return [outputs.log_probs, outputs.entropy]


def kept(model: PreTrainedModel, ids: Tensor, labels: Tensor, *, missing: int = -1, with_entropy: bool = True) -> Any:
    """Among sets of 1, 5 or 40 tokens, one of which may be missing."""
    flat = ids.flatten().tolist()
    sets = [sorted({token, *range(token % 7, [1, 5, 40][i % 3])}) for i, token in enumerate(flat)]
    index = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    bare = lambda *, token_indices, **batch: model(**batch, fused_lm_head=True)
    number = index.where(index != missing, -1)
    kept_mass = torch.zeros(2, dtype=torch.float64)
    wrapped = SamplingMaskModel(bare, candidate_sets(sets), number, with_entropy, kept_mass)
    outputs = wrapped(token_indices=index, input_ids=ids, labels=labels)
    return [outputs.log_probs, *([outputs.entropy] if with_entropy else []), wrapped.kept_mass]


def kept_but_one(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> list[Tensor]:
    return kept(model, ids, labels, missing=WIDTH + 3)


def kept_alone(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> list[Tensor]:
    return kept(model, ids, labels, with_entropy=False)


def critic(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> list[Tensor]:
    weight = torch.linspace(-1, 1, tiny.SIZES["hidden_size"], device=ids.device)
    return [per_token(model, lambda head: head.hidden.float() @ weight, input_ids=ids, labels=labels)]


def outcome(run: Run, model: PreTrainedModel, ids: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the results, and the gradients of a loss in which all of them have a part."""
    results = run(model, ids, labels)
    weights = torch.linspace(-1, 2, BATCH * (WIDTH - 1), device=ids.device).view(BATCH, -1)
    sum((weights * each).sum() for each in results if each.requires_grad).backward()
    gradients = [own.grad for own in model.parameters() if own.grad is not None]
    return [each.detach().cpu() for each in (*results, *gradients)]


@pytest.mark.fast_rows(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("run", "family"),
    [  # what the head does to logits matters where TRL's function computes them
        *((run, family) for run in (policy, kept_but_one) for family in FAMILIES),
        *((run, "plain") for run in (kept, kept_alone, critic)),
    ],
)
def test_the_head_of_a_gpu_gives_what_that_of_the_cpu_gives(
    run: Run, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 100)  # of the vocabulary: three rounds
    expected = outcome(run, build(family, dtype), *batch())
    model = build(family, dtype)
    with pretended_gpu() as gpu:
        to_gpu(model)
        got = outcome(run, model, *(each.to(CUDA) for each in batch()))
    assert bool(gpu.kernel_arguments) == (HAS_INTERPRETER and run not in (kept_alone, critic))
    assert expected[0].any() and any(each.ndim == 2 for each in expected)
    for own, other in zip(got, expected, strict=True):
        # Results are float32. Gradients in bfloat16 are rounded in each layer, the interpreter's towards zero.
        bound = 0.08 if own.dtype == torch.bfloat16 else 1e-5
        assert within((own - other).abs().max(), bound * other.abs().max())
