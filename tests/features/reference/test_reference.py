"""The reference moves to the policy, exactly, when it should and only then, for every kind of adapter and base."""

import contextlib
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from peft import LoraConfig
from trl.trainer.utils import use_adapter

import trl_steady
from tests.features.reference.tools import MOVING, adapter_tensors
from tests.tools import tiny
from tests.tools import wide as wide_model
from trl_steady.core.types import Construction
from trl_steady.features.reference.feature import Reference

SLOW = pytest.mark.slow
OTHER = {"target_modules": ["k_proj", "v_proj"]}
RANDOM = {"init_lora_weights": False, "target_modules": ["q_proj", "v_proj"], "r": 4}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("base", "adapter", "options"),
    [
        pytest.param("dense", LoraConfig(**RANDOM), {}, id="LoRA"),
        pytest.param("moe", LoraConfig(**RANDOM, use_dora=True), {}, id="DoRA"),
        pytest.param("dense", LoraConfig(**RANDOM, modules_to_save=["input_layernorm", "lm_head"]), {}, id="modules"),
        pytest.param("dense", LoraConfig(**RANDOM, trainable_token_indices=[*range(40)]), {}, id="tokens", marks=SLOW),
        pytest.param("moe", LoraConfig(**{**RANDOM, "init_lora_weights": "pissa"}), {}, id="PiSSA", marks=SLOW),
        pytest.param("dense", peft.LoHaConfig(**OTHER, r=4, init_weights=False), {}, id="LoHa", marks=SLOW),
        pytest.param(
            "dense",
            peft.IA3Config(**OTHER, feedforward_modules=[], init_ia3_weights=False),
            {},
            id="IA3",
            marks=SLOW,
        ),
        pytest.param(
            "moe",
            LoraConfig(r=2, init_lora_weights=False, target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
            {},
            id="experts",
        ),
        pytest.param("dense", None, {}, id="full"),
        pytest.param("nf4", None, {"lora": True}, id="nf4"),
        pytest.param("int8", None, {"lora": True, "adapter_dtype": "float32"}, id="int8, float32", marks=SLOW),
    ],
)
def test_log_probs_are_equal_right_after_a_refresh(
    models: dict[str, Path],
    wide: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: str,
    adapter: peft.PeftConfig | None,
    options: dict[str, Any],
) -> None:
    class Watched(trl_steady.GRPOTrainer):
        """Scores every rollout with the policy and with the reference."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)

            width = batch["completion_ids"].size(1)

            def logps(model: Any) -> torch.Tensor:
                with torch.no_grad():
                    return self._get_per_token_logps_and_entropies(model, ids, mask, width)[0]

            policy = logps(self.model)
            with contextlib.nullcontext() if self.ref_model else use_adapter(self.model, "ref"):
                reference = logps(self.ref_model or self.model)
            self.rollouts = [*getattr(self, "rollouts", []), (self.state.global_step, policy, reference)]
            return batch

    model = models[base] if base in models else wide_model.load(wide, base)
    build = {} if adapter is None else {"build": {"peft_config": adapter}}
    monkeypatch.setattr(trl_steady, "GRPOTrainer", Watched, raising=False)
    trainer = tiny.trainer(model, tmp_path, **{**MOVING, **build, **options})
    if base not in models:
        trained = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
        assert trained == {getattr(torch, options.get("adapter_dtype", "bfloat16"))}
    if isinstance(adapter, LoraConfig) and adapter.target_parameters:
        assert sum("experts" in pair.name for pair in trainer.feature(Reference).callback.pairs()) == 8
    trainer.train()
    # equal where the reference had just moved, and nowhere else
    assert [(step, rule) for step, _, rule in trainer.reference_refreshes] == [(n, "steps") for n in (4, 8, 12)]
    at_rollout = {step: torch.equal(policy, reference) for step, policy, reference in trainer.rollouts}
    assert at_rollout == dict.fromkeys((0, 4, 8, 12), True)
    kl = [row["kl"] for row in tiny.history(trainer) if "kl" in row]
    assert [i for i, value in enumerate(kl) if value == 0.0] == [0, 4, 8, 12]
    trained = [pair for pair in trainer.feature(Reference).callback.pairs() if pair.policy.requires_grad]
    assert trained and all(not torch.equal(pair.policy, pair.reference) for pair in trained)  # step 13 moved on


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("base", "steps"), [("dense", 100), ("moe", 4)])
def test_the_reference_is_trls_where_steps_and_windows_agree(
    models: dict[str, Path], tmp_path: Path, base: str, steps: int
) -> None:
    """An adapter that never moves is TRL's base model, and rollouts are drawn as without it. A full model moves."""
    options: dict[str, Any] = {**MOVING, "ref_model_sync_steps": steps, "ref_model_mixup_alpha": 0.6}
    fresh = {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_dora": True}

    def train(*, ours: bool) -> Any:
        build = {"peft_config": LoraConfig(**fresh)} if base == "dense" else {}
        asked = {**options, "sync_ref_model": ours or base == "moe"}
        return tiny.train(tiny.trainer(models[base], tmp_path, ours=ours, padded=True, build=build, **asked))

    ours, theirs = train(ours=True), train(ours=False)
    after = tiny.parameters(ours)
    assert all(torch.equal(value, after[name]) for name, value in tiny.parameters(theirs).items())
    assert [row.get("kl") for row in tiny.history(ours)] == [row.get("kl") for row in tiny.history(theirs)]
    if base == "moe":
        references = [dict(trainer.ref_model.named_parameters()) for trainer in (ours, theirs)]
        assert all(torch.equal(references[0][name], references[1][name]) for name in references[0])


def test_a_loaded_adapter_is_the_first_reference(models: dict[str, Path], tmp_path: Path) -> None:
    """TRL copies it before it rounds the policy's to bf16, and misses what is not named `.default.`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    config = LoraConfig(**{**RANDOM, "target_modules": ["q_proj", "embed_tokens"]})
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    trainer = tiny.trainer(loaded, tmp_path, **MOVING)
    policy, reference = adapter_tensors(trainer.model, "default"), adapter_tensors(trainer.model, "ref")
    assert len(policy) == 6 and all(torch.equal(reference[name], policy[name]) for name in policy)
    trainer.train()
    assert next(row["kl"] for row in tiny.history(trainer)) == 0.0


def test_what_is_frozen_stays_frozen(models: dict[str, Path], tmp_path: Path) -> None:
    """PEFT makes an adapter trainable as a whole when TRL switches to the reference and back."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    model = peft.get_peft_model(model, LoraConfig(**RANDOM))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    trainer = tiny.trainer(model, tmp_path, **MOVING)
    before = adapter_tensors(trainer.model, "default")
    trainer.train()
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == {
        name for name, _ in trainer.model.named_parameters() if "lora_B.default" in name
    }
    after = adapter_tensors(trainer.model, "default")
    assert all(torch.equal(after[name], before[name]) == ("lora_A" in name) for name in before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING.*LORA", id="prompts"
        ),
        pytest.param(
            LoraConfig(**RANDOM, layer_replication=[(0, 2), (1, 2)]),
            "layer_replication.*without it",
            id="replicated layers",
        ),
        pytest.param(
            LoraConfig(**RANDOM, bias="lora_only"), r"4 parameters of the base.*q_proj.bias.*bias='none'", id="bias"
        ),
    ],
)
def test_an_adapter_that_cannot_be_moved_is_refused(
    models: dict[str, Path], tmp_path: Path, config: peft.PeftConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.trainer(models["dense"], tmp_path, build={"peft_config": config}, **MOVING)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["default", "second"], {"method": "PPO", "num_generations": 1}, r"\['default', 'second'\].*'default'"),
        (["mine"], MOVING, r"\['mine'\].*'default'"),
        (["ref"], MOVING, r"\['ref'\].*'default'"),
    ],
)
def test_a_policy_of_other_adapters_is_refused(
    models: dict[str, Path], tmp_path: Path, names: list[str], options: dict[str, Any], message: str
) -> None:
    """TRL would copy one of them as the reference, and let that one alone act after the first rollout."""
    base = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    model = peft.get_peft_model(base, LoraConfig(**RANDOM), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, LoraConfig(**RANDOM))
    model.base_model.set_adapter(names)
    with pytest.raises(ValueError, match=message):
        tiny.trainer(model, tmp_path, **options)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("disable", [True, False])
def test_the_reference_drops_nothing_out(models: dict[str, Path], tmp_path: Path, disable: bool) -> None:
    config = LoraConfig(**RANDOM, lora_dropout=0.2)
    trainer = tiny.trainer(models["dense"], tmp_path, build={"peft_config": config}, disable_dropout=disable, **MOVING)
    shares = {name.split(".")[-1]: m.p for name, m in trainer.model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert shares == {"default": 0.0 if disable else 0.2, "ref": 0.0}
    trainer.train()
    kl = [row["kl"] for row in tiny.history(trainer) if "kl" in row]
    assert [i for i, value in enumerate(kl) if value == 0.0] == ([0, 4, 8, 12] if disable else [])


@pytest.mark.parametrize("given", [None, {"dtype": "float32"}, {"device_map": "cpu"}])
@pytest.mark.parametrize(
    ("asked", "beta", "expected"), [("true", 0.1, True), ("true", 0.0, False), ("false", 0.1, False)]
)
def test_under_fsdp_each_process_loads_the_reference_for_its_own_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any] | None,
    asked: str,
    beta: float,
    expected: bool,
) -> None:
    """TRL would load it with device_map="auto", over all GPUs that a process sees."""
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, beta=beta, model_init_kwargs=given)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", asked)
    seen: list[dict[str, Any]] = []
    construction = Construction("path", args)
    Reference(cast(Any, None), args).around_init(construction, lambda own: seen.append(dict(own.seen_by_trl)))
    assert ("model_init_kwargs" in seen[0]) == expected
    if expected:
        assert seen[0]["model_init_kwargs"] == {"device_map": None, **(given or {})}
