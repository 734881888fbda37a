"""With an engine in the trainer's process features train as without one on the same tokens and log-probs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.features.router_replay.tools import build
from tests.tools import tiny
from tests.vllm.tools import Colocated, needs_vllm
from trl_steady import StepRewards

pytestmark = needs_vllm


@pytest.mark.supports("gspo", "gspo_token", "KL corrections", "masks", "step rewards", on="vLLM colocate")
@pytest.mark.supports("moving reference, full", "moving reference, LoRA", on="vLLM colocate")
@pytest.mark.supports("ref_model_sync_kl", "ref_model_sync_reset_optimizer", on="vLLM colocate")
@pytest.mark.supports("router_replay R2", "token_budget", "share_prompts", on="vLLM colocate")
def test_what_is_sampled_is_trained_on_as_if_it_came_from_elsewhere(
    mixture: Path, tmp_path: Path, colocated: Colocated, request: pytest.FixtureRequest
) -> None:
    """The second run is given what the first has sampled, and its log-probs; the engine had the policy's weights."""

    def in_steps(completion_ids: list[list[int]], **_: Any) -> list[StepRewards]:
        return [
            StepRewards.at_tokens(
                [float(sum(ids) % 7), float(len(ids) % 5)][: 1 + (len(ids) > 1)], sorted({1, len(ids)})
            )
            for ids in completion_ids
        ]

    moving = {"sync_ref_model": True, "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 0.6}
    common: dict[str, Any] = {
        "beta": 0.1,
        "max_steps": 9,  # three rollouts
        "router_aux_loss_coef": 0.0,
        "vllm_importance_sampling_correction": False,  # TRL's, which is for vLLM alone
        "learning_rate": 1e-3,
    }
    shown: dict[str, dict[str, Any]] = {
        "gspo": {
            "shows": ["gspo", "KL corrections", "masks", "router_replay R2"],
            "loss_type": "gspo",
            "kl_ratio_denominator": "sampler",
            "off_policy_mask_threshold": 1e-3,
            "geometric_mask_range": (0.998, 1.002),
            "token_veto_threshold": 0.98,
            "router_replay": "R2",
            "dtype": "bfloat16",  # of the engine, which masks then see
        },
        "gspo_token": {
            "shows": ["gspo_token", "step rewards", "moving reference, full", "ref_model_sync_kl"],
            "loss_type": "gspo_token",
            "build": {"reward_funcs": in_steps},
            "ref_model_sync_kl": 1e-4,
            **moving,
        },
        "lora": {
            "shows": ["moving reference, LoRA", "ref_model_sync_reset_optimizer", "token_budget", "share_prompts"],
            "lora": "attention",
            "token_budget": 300,
            "share_prompts": True,
            "ref_model_sync_reset_optimizer": True,
            **moving,
        },
    }
    marked = {feature for mark in request.node.iter_markers("supports") for feature in mark.args}
    assert marked == {feature for options in shown.values() for feature in options["shows"]}
    for case, own in shown.items():
        options = {name: value for name, value in own.items() if name != "shows"} | common
        with_engine = colocated(mixture, tmp_path / case, **{"router_replay": None, **options})
        answers: list[tuple[Any, ...]] = []
        generate = with_engine.vllm_generation.generate

        def kept(*arguments: Any, _generate: Any = generate, _answers: Any = answers, **keywords: Any) -> Any:
            with torch.random.fork_rng():  # TRL shuffles by the same numbers
                _answers.append(_generate(*arguments, **keywords))
            return _answers[-1]

        with_engine.vllm_generation.generate = kept
        torch.manual_seed(0)  # an engine that is built seeds this process
        tiny.train(with_engine)
        assert len(answers) == 3 and len({len(ids) for ids in answers[0][1]}) > 3
        left = iter(answers)

        def told(prompts: Any, trainer: Any, _left: Any = left) -> dict[str, Any]:
            prompt_ids, completion_ids, logprobs, _ = next(_left)
            of_tokens = [[each[0] for each in answer] for answer in logprobs]
            return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": of_tokens}

        other = {**options, "build": {**options.get("build", {}), "rollout_func": told}, "max_completion_length": 40}
        is_exact = other.pop("dtype", "float32") == "float32"
        without = build(mixture, tmp_path / f"{case} told", **other)
        torch.manual_seed(0)
        tiny.train(without)

        expected, found = tiny.parameters(without), tiny.parameters(with_engine)
        # TRL's push merges an adapter into its base and takes it out again, which leaves rounding behind
        near = {"rtol": 1e-4, "atol": 1e-5} if "lora" in options else {"rtol": 0.0, "atol": 0.0}
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **near, msg=f"{case}: {name}")
        history = tiny.history(with_engine)[:-1]
        assert all((row["mismatch/kl"] < 1e-9) == is_exact for row in history), case
        moves = [[(step, rule) for step, _, rule in run.reference_refreshes] for run in (with_engine, without)]
        assert moves[0] == moves[1] and len(moves[0]) == (2 if "sync_ref_model" in options else 0), case
        for mask in ("off_policy", "geometric", "veto"):
            assert case != "gspo" or any(0 < row[f"dropped/{mask}"] < 1 for row in history), mask
