"""The gallery: every recipe says what it is, is in the README and runs; accelerate reads its files as meant."""

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.utils import DistributedType
from trl.scripts import grpo as launched

import trl_steady
from tests.project.test_recipes import CHAT, GSM8K, moved, on_a_small_scale, small  # noqa: F401  (a fixture)
from tests.tools import tiny

FOLDER = Path(__file__).parents[2] / "recipes"
YAMLS = {
    f"{path.parent.name}/{path.stem}": path
    for path in sorted(FOLDER.glob("**/*.yaml"))
    if path.parent.name not in ("accelerate", "stress")  # these have tests of their own
}
WITHOUT_SCRIPT = [name for name, path in YAMLS.items() if "reward_funcs" in yaml.safe_load(path.read_text())]
OWN_DATA = "your_own_data/smollm2-135m"  # shows the form of its files
LARGE = [name for name in WITHOUT_SCRIPT if name != OWN_DATA]
ACCELERATE = {
    "single_gpu": (DistributedType.NO, 1),
    "ddp": (DistributedType.MULTI_GPU, 8),
    "ddp_cpu": (DistributedType.MULTI_GPU, 2),  # the file says why
    "fsdp2": (DistributedType.FSDP, 8),
    "zero2": (DistributedType.DEEPSPEED, 8),
    "zero3": (DistributedType.DEEPSPEED, 8),
}
# the end-to-end tests that run a recipe's YAML on a tiny model; the others run below
RUN_BY = {
    "deepseekmath_loop/smollm2-135m": "test_recipe_loop::test_each_arm_runs_on_a_tiny_model",
    "gspo/smollm2-135m-comparison": "test_recipes::test_the_gspo_script_runs_from_end_to_end_on_a_tiny_model",
    "iterative_grpo/deepseekmath-7b": "test_recipes::test_gsm8k_runs_on_a_tiny_model_and_tiny_data",
    "iterative_grpo/qwen2.5-7b-gsm8k-24gb": "test_recipes::test_gsm8k_runs_on_a_tiny_model_and_tiny_data",
    "iterative_grpo/smollm2-135m": "test_recipes::test_the_iterative_script_refreshes_and_resumes_on_a_tiny_model",
    "moe/qwen3-moe-digits": "test_recipe_moe::test_each_variant_runs_on_a_smaller_model",
    "ppo/instructgpt": "test_recipe_ppo::test_the_presets_run_on_a_tiny_model",
    "ppo/sao": "test_recipe_ppo::test_the_presets_run_on_a_tiny_model",
    "ppo/smollm2-135m-grpo": "test_recipe_ppo::test_both_methods_run_on_a_tiny_model",
    "ppo/smollm2-135m-ppo": "test_recipe_ppo::test_both_methods_run_on_a_tiny_model",
    "ppo/vapo": "test_recipe_ppo::test_the_presets_run_on_a_tiny_model",
    "process_rewards/smollm2-135m-process": (
        "test_recipes::test_the_process_script_rewards_steps_or_outcomes_from_one_start"
    ),
    "sampling_mask/digits-top-p": "test_recipe_sampling_mask::test_each_variant_runs_on_a_smaller_model",
    "v32/qwen2.5-7b-gsm8k-80gb": "test_recipes::test_gsm8k_runs_on_a_tiny_model_and_tiny_data",
    "v32/smollm2-135m-v32": "test_recipes::test_the_v32_script_shows_what_the_mask_sees_and_drops",
    OWN_DATA: "test_recipe_own_data::test_the_one_command_trains_a_tiny_model",
}
SMOKE = {
    "moe/qwen3-30b-a3b-fsdp2": {},
    "sampling_mask/smollm2-135m-one-rollout": {},
    "gspo/qwen3-4b-deepmath-80gb": {},
    "iterative_grpo/qwen3-4b-deepmath-80gb": {"ref_model_sync_steps": 1, "steps_per_generation": 1},
    # without an engine there are no log-probs of the sampler's
    "v32/qwen3-4b-deepmath-80gb": {"kl_ratio_denominator": "old"},
}


def dataclasses(recipes: Any, name: str) -> tuple[Any, ...]:
    """Of the script that reads the recipe, ours or TRL's."""
    if name in WITHOUT_SCRIPT:
        return launched.GRPOScriptArguments, trl_steady.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig
    is_ppo = name.startswith("ppo/") and not name.endswith("-grpo")
    config = trl_steady.PPOConfig if is_ppo else trl_steady.GRPOConfig
    return getattr(recipes, name.split("/")[0]).RecipeArguments, config


def parse(recipes: Any, name: str, *command: str) -> tuple[Any, ...]:
    parser = trl.TrlParser(dataclasses(recipes, name))
    return parser.parse_args_and_config(
        ["--config", str(YAMLS[name]), "--use_cpu", "true", "--bf16", "false", *command]
    )


def header(path: Path) -> dict[str, str]:
    """The comment that a YAML begins with, by its headings; the first line is under the empty one."""
    found, heading = {"": ""}, ""
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            return found
        if start := re.match(r"# ([A-Z]\w+): +", line):
            heading = start[1]
            found[heading] = ""
        found[heading] += line[start.end() if start else 1 :].strip() + " "
    return found


@pytest.mark.parametrize("name", YAMLS)
def test_a_recipe_parses_without_a_warning(recipes: Any, name: str, recwarn: pytest.WarningsRecorder) -> None:
    parse(recipes, name)
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []


@pytest.mark.parametrize("name", YAMLS)
def test_a_recipe_says_where_it_comes_from_and_what_to_expect(name: str) -> None:
    said, folder = header(YAMLS[name]), YAMLS[name].parent
    assert said.keys() >= {"Paper", "Hardware", "Expect"}
    assert re.search(r"arXiv:? ?\d{4}\.\d{5}", said["Paper"]), said["Paper"]
    expected = said["Expect"]
    if name == OWN_DATA:
        assert expected.startswith("no figures: ")
        return
    if expected.startswith("not yet run"):
        assert "NOT YET RUN" in said[""] and "not yet run" in said["Hardware"]
        return
    assert "NOT YET RUN" not in said[""]
    (file, *_) = files = re.findall(r"results/[\w.-]+\.json", expected)
    assert all((folder / file).is_file() for file in files)
    readme = (folder / "README.md").read_text().replace(" %", "%")
    figures = re.findall(r"\d+\.\d+%?", expected.replace(" %", "%"))
    assert figures and all(figure in readme for figure in figures)
    results = json.loads((folder / file).read_text())
    (results,) = [run for run in results.get("runs", [results]) if run["seed"] == 0]
    measured = {f"{row[time]:.1%}" for row in results["accuracy"].values() for time in ("before", "after")}
    assert {figure for figure in figures if figure.endswith("%")} <= measured


@pytest.mark.parametrize("name", YAMLS)
def test_a_setting_that_is_not_the_default_has_a_comment(recipes: Any, name: str) -> None:
    defaults = {field.name: field.default for kind in dataclasses(recipes, name) for field in fields(kind)}
    for line in YAMLS[name].read_text().splitlines():
        if line and not line.startswith(("#", " ")):
            ((option, value),) = yaml.safe_load(line).items()
            assert " # " in line or defaults[option] == value, line


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate_reads_a_configuration_as_it_is_meant(name: str) -> None:
    path = FOLDER / f"accelerate/{name}.yaml"
    found = load_config_from_file(str(path))
    assert (found.distributed_type, found.num_processes) == ACCELERATE[name]
    assert found.use_cpu == (name == "ddp_cpu") and found.mixed_precision == ("no" if found.use_cpu else "bf16")
    stage = found.deepspeed_config.get("zero_stage"), found.fsdp_config.get("fsdp_version")
    assert stage == {"zero2": (2, None), "zero3": (3, None), "fsdp2": (None, 2)}.get(name, (None, None))
    assert header(path).keys() >= {"For", "With", "Tested"}
    (line,) = (line for line in path.read_text().splitlines() if line.startswith("num_processes:"))
    assert "  # " in line


# `--use_cpu true` has the trainer ask for the CPU in this way
WHO = """
import pathlib, sys, accelerate
state = accelerate.PartialState(cpu=True)
found = f"{state.num_processes} {state.backend} {state.device.type}"
pathlib.Path(sys.argv[1], str(state.process_index)).write_text(found)
"""


def test_two_processes_on_cpu_are_two(tmp_path: Path) -> None:
    script = tmp_path / "who.py"
    script.write_text(WHO)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(FOLDER / "accelerate/ddp_cpu.yaml"), str(script), str(tmp_path)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / rank).read_text() for rank in "01"] == 2 * ["2 gloo cpu"]


def test_the_gallery_has_every_file_and_every_picture() -> None:
    readme = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("**/*.yaml"):
        assert path.relative_to(FOLDER).as_posix() in readme
    assert {path.stem for path in FOLDER.glob("accelerate/*.yaml")} == set(ACCELERATE)
    shown = re.findall(r"!\[[^\]]+\]\(([\w/.-]+)\)", readme)
    assert {picture.split("/")[0] for picture in shown} == {
        path.parent.parent.name for path in FOLDER.glob("*/results/*.png")
    }
    for file in re.findall(r"recipes/[\w/.-]+\.(?:yaml|py)", readme):
        assert (FOLDER.parent / file).is_file(), file
    headings = re.findall(r"^#+ (.+)$", readme, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", readme)) <= anchors


def test_a_figure_of_the_gallery_is_its_recipes() -> None:
    """Each paragraph with figures links the README that has them."""
    readme = (FOLDER / "README.md").read_text()
    for section in re.split(r"^###? ", readme, flags=re.MULTILINE)[1:]:
        figures = re.findall(r"\d+\.\d+ %|\b\d\.\d{4}\b", section)
        linked = [FOLDER / path for path in re.findall(r"\]\((\w+/README\.md)\)", section)]
        theirs = "".join(path.read_text() for path in linked).replace(" %", "%")
        for figure in figures:
            assert figure.replace(" %", "%") in theirs, (section.splitlines()[0], figure)


def test_every_recipe_runs_somewhere() -> None:
    assert sorted([*RUN_BY, *SMOKE]) == sorted(YAMLS)
    for name, test in RUN_BY.items():
        file, function = test.split("::")
        source = (Path(__file__).parent / f"{file}.py").read_text()
        (body,) = (node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == function)
        stem = name.split("/")[1]
        found = ast.get_source_segment(source, body) or ""
        assert f'"{stem}"' in found or f'"{stem}.yaml"' in found, test


def test_recipes_without_a_script_differ_in_the_objective_only() -> None:
    objective = {"loss_type", "epsilon", "epsilon_high", "beta", "scale_rewards", "use_bias_correction_kl"}
    objective |= {"kl_ratio_denominator", "off_policy_mask_threshold", "top_p", "top_k", "keep_sampling_mask"}
    objective |= {"sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha", "output_dir"}
    settings = [yaml.safe_load(YAMLS[name].read_text()) for name in LARGE]
    rest = [{name: value for name, value in one.items() if name not in objective} for one in settings]
    assert len(rest) == 3 and rest[0] == rest[1] == rest[2]


def test_recipes_without_a_script_have_their_papers_settings(recipes: Any) -> None:
    for name in LARGE:
        script, args, model, _ = parse(recipes, name)
        assert recipes.run.updates_per_rollout(args) == 4 and script.reward_funcs == ["accuracy_reward"]
        assert model.use_peft and model.lora_target_modules == "all-linear"
    gspo, v32, iterative = (
        parse(recipes, f"{folder}/qwen3-4b-deepmath-80gb")[1] for folder in ("gspo", "v32", "iterative_grpo")
    )
    assert (gspo.loss_type, gspo.epsilon, gspo.epsilon_high, gspo.beta) == ("gspo", 3e-4, 4e-4, 0)
    assert v32.keep_sampling_mask and v32.truncations and v32.kl_ratio_denominator == "sampler"
    assert iterative.sync_ref_model and (iterative.beta, iterative.ref_model_mixup_alpha) == (0.04, 1.0)
    assert iterative.max_steps == 4 * iterative.ref_model_sync_steps


@pytest.fixture
def chatty(models: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """The tiny models with a chat template."""
    folders = {name: tmp_path / name for name in ("dense", "moe")}
    for name, folder in folders.items():
        shutil.copytree(models[name], folder)
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(folder)
    return folders


def by_length(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """A random model is never right, and without a difference in reward there is nothing to learn."""
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


@pytest.mark.filterwarnings("ignore:sampling leaves tokens out:UserWarning")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", SMOKE)
def test_a_recipe_takes_two_steps_on_a_tiny_model(
    recipes: Any, chatty: dict[str, Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 1}
    few |= {"steps_per_generation": 2, "max_steps": 2, "max_completion_length": 8, "use_vllm": False} | SMOKE[name]
    few |= {"save_strategy": "no", "learning_rate": 0.01}
    if name in WITHOUT_SCRIPT:
        built: list[Any] = []

        class Kept(trl_steady.GRPOTrainer):
            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                built.append(self)

        data = tmp_path / "data"
        data.mkdir()
        rows = [recipes.gsm8k.example(row) for row in GSM8K]
        (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        monkeypatch.setattr(trl, "GRPOTrainer", Kept)
        monkeypatch.setattr(trl.rewards, "accuracy_reward", by_length)
        few |= {"model_name_or_path": chatty["dense"], "dataset_name": data, "dtype": "float32"}
        few |= {"output_dir": tmp_path / "out"}
        launched.main(
            *parse(recipes, name, *(part for key, value in few.items() for part in (f"--{key}", str(value))))
        )
        assert len(built[0].reference_refreshes) == ("ref_model_sync_steps" in SMOKE[name])
        history, policy, start = built[0].state.log_history, tmp_path / "out", chatty["dense"]
    else:
        if name.startswith("moe/"):
            problems = [recipes.gsm8k.example(row) for row in GSM8K]
            monkeypatch.setattr(recipes.gsm8k, "questions", lambda _: recipes.gsm8k.Dataset.from_list(problems))
            monkeypatch.setattr(recipes.gsm8k, "accuracy_reward", by_length)
            few |= {"model_name": chatty["moe"], "eval_strategy": "no", "eval_on_start": False}
        results = getattr(recipes, name.split("/")[0]).main(
            *parse(recipes, name, *on_a_small_scale(tmp_path / "out", **few))
        )
        history, policy = results["history"], tmp_path / "out"
        policy, start = next(policy / kind for kind in ("adapter", "model") if (policy / kind).is_dir()), chatty["moe"]
    assert [row["step"] for row in history if "loss" in row] == [1, 2]
    assert any(row.get("frac_reward_zero_std", 1) < 1 for row in history)
    if (policy / "adapter_config.json").is_file():
        assert moved(policy, chatty["dense"])
    else:
        before, after = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (start, policy))
        assert any(not torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True))
