"""The engine check: an engine with another base is found in the first rollout, and the check changes no training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.features.adapters import tools
from tests.features.adapters.tools import LLM
from tests.features.dynamic_sampling import tools as rounds
from tests.tools import tiny
from tests.tools.cases import cases
from trl_steady.features import engine_check
from trl_steady.features.engine_check import disagreement

built = tools.built
Built = Callable[..., tuple[Any, LLM]]
METHODS = ("GRPO", "RLOO", "PPO")
CAUSES = r"engine_check=1.0: engine and policy differ by a mean k3 of \S+ nats per token.*vllm_adapter_sync=False"
# one update of a rollout, without TRL's correction: TRL then scores no old policy
ON_POLICY = {"steps_per_generation": 1, "per_device_train_batch_size": 16}


def settings(method: str, **options: Any) -> dict[str, Any]:
    """Return the options of an on-policy run. RLOO has no correction."""
    correction = {} if method == "RLOO" else {"vllm_importance_sampling_correction": False}
    return {"method": method, "beta": 0.0, **ON_POLICY, **correction, **options}


@pytest.fixture
def other(wide: Path, tmp_path: Path) -> str:
    """Another checkpoint, surer of its tokens than the policy is of its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(wide)
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    model.save_pretrained(tmp_path / "other")
    return str(tmp_path / "other")


def compared(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record each mean k3 that is measured from now on."""
    found: list[float] = []

    def measured(*tensors: Tensor) -> Tensor:
        sums = disagreement(*tensors)
        found.append(float(sums[0] / sums[1]))
        return sums

    monkeypatch.setattr(engine_check, "disagreement", measured)
    return found


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("method", "dynamic"),
    cases([*((each, False) for each in METHODS), ("RLOO", True)], fast=[("GRPO", False), ("RLOO", True)]),
)
def test_an_engine_with_the_policys_base_passes(
    built: Built, monkeypatch: pytest.MonkeyPatch, method: str, dynamic: bool
) -> None:
    """The limit is far below the default: log-probs are those of the policy, and nothing but rounding is left."""
    found, build = compared(monkeypatch), {"reward_funcs": rounds.planted} if dynamic else {}
    trainer, _ = built(**settings(method, max_steps=3, engine_check=1e-6, dynamic_sampling=dynamic, build=build))
    trainer.train()
    assert len(found) == 1 and trainer.state.global_step == 3


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("method", "dynamic"), [*((each, False) for each in METHODS), ("RLOO", True)])
def test_an_engine_with_another_base_is_found_before_the_first_update(
    built: Built, other: str, method: str, dynamic: bool
) -> None:
    build = {"reward_funcs": rounds.planted} if dynamic else {}  # a rollout of several rounds
    trainer, llm = built(**settings(method, max_steps=3, dynamic_sampling=dynamic, build=build))
    before = tiny.parameters(trainer)
    llm.asked["model"] = other
    with pytest.raises(ValueError, match=CAUSES):
        trainer.train()
    assert trainer.state.global_step == 0 and (len(llm.answered) > 1) == dynamic
    assert all(torch.equal(value, before[name]) for name, value in tiny.parameters(trainer).items())


def test_an_engine_with_another_base_is_found_in_the_first_new_rollout_of_a_resume(
    built: Built, other: str, tmp_path: Path
) -> None:
    """Inside a generation window; and by a trainer that has compared before."""
    trainer, llm = built(max_steps=8, save_strategy="steps", save_steps=2)
    trainer.train()
    llm.asked["model"] = other
    with pytest.raises(ValueError, match=CAUSES):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4


OFF_POLICY = {"steps_per_generation": 4, "per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("method", "updates"), cases([("GRPO", ON_POLICY), ("RLOO", ON_POLICY), ("PPO", OFF_POLICY)], fast=1)
)
def test_the_check_changes_no_bit_of_a_run(
    built: Built, monkeypatch: pytest.MonkeyPatch, method: str, updates: dict[str, Any]
) -> None:
    """On-policy it scores a rollout that TRL does not score. Dropout would draw from the run's random numbers."""
    found, ends, logs = compared(monkeypatch), [], []
    for check in (1.0, None):
        torch.manual_seed(0)
        run = {"max_steps": 4, "engine_check": check, "lora": {"lora_dropout": 0.1}}
        trainer, _ = built(**settings(method, **run, **updates))
        trainer.train()
        ends.append(tiny.parameters(trainer))
        logs.append(tiny.history(trainer))
    assert len(found) == 1 and logs[0] == logs[1]
    assert found[0] < 1e-6  # dropout, which draws the old log-probs, is not the engine's fault
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_another_distribution_than_the_policys_is_not_compared(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(monkeypatch)
    with pytest.warns(
        UserWarning, match="engine_check=1.0 has no effect because .* without top_p=0.9 and repetition_penalty=1.2"
    ):
        trainer, _ = built(max_steps=1, top_p=0.9, repetition_penalty=1.2)
    trainer.train()
    assert not found


QUANTISED = {"vllm_adapter_sync": True, "vllm_engine_kwargs": {"quantization": "bitsandbytes"}}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, 0.1), ({"engine_check": 0.9}, 0.9), ({"vllm_adapter_sync": False}, 1.0), (QUANTISED, 1.0)],
    ids=["adapter", "a user's limit", "merged weights", "quantised by the user"],
)
def test_the_default_limit_is_lower_where_the_engine_has_loaded_the_base(
    built: Built, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], limit: float
) -> None:
    """A mean k3 just above the limit is refused, and one just below it passes."""
    for k3 in (0.98 * limit, 1.02 * limit):
        monkeypatch.setattr(engine_check, "disagreement", lambda *_, k3=k3: torch.tensor([100 * k3, 100.0, 100.0]))
        trainer, _ = built(max_steps=1, **options)
        if k3 < limit:
            trainer.train()
            continue
        with pytest.raises(ValueError, match=rf"nats per token, more than {limit}\. .*set engine_check to a larger"):
            trainer.train()


def test_a_rollout_func_is_compared_by_its_log_probs(models: dict[str, Path], tmp_path: Path) -> None:
    """Their NaN are left out, and hide nothing. If there are no others, one warning says so."""

    def rolled(logprobs: Any) -> Any:
        """A `rollout_func` that answers alike, with log-probs made of its answers."""

        def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            ids = [trainer.processing_class(text=prompt)["input_ids"] for prompt in prompts]
            answers = [[60 + row % 3, 70, 80] for row in range(len(prompts))]
            return {
                "prompt_ids": ids,
                "completion_ids": answers,
                "logprobs": logprobs and list(map(logprobs, answers)),
            }

        return rollout_func

    given: dict[str, Any] = {
        "some": lambda ids: [0.0, float("nan"), 0.0],
        "NaN": lambda ids: [float("nan")] * len(ids),
        "none": None,
    }
    some, *without = (
        tiny.trainer(models["dense"], tmp_path / name, build={"rollout_func": rolled(each)}, engine_check=1.0)
        for name, each in given.items()
    )
    with pytest.raises(ValueError, match="rollout_func returns log-probs of another policy") as refused:
        some.train()
    assert "vllm" not in str(refused.value)
    for trainer in without:
        with pytest.warns(
            UserWarning, match="engine_check=1.0 has no effect because the rollout has no log-probs"
        ) as caught:
            trainer.train()
        assert len([each for each in caught if "engine_check" in str(each.message)]) == 1


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("k3", [1e4, torch.nan])
def test_a_process_with_a_good_rollout_hears_of_anothers(
    built: Built, monkeypatch: pytest.MonkeyPatch, k3: float
) -> None:
    trainer, _ = built(max_steps=1)
    reduce = trainer.accelerator.reduce

    def with_another(sums: Tensor, reduction: str) -> Tensor:
        of_another = sums.new_tensor([k3, 50.0, 50.0]) if sums.shape == (3,) else 0
        return reduce(sums, reduction) + of_another

    monkeypatch.setattr(trainer.accelerator, "reduce", with_another)
    with pytest.raises(ValueError, match=CAUSES):
        trainer.train()


def test_sums_of_two_processes_are_those_of_all_their_tokens() -> None:
    """By hand. Neither what is not sampled counts, nor what the sampler could not score."""
    nan = float("nan")
    logps = torch.tensor([[0.0, -1.0, nan], [-2.0, 7.0, -3.0]])
    sampler = torch.tensor([[0.5, -1.0, 0.0], [-1.0, nan, nan]])
    is_sampled = torch.tensor([[True, True, False], [True, False, True]])
    whole = disagreement(logps, sampler, is_sampled)
    # k3 of log(policy / sampler) = -0.5, 0 and -1
    k3 = (torch.tensor(-0.5).exp() - 1 + 0.5) + (torch.tensor(-1.0).exp() - 1 + 1)
    torch.testing.assert_close(whole, torch.tensor([k3, 3.0, 4.0]))
    parts = [disagreement(*(tensor[row : row + 1] for tensor in (logps, sampler, is_sampled))) for row in (0, 1)]
    torch.testing.assert_close(sum(parts), whole)


def test_a_policy_without_a_number_is_no_agreement_and_an_outlier_is_no_other_model() -> None:
    logps, sampled = torch.full((8, 100), -1.0), torch.ones(8, 100, dtype=torch.bool)
    total, scored, _ = disagreement(logps.index_fill(1, torch.tensor([0]), torch.nan), logps, sampled).tolist()
    assert not total / scored <= 1.0
    sampler, policy = logps.clone(), logps.clone()
    sampler[0, 0], policy[0, 0] = -9.0, -0.2  # k3 is e^8.8 - 9.8 nats, 8.3 a token
    total, scored, _ = disagreement(policy, sampler, sampled).tolist()
    assert total / scored < 0.1
    total, scored, _ = disagreement(logps, logps - 3, sampled).tolist()  # all tokens are off
    assert total / scored > 1
