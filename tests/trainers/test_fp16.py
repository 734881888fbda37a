"""Runs under fp16 autocast, with its loss scaler: they are finite, survive overflows, and resume to the bit.

The scale doubles every second step, so that it overflows again and again.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from transformers import TrainerCallback

from tests.conformance import cases
from tests.tools import half, resumable, tiny, wide
from tests.tools.cases import cases as quick
from tests.tools.nonfinite import OPTIONS, poison_gradients, state
from trl_steady.features.adapters.precision import refuse_unscalable
from trl_steady.features.critic.feature import Critic
from trl_steady.features.nonfinite_steps import NonfiniteSteps

# a rollout is used for 4 steps, and a checkpoint in the middle of one
WINDOW: dict[str, Any] = {
    "fp16": True,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 10,
    "save_strategy": "steps",
    "save_steps": 6,
}
NAN = float("nan")
LEFT_OUT = re.compile(r"leaves out step (\d+) of the ([a-z ]+): .*; the loss scale falls from (\S+) to (\S+)$")


@pytest.fixture
def overflowing() -> Iterator[None]:
    with half.allowed(scale=2.0**26, growth_interval=2):
        yield


def build(request: pytest.FixtureRequest, output: Path, *, model: str = "dense", **options: Any) -> Any:
    then = options.pop("then", lambda _: None)
    models = request.getfixturevalue("models")
    if options.get("teacher") in models:
        options["teacher"] = str(models[options["teacher"]])
    policy = wide.load(request.getfixturevalue("wide"), model) if model in wide.BASES else models[model]
    torch.manual_seed(0)
    trainer = tiny.trainer(policy, output, **{**WINDOW, **options})
    then(trainer)
    return trainer


def whole_state(trainer: Any) -> dict[str, Any]:
    scalers = {name: scaler.state_dict() for name, scaler in half.scalers(trainer).items()}
    found = {**resumable.state(trainer), "scalers": scalers}
    for row in found["history"]:
        if "grad_norm" in row:  # not of an evaluation
            row["grad_norm"] = str(row["grad_norm"])  # NaN is not equal to itself
    return found


def said(output: str) -> list[tuple[int, str, float, float]]:
    """Step, owner, and both scales of each step that a line of the output names."""
    found = [LEFT_OUT.search(line) for line in output.splitlines() if "leaves out" in line]
    assert None not in found
    return [(int(line[1]), line[2], float(line[3]), float(line[4])) for line in found if line]


@pytest.mark.usefixtures("overflowing")
@pytest.mark.parametrize(
    ("feature", "case"),
    [
        pytest.param(*row, marks=[] if row == ("critic", "LoRA") else pytest.mark.slow)
        for row in cases.names()
        if row[0] != "nonfinite_steps"
    ],
    ids=lambda own: own,
)
def test_a_run_is_finite_and_resumes_exactly(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], feature: str, case: str
) -> None:
    run = cases.options(feature, case)
    expected = tiny.train(build(request, tmp_path, **run))
    lines = said(capsys.readouterr().out)
    assert {owner for _, owner, _, _ in lines} == half.scalers(expected).keys()
    assert all(after == before / 2 for _, _, before, after in lines)
    assert sum(row.get("steps/nonfinite", 0) for row in tiny.history(expected)) == len(lines)
    scales = {row["step"]: row["loss_scale"] for row in tiny.history(expected) if "loss_scale" in row}
    assert len(scales) == 10 and all(scales[step] == scale for step, owner, scale, _ in lines if owner == "policy")
    at_end = whole_state(expected)
    for name, tensor in {**at_end["policy"], **at_end["critic"], **at_end["reference"]}.items():
        assert tensor.dtype == torch.uint8 or tensor.isfinite().all(), name

    resumed = build(request, tmp_path, **cases.options(feature, case))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumable.differences(at_end, whole_state(resumed)) == []


def test_passes_are_fp16_and_weights_float32(models: dict[str, Path], tmp_path: Path) -> None:
    dtypes: set[torch.dtype] = set()
    with half.allowed():
        trainer = tiny.trainer(models["dense"], tmp_path, fp16=True, max_steps=1)
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda _module, _inputs, output: dtypes.add(output.dtype))
    trainer.train()
    assert dtypes == {torch.float16} and layer.weight.dtype == torch.float32


# which steps count


def overflow_at(trainer: Any, steps: range) -> Any:
    """Let gradients overflow as by their scale: the loss is finite."""
    return poison_gradients(trainer, steps, value=math.inf)


def spoil_loss(trainer: Any, steps: range) -> Any:
    """Let the forward pass give a loss of NaN."""

    class Spoilt(type(trainer)):
        def _compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super()._compute_loss(*arguments, **keywords)
            return loss * NAN if self.state.global_step in steps else loss

    trainer.__class__ = Spoilt
    return trainer


def test_overflows_that_a_smaller_scale_can_mend_do_not_end_a_run(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with half.allowed():
        trainer = overflow_at(tiny.trainer(models["dense"], tmp_path, fp16=True, **OPTIONS), range(1, 6))
    trainer.train()
    lines = said(capsys.readouterr().out)
    assert lines == [(i + 2, "policy", 2.0 ** (16 - i), 2.0 ** (15 - i)) for i in range(5)]
    logged = tiny.history(trainer)[:-1]
    assert [row.get("steps/nonfinite") for row in logged] == [None, 1, 1, 1, 1, 1]
    assert [row["loss_scale"] for row in logged] == [2.0**16, *(2.0 ** (16 - i) for i in range(5))]


@pytest.mark.parametrize(
    ("scale", "poison"), [(65536.0, spoil_loss), (1.0, overflow_at)], ids=["loss", "smallest scale"]
)
def test_what_no_scale_can_mend_ends_a_run(models: dict[str, Path], tmp_path: Path, scale: float, poison: Any) -> None:
    with half.allowed(scale):
        trainer = poison(tiny.trainer(models["dense"], tmp_path, fp16=True, **OPTIONS), range(1, 6))
    with pytest.raises(FloatingPointError, match=r"^3 optimizer steps in a row .*or set bf16=True in place of fp16"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_a_step_that_is_left_out_leaves_no_trace_but_its_scale(models: dict[str, Path], tmp_path: Path) -> None:
    """With TRL's trainer, whose scaler does the same."""
    ends = []
    for ours in (True, False):
        with half.allowed():
            trainer = tiny.trainer(models["dense"], tmp_path, ours=ours, padded=ours, fp16=True, **OPTIONS)
        overflow_at(trainer, range(2, 4)).train()
        ends.append({**state(trainer), "scaler": trainer.accelerator.scaler.state_dict()})
    assert resumable.differences(*ends) == []
    assert ends[0]["scaler"]["scale"] == 2.0**14


def test_none_counts_nothing_and_the_scaler_still_leaves_steps_out(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**OPTIONS, "method": "PPO", "num_generations": 1, "skip_nonfinite_steps": None, "fp16": True}
    with half.allowed(scale=2.0**24):
        trainer = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    assert "leaves out" not in capsys.readouterr().out
    assert not {"steps/nonfinite", "loss_scale"} & {key for row in tiny.history(trainer) for key in row}
    assert all(scaler.get_scale() < 2.0**24 for scaler in half.scalers(trainer).values())
    assert all(tensor.isfinite().all() for tensor in [*tiny.parameters(trainer).values(), *trainer.critic.parameters])


def test_deepspeed_keeps_its_scale_to_itself(models: dict[str, Path], tmp_path: Path) -> None:
    with half.allowed():
        trainer = tiny.trainer(models["dense"], tmp_path, fp16=True, skip_nonfinite_steps=5)
    assert not trainer.args.idle_options
    trainer.args.deepspeed_plugin = object()
    (idle,) = trainer.args.idle_options.values()
    assert idle.startswith("skip_nonfinite_steps=5 has no effect because fp16=True with DeepSpeed")
    trainer.accelerator.scaler = None
    trainer.feature(NonfiniteSteps).on_init_end()
    assert trainer.feature(NonfiniteSteps).judge_step("policy", NAN, [])


# the critic


PPO: dict[str, Any] = {"method": "PPO", "num_generations": 1, "fp16": True, **OPTIONS}


@pytest.mark.parametrize("options", quick([{"lora": True}, {}], 1), ids=str)
def test_a_critic_has_a_scale_of_its_own(models: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    """Its overflows leave no trace in the policy's scale, and the policy's none in the critic's."""
    with half.allowed(scale=2.0**11, own_scale=2.0**10):
        trainer = tiny.trainer(models["dense"], tmp_path, **PPO, **options)
        trained = [parameter for _, parameter in trainer.critic.named_parameters()]
        poison_gradients(trainer, (1, 2), of=trained, value=math.inf)
        overflow_at(trainer, range(3, 4)).train()
    assert {name: scaler.get_scale() for name, scaler in half.scalers(trainer).items()} == {
        "policy": 2.0**10,
        "critic": 2.0**8,
    }


class AsItIs:
    """A script's method, which may change the loss."""

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        return super().compute_loss(*arguments, **keywords)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("options", quick([{"lora": True}, {}], 1), ids=str)
def test_a_critic_in_the_policys_backward_pass_keeps_its_own_scale(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """A script's `compute_loss` may scale the sum. The critic's loss is then part of the policy's backward pass."""
    ends = []
    for is_own in (True, False):
        with half.allowed(own_scale=2.0**10):
            trainer = tiny.trainer(models["dense"], tmp_path, **PPO, **options)
            if not is_own:
                trainer.__class__ = type("Script", (AsItIs, type(trainer)), {})
            trainer.train()
        ends.append({"critic": trainer.critic.state(), "policy": tiny.parameters(trainer)})
    assert resumable.differences(*ends) == []


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_a_warm_up_moves_the_critic_alone(models: dict[str, Path], tmp_path: Path, optim: str) -> None:
    """The policy has no gradients then, for which its scaler would raise."""
    options = {**PPO, "value_warmup_steps": 3, "weight_decay": 0.1, "lora": True, "optim": optim}
    with half.allowed(scale=2.0**10, growth_interval=2):
        trainer = tiny.trainer(models["dense"], tmp_path, **options)
    states: list[tuple[dict[str, Any], dict[str, Any], float]] = []

    class Keep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            policy = {name: each for name, each in tiny.parameters(trainer).items() if ".default." in name}
            critic = {name: each.clone() for name, each in trainer.critic.state().items()}
            states.append((policy, critic, trainer.accelerator.scaler.get_scale()))

    trainer.add_callback(Keep())
    with half.allowed(scale=2.0**10, growth_interval=2):
        trainer.train()
    policies, critics, scales = zip(*states, strict=True)
    moved = [bool(resumable.differences(policies[i], policies[i + 1])) for i in range(5)]
    assert moved == [False, False, True, True, True]
    assert all(resumable.differences(critics[i], critics[i + 1]) for i in range(5))
    assert scales == (2.0**10, 2.0**10, 2.0**10, 2.0**10, 2.0**11, 2.0**11)  # grown after two steps of the policy
    rates = [row["learning_rate"] for row in tiny.history(trainer)[:-1]]
    assert rates == sorted(rates, reverse=True) and len({*rates}) == 6  # the schedule goes on


def test_a_critic_in_fp16_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    value_model = transformers.AutoModelForSequenceClassification.from_pretrained(
        models["dense"], num_labels=1, dtype=torch.float16
    )
    with half.allowed(), pytest.raises(ValueError, match=r"fp16=True cannot train .*float16.* Load it in float32"):
        tiny.trainer(models["dense"], tmp_path, **PPO, build={"value_model": value_model})


def test_torch_says_what_it_unscales() -> None:
    device = torch.device("cpu")
    own = {dtype: torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float16)}
    refuse_unscalable([("a", own[torch.float32])], device)
    with pytest.raises(ValueError, match=r"cannot train b, which is torch\.float16"):
        refuse_unscalable([("a", own[torch.float32]), ("b", own[torch.float16])], device)
    no_bf16 = patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", side_effect=NotImplementedError)
    with no_bf16, pytest.raises(ValueError, match=r"cannot train a, which is torch\.bfloat16"):  # as CUDA does
        refuse_unscalable([("a", torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))], device)


def test_deepspeed_is_refused_with_a_critic(models: dict[str, Path], tmp_path: Path) -> None:
    with half.allowed():
        trainer = tiny.trainer(models["dense"], tmp_path, **PPO)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match=r"fp16.*DeepSpeed.*bf16"):
        trainer.feature(Critic)._refuse_setups()


# weights whose gradients cannot be unscaled


@pytest.mark.parametrize(
    ("lora", "dtype"), [(False, "float16"), (True, "float16"), (True, "float32"), (False, "float32")]
)
def test_trained_weights_in_fp16_are_refused_before_a_rollout(
    models: dict[str, Path], tmp_path: Path, lora: bool, dtype: str
) -> None:
    """PEFT makes the adapter of an fp16 base float32."""
    options: dict[str, Any] = {"fp16": True, "model_init_kwargs": {"dtype": dtype}, "lora": lora, "max_steps": 2}
    with half.allowed():
        if dtype == "float32" or lora:
            trainer = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
            assert {each.dtype for each in trainer.model.parameters() if each.requires_grad} == {torch.float32}
        else:
            with pytest.raises(ValueError, match=r"fp16=True cannot train .*float16.*'dtype': 'float32'"):
                tiny.trainer(models["dense"], tmp_path, **options)
            # what TRL's trainer says, after a rollout
            theirs = tiny.trainer(models["dense"], tmp_path, ours=False, **options)
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                theirs.train()
