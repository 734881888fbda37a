"""RLOO with our parts: with all of them off it is TRL's bit for bit, and each acts as it does under GRPO."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import trl_steady
from tests.oracles import routes as routed_oracle
from tests.tools import resumable, tiny
from tests.tools.cases import cases
from tests.tools.sets import lists
from trl_steady.features.sampling_mask.candidates import CandidateSets

trainer = functools.partial(tiny.trainer, method="RLOO")


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """None for some, which RLOO leaves out of the baseline."""
    return [None if sum(ids) % 5 == 0 else float(len(ids)) for ids in completion_ids]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "several passes": {"num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3},
    "normalised": {"normalize_advantages": True, "reward_clip_range": (0.0, 9.0)},
    "sampling": {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1},
    "two rewards": {"reward_weights": [1.0, 0.5], "build": {"reward_funcs": [tiny.reward, lengths]}},
    "lora": {"lora": True, "beta": 0.1},
    "evaluation": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "build": {"eval_dataset": tiny.dataset(4)},
    },
}


@pytest.mark.filterwarnings("ignore:sampling leaves tokens out")
@pytest.mark.parametrize("name", cases(OPTIONS, ("accumulation", "several passes", "two rewards", "lora")))
def test_everything_off_is_trls_bit_for_bit(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    model = ("dense", "moe")[list(OPTIONS).index(name) % 2]
    ours = tiny.train(trainer(models[model], tmp_path, padded=True, **OPTIONS[name]))
    theirs = tiny.train(trainer(models[model], tmp_path, ours=False, **OPTIONS[name]))
    assert resumable.differences(tiny.parameters(theirs), tiny.parameters(ours)) == []
    assert resumable.differences(tiny.history(theirs), tiny.history(ours)) == []
    moved = tiny.parameters(trainer(models[model], tmp_path, padded=True, **OPTIONS[name]))
    assert resumable.differences(moved, tiny.parameters(ours)) != []


def test_the_kl_is_exactly_0_after_a_refresh_with_lora(models: dict[str, Path], tmp_path: Path) -> None:
    """RLOO's KL is that of a rollout, which is the first thing after a refresh."""
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 1.0}
    moving = tiny.train(trainer(models["dense"], tmp_path, lora=True, max_steps=12, **options))
    assert [refresh.step for refresh in moving.reference_refreshes] == [4, 8]
    kls = {row["step"] - 1: row["kl"] for row in moving.state.log_history if "kl" in row}
    assert kls[0] == kls[4] == kls[8] == 0  # the initial adapter counts too: the reference is its copy
    fixed = tiny.train(trainer(models["dense"], tmp_path, lora=True, max_steps=12, beta=0.1))
    assert all(row["kl"] != 0 for row in fixed.state.log_history[4:] if "kl" in row)


class Recorded(trl_steady.RLOOTrainer):
    """Ours, which keeps its rollouts and what the policy scores in updates."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.rollouts: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = []
        self.updates: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = []
        super().__init__(*arguments, **keywords)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        weights = routed_oracle.weights(self.model)
        self.rollouts.append((weights, super()._generate_and_score_completions(inputs)))
        return self.rollouts[-1][1]

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        weights = routed_oracle.weights(self.model)
        loss = super()._compute_loss(model, inputs)
        self.updates.append((weights, {**inputs, "logps": self.scored}))
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        self.scored = scores[0].detach()
        return scores


def recorded(folder: Path, output: Path, **options: Any) -> Recorded:
    args = tiny.arguments(trl_steady.RLOOConfig, output, **options)
    own = Recorded(str(folder), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())
    own.train()
    return own


def sequences(inputs: dict[str, Any]) -> list[tuple[list[int], int, torch.Tensor, int]]:
    """Return the tokens of each sequence, the length of its prompt, its places in the batch, and its row."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool()
    prompts = inputs["prompt_mask"].sum(-1).tolist()
    return [(ids[i][own].tolist(), prompts[i], own, i) for i, own in enumerate(mask)]


CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def test_r2_replays_the_experts_of_the_old_policy(models: dict[str, Path], tmp_path: Path) -> None:
    """Log-probs of each update equal those of the model alone whose tokens are sent through these experts."""
    own = recorded(models["moe"], tmp_path, router_replay="R2", max_steps=4)
    otherwise = 0
    for weights, inputs in own.updates:
        model = routed_oracle.initial(models["moe"], weights)
        for tokens, prompt, where, row in sequences(inputs):
            if len(tokens) == prompt:
                continue
            routes = inputs["routes"][row][where]
            found = inputs["logps"][row][inputs["completion_mask"][row].bool()]
            with torch.no_grad():
                torch.testing.assert_close(found, routed_oracle.log_probs(model, tokens, prompt, routes), **CLOSE)
                otherwise += not torch.allclose(found, routed_oracle.log_probs(model, tokens, prompt), **CLOSE)
    assert otherwise > 0  # routers have changed, or nothing would have been shown
    assert any(row.get("routing/changed", 0) > 0 for row in own.state.log_history)


def test_kept_tokens_are_what_old_and_new_log_probs_are_among(models: dict[str, Path], tmp_path: Path) -> None:
    """From the model's own logits, masked by hand to the 5 tokens that top-k keeps."""
    sampling = {"keep_sampling_mask": True, "top_k": 5, "temperature": 0.8}
    own = recorded(models["dense"], tmp_path, max_steps=2, token_budget=60, **sampling)

    def by_hand(weights: dict[str, torch.Tensor], inputs: dict[str, Any]) -> list[torch.Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32).eval()
        model.load_state_dict(weights)
        found = []
        for tokens, prompt, _, row in sequences(inputs):
            sets = lists(CandidateSets(*inputs["kept_tokens"][row]))[: len(tokens) - prompt]
            assert all(len(own) == 5 for own in sets)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens])).logits[0, prompt - 1 : -1] / 0.8
            kept = [row[own].logsumexp(0) for row, own in zip(logits, sets, strict=True)]
            of_tokens = logits.gather(-1, torch.tensor(tokens[prompt:])[:, None])[:, 0]
            found.append(of_tokens - torch.stack(kept))
        return found

    for weights, samples in own.rollouts:
        expected = torch.stack([each.sum() for each in by_hand(weights, samples)])
        torch.testing.assert_close(samples["old_logps"], expected, rtol=1e-4, atol=1e-4)
    for weights, inputs in own.updates:
        for row, expected in enumerate(by_hand(weights, inputs)):
            own_logps = inputs["logps"][row][inputs["completion_mask"][row].bool()]
            torch.testing.assert_close(own_logps, expected, rtol=1e-4, atol=1e-4)
    assert {
        row["sampling_mask/kept_tokens"] for row in own.state.log_history if "sampling_mask/kept_tokens" in row
    } == {5}


def test_step_rewards_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    def steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        return [trl_steady.StepRewards.at_tokens([1.0], [len(ids)]) for ids in completion_ids]

    with pytest.raises(
        ValueError, match="returned StepRewards, but RLOO has one ratio and one advantage per sequence"
    ):
        tiny.train(trainer(models["dense"], tmp_path, build={"reward_funcs": steps}))


def test_inside_a_window_the_kl_of_the_reward_must_stay(models: dict[str, Path], tmp_path: Path) -> None:
    """The rewards of the rollout contain it. Under GRPO, whose loss reads it in each update, it may change."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    tiny.train(trainer(models["dense"], tmp_path, beta=0.1, **options))
    checkpoint = str(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match=r"window that began with\s+beta=0\.1; this run has beta=0\.2"):
        trainer(models["dense"], tmp_path, beta=0.2, **options).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"began with\s+normalize_advantages=False; this run .*=True"):
        again = trainer(models["dense"], tmp_path, beta=0.1, normalize_advantages=True, **options)
        again.train(resume_from_checkpoint=checkpoint)
    resumed = trainer(models["dense"], tmp_path, beta=0.1, epsilon=0.3, **options)  # the loss reads it in each update
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 5
