"""`--dry-run`: its numbers are those of the run, it fails as the run does, and it leaves no trace."""

import hashlib
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from benchmarks.padding import peak_bytes
from transformers.integrations import integration_utils
from trl.kernels import ChunkedLogProbFunction

from tests.cli import tools as own_scripts
from tests.cli.tools import IMPORTS, Launched, Scripts
from tests.tools import tiny
from tests.tools.script import figure
from trl_steady.cli import device_memory
from trl_steady.cli import main as cli
from trl_steady.cli.device_memory import _owner, _sizes, host_memory, memory
from trl_steady.cli.dry_run import dry_run
from trl_steady.functional import memory as formulas

scripts = own_scripts.scripts


@pytest.mark.fast_rows(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"gradient_accumulation_steps": 8, "max_steps": 3}, id="several rollouts for a step"),
        pytest.param({"num_iterations": 2, "token_budget": 64}, id="num_iterations"),
        pytest.param({"max_steps": -1, "num_train_epochs": 1.5}, id="epochs"),
        # 16 micro-batches in an epoch
        pytest.param(
            {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3},
            id="epochs, whose last step is short",
        ),
        pytest.param({"method": "RLOO", "num_generations": 2, "steps_per_generation": 2}, id="RLOO"),
        pytest.param(
            {"method": "PPO", "num_generations": 1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 7},
            id="PPO",
        ),
        pytest.param({"eval_strategy": "steps", "eval_steps": 3, "num_generations_eval": 2}, id="evaluation"),
    ],
)
def test_its_numbers_are_those_of_the_run(
    case: dict[str, Any], models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"build": {"eval_dataset": tiny.dataset(4)}, **case}
    with dry_run(step=False), pytest.raises(SystemExit):
        tiny.trainer(models["dense"], tmp_path, **options).train()
    said = capsys.readouterr().out
    numbers = (
        r"rollout: (\d+) prompts, (\d+) completions, for ([\d.]+) optimizer steps\n"
        r"  optimizer step: (\d+) completions = gradient_accumulation_steps (\d+) \* "
        r"per_device_train_batch_size (\d+) \* processes 1\n"
        r"(?:.|\n)*  run: (\d+) optimizer steps, (\d+) rollouts"
    )
    found = re.search(numbers, said)
    assert found, said
    prompts, completions, feeds, per_step, micro_batches, micro_batch, steps, rollouts = map(float, found.groups())

    trainer = tiny.trainer(models["dense"], tmp_path, **options)
    made: dict[str, list[int]] = {"train": [], "eval": [], "begins": [], "generated": [], "micro-batches": []}
    own, generate, update = trainer._generate_and_score_completions, trainer._generate, trainer.training_step

    def rollout(inputs: list[Any]) -> Any:
        made["train" if trainer.model.training else "eval"].append(len(inputs))
        made["begins"] += [len(made["micro-batches"]) - 1] if trainer.model.training else []
        return own(inputs)

    vars(trainer)["_generate_and_score_completions"] = rollout
    vars(trainer)["_generate"] = lambda *given: made["generated"].append(1) or generate(*given)
    vars(trainer)["training_step"] = lambda *given: made["micro-batches"].append(1) or update(*given)
    trainer.train()
    assert (trainer.state.global_step, len(made["train"])) == (steps, rollouts)
    assert len(made["generated"]) == rollouts + len(made["eval"])
    assert set(made["train"]) == {completions} and completions == prompts * trainer.num_generations
    assert per_step == micro_batches * micro_batch
    assert made["begins"] == [round(i * feeds * micro_batches, 1) for i in range(int(rollouts))]
    assert len(made["micro-batches"]) == (32 if case.get("num_train_epochs") == 2 else steps * micro_batches)
    evaluation = re.search(r"evaluation: (\d+) prompts, (\d+) completions", said)
    assert bool(evaluation) == bool(made["eval"])
    if evaluation:
        assert [*map(int, evaluation.groups())] == [4, sum(made["eval"]) // 2]  # of two evaluations


def test_a_step_leaves_no_trace(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the script saves each step, moves its outputs, and resumes."""

    class Tracker(transformers.TrainerCallback):
        """A tracker that must not start."""

        def __init__(self) -> None:
            raise KeyError

    def traces(folder: Path) -> dict[str, str]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path): hashlib.md5(path.read_bytes()).hexdigest() for path in files}

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tracker", Tracker)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "log_line": True}
    assert scripts.run(IMPORTS["from trl"], **options) == 0
    before = traces(scripts.folder)
    assert any("checkpoint-2" in path for path in before)
    capsys.readouterr()
    options |= {"report_to": "tracker", "training_report": True, "push_to_hub": True, "logging_steps": 50}
    options |= {"log_completions": True, "log_completions_hub_repo": "owner/completions"}
    own = f"""
    class Resumed(GRPOTrainer):
        def train(self):
            self.args.output_dir = {str(scripts.folder)!r}
            return super().train(resume_from_checkpoint=True)
    """
    for how, steps in (("--dry-run", 0), ("--dry-run=step", 1)):
        assert scripts.run(IMPORTS["from trl"], own, settings=[how], trainer="Resumed", **options) == 0
        out = capsys.readouterr().out
        assert out.count("dry run: nothing is saved") == 1 and out.count("\nstep 1/2  ") == steps
        assert "step 2" not in out and "  run: 2 optimizer steps, 1 rollouts, 0.125 epochs" in out
        after = traces(scripts.folder)
        assert {name for name in after if before.get(name) != after[name]} == {str(scripts.folder / "script.py")}


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        pytest.param([], {"loss_type": "gpso"}, id="an option"),
        pytest.param([], {"token_budget": 64, "trim_padding": False}, id="two options"),
        pytest.param(["from tests.tools import tiny", "tiny.dataset.__defaults__ = (2,)"], {}, id="a small data set"),
    ],
)
def test_it_fails_as_the_run_does(
    lines: list[str], options: dict[str, Any], scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.dataset, "__defaults__", tiny.dataset.__defaults__)
    said: list[str] = []
    for settings in ([], ["--dry-run"], ["--dry-run=step"]):
        with pytest.raises(ValueError) as error:
            scripts.run(IMPORTS["from trl"], *lines, settings=settings, **options)
        said.append(str(error.value))
    assert said[0] and set(said) == {said[0]}


def test_a_mistake_is_refused_with_the_same_status(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--dry-run"]):
        assert cli.main(["grpo", "--los_type", "gspo", *more]) == 2
        assert capsys.readouterr().err == "trl-steady: --los_type: did you mean loss_type?\n"
    assert cli.main(["grpo", "--dry-run=twice"]) == 2
    capsys.readouterr()
    assert cli.main(["run", "--ppo=1", "train.py"]) == 2
    assert "--ppo takes no value" in capsys.readouterr().err


def test_it_reaches_every_process_of_a_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    launched = Launched(monkeypatch)
    assert cli.main(["run", "--num_processes", "2", "train.py", "--lr", "1", "--dry-run=step"]) == 0
    assert launched.args.training_script_args == ["run", "--dry-run=step", "train.py", "--lr", "1"]
    assert cli.main(["ppo", "--output_dir", "x", "--use_cpu", "true", "--bf16", "false", "--dry-run"]) == 0
    assert launched.args.training_script_args[:3] == ["run", "--dry-run", "--ppo"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_memory_is_that_of_the_page(tmp_path: Path) -> None:
    sizes = {**tiny.SIZES, "hidden_size": 32, "vocab_size": 512, "head_dim": 16, "tie_word_embeddings": True}
    policy = tmp_path / "policy"
    transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes)).save_pretrained(policy)
    options = {"max_completion_length": 64, "beta": 0.1}
    parts = memory(tiny.trainer(policy, tmp_path, **options))
    with figure("memory", draws=False) as page:
        model = page.Model(32, 2, 2, 2, 32, tied=True, head_dim=16, vocab=512)
        expected = {**page.states(model, "full"), "optimizer, if AdamW": page.states(model, "full")["optimizer"]}
        kept, *moments = page.passes(model, "full", 256, checkpointing=True, on_cpu=True).values()
    assert parts.pop("micro-batch of 256 tokens") == round(kept + max(moments))
    assert parts == {name: expected[name] for name in ("weights", "reference", "gradients", "optimizer, if AdamW")}
    lora = memory(tiny.trainer(policy, tmp_path, lora=True, sync_ref_model=True, ref_model_sync_steps=2, **options))
    assert lora["weights"] == parts["weights"] and lora["adapter"] == lora["reference"] == lora["gradients"]
    critic = memory(tiny.trainer(policy, tmp_path, lora=True, method="PPO", num_generations=1, max_steps=2))
    assert critic["adapter"] + critic["critic"] == critic["gradients"]
    assert critic["critic"] == critic["adapter"] + 32 * 4  # and its head


def test_a_module_with_the_name_of_an_adapter_has_weights_of_the_model() -> None:
    layers = {"value": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)}
    model = torch.nn.Sequential(OrderedDict(layers))
    both = peft.get_peft_model(cast(Any, model), peft.LoraConfig(target_modules=["value"], modules_to_save=["norm"]))
    both.add_adapter("value", peft.LoraConfig(target_modules=["value"]))
    owners = {name: _owner(both, name, both.peft_config) for name, _ in both.named_parameters()}
    assert owners["base_model.model.value.base_layer.weight"] is None
    assert owners["base_model.model.value.lora_A.default.weight"] == "adapter"
    assert owners["base_model.model.value.lora_A.value.weight"] == "critic"
    assert owners["base_model.model.norm.modules_to_save.default.weight"] == "adapter"


def peak(moments: dict[str, float]) -> int:
    kept, *others = moments.values()
    return round(kept + max(others))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("of_policy", "of_critic"), [(5.0, 7.0), (9.0, 7.0)])
def test_a_micro_batch_takes_what_the_critic_takes_if_that_is_more(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_policy: float, of_critic: float
) -> None:
    """As on a quantised base with a float32 adapter of the policy."""
    trainer = tiny.trainer(models["dense"], tmp_path, method="PPO", num_generations=1)

    def passes(*_: Any, critic: bool = False, **__: Any) -> dict[str, float]:
        return {"kept": 100.0, "layer backward": of_critic if critic else of_policy}

    monkeypatch.setattr(device_memory, "passes", passes)
    assert memory(trainer)["micro-batch of 32 tokens"] == 100 + max(of_policy, of_critic)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["full", "LoRA", "QLoRA"])
def test_a_critic_takes_no_more_than_the_policy_in_the_same_mode(mode: str) -> None:
    """Both compute under autocast, and the critic has no LM head."""
    sizes = formulas.Model(384, 8, 8, 4, 1152, head_dim=64, vocab=8192)
    policy, critic = (formulas.passes(sizes, mode, 2048, critic=of) for of in (False, True))
    assert all(critic[moment] <= policy[moment] for moment in ("kept", "layer backward"))
    assert mode == "LoRA" or critic["kept"] == policy["kept"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_head_is_copied_in_float32_on_a_gpu_before_torch_2_8(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, lora=True)
    sizes = _sizes(trainer.model)
    assert sizes is not None
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    found: list[float] = []
    for version, copies in (("2.7.1+cu128", True), ("2.8.0+cu128", False)):
        monkeypatch.setattr(torch, "__version__", version)
        found.append(memory(trainer)["micro-batch of 32 tokens"])
        assert found[-1] == peak(formulas.passes(sizes, "LoRA", 32, copies_head=copies))
    assert found[0] > found[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["LoRA", "full"])
def test_offload_moves_inputs_of_layers_from_a_gpu_to_the_host(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
) -> None:
    monkeypatch.setattr(formulas, "VOCAB_TILE", 64)
    given: list[dict[str, Any]] = [
        {},
        {"every_n_layers": 2},
        {"every_n_layers": 2, "offload": True},
        {"offload": True},
    ]
    options: dict[str, Any] = {"lora": mode == "LoRA", "max_steps": 1}
    trainers = [tiny.trainer(models["dense"], tmp_path, gradient_checkpointing_kwargs=own, **options) for own in given]
    sizes = _sizes(trainers[0].model)
    assert sizes is not None
    on_cpu = peak(formulas.passes(sizes, mode, 32, every_n_layers=2, on_cpu=True))
    assert memory(trainers[2])["micro-batch of 32 tokens"] == on_cpu
    with dry_run(step=False), pytest.raises(SystemExit):
        trainers[2].train()
    assert "    offload saves nothing here: the device is the host\n" in capsys.readouterr().out

    monkeypatch.setattr(type(trainers[0].args), "device", torch.device("cuda"))
    every, some, moved, _ = (memory(trainer)["micro-batch of 32 tokens"] for trainer in trainers)
    assert every == peak(formulas.passes(sizes, mode, 32))
    assert some == peak(formulas.passes(sizes, mode, 32, every_n_layers=2))
    of_input = 32 * 16 * {"LoRA": 2, "full": 4}[mode]  # tokens, hidden size, bytes of bf16 or float32
    # of two layers, the first is computed again; before an adapter, its input also stays on the device
    assert some - moved == {"LoRA": 0, "full": of_input}[mode]
    assert [host_memory(trainer) for trainer in trainers] == [0, 0, of_input, 2 * of_input]
    with dry_run(step=False), pytest.raises(SystemExit):
        trainers[2].train()
    assert f"    offload keeps {of_input / 1e9:.3g} GB in the host's memory in addition\n" in capsys.readouterr().out
    trainers[2].args.gradient_checkpointing = False
    assert host_memory(trainers[2]) == 0


def test_a_model_whose_layers_differ_has_no_micro_batch(models: dict[str, Path], tmp_path: Path) -> None:
    """One config has lists, another refuses to be asked."""
    trainer = tiny.trainer(models["dense"], tmp_path)
    parts = memory(trainer)
    for config in (transformers.Gemma3nTextConfig(), transformers.Gemma4TextConfig()):
        trainer.model.config = config
        assert parts.keys() - memory(trainer).keys() == {"micro-batch of 32 tokens"}


FAMILIES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "Llama": (transformers.LlamaConfig, {}, {"norms": 2, "head_norms": False}),
    "Qwen3": (transformers.Qwen3Config, {"head_dim": 32}, {"norms": 2, "head_norms": True}),
    "Gemma3": (transformers.Gemma3TextConfig, {"head_dim": 32}, {"norms": 4, "head_norms": True, "tied": True}),
    "Qwen3Moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 32},
        {"experts": 4, "intermediate": 24, "chosen": 2},
    ),
    "GptOss": (
        transformers.GptOssConfig,
        {"num_local_experts": 4, "head_dim": 32},
        {"experts": 4, "intermediate": 96, "chosen": 2, "head_norms": False, "activation": 6, "expert_biases": True},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_each_family(family: str) -> None:
    kind, options, expected = FAMILIES[family]
    options = {"num_experts_per_tok": 2, "tie_word_embeddings": "tied" in expected, **options}
    sizes = {**tiny.SIZES, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **options}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind(**sizes))
    found = _sizes(model)
    assert found is not None
    assert {name: getattr(found, name) for name in expected} == expected
    if not found.expert_biases:
        assert found.parameters == model.num_parameters()


@pytest.mark.parametrize("rows", [16, 256])
def test_the_head_takes_what_is_computed(rows: int) -> None:
    """TRL's function on CPU. For few rows, its float32 copy of the head's weights is the most."""
    hidden, vocabulary = 512, 32_768
    states = torch.zeros(rows, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocabulary, hidden, dtype=torch.bfloat16)
    settings = (None, torch.zeros(rows, dtype=torch.long), 1.0, vocabulary, None, 1.0, ("log_probs", "entropy"))
    _, peak = peak_bytes(lambda: ChunkedLogProbFunction.apply(states, weight, *settings)[0].sum().backward())
    with figure("memory", draws=False) as page:
        model = page.Model(hidden, 1, 4, 2, 1024, vocab=vocabulary)
        computed = page.passes(model, "QLoRA", rows, on_cpu=True)["head backward"]
    assert abs(computed / peak - 1) < 0.05


def test_sets_for_evaluations_may_be_streams(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose prompts nobody can count."""
    rows = tiny.dataset(2)
    for second, words in (
        (tiny.dataset(4), "evaluation: 6 prompts, 24 completions"),
        (rows.to_iterable_dataset(), ""),
    ):
        sets = {"a": rows, "b": second}
        with dry_run(step=False), pytest.raises(SystemExit):
            tiny.trainer(models["dense"], tmp_path, build={"eval_dataset": sets}, eval_strategy="steps").train()
        said = capsys.readouterr().out
        assert words in said and ("evaluation:" in said) == bool(words)
