"""Kept tokens of transformers' generation: the sets, and training with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools import tiny
from tests.tools.sets import lists
from trl_steady.features.sampling_mask.recording import CandidateRecorder, refuse_other_modes
from trl_steady.trl_bridge.generation import last_logits_processor

TOP_K = 5
BY_TOKENS = {"token_budget": 60, "share_prompts": True}


@everywhere
def test_sets_are_the_finite_scores_of_generate(place: Place, models: dict[str, Path], figures: Figures) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(models["dense"]).eval().to(place.device)
    ids = torch.tensor([[50, 51, 52], [60, 61, 62]], device=place.device)
    recorder = CandidateRecorder()
    with last_logits_processor(model, recorder, refuse_other_modes):
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_p=0.8,
            top_k=0,
            max_new_tokens=8,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
    completions = out.sequences[:, 3:].tolist()
    finite = [(scores > -torch.inf).tolist() for scores in out.scores]
    expected = [[i for i, own in enumerate(finite[step][row]) if own] for row in range(2) for step in range(8)]
    assert [sorted(own) for own in lists(recorder.candidates(completions))] == expected
    figures("mean number of kept tokens", sum(map(len, expected)) / len(expected), "tokens")


@everywhere(slow=True)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("options", [{}, BY_TOKENS], ids=["packed", "by tokens"])
def test_a_run_with_the_mask(
    place: Place, models: dict[str, Path], tmp_path: Path, options: dict[str, Any], bf16: bool, figures: Figures
) -> None:
    if bf16:
        place.need_bf16()
    settings = {**place.arguments, "bf16": bf16, "keep_sampling_mask": True, "top_k": TOP_K, "beta": 0.1, **options}
    trainer = tiny.train(tiny.trainer(models["dense"], tmp_path, **settings))
    first, *others = [row for row in trainer.state.log_history if "loss" in row]
    # top-k keeps all tokens that tie with the last one, and logits in bf16 have 8 bits
    assert TOP_K <= first["sampling_mask/kept_tokens"] <= TOP_K + (0.5 if bf16 else 0)
    assert first["sampling_mask/fallback"] == 0
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in (first, *others))
    # The reference is the policy still. A log-prob in bf16 may be off by 0.1 nats. The KL is half the square of it.
    assert first["kl"] == pytest.approx(0, abs=5e-3)
    assert others[-1]["kl"] > 0.02  # the policy has trained
    figures("KL at the last step", others[-1]["kl"], "nats")


@everywhere
def test_without_the_mask_the_trainer_says_that_sampling_leaves_tokens_out(
    place: Place, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"sampling leaves tokens out \(top_p=0\.8\)"):
        tiny.trainer(models["dense"], tmp_path, top_p=0.8, max_steps=1, **place.arguments)
