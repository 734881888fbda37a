"""recipes/gsm8k: its figures are those of the arithmetic, and a config trains a tiny model."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.project import recipe
from trl_steady.cli.device_memory import memory

FOLDER = recipe.FOLDER / "gsm8k"
SIZES = {  # of the models' own configs, and their parameters
    "Qwen/Qwen2.5-0.5B-Instruct": ((896, 24, 14, 2, 4864, 151_936, True), 494_032_768),
    "Qwen/Qwen2.5-7B-Instruct": ((3584, 28, 28, 4, 18_944, 152_064, False), 7_615_616_512),
}
NAMES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)
CONFIGS = [f"gsm8k/{path.stem}" for path in sorted(FOLDER.glob("*.yaml"))]
ROWS = [(name, {}) for name in CONFIGS] + [("gsm8k/qwen2.5-7b-80gb", {"quantised": True})]


def build(options: Any, args: Any) -> Any:
    """Return the trainer's model without its weights, and its number of parameters."""
    sizes, parameters = SIZES[options.model_name]
    with torch.device("meta"):
        config = transformers.Qwen2Config(**dict(zip(NAMES, sizes, strict=True)))
        bare = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        assert bare.num_parameters() == parameters
        model = peft.get_peft_model(bare, options.adapter)
        model.add_adapter("ref", options.adapter)
        bases = [module.base_layer for module in model.modules() if hasattr(module, "base_layer")]
        for base in bases if options.quantised else ():
            size, scales = base.weight.numel(), torch.uint8 if args.use_vllm else torch.float32
            base.weight = torch.nn.Parameter(torch.empty(size // 2, dtype=torch.uint8), requires_grad=False)
            base.weight.quant_state = SimpleNamespace(absmax=torch.empty(size // 64, dtype=scales))
    return model, parameters


def hours(options: Any, args: Any, parameters: int) -> float:
    """Return the time of a run with the rates of recipes/cluster/hours.py."""
    large, steps = "24gb" not in args.output_dir, args.max_steps
    answers = steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
    passes = answers * 400 * parameters * 10 / (400e12 if large else 60e12)
    token = 0.1 if options.quantised else 0.05
    rollouts = steps * args.gradient_accumulation_steps / args.steps_per_generation
    writing = rollouts * args.max_completion_length * token
    batches = 2 * math.ceil(options.held_out / args.per_device_eval_batch_size)
    evaluations = steps / args.eval_steps
    if args.use_vllm:
        written = answers + evaluations * options.eval_questions
        writing = written * 300 / (8000 if large else 2000)
    else:
        batches += evaluations * math.ceil(options.eval_questions / args.per_device_eval_batch_size)
    return (passes + writing + batches * args.max_completion_length * token) / 3600


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("name", "more"), ROWS, ids=str)
def test_memory_and_time_are_those_of_the_arithmetic(recipes: Any, name: str, more: dict[str, Any]) -> None:
    options, args = recipe.parse(recipes, name, **more)
    model, parameters = build(options, args)
    fields = (
        "per_device_train_batch_size",
        "max_completion_length",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
    )
    on_gpu = SimpleNamespace(**{field: getattr(args, field) for field in fields}, device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(model=model, ref_model=None, reward_funcs=[], args=on_gpu)
    gigabytes = f"{sum(memory(trainer).values()) / 1e9:.3g} GB"
    time = hours(options, args, parameters)
    cells = f"| {gigabytes} | {f'{60 * time:.0f} min' if time < 1 else f'{time:.1f} h'} |"
    start = f"[{name.removeprefix('gsm8k/')}]" if not more else "the same, `--quantised"
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| {start}")]
    assert len(rows) == 1 and cells in rows[0], cells
    if not more:
        assert f"; {gigabytes}" in recipe.YAMLS[name].read_text()


@pytest.mark.parametrize("options", [{}, {"sync_ref_model": False}, {"sync_ref_model": False, "beta": 0}], ids=str)
@pytest.mark.filterwarnings("ignore:kl_ratio_denominator:UserWarning")  # without a KL
def test_the_readme_has_the_options_of_an_arm(recipes: Any, options: dict[str, Any]) -> None:
    command = " ".join(f"--{name} {value}" for name, value in options.items()).lower()
    assert not options or f"`{command}`" in (FOLDER / "README.md").read_text()
    for name in CONFIGS:
        recipe.parse(recipes, name, **options)


def few_of(model: Path) -> dict[str, Any]:
    """Return options with which a config trains a tiny model on eight questions."""
    few: dict[str, Any] = {"model_name": model, "model_init_kwargs": '{"dtype": "float32"}', "quantised": False}
    few |= {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2}
    few |= {"max_completion_length": 8, "use_vllm": False, "held_out": 4, "per_device_eval_batch_size": 3}
    few |= {"steps_per_generation": 1, "learning_rate": 0.01, "eval_steps": 1, "eval_questions": 3}
    return few


def test_a_config_trains_and_is_scored_before_and_after(
    recipes: Any, gsm8k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def completions(model: Any, tokenizer: Any, prompts: list[Any], **options: Any) -> list[list[str]]:
        asked.append(real(model, tokenizer, prompts, **options))  # of a random model: no numbers
        form = ("It is {}.", "\\boxed{{{}}}")[len(asked) - 1]
        return [[form.format(1000 + i)] for i in range(3)] + [["1"]]

    real = recipes.evaluate.completions
    monkeypatch.setattr(recipes.evaluate, "completions", completions)
    few = few_of(gsm8k)
    results = recipe.run(recipes, "gsm8k/qwen2.5-0.5b", tmp_path, ref_model_sync_steps=1, **few)
    assert [refresh["step"] for refresh in results["refreshes"]] == [1]
    assert results["problems"] == {"training": 8, "held out": 4}
    evaluated = [row for row in results["history"] if "eval_reward" in row]
    assert [row["step"] for row in evaluated] == [1, 2]
    assert [round(row["eval_runtime"] * row["eval_samples_per_second"]) for row in evaluated] == [3, 3]
    assert recipe.moved(tmp_path / "adapter", gsm8k) and "<svg" in (tmp_path / "report.html").read_text()
    assert [len(own) for own in asked] == [4, 4] and asked[0] != asked[1]
    right = {score: own.values() for score, own in results["right answers to each held-out problem"].items()}
    assert {score: [*own] for score, own in right.items()} == {"strict": ["0000", "1110"], "lenient": ["1110", "1110"]}
    gains = {score: (own["before"], own["after"], own["difference"]) for score, own in results["accuracy"].items()}
    assert gains == {"strict": (0, 0.75, 0.75), "lenient": (0.75, 0.75, 0)}
    intervals = results["95 % intervals"]
    assert intervals["strict"]["before"] == (0, 0) and intervals["strict"]["after"] == intervals["lenient"]["before"]
    assert intervals["strict"]["after"][0] < 0.75 < intervals["strict"]["after"][1]


@pytest.mark.slow
def test_the_five_minutes_before_a_night_save_and_resume(
    recipes: Any, gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of recipes/cluster/README.md, on a tiny model."""
    few = {**few_of(gsm8k), "save_steps": 2, "eval_steps": 2, "max_completion_length": 4, "sync_ref_model": False}
    recipe.run(recipes, "gsm8k/qwen2.5-7b-24gb", tmp_path, **few)
    resumed = {**few, "max_steps": 4, "resume_from_checkpoint": "true"}
    results = recipe.run(recipes, "gsm8k/qwen2.5-7b-24gb", tmp_path, **resumed)
    assert "resumed from checkpoint-2 (step 2)" in capsys.readouterr().out
    assert [row["step"] for row in results["history"] if "loss" in row] == [1, 2, 3, 4]
