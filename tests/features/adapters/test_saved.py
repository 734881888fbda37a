"""A checkpoint of another adapter is refused: PEFT would load it as far as names of tensors agree."""

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig

from tests.tools import resumable, tiny
from trl_steady.features.adapters.saved import refuse_other_adapter, unsaved_parameters

RUN: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}  # a window is 4 steps
QV = ["q_proj", "v_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": QV}


def policy(folder: Path, config: peft.PeftConfig) -> Any:
    return peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), config)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        pytest.param(LoraConfig(**LORA), LoraConfig(**{**LORA, "target_modules": QV[::-1]}), id="order"),
        pytest.param(
            LoraConfig(**LORA),
            LoraConfig(**{**LORA, "target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"}),
            id="pattern",
        ),
        pytest.param(LoraConfig(**LORA), LoraConfig(**LORA, init_lora_weights="gaussian"), id="start"),
        pytest.param(
            LoraConfig(**LORA, modules_to_save=["lm_head", "embed_tokens"]),
            LoraConfig(**LORA, modules_to_save=["embed_tokens", "lm_head"]),
            id="order of whole modules",
        ),
        pytest.param(LoraConfig(**LORA), LoraConfig(**LORA, rank_pattern={"q_proj": LORA["r"]}), id="ranks"),
        pytest.param(
            LoraConfig(**LORA, init_lora_weights="pissa"), LoraConfig(**LORA, init_lora_weights="pissa"), id="pissa"
        ),
        pytest.param(
            LoraConfig(**LORA, trainable_token_indices=[3]),
            LoraConfig(**LORA, trainable_token_indices=[3]),
            id="tokens",
        ),
        pytest.param(
            LoraConfig(target_modules="all-linear"), LoraConfig(target_modules="all-linear"), id="all-linear"
        ),
        pytest.param(
            peft.OFTConfig(r=0, oft_block_size=4, target_modules=QV),
            peft.OFTConfig(r=0, oft_block_size=4, target_modules=QV),
            id="oft",
        ),
        pytest.param(
            peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
            peft.IA3Config(target_modules=["down_proj", "k_proj"], feedforward_modules=["down_proj"]),
            id="ia3",
        ),
    ],
)
def test_an_adapter_that_means_the_same_is_taken(
    models: dict[str, Path], tmp_path: Path, saved: peft.PeftConfig, own: peft.PeftConfig
) -> None:
    policy(models["dense"], saved).save_pretrained(tmp_path)
    refuse_other_adapter(policy(models["dense"], own), tmp_path)


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        pytest.param(
            LoraConfig(**LORA),
            LoraConfig(**{**LORA, "target_modules": ["q_proj"]}),
            "target_modules=",
            id="fewer modules",
        ),
        pytest.param(
            LoraConfig(**LORA), LoraConfig(**LORA, layers_to_transform=[1]), "layers_to_transform=None", id="layers"
        ),
        pytest.param(
            LoraConfig(**LORA), LoraConfig(**{**LORA, "lora_alpha": 32}), "lora_alpha=8; .* lora_alpha=32", id="alpha"
        ),
        pytest.param(LoraConfig(**LORA, use_dora=True), LoraConfig(**LORA), "use_dora=True", id="dora"),
        pytest.param(
            LoraConfig(**LORA, modules_to_save=["lm_head"]),
            LoraConfig(**LORA),
            "modules_to_save=.'lm_head'",
            id="head",
        ),
        pytest.param(
            LoraConfig(**LORA, trainable_token_indices=[3]),
            LoraConfig(**LORA, trainable_token_indices=[4]),
            r"trainable_token_indices=\[3\]",
            id="tokens",
        ),
        pytest.param(LoraConfig(**LORA, init_lora_weights="pissa"), LoraConfig(**LORA), "init=.*pissa", id="base"),
        pytest.param(
            peft.LoHaConfig(r=4, alpha=8, target_modules=QV),
            peft.LoHaConfig(r=4, alpha=4, target_modules=QV),
            "alpha=8; .* alpha=4",
            id="loha",
        ),
        pytest.param(
            peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[]),
            peft.IA3Config(target_modules=["o_proj"], feedforward_modules=["o_proj"]),
            "feedforward_modules=",
            id="ia3",
        ),
        pytest.param(LoraConfig(**LORA), peft.LoHaConfig(r=4, target_modules=QV), "peft_type=", id="kind"),
    ],
)
def test_another_adapter_is_refused(
    models: dict[str, Path], tmp_path: Path, saved: peft.PeftConfig, own: peft.PeftConfig, message: str
) -> None:
    policy(models["dense"], saved).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"(?s)holds an adapter with.*{message}.*Give the configuration"):
        refuse_other_adapter(policy(models["dense"], own), tmp_path)


def test_an_adapter_of_a_deeper_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    policy(models["dense"], LoraConfig(**LORA)).save_pretrained(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    base.model.layers = base.model.layers[:1]
    with pytest.raises(ValueError, match=r"tensors=\['.*layers.1.*this run has tensors=\[\]"):
        refuse_other_adapter(peft.get_peft_model(base, LoraConfig(**LORA)), tmp_path)


def test_a_policy_of_another_name_is_compared_with_its_own_files(models: dict[str, Path], tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    model = peft.get_peft_model(base, LoraConfig(**LORA), adapter_name="mine")
    model.add_adapter("idle", LoraConfig(r=2, target_modules=["k_proj"]))
    model.save_pretrained(tmp_path)
    refuse_other_adapter(model, tmp_path)
    model.peft_config["mine"].lora_alpha = 1
    with pytest.raises(ValueError, match=r"lora_alpha=8; .* lora_alpha=1"):
        refuse_other_adapter(model, tmp_path)


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tiny.train(tiny.trainer(models["dense"], folder, build={"peft_config": LoraConfig(**LORA)}, **RUN))
    return folder


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("step", [2, 4])  # inside a window, and at its end
def test_a_resume_with_another_adapter_is_refused(
    models: dict[str, Path], tmp_path: Path, run: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for change in ({"lora_alpha": 32}, {"target_modules": ["q_proj", "k_proj"]}, {"target_modules": ["q_proj"]}):
        config = LoraConfig(**{**LORA, **change})
        trainer = tiny.trainer(models["dense"], tmp_path, build={"peft_config": config}, **RUN)
        with pytest.raises(ValueError, match=rf"checkpoint-{step} holds an adapter with\s+{next(iter(change))}="):
            trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{step}"))
    config = LoraConfig(**{**LORA, "lora_dropout": 0.2})
    trainer = tiny.trainer(models["dense"], tmp_path, build={"peft_config": config}, **RUN)
    trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{step}"))
    line = f"checkpoint-{step} holds an adapter with\n  lora_dropout=0.0; this run has lora_dropout=0.2\n"
    assert line in capsys.readouterr().out and trainer.state.global_step == 5


def test_a_best_model_of_another_adapter_is_refused(models: dict[str, Path], tmp_path: Path, run: Path) -> None:
    """The folder may be of an earlier run."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_only_model": True}
    build = {"peft_config": LoraConfig(**{**LORA, "lora_alpha": 1}), "eval_dataset": tiny.dataset(4)}
    trainer = tiny.trainer(models["dense"], tmp_path, build=build, **{**RUN, "max_steps": 1, "save_steps": 1}, **best)
    trainer.train()  # its own is taken
    shutil.copytree(run / "checkpoint-4", tmp_path / "checkpoint-1", dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"lora_alpha=8; .* lora_alpha=1"):
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)


def test_shards_get_the_configuration_of_their_adapter(models: dict[str, Path], tmp_path: Path) -> None:
    """FSDP saves tensors in files of its own, without it."""
    trainer = tiny.trainer(models["dense"], tmp_path / "run", build={"peft_config": LoraConfig(**LORA)})
    trainer.checkpoints._save_state(tmp_path)
    refuse_other_adapter(trainer.model, tmp_path)
    with pytest.raises(ValueError, match="use_dora=False"):
        refuse_other_adapter(policy(models["dense"], LoraConfig(**LORA, use_dora=True)), tmp_path)


# kinds of which PEFT does not save what they train

PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
VECTORS = {"target_modules": QV, "num_vectors": 8, "vector_length": 4, "topk": 2, "r": 2}
UNSAVED: dict[str, peft.PeftConfig] = {
    "p-tuning": peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=8),
    "projected prefix": peft.PrefixTuningConfig(**PROMPT, prefix_projection=True, encoder_hidden_size=8),
    "vectors, best only": peft.VBLoRAConfig(**VECTORS, save_only_topk_weights=True),
}
SAVED: dict[str, peft.PeftConfig] = {
    "prompt": peft.PromptTuningConfig(**PROMPT),
    "prefix": peft.PrefixTuningConfig(**PROMPT),
    "vectors": peft.VBLoRAConfig(**VECTORS),
    "vera": peft.VeraConfig(target_modules=QV, save_projection=False),
    "ia3": peft.IA3Config(target_modules=QV, feedforward_modules=[]),
    "loha": peft.LoHaConfig(r=4, target_modules=QV),
    "tokens": peft.TrainableTokensConfig(token_indices=[1, 2]),
    "lora": LoraConfig(**LORA, use_dora=True, bias="all", modules_to_save=["lm_head"], trainable_token_indices=[3]),
}


@pytest.mark.parametrize("name", [*UNSAVED, *SAVED])
def test_what_peft_does_not_save_is_what_it_does_not_load(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    config = {**UNSAVED, **SAVED}[name]
    torch.manual_seed(1)
    model = policy(models["dense"], copy.deepcopy(config))
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for parameter in trained.values():
        parameter.data += torch.randn(parameter.shape) / 10
    random_state = torch.get_rng_state()
    unsaved = unsaved_parameters(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert bool(unsaved) == (name in UNSAVED)
    model.save_pretrained(tmp_path)
    other = policy(models["dense"], copy.deepcopy(config))
    if name == "projected prefix":
        with pytest.raises(RuntimeError, match="size mismatch"):
            other.load_adapter(tmp_path, "default", is_trainable=True)
        return
    other.load_adapter(tmp_path, "default", is_trainable=True)
    lost = [name for name, each in trained.items() if not torch.equal(each, other.get_parameter(name))]
    assert sorted(unsaved) == sorted(lost)


def test_a_kind_that_cannot_be_resumed_is_told_before_the_run(models: dict[str, Path], tmp_path: Path) -> None:
    def build(**options: Any) -> Any:
        build = {"peft_config": copy.deepcopy(UNSAVED["p-tuning"]), "eval_dataset": tiny.dataset(4)}
        return tiny.trainer(models["dense"], tmp_path, build=build, gradient_checkpointing=False, **options)

    why = r"PEFT does not save \d+ of the parameters that P_TUNING trains, for example prompt_encoder"
    with pytest.warns(UserWarning, match=rf"^{why}.*This run cannot be resumed"):
        trainer = build(**RUN)
    trainer.train()
    with pytest.raises(ValueError, match=rf"checkpoint-4 cannot be resumed: {why}"):
        build(**RUN).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(ValueError, match=rf"^load_best_model_at_end=True does not work here: {why}"):
        build(**RUN, **best)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()  # it saves nothing
    assert not [each for each in caught if "PEFT does not save" in str(each.message)]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("name", ["prompt", "prefix"])
def test_a_kind_that_is_saved_resumes_exactly(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    def build() -> Any:
        build = {"peft_config": copy.deepcopy(SAVED[name]), "train_dataset": tiny.dataset(64)}
        return tiny.trainer(models["dense"], tmp_path, build=build, gradient_checkpointing=False, **RUN)

    whole, resumed = tiny.train(build()), build()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumable.differences(tiny.parameters(whole), tiny.parameters(resumed)) == []
