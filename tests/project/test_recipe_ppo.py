"""The recipe of PPO: its presets, a small run of both methods from one start, and the comparison of runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from trl import TrlParser

import trl_steady
from tests.project.test_recipes import moved, on_a_small_scale, small  # noqa: F401  (a fixture)

FOLDER = Path(__file__).parents[2] / "recipes/ppo"


def parse(recipes: Any, name: str, *command: str) -> tuple[Any, Any]:
    config = trl_steady.GRPOConfig if name.endswith("-grpo") else trl_steady.PPOConfig
    parser = TrlParser((recipes.ppo.RecipeArguments, config))
    return parser.parse_args_and_config(
        ["--config", str(FOLDER / f"{name}.yaml"), "--use_cpu", "true", "--bf16", "false", *command]
    )


def test_both_methods_have_the_same_answers_and_adapters(recipes: Any) -> None:
    (recipe, ppo), (other, grpo) = (parse(recipes, f"smollm2-135m-{method}") for method in ("ppo", "grpo"))
    assert recipe == other and isinstance(ppo, trl_steady.PPOConfig) and not isinstance(grpo, trl_steady.PPOConfig)
    same = ("generation_batch_size", "steps_per_generation", "max_steps", "max_completion_length", "temperature")
    for option in (*same, "loss_type", "epsilon", "lr_scheduler_type", "adapter_dtype", "max_grad_norm", "seed"):
        assert getattr(ppo, option) == getattr(grpo, option), option
    assert (ppo.num_generations, grpo.num_generations) == (1, 8)
    assert (ppo.kl_coef, ppo.beta) == (grpo.beta, 0)


def test_the_presets_have_their_papers_settings(recipes: Any, recwarn: pytest.WarningsRecorder) -> None:
    found = {name: parse(recipes, name)[1] for name in ("instructgpt", "vapo", "sao")}
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []
    assert all(isinstance(args, trl_steady.PPOConfig) and not args.cannot_act for args in found.values())
    instructgpt, vapo, sao = found.values()
    assert (instructgpt.kl_coef, instructgpt.epsilon, instructgpt.gamma, instructgpt.temperature) == (0.02, 0.2, 1, 1)
    assert (instructgpt.value_init, instructgpt.value_learning_rate) == ("reward", 9e-6)
    assert (instructgpt.generation_batch_size, recipes.run.updates_per_rollout(instructgpt)) == (512, 8)
    assert instructgpt.max_steps // 8 * 512 == 256_000
    assert "# ptx_coef: 27.8 " in (FOLDER / "instructgpt.yaml").read_text()
    assert (vapo.learning_rate, vapo.value_learning_rate, vapo.value_warmup_steps) == (1e-6, 2e-6, 50)
    assert (vapo.lam_length_alpha, vapo.value_lam, vapo.epsilon, vapo.epsilon_high) == (0.05, 1, 0.2, 0.28)
    assert (vapo.generation_batch_size, vapo.generation_batch_size // vapo.num_generations) == (8192, 512)
    assert (sao.learning_rate, sao.value_learning_rate, sao.value_updates) == (1e-6, 5e-6, 2)
    assert (sao.num_generations, sao.generation_batch_size, sao.is_on_policy) == (1, 128, True)


@pytest.mark.usefixtures("small")
def test_both_methods_run_on_a_tiny_model(
    recipes: Any, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("smollm2-135m-ppo", "smollm2-135m-grpo"):
        few = on_a_small_scale(tmp_path / name, max_steps=8, check_every=1)
        results = recipes.ppo.main(*parse(recipes, name, *few))
        assert list(results["held-out greedy accuracy by step"]) == [0, 4, 8]
        assert (tmp_path / name / "training.png").read_bytes().startswith(b"\x89PNG")
        assert moved(tmp_path / name / "adapter", models["dense"])
        is_ppo = results["objective"]["method"] == "PPO"
        assert is_ppo == name.endswith("-ppo") == (tmp_path / name / "adapter/value").is_dir()
        explained = recipes.report.series(results["history"], "value/explained_variance")[0]
        assert explained == ([1, 5] if is_ppo else [])
        files.append(str(tmp_path / name / "results.json"))
    printed = capsys.readouterr().out
    assert printed.count("\nstep ") >= 16 and printed.count("  explained ") == 2

    recipes.ppo_and_grpo.main(str(tmp_path / "both.png"), *files)
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 6 and rows[2].startswith("| 0 | ") and rows[-1].startswith("| mean | ")


@pytest.mark.filterwarnings("ignore:vllm_importance_sampling_mode:UserWarning")  # without an engine here
@pytest.mark.usefixtures("small")
def test_the_presets_run_on_a_tiny_model(recipes: Any, models: dict[str, Path], tmp_path: Path) -> None:
    for name in ("instructgpt", "vapo", "sao"):
        few = {"max_steps": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_completion_length": 8}
        few |= {"learning_rate": 0.01, "value_warmup_steps": 1, "warmup_steps": 0, "value_init": "policy"}
        few |= {"lam_length_alpha": 0.5} if name != "instructgpt" else {}
        few |= {"use_vllm": False, "num_generations": 1, "logging_steps": 1, "report_to": "none"}
        results = recipes.ppo.main(*parse(recipes, name, *on_a_small_scale(tmp_path / name, **few)))
        assert [row["step"] for row in results["history"] if "value/loss" in row] == [1, 2, 3, 4]
        assert moved(tmp_path / name / "adapter", models["dense"])


def test_the_methods_are_compared_problem_by_problem(recipes: Any) -> None:
    def results(method: str, seed: int, greedy: str) -> dict[str, Any]:
        counts = {"sampled": {"after": "0212"}, "greedy": {"before": "1111", "after": greedy}}
        return {
            "seed": seed,
            "objective": {"method": method},
            "recipe": {"samples": 2},
            recipes.ppo_and_grpo.COUNTS: counts,
        }

    runs = [
        results("PPO", 0, "1101"),
        results("GRPO", 0, "0100"),
        results("PPO", 1, "1111"),
        results("PPO", 2, "0000"),
    ]
    found = recipes.ppo_and_grpo.differences([*runs, results("GRPO", 1, "0000")])
    assert list(found) == [(s, d) for s in ("0", "1", "mean") for d in ("greedy", "sampled")]
    assert found["0", "greedy"][:3] == (0.25, 0.75, 0.5)
    assert found["1", "greedy"] == (0, 1, 1, 1, 1) and found["mean", "greedy"][:3] == (0.125, 0.875, 0.75)
    assert "| 0 | greedy | 25.0% | 75.0% | +50.0% |" in recipes.ppo_and_grpo.table(found)


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    readme = (FOLDER / "README.md").read_text().replace(" %", "%")
    files = sorted((FOLDER / "results").glob("*-seed?.json"))
    assert [file.stem for file in files] == [f"{method}-seed{seed}" for method in ("grpo", "ppo") for seed in range(3)]
    runs = [json.loads(file.read_text()) for file in files]
    for run in runs:
        cells = [run["objective"]["method"], str(run["seed"])]
        for row in run["accuracy"].values():
            cells += [f"{row['before']:.1%}", f"{row['after']:.1%}", f"{100 * row['difference']:+.1f}"]
            cells += [f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}"]
        assert f"| {' | '.join(cells)} |" in readme
    for (seed, decoding), row in recipes.ppo_and_grpo.differences(runs).items():
        cells = [{"mean": "mean of the three"}.get(seed, seed), decoding.split()[0]]
        cells += [f"{row.before:.1%}", f"{row.after:.1%}", f"{100 * row.difference:+.1f}"]
        cells += [f"{100 * row.low:+.1f} to {100 * row.high:+.1f}"]
        assert f"| {' | '.join(cells)} |" in readme
