"""Recipes: their settings are the papers', the task is what it says, and the scripts run on a tiny model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
from trl import TrlParser

import trl_steady
from tests.tools import tiny

ROOT = Path(__file__).parents[2]


def is_scripted(recipe: Path) -> bool:
    """Whether a script of its folder reads it; test_gallery.py has the others too."""
    return (recipe.parent / "train.py").is_file() and "reward_funcs:" not in recipe.read_text()


YAMLS = {path.stem: path for path in sorted(ROOT.glob("recipes/**/*.yaml")) if is_scripted(path)}


def parse(recipes: Any, path: Path, *command: str) -> tuple[Any, trl_steady.GRPOConfig]:
    script = getattr(recipes, path.parent.name)
    parser = TrlParser((script.RecipeArguments, trl_steady.GRPOConfig))
    return parser.parse_args_and_config(["--config", str(path), "--use_cpu", "true", *command])


def test_the_gspo_recipe_has_the_papers_clip_range_off_policy(recipes: Any) -> None:
    _, args = parse(recipes, YAMLS["smollm2-135m-comparison"])
    assert (args.epsilon, args.epsilon_high) == (3e-4, 4e-4) and not args.is_on_policy


@pytest.mark.parametrize(
    ("name", "processes", "an_update", "a_rollout", "questions", "outer_iterations"),
    [
        ("smollm2-135m", 1, 16, 64, 8, 4),
        ("qwen2.5-7b-gsm8k-24gb", 1, 32, 128, 16, 4),
        ("deepseekmath-7b", 8, 1024, 1024, 16, 3),  # section 4.2: a single update after each exploration
    ],
)
def test_the_three_clocks_of_iterative_grpo(
    recipes: Any, name: str, processes: int, an_update: int, a_rollout: int, questions: int, outer_iterations: int
) -> None:
    _, args = parse(recipes, YAMLS[name], "--bf16", "false")
    answers = args.per_device_train_batch_size * processes
    assert answers * args.gradient_accumulation_steps == an_update
    assert answers * args.steps_per_generation == a_rollout == questions * args.num_generations
    updates = recipes.run.updates_per_rollout(args)
    assert updates == a_rollout // an_update
    # a refresh waits for the next rollout: an outer iteration of whole rollouts is as long as it says
    assert args.sync_ref_model and args.ref_model_sync_steps % updates == 0
    assert args.max_steps == outer_iterations * args.ref_model_sync_steps
    assert (args.loss_type, args.beta, args.ref_model_mixup_alpha) == ("grpo", 0.04, 1.0)


def test_deepseekmath_has_the_papers_settings(recipes: Any) -> None:
    recipe, args = parse(recipes, YAMLS["deepseekmath-7b"], "--bf16", "false")
    assert (args.learning_rate, args.num_generations, args.max_completion_length) == (1e-6, 64, 1024)
    assert args.is_on_policy and not args.use_bias_correction_kl
    assert recipe.adapter is None and not recipe.quantised


@pytest.mark.parametrize("name", ["smollm2-135m-v32", "qwen2.5-7b-gsm8k-80gb"])
def test_v32_has_the_papers_set_off_policy(recipes: Any, name: str) -> None:
    _, args = parse(recipes, YAMLS[name], "--bf16", "false")
    assert (args.loss_type, args.importance_sampling_level, args.scale_rewards) == ("grpo", "token", "none")
    assert args.beta > 0 and args.use_bias_correction_kl and args.kl_estimator == "k3"
    assert args.off_policy_mask_threshold is not None and recipes.run.updates_per_rollout(args) == 4
    # TRL's own term where the policy samples; against the engine where an engine does
    assert args.kl_ratio_denominator == ("sampler" if args.use_vllm else "old")
    assert bool(args.truncations) == args.keep_sampling_mask == args.use_vllm


def test_training_and_held_out_problems_are_disjoint_also_turned_round(recipes: Any) -> None:
    train, test = recipes.task.split(200)
    assert len(test) == len(set(test)) == 200 and len(train) == len(set(train)) == 2 * (90 * 89 // 2 - 3 - 200)
    both_ways = {pair for problem in test for pair in (problem, problem[::-1])}
    assert not both_ways & set(train) and not both_ways & set(recipes.task.EXAMPLES)
    assert recipes.task.split(200) == (train, test)
    assert 60 < sum(a > b for a, b in test) < 140  # either place holds the answer


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (" 45\n", True),
        ("45", True),
        (" 45\nmax(1, 2)", True),
        (" 45 ", True),
        (" 4\n5", False),
        (" 455\n", False),
        ("", False),
    ],
)
def test_an_answer_is_the_first_line(recipes: Any, completion: str, right: bool) -> None:
    assert recipes.task.is_right((12, 45), completion) is right


def test_the_process_recipe_rewards_steps_with_gspo_token(recipes: Any) -> None:
    recipe, args = parse(recipes, YAMLS["smollm2-135m-process"])
    assert (recipe.rewards, args.loss_type, args.step_advantage) == ("steps", "gspo_token", "return_to_go")
    assert (args.epsilon, args.epsilon_high) == (3e-4, 4e-4) and not args.is_on_policy
    longest = len(recipes.sums.answer((29, 29, 29, 29)))  # a token for each character, and one for the end
    assert longest < args.max_completion_length


def test_the_interval_is_that_of_paired_problems(recipes: Any) -> None:
    before = np.tile([[1.0, 0.0]], (100, 1))
    after = np.concatenate([np.ones((50, 2)), np.tile([[1.0, 0.0]], (50, 1))])
    found = recipes.report.difference(before, after)
    # each problem gains 1/2 or 0 with equal odds: mean 1/4, standard error 1/4 / sqrt(100)
    assert found.before == 0.5 and found.after == 0.75 and found.difference == 0.25
    assert found.low == pytest.approx(0.25 - 1.96 * 0.025, abs=5e-3)
    assert found.high == pytest.approx(0.25 + 1.96 * 0.025, abs=5e-3)


@pytest.fixture
def small(recipes: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model in place of SmolLM2."""

    def load(folder: Path, quantised: bool) -> tuple[Any, Any]:
        return transformers.AutoModelForCausalLM.from_pretrained(models["dense"]), tiny.tokenizer()

    # a random model is never right, and without a difference in reward there is nothing to learn
    monkeypatch.setattr(recipes.task, "is_right", lambda problem, text: len(text) % 2 == 0)
    monkeypatch.setattr(recipes.sums, "outcome_reward", lambda problem, text: float(len(text) % 2 == 0))
    monkeypatch.setattr(recipes.sums, "lines", trl_steady.rewards.by_regex("[a-z]"))
    monkeypatch.setattr(
        recipes.sums,
        "right_lines",
        lambda problem, text: [len(line) % 2 == 0 for line in recipes.sums.lines(text).texts],
    )
    monkeypatch.setattr(recipes.smollm2, "load", load)
    monkeypatch.setattr(
        recipes.smollm2,
        "reload",
        lambda folder, quantised: (transformers.AutoModelForCausalLM.from_pretrained(folder), tiny.tokenizer()),
    )


def on_a_small_scale(output: Path, **options: Any) -> list[str]:
    few = {"per_device_train_batch_size": 8, "held_out": 10, "samples": 2, "output_dir": output, **options}
    return [part for name, value in few.items() for part in (f"--{name}", str(value))]


def moved(path: Path, model: Path) -> bool:
    """Whether the adapter at `path` does anything; it is loaded as a user would."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    adapter = peft.PeftModel.from_pretrained(plain, str(path))
    return any(value.abs().max() > 0 for name, value in adapter.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("script", sorted(ROOT.glob("recipes/*/train.py")), ids=lambda path: path.parent.name)
def test_a_recipe_imports_trl_steady_before_it_loads_bitsandbytes(script: Path) -> None:
    """transformers and peft load it, and its message about a missing kernel has to be filtered by then."""
    assert not re.search(r"^(from|import) (transformers|peft)", script.read_text().split("\nfrom common ")[0], re.M)


@pytest.mark.usefixtures("small")
def test_the_gspo_script_runs_from_end_to_end_on_a_tiny_model(
    recipes: Any,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipes.small_model, "BATCH", 10)
    few = on_a_small_scale(tmp_path, max_steps=8)
    results = recipes.gspo.main(*parse(recipes, YAMLS["smollm2-135m-comparison"], *few))
    printed = capsys.readouterr().out
    assert printed.count("\nstep ") >= 8 and "accuracy on held-out problems" in printed
    before = printed.partition("Before: ")[2].partition("Training: ")[0]
    assert [line.strip() for line in before.splitlines()[1:3]] == ["10 of 20 answers", "20 of 20 answers"]
    for name, accuracy in results["accuracy"].items():
        assert f"held out, {name}: {accuracy['before']:.1%} right\n" in before
    assert json.loads((tmp_path / "results.json").read_text())["seed"] == 0
    assert list(results["held-out greedy accuracy by step"]) == [0, 4, 8]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert moved(tmp_path / "adapter", models["dense"])


@pytest.mark.usefixtures("small")
def test_the_iterative_script_refreshes_and_resumes_on_a_tiny_model(
    recipes: Any, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = on_a_small_scale(tmp_path, max_steps=6, steps_per_generation=2, ref_model_sync_steps=2, save_steps=4)
    command = [*whole, "--save_strategy", "steps", "--resume_from_checkpoint", "true"]
    first = recipes.iterative_grpo.main(*parse(recipes, YAMLS["smollm2-135m"], *command))
    assert [(refresh["step"], refresh["rule"]) for refresh in first["refreshes"]] == [(2, "steps"), (4, "steps")]
    kl = dict(zip(*recipes.report.series(first["history"], "kl"), strict=True))
    assert kl[1] == kl[3] == kl[5] == 0 and min(kl[2], kl[4], kl[6]) > 0
    printed = capsys.readouterr().out
    assert printed.count("\nstep ") == 6 and printed.count("-- refresh ") == 2
    assert printed.index("-- refresh 1 after update 2 (steps)") < printed.index("step   3/6")
    assert json.loads((tmp_path / "results.json").read_text())["refreshes"] == first["refreshes"]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert moved(tmp_path / "adapter", models["dense"])

    axis = recipes.report.plt.Figure().subplots()
    recipes.pictures.kl(axis, first)
    curve, *refreshes = axis.get_lines()
    assert dict(zip(curve.get_xdata(), curve.get_ydata(), strict=True)) == kl
    assert [line.get_xdata()[0] for line in refreshes] == [2.5, 4.5]

    shutil.rmtree(tmp_path / "checkpoint-6")
    second = recipes.iterative_grpo.main(*parse(recipes, YAMLS["smollm2-135m"], *command))
    assert "-- refresh 1" not in (printed := capsys.readouterr().out) and printed.count("-- refresh 2") == 1
    for same in ("refreshes", "accuracy", "held-out greedy accuracy by step"):
        assert second[same] == first[same]
    assert dict(zip(*recipes.report.series(second["history"], "kl"), strict=True)) == kl


@pytest.mark.usefixtures("small")
def test_a_frozen_reference_is_drawn_beside_a_moving_one(recipes: Any, tmp_path: Path) -> None:
    files = {}
    for name, moves in (("moving", "true"), ("frozen", "false")):
        few = on_a_small_scale(tmp_path / name, max_steps=3, steps_per_generation=1, ref_model_sync_steps=1)
        found = recipes.iterative_grpo.main(*parse(recipes, YAMLS["smollm2-135m"], *few, "--sync_ref_model", moves))
        assert [refresh["step"] for refresh in found["refreshes"]] == ([1, 2] if moves == "true" else [])
        files[name] = tmp_path / name / "results.json"
    recipes.pictures.main(str(tmp_path / "both.png"), *(f"{name}={file}" for name, file in files.items()))
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small")
def test_the_v32_script_shows_what_the_mask_sees_and_drops(
    recipes: Any, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = on_a_small_scale(tmp_path, max_steps=8)
    found = {}
    for threshold in ("0", "inf"):
        command = [*few, "--off_policy_mask_threshold", threshold]
        found[threshold] = recipes.v32.main(*parse(recipes, YAMLS["smollm2-135m-v32"], *command))
    assert capsys.readouterr().out.count("off policy q90") == 16
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert moved(tmp_path / "adapter", models["dense"])
    assert "Infinity" not in (tmp_path / "results.json").read_text()  # which JSON has not

    def curve(results: Any, name: str) -> list[float]:
        return recipes.report.series(results["history"], name)[1]

    for results in found.values():
        q99 = curve(results, "off_policy_q99")
        assert [step for step, value in enumerate(q99) if value == 0] == [0, 4]  # on-policy: each rollout's first
        assert curve(results, "kl/k3") == pytest.approx(curve(results, "kl"), rel=1e-3)
    assert sum(curve(found["0"], "dropped/off_policy")) > 0 == sum(curve(found["inf"], "dropped/off_policy"))
    for threshold, lines in (("0", 4), ("inf", 3)):  # three quantiles, and the threshold where there is one
        axis = recipes.report.plt.Figure().subplots()
        recipes.panels.statistic(axis, found[threshold])
        assert len(axis.get_lines()) == lines
    recipes.panels.main(str(tmp_path / "both.png"), f"V3.2={tmp_path}/results.json", f"again={tmp_path}/results.json")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:Glyph")  # a random model writes control characters
@pytest.mark.usefixtures("small")
def test_the_process_script_rewards_steps_or_outcomes_from_one_start(
    recipes: Any, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, files = {}, []
    for rewards in ("steps", "outcome"):
        few = on_a_small_scale(tmp_path / rewards, max_steps=4, rewards=rewards, start=tmp_path / "start")
        found[rewards] = recipes.process_rewards.main(*parse(recipes, YAMLS["smollm2-135m-process"], *few))
        files.append(str(tmp_path / rewards / "results.json"))
        assert moved(tmp_path / rewards / "adapter", tmp_path / "start")
        assert (tmp_path / rewards / "training.png").read_bytes().startswith(b"\x89PNG")
        # of whole answers there are no advantages by token to be shown
        assert (tmp_path / rewards / "advantages.png").exists() == (rewards == "steps")
    printed = capsys.readouterr().out
    assert printed.count("worked problems ") == 20  # once: the second run starts where the first one did
    assert printed.count("answers right ") == printed.count("lines right ") >= 4
    taught, plain = (
        transformers.AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "start", models["dense"])
    )
    assert any(not torch.equal(*pair) for pair in zip(taught.parameters(), plain.parameters(), strict=True))

    def curve(rewards: str, name: str) -> list[float]:
        return recipes.report.series(found[rewards]["history"], name)[1]

    # the first rollout is the same, and rewarded by what the arm says
    assert curve("steps", "right")[0] == curve("outcome", "right")[0]
    assert curve("steps", "reward")[0] == pytest.approx(curve("steps", "right_lines")[0])
    assert curve("outcome", "reward") == pytest.approx(curve("outcome", "right"))
    assert curve("steps", "reward")[0] != curve("outcome", "reward")[0]

    recipes.compare.main(str(tmp_path / "both.png"), *files)
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 6 and rows[2].startswith("| 0 | ") and rows[-1].startswith("| mean | ")


def test_the_arms_are_compared_problem_by_problem(recipes: Any) -> None:
    def results(rewards: str, seed: int, greedy: str, step_advantage: str = "return_to_go") -> dict[str, Any]:
        return {
            "seed": seed,
            "objective": {"rewards": rewards, "step_advantage": step_advantage},
            "recipe": {"samples": 2},
            recipes.compare.COUNTS: {"sampled": {"after": "0212"}, "greedy": {"before": "1111", "after": greedy}},
        }

    runs = [
        *(results("steps", 0, "1101"), results("outcome", 0, "0100"), results("steps", 1, "1111")),
        *(results("outcome", 1, "0000"), results("steps", 0, "0000", "process"), results("steps", 2, "0000")),
    ]
    found = recipes.compare.differences(runs)
    assert list(found) == [(s, d) for s in ("0", "1", "mean") for d in ("greedy", "sampled")]
    assert found["0", "greedy"][:3] == (0.25, 0.75, 0.5) and found["0", "greedy"].low < 0.5 < found["0", "greedy"].high
    assert found["1", "greedy"] == (0, 1, 1, 1, 1) and found["mean", "greedy"][:3] == (0.125, 0.875, 0.75)
    assert found["0", "sampled"] == (0.625, 0.625, 0, 0, 0)
    assert [recipes.compare.arm(runs[i]) for i in (0, 1, 4)] == ["steps", "outcome", "steps, process"]
    assert "| 0 | greedy | 25.0% | 75.0% | +50.0% |" in recipes.compare.table(found)


GSM8K = [
    {"question": f"What is 1,000 + {i}?", "answer": f"One thousand and {i}.\n#### {1000 + i:,}"} for i in range(8)
]
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def test_gsm8k_runs_on_a_tiny_model_and_tiny_data(
    recipes: Any, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "chatty"
    shutil.copytree(models["dense"], folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    asked: list[tuple[str, str]] = []

    def by_length(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
        asked.extend((completion[0]["role"], answer) for completion, answer in zip(completions, solution, strict=True))
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    monkeypatch.setattr(recipes.gsm8k, "load_dataset", lambda *_, split: datasets.Dataset.from_list(GSM8K))
    monkeypatch.setattr(recipes.gsm8k, "accuracy_reward", by_length)
    few = on_a_small_scale(
        tmp_path / "out",
        **{"model_name": folder, "model_init_kwargs": '{"dtype": "float32"}', "quantised": False, "bf16": False},
        **{"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        **{"steps_per_generation": 1, "max_steps": 2, "ref_model_sync_steps": 1, "max_completion_length": 8},
        **{"per_device_eval_batch_size": 4, "held_out": 4, "eval_steps": 1, "use_vllm": False},
    )
    for name, policy in (("qwen2.5-7b-gsm8k-24gb", "adapter"), ("deepseekmath-7b", "model")):
        results = recipes.iterative_grpo.main(*parse(recipes, YAMLS[name], *few))
        assert [refresh["step"] for refresh in results["refreshes"]] == [1]
        assert results["problems"] == {"training": 8, "held out": 4}
        assert recipes.report.series(results["history"], "eval_reward")[0] == [0, 1, 2]
        assert (tmp_path / "out" / policy).is_dir() and (tmp_path / "out/training.png").exists()
    # without an engine there are no log-probs of the sampler's
    alone = [*few, "--kl_ratio_denominator", "old", "--steps_per_generation", "2"]
    results = recipes.v32.main(*parse(recipes, YAMLS["qwen2.5-7b-gsm8k-80gb"], *alone))
    assert recipes.report.series(results["history"], "eval_reward")[0] == [0, 1, 2]
    assert results["objective"]["off_policy_mask_threshold"] is None
    assert set(asked) <= {("assistant", f"{1000 + i:,}") for i in range(8)}
    prompt = recipes.gsm8k.questions("test")[0]["prompt"]
    assert [message["role"] for message in prompt] == ["user"] and "\\boxed{}" in prompt[0]["content"]


def test_maths_answers_are_verified_as_trl_does(recipes: Any) -> None:
    solution = recipes.gsm8k.example(GSM8K[0])["solution"]
    texts = {"So it is \\boxed{1000}.": 1.0, "\\boxed{1,000}": 1.0, "\\boxed{1001}": 0.0, "1000": 0.0}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert recipes.gsm8k.accuracy_reward(completions, [solution] * len(texts)) == list(texts.values())


@pytest.mark.slow
def test_smollm2_loads_quantised_and_trains_through_every_layer(recipes: Any, tmp_path: Path) -> None:
    model, tokenizer = recipes.smollm2.load(tmp_path)
    assert sum(p.dtype == torch.uint8 for p in model.parameters()) == 7 * 30
    embeddings = torch.randn(1, 4, model.config.hidden_size).requires_grad_()
    model.train()(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad is not None and embeddings.grad.abs().max() > 0
    assert tokenizer.decode(tokenizer("max(10, 20) =")["input_ids"]) == "max(10, 20) ="


@pytest.mark.parametrize(("cpu", "dtype"), [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_nf4_computes_in_bf16_where_that_is_fast(
    recipes: Any, monkeypatch: pytest.MonkeyPatch, cpu: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    assert recipes.smollm2.nf4().bnb_4bit_compute_dtype == dtype
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert recipes.smollm2.nf4().bnb_4bit_compute_dtype == torch.bfloat16
