"""A teacher beside the policy: what is loaded, computed, saved and refused."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.features.padding_free.rollouts import UNEQUAL, Widths
from tests.tools import agent, resumable, tiny
from tests.tools.wide import load
from trl_steady.features.teacher.feature import Teacher

SOLVED = tiny.dataset().map(lambda row: {"solution": f"{row['prompt']} because {row['prompt']}"})


def by_group(prompts: list[str], **_: Any) -> list[float]:
    """The groups of even sums have no signal."""
    is_odd = [int(prompt.lstrip("ab").split("+")[0]) % 2 for prompt in prompts]
    return [float(row % 4 * odd) for row, odd in enumerate(is_odd)]


def rollouts_of(trainer: Any) -> list[dict[str, Any]]:
    """The samples of each rollout that a trainer will make."""
    rollouts: list[dict[str, Any]] = []
    generate = trainer._generate_and_score_completions

    def generate_and_keep(inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rollouts.append(generate(inputs))
        return rollouts[-1]

    trainer._generate_and_score_completions = generate_and_keep
    return rollouts


def adapter(models: dict[str, Path], folder: Path, seed: int = 3) -> str:
    torch.manual_seed(seed)
    base = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    peft.get_peft_model(base, peft.LoraConfig(**tiny.LORA)).save_pretrained(folder)
    return str(folder)


def test_sequences_without_an_advantage_are_not_scored(models: dict[str, Path], tmp_path: Path) -> None:
    """With "weight"; with "add", all are. One pass each, without padding."""
    tokens: dict[str, int] = {}
    for mode in ("weight", "add"):
        options = {"teacher": str(models["moe"]), "teacher_mode": mode, "max_steps": 1, "num_iterations": 2}
        build = {"reward_funcs": by_group, "rollout_func": UNEQUAL}
        trainer = tiny.trainer(models["dense"], tmp_path, **options, build=build)
        seen = Widths(trainer.feature(Teacher)._model)
        samples = rollouts_of(trainer)
        trainer.train()
        tokens[mode] = sum(height * width for height, width in seen.shapes)
        lengths = (samples[0]["prompt_mask"].sum(1) + samples[0]["completion_mask"].sum(1)).tolist()
        needed = [n for n, values in zip(lengths, samples[0]["advantages"], strict=True) if values.any()]
        assert tokens[mode] == sum(needed if mode == "weight" else lengths)
    assert 0 < tokens["weight"] < tokens["add"]


def test_a_teacher_that_does_not_follow_the_rewards_leaves_their_sign(models: dict[str, Path], tmp_path: Path) -> None:
    rollouts: list[dict[str, Any]] = []
    for options in ({}, {"teacher": str(models["moe"]), "teacher_coef": 1.0}):
        trainer = tiny.trainer(models["dense"], tmp_path, max_steps=1, **options, build={"rollout_func": UNEQUAL})
        samples = rollouts_of(trainer)
        trainer.train()
        rollouts += samples
    alone, taught = (samples["advantages"] for samples in rollouts)
    mask = rollouts[1]["completion_mask"].bool()
    assert torch.equal(taught.sign()[mask], alone.sign().unsqueeze(1).expand_as(taught)[mask])
    sizes = (taught / alone.unsqueeze(1))[mask]
    assert sizes.min() >= 0.8 - 1e-6 and sizes.max() <= 1.2 + 1e-6 and sizes.unique().numel() > 5
    assert not taught[~mask].any()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [None, "solution"])
def test_an_adapter_needs_no_second_base_and_is_not_saved(
    models: dict[str, Path], tmp_path: Path, prompt: str | None
) -> None:
    teacher = adapter(models, tmp_path / "teacher")
    options: dict[str, Any] = {"teacher": teacher, "teacher_prompt": prompt, "beta": 0.04, "max_steps": 2}
    build = {"train_dataset": SOLVED}
    trainer = tiny.trainer(models["dense"], tmp_path / "out", lora=True, **options, save_strategy="steps", build=build)
    before = {name: p.clone() for name, p in trainer.model.named_parameters() if ".default" not in name}
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    trainer.train()
    assert trainer.feature(Teacher)._model is None and trainer.model.active_adapters == ["default"]
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
    assert [n for n, p in trainer.model.named_parameters() if p.requires_grad] == trained
    assert not any("teacher" in name for name in trained) and any("teacher" in name for name in before)
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "out/checkpoint-2"):
        assert not list(folder.rglob("*teacher*")), folder
    assert tiny.history(trainer)[0]["teacher/kl"] > 0


def test_beside_a_moving_reference_neither_adapter_is_saved(models: dict[str, Path], tmp_path: Path) -> None:
    moving = {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 2}
    options = {**moving, "teacher": adapter(models, tmp_path / "teacher"), "save_strategy": "steps"}
    trainer = tiny.trainer(models["dense"], tmp_path / "out", lora=True, **options)
    assert {"default", "ref"} < {*trainer.model.peft_config}
    tiny.train(trainer).save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "out/checkpoint-2"):
        assert [file.parent for file in folder.rglob("adapter_config.json")] == [folder]


@pytest.mark.slow
def test_a_quantised_base_has_an_adapter_and_itself_as_teachers(wide: Path, tmp_path: Path) -> None:
    """The base without an adapter is what its own path means."""
    kls = []
    for teacher in (str(wide), "reference"):
        model = load(wide, "nf4")
        torch.manual_seed(0)
        options = {"teacher": teacher, "teacher_mode": "add", "max_steps": 3, "num_iterations": 1}
        trainer = tiny.trainer(model, tmp_path, lora=True, **options, build={"rollout_func": UNEQUAL})
        assert trainer.feature(Teacher)._model is None
        trainer.train()
        kls.append([row["teacher/kl"] for row in tiny.history(trainer) if "teacher/kl" in row])
    assert kls[0] == kls[1] and kls[0][-1] != 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["add", "weight"])
def test_a_run_resumes_inside_a_rollout_of_a_privileged_adapter(
    models: dict[str, Path], tmp_path: Path, mode: str
) -> None:
    teacher = adapter(models, tmp_path / "teacher")
    options: dict[str, Any] = {"teacher": teacher, "teacher_prompt": "solution", "teacher_mode": mode}
    options |= {"save_strategy": "steps", "save_steps": 3, "num_iterations": 2, "steps_per_generation": 2}
    build = {"train_dataset": SOLVED}
    ends = []
    for checkpoint in (None, str(tmp_path / "out/checkpoint-3")):
        torch.manual_seed(0)
        trainer = tiny.trainer(models["dense"], tmp_path / "out", lora=True, **options, build=build)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append(resumable.state(trainer))
    assert resumable.differences(*ends) == []
    other = tiny.trainer(models["dense"], tmp_path / "out", lora=True, **{**options, "teacher_coef": 0.1}, build=build)
    with pytest.raises(ValueError, match=r"teacher_coef=0\.5; this run has teacher_coef=0\.1"):
        other.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-3"))


def test_another_tokenizer_is_refused_with_both_names(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    transformers.AutoModelForCausalLM.from_pretrained(models["dense"]).save_pretrained(folder)
    reader = tiny.tokenizer()
    reader.save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(
        file.read_text().replace('"A":', '"swapped":').replace('"B":', '"A":').replace('"swapped":', '"B":')
    )
    policy = transformers.AutoTokenizer.from_pretrained(models["dense"])
    with pytest.raises(ValueError) as refused:
        tiny.trainer(models["dense"], tmp_path, teacher=str(folder), build={"processing_class": policy})
    assert repr(str(folder)) in str(refused.value) and repr(str(models["dense"])) in str(refused.value)


def test_an_adapter_that_changes_the_base_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    adapter(models, folder)
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.init_lora_weights = "pissa"
    config.save_pretrained(str(folder))
    with pytest.raises(ValueError, match="one of the two adapters changes the base that they share"):
        tiny.trainer(models["dense"], tmp_path, lora=True, teacher=str(folder))


def test_an_adapter_under_full_fine_tuning_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """transformers would load it on another copy of its base."""
    teacher = adapter(models, tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"teacher='.*/teacher' is the folder of an adapter, .*Set peft_config, or"):
        tiny.trainer(models["dense"], tmp_path, teacher=teacher)


def test_a_column_that_is_missing_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train_dataset has no column 'solution', .*Set teacher_prompt to one"):
        tiny.trainer(models["dense"], tmp_path, teacher="reference", teacher_prompt="solution")


@pytest.mark.slow
def test_metrics_say_how_far_the_teacher_is_and_how_often_it_agrees(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"teacher": str(models["moe"]), "teacher_mode": "add", "teacher_coef": 1.0, "loss_type": "dapo"}
    trainer = tiny.trainer(models["dense"], tmp_path, **options, max_steps=1, build={"rollout_func": UNEQUAL})
    samples = rollouts_of(trainer)
    trainer.train()
    (rollout,), (row, *_) = samples, tiny.history(trainer)
    rewards = torch.tensor(
        tiny.reward(
            [
                ids[m.bool()].tolist()
                for ids, m in zip(rollout["completion_ids"], rollout["completion_mask"], strict=True)
            ]
        )
    )
    groups = rewards.view(-1, 4)
    before = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten().unsqueeze(1)
    mask = rollout["completion_mask"].bool()
    difference = rollout["advantages"] - before  # of coefficient 1
    expected = -difference[mask].mean().item()
    assert row["teacher/kl"] == pytest.approx(expected, rel=1e-3)
    assert row["teacher/agreement"] == pytest.approx((difference * before > 0)[mask].float().mean().item())


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["adapter", "base", "reference"])
def test_the_policy_is_as_before_after_an_error_of_the_teacher(
    models: dict[str, Path], tmp_path: Path, teacher: str
) -> None:
    names = {"adapter": adapter(models, tmp_path / "teacher"), "base": str(models["dense"])}
    options = {"teacher": names.get(teacher, teacher), "teacher_prompt": "solution", "teacher_mode": "add"}
    build = {"train_dataset": SOLVED}
    trainer = tiny.trainer(models["dense"], tmp_path / "out", lora=True, **options, build=build)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    score = trainer.teacher_log_probs

    def fail(*arguments: Any) -> None:
        score(*arguments)
        raise MemoryError("of the teacher")

    trainer.teacher_log_probs = fail
    with pytest.raises(MemoryError):
        trainer.train()
    assert trainer.model.active_adapters == ["default"]
    layers = [module for module in trainer.model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers and not any(layer.disable_adapters for layer in layers)
    assert [name for name, p in trainer.model.named_parameters() if p.requires_grad] == trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_a_teacher_has_no_dropout(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """The KL of the first rollout is that of the same weights without dropout."""
    kls = []
    for rate in (0.0, 0.5):
        folder = tmp_path / f"teacher {rate}"
        adapter(models, folder)
        if kind == "model":
            folder = tmp_path / f"model {rate}"
            model = transformers.AutoModelForCausalLM.from_pretrained(models["gpt2"])
            model.config.update({"resid_pdrop": rate, "attn_pdrop": rate})
            model.save_pretrained(folder)
            tiny.tokenizer().save_pretrained(folder)
        else:
            config = peft.PeftConfig.from_pretrained(str(folder))
            config.lora_dropout = rate
            config.save_pretrained(str(folder))
        options = {"teacher": str(folder), "teacher_mode": "add", "max_steps": 1}
        torch.manual_seed(0)
        trainer = tiny.trainer(
            models["dense"], tmp_path, lora=kind == "adapter", **options, build={"rollout_func": UNEQUAL}
        )
        trainer.train()
        kls.append(tiny.history(trainer)[0]["teacher/kl"])
    assert kls[0] == kls[1] != 0


def test_a_log_has_no_metrics_of_the_teacher_without_scored_tokens(models: dict[str, Path], tmp_path: Path) -> None:
    """With "weight" and no advantage; with "add", there is a KL, and no advantage to agree with."""
    logged: dict[str, set[str]] = {}
    for mode in ("weight", "add"):
        options = {"teacher": str(models["moe"]), "teacher_mode": mode, "max_steps": 1}
        build = {"reward_funcs": lambda completions, **_: [1.0] * len(completions), "rollout_func": UNEQUAL}
        trainer = tiny.train(tiny.trainer(models["dense"], tmp_path, **options, build=build))
        logged[mode] = {name for name in tiny.history(trainer)[0] if name.startswith("teacher/")}
    assert logged == {"weight": set(), "add": {"teacher/kl"}}


@pytest.mark.slow
def test_a_teacher_is_compared_with_the_policy_among_kept_tokens(models: dict[str, Path], tmp_path: Path) -> None:
    """The policy itself as the teacher has no distance."""
    options = {"teacher": str(models["dense"]), "teacher_coef": 0.0, "teacher_mode": "add", "num_iterations": 1}
    options |= {"keep_sampling_mask": True, "top_p": 0.7, "max_steps": 3}
    trainer = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    row = tiny.history(trainer)[0]
    assert abs(row["teacher/kl"]) < 1e-6 and row["sampling_mask/kept_mass"] < 0.99


def test_a_privileged_teacher_reads_rows_of_environments(tmp_path: Path) -> None:
    """With "weight", it reads the prompts of some rows, each with the tools of its own environment."""

    class Calculator(agent.Calculator):
        get_reward = None  # type: ignore[assignment]

    class Doubler(Calculator):
        pass

    def by_rows(completions: list[Any], **_: Any) -> list[float]:
        return [float(row % 2) if row < 2 else 1.0 for row in range(len(completions))]

    data = agent.dataset(agent.one_by_one)
    names = [("a", "b")[row % 2] for row in range(len(data))]
    solutions = [[{"role": "user", "content": f"solved {row}"}] for row in range(len(data))]
    data = data.add_column("environment", names).add_column("solution", solutions)
    factories = {"a": Calculator, "b": Doubler}
    build = {"train_dataset": data, "processing_class": agent.tokenizer(), "environment_factory": factories}
    options: dict[str, Any] = {"teacher": "reference", "teacher_prompt": "solution", "loss_type": "grpo", "min_p": 0.1}
    options |= {"num_generations": 2, "max_completion_length": 160, "max_steps": 1, "beta": 0.1}
    model = agent.save_model(tmp_path / "model")
    trainer = tiny.trainer(model, tmp_path / "out", **options, build={**build, "reward_funcs": by_rows})
    given: list[tuple[list[Any], list[Any]]] = []
    tokenize = trainer._tokenize_prompts

    def record(prompts: list[Any]) -> Any:
        given.append((prompts, [*trainer._batch_environments]))
        return tokenize(prompts)

    trainer._tokenize_prompts = record
    trainer.train()
    prompts, environments = given[-1]
    assert 0 < len(prompts) < 16 and len(environments) == len(prompts)
    assert [environments[i] for i in range(len(prompts))] == [
        names[int(prompt[0]["content"].split()[1])] for prompt in prompts
    ]
