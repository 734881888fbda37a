"""The files of recipes/: they parse, say where they come from, have their papers' settings, and run."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from accelerate.commands.config import load_config_from_file
from accelerate.utils import DistributedType
from trl.scripts import grpo as launched

import trl_steady
from tests.project import recipe
from tests.project.recipe import FOLDER, WITHOUT_SCRIPT, YAMLS, parse

OWN_DATA = "your_own_data/smollm2-135m"  # shows the form of its files
ACCELERATE = {
    "single_gpu": (DistributedType.NO, 1),
    "ddp": (DistributedType.MULTI_GPU, 8),
    "ddp_cpu": (DistributedType.MULTI_GPU, 2),  # the file says why
    "fsdp2": (DistributedType.FSDP, 8),
    "zero2": (DistributedType.DEEPSPEED, 8),
    "zero3": (DistributedType.DEEPSPEED, 8),
}
# of the recipes that test_recipe*.py do not run
SMOKE = {
    "moe/qwen3-30b-a3b-fsdp2": {},
    "sampling_mask/smollm2-135m-one-rollout": {},
    "gspo/qwen3-4b-deepmath-80gb": {},
    "async/qwen3-4b-deepmath-2x80gb": {"async_generate": False},  # without a server
    "iterative_grpo/qwen3-4b-deepmath-80gb": {"ref_model_sync_steps": 1, "steps_per_generation": 1},
    # without an engine there are no log-probs of the sampler's
    "v32/qwen3-4b-deepmath-80gb": {"kl_ratio_denominator": "old"},
}


@pytest.mark.parametrize("name", YAMLS)
def test_a_recipe_parses_without_a_warning(recipes: Any, name: str, recwarn: pytest.WarningsRecorder) -> None:
    parse(recipes, name)
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []


@pytest.mark.parametrize("name", YAMLS)
def test_a_recipe_quotes_its_results_or_says_that_it_has_not_run(name: str) -> None:
    lines = itertools.takewhile(lambda line: line.startswith("#"), YAMLS[name].read_text().splitlines())
    header = " ".join(line.strip("# ") for line in lines).replace(" %", "%")
    expected = header.split("Expect: ")[1]
    if not (files := re.findall(r"results/[\w.-]+\.json", expected)):
        assert name == OWN_DATA or ("NOT YET RUN" in header and "not yet run" in expected)
        return
    readme = recipe.without_spaces(YAMLS[name].parent / "README.md")
    figures = re.findall(r"\d+\.\d+%?", expected)
    assert figures and all(figure in readme for figure in figures)
    results = json.loads((YAMLS[name].parent / files[0]).read_text())
    (results,) = [run for run in results.get("runs", [results]) if run["seed"] == 0]
    measured = {f"{row[time]:.1%}" for row in results["accuracy"].values() for time in ("before", "after")}
    assert {figure for figure in figures if figure.endswith("%")} <= measured


def test_accelerate_reads_the_configurations_as_they_are_meant() -> None:
    assert {path.stem for path in FOLDER.glob("accelerate/*.yaml")} == set(ACCELERATE)
    for name, expected in ACCELERATE.items():
        found = load_config_from_file(str(FOLDER / f"accelerate/{name}.yaml"))
        assert (found.distributed_type, found.num_processes) == expected
        assert found.use_cpu == (name == "ddp_cpu") and found.mixed_precision == ("no" if found.use_cpu else "bf16")
        stage = found.deepspeed_config.get("zero_stage"), found.fsdp_config.get("fsdp_version")
        assert stage == {"zero2": (2, None), "zero3": (3, None), "fsdp2": (None, 2)}.get(name, (None, None))


def test_the_gallery_has_every_file_and_the_figures_of_its_recipes() -> None:
    """Each paragraph with figures links the README that has them."""
    readme = (FOLDER / "README.md").read_text()
    assert all(path.relative_to(FOLDER).as_posix() in readme for path in FOLDER.glob("**/*.yaml"))
    for section in re.split(r"^###? ", readme, flags=re.MULTILINE)[1:]:
        linked = [FOLDER / path for path in re.findall(r"\]\((\w+/README\.md)\)", section)]
        theirs = "".join(map(recipe.without_spaces, linked))
        for figure in re.findall(r"\d+\.\d+ %|\b\d\.\d{4}\b", section):
            assert figure.replace(" %", "%") in theirs, (section.splitlines()[0], figure)


def test_the_gspo_recipes_have_the_papers_clip_range_off_policy(recipes: Any) -> None:
    for name in ("gspo/smollm2-135m-comparison", "gspo/qwen3-4b-deepmath-80gb"):
        args = parse(recipes, name)[1]
        assert (args.loss_type, args.epsilon, args.epsilon_high) == ("gspo", 3e-4, 4e-4)
        assert args.beta == 0 and not args.is_on_policy
    script, args = parse(recipes, "process_rewards/smollm2-135m-process")
    assert (script.rewards, args.loss_type, args.step_advantage) == ("steps", "gspo_token", "return_to_go")
    assert (args.epsilon, args.epsilon_high) == (3e-4, 4e-4) and not args.is_on_policy
    longest = len(recipes.sums.answer((29, 29, 29, 29)))  # a token for each character, and one for the end
    assert longest < args.max_completion_length


CLOCKS = {  # processes, answers of an update and of a rollout, questions of a rollout, outer iterations
    "smollm2-135m": (1, 16, 64, 8, 4),
    "qwen2.5-7b-gsm8k-24gb": (1, 32, 128, 16, 4),
    "deepseekmath-7b": (8, 1024, 1024, 16, 3),  # section 4.2: a single update after each exploration
}


def test_the_three_clocks_of_iterative_grpo(recipes: Any) -> None:
    for name, (processes, an_update, a_rollout, questions, outer_iterations) in CLOCKS.items():
        script, args = parse(recipes, f"iterative_grpo/{name}")
        answers = args.per_device_train_batch_size * processes
        assert answers * args.gradient_accumulation_steps == an_update
        assert answers * args.steps_per_generation == a_rollout == questions * args.num_generations
        updates = recipes.run.updates_per_rollout(args)
        assert updates == a_rollout // an_update
        # a refresh waits for the next rollout: an outer iteration of whole rollouts is as long as it says
        assert args.sync_ref_model and args.ref_model_sync_steps % updates == 0
        assert args.max_steps == outer_iterations * args.ref_model_sync_steps
        assert (args.loss_type, args.beta, args.ref_model_mixup_alpha) == ("grpo", 0.04, 1.0)
        if processes == 8:
            assert (args.learning_rate, args.num_generations, args.max_completion_length) == (1e-6, 64, 1024)
            assert not args.use_bias_correction_kl and script.adapter is None and not script.quantised


def test_v32_has_the_papers_settings_off_policy(recipes: Any) -> None:
    for name in ("smollm2-135m-v32", "qwen2.5-7b-gsm8k-80gb"):
        args = parse(recipes, f"v32/{name}")[1]
        assert (args.loss_type, args.importance_sampling_level, args.scale_rewards) == ("grpo", "token", "none")
        assert args.beta > 0 and args.use_bias_correction_kl and args.kl_estimator == "k3"
        assert args.off_policy_mask_threshold is not None and recipes.run.updates_per_rollout(args) == 4
        # TRL's own term where the policy samples; against the engine where an engine does
        assert args.kl_ratio_denominator == ("sampler" if args.use_vllm else "old")
        assert bool(args.truncations) == args.keep_sampling_mask == args.use_vllm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sampling leaves tokens out:UserWarning")
@pytest.mark.parametrize("name", SMOKE)
def test_a_recipe_takes_two_steps_on_a_tiny_model(
    smollm2: Any, models: dict[str, Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few: dict[str, Any] = {**recipe.FROM_HUB, "steps_per_generation": 2, "max_steps": 2, "save_strategy": "no"}
    few |= {"learning_rate": 0.01, **SMOKE[name]}
    del few["model_init_kwargs"]
    start = recipe.chatty(models["moe" if name.startswith("moe/") else "dense"], tmp_path / "model")
    policy = tmp_path / "out"
    if name in WITHOUT_SCRIPT:
        trained: list[Any] = []

        class Kept(trl_steady.GRPOTrainer):
            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                trained.append(self)

        data = tmp_path / "data"
        data.mkdir()
        rows = [smollm2.gsm8k.example(row) for row in recipe.GSM8K]
        (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        monkeypatch.setattr(trl, "GRPOTrainer", Kept)
        monkeypatch.setattr(trl.rewards, "accuracy_reward", recipe.by_length)
        few |= {"model_name_or_path": start, "dataset_name": data, "dtype": "float32", "output_dir": policy}
        launched.main(*parse(smollm2, name, **few))
        assert len(trained[0].reference_refreshes) == ("ref_model_sync_steps" in SMOKE[name])
        history = trained[0].state.log_history
    else:
        if name.startswith("moe/"):
            problems = [smollm2.gsm8k.example(row) for row in recipe.GSM8K]
            monkeypatch.setattr(smollm2.gsm8k, "questions", lambda _: smollm2.gsm8k.Dataset.from_list(problems))
            monkeypatch.setattr(smollm2.gsm8k, "accuracy_reward", recipe.by_length)
            few |= {"model_name": start, "eval_strategy": "no", "eval_on_start": False}
        history = recipe.run(smollm2, name, policy, **few)["history"]
        policy = next(policy / kind for kind in ("adapter", "model") if (policy / kind).is_dir())
    assert [row["step"] for row in history if "loss" in row] == [1, 2]
    assert any(row.get("frac_reward_zero_std", 1) < 1 for row in history)
    if (policy / "adapter_config.json").is_file():
        assert recipe.moved(policy, start)
    else:
        before, after = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (start, policy))
        assert any(not torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True))
