"""Stages before the trainer of ours: a dry run announces them, trains and saves nothing, and goes on."""

import textwrap

import pytest

from tests.cli import tools as own_scripts
from tests.cli.tools import Scripts
from trl_steady.cli import main as cli

scripts = own_scripts.scripts
COMMON = """
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
import trl_steady
from tests.tools import tiny
common = dict(report_to="none", use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=4)
lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
texts = Dataset.from_dict({"text": ["hello"] * 8})
pairs = Dataset.from_dict({"chosen": ["hello"] * 8, "rejected": ["no"] * 8})

def sft(model=MODEL, **options):
    args = SFTConfig(output_dir=FOLDER + "/sft", push_to_hub=True, **common)
    return SFTTrainer(model, args=args, train_dataset=texts, eval_dataset=texts, **options)

def grpo(model, reward=tiny.reward, kind=GRPOTrainer, config=GRPOConfig, **options):
    args = config(output_dir=FOLDER + "/grpo", num_generations=4, max_completion_length=8, **common)
    kind(model, reward, args=args, train_dataset=tiny.dataset(), **options).train()
    raise AssertionError("it goes on")
"""
STAGES = {
    "a folder": """
        trainer = sft()
        trained = trainer.train()
        metrics = {**trained.metrics, **trainer.evaluate()}
        assert trainer.evaluate()["eval_loss"] != trainer.evaluate()["eval_loss"]
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        trainer.save_model(_internal_call=True)
        trainer.push_to_hub()
        grpo(FOLDER + "/sft")
    """,
    "a checkpoint": """
        sft().train()
        grpo(FOLDER + "/sft/checkpoint-2")
    """,
    "the folder of its config": """
        trainer = sft()
        trainer.train()
        trainer.save_model(trainer.args.output_dir)
        grpo(trainer.args.output_dir)
    """,
    "its model": """
        trainer = sft()
        trainer.train()
        grpo(trainer.model, processing_class=trainer.processing_class)
    """,
    "a model without a name": """
        model = AutoModelForCausalLM.from_config(tiny.CONFIGS["dense"])
        trainer = sft(model, processing_class=tiny.tokenizer())
        trainer.train()
        trainer.save_model(FOLDER + "/final")
        grpo(FOLDER + "/final")
    """,
    "a subclass, saved by hand": """
        class Mine(SFTTrainer):
            def train(self):
                raise AssertionError("it trains")
        trainer = Mine(MODEL, args=SFTConfig(output_dir=FOLDER + "/sft", **common), train_dataset=texts)
        trainer.train()
        trainer.model.save_pretrained(FOLDER + "/final")
        trainer.processing_class.save_pretrained(FOLDER + "/final")
        model = AutoModelForCausalLM.from_pretrained(FOLDER + "/final")
        grpo(model, processing_class=AutoTokenizer.from_pretrained(FOLDER + "/final"))
    """,
    "an adapter, merged": """
        trainer = sft(peft_config=lora)
        trainer.train()
        trainer.save_model(FOLDER + "/adapter")
        model = AutoPeftModelForCausalLM.from_pretrained(FOLDER + "/adapter").merge_and_unload()
        model.save_pretrained(FOLDER + "/merged")
        tokenizer = AutoTokenizer.from_pretrained(FOLDER + "/adapter")
        tokenizer.save_pretrained(FOLDER + "/merged")
        grpo(FOLDER + "/merged")
    """,
    "a reward model": """
        args = RewardConfig(output_dir=FOLDER + "/reward", **common)
        RewardTrainer(MODEL, args=args, train_dataset=pairs).train()
        grpo(MODEL, FOLDER + "/reward")
    """,
    "a critic": """
        args = RewardConfig(output_dir=FOLDER + "/reward", **common)
        trainer = RewardTrainer(MODEL, args=args, train_dataset=pairs)
        trainer.train()
        trainer.save_model(None)
        from trl_steady import PPOConfig, PPOTrainer
        grpo(MODEL, kind=PPOTrainer, config=PPOConfig, value_model=FOLDER + "/reward")
    """,
    "a reward adapter": """
        args = RewardConfig(output_dir=FOLDER + "/reward", **common)
        of_rewards = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
        trainer = RewardTrainer(MODEL, args=args, train_dataset=pairs, peft_config=of_rewards)
        trainer.train()
        trainer.save_model()
        grpo(MODEL, trl_steady.RewardAdapter(FOLDER + "/reward"), peft_config=lora)
    """,
    "an evaluation of our trainer": """
        class Evaluated(GRPOTrainer):
            def train(self):
                self.evaluate()
                self.save_model(FOLDER + "/before")
                return super().train()
            def evaluate(self):
                raise AssertionError("it evaluates")
        grpo(MODEL, kind=Evaluated, eval_dataset=tiny.dataset())
    """,
}


@pytest.mark.fast_rows(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_before_the_run_is_left_out(stage: str, scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    path = scripts.folder / "script.py"
    names = f"MODEL, FOLDER = {str(scripts.model)!r}, {str(scripts.folder)!r}\n"
    path.write_text(names + COMMON + textwrap.dedent(STAGES[stage]))
    assert cli.main(["run", "--dry-run", str(path)]) == 0
    said = capsys.readouterr().out
    assert "  run: 2 optimizer steps" in said
    left_out = "Evaluated.evaluate" if "our trainer" in stage else ".train is left out"
    assert said.count(left_out) == 1
    is_read = stage not in ("its model", "an evaluation of our trainer")
    assert ("does not exist yet" in said) == is_read
    assert [path for path in scripts.folder.rglob("*") if path.is_file()] == [path]


def test_a_model_that_is_there_is_taken(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that the script makes before any stage."""
    path = scripts.folder / "script.py"
    names = f"MODEL, FOLDER = {str(scripts.model)!r}, {str(scripts.folder)!r}\n"
    stage = """
        model = AutoModelForCausalLM.from_config(tiny.CONFIGS["dense"])
        model.save_pretrained(FOLDER + "/made")
        tiny.tokenizer().save_pretrained(FOLDER + "/made")
        trainer = sft()
        trainer.train()
        trainer.save_model(FOLDER + "/made")
        grpo(FOLDER + "/made")
    """
    path.write_text(names + COMMON + textwrap.dedent(stage))
    assert cli.main(["run", "--dry-run", str(path)]) == 0
    assert "does not exist yet" not in capsys.readouterr().out


def test_a_script_with_other_trainers_only_says_so(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    path = scripts.folder / "script.py"
    names = f"MODEL, FOLDER = {str(scripts.model)!r}, {str(scripts.folder)!r}\n"
    path.write_text(names + COMMON + "sft().train()\n")
    assert cli.main(["run", "--dry-run", str(path)]) == 0
    said = capsys.readouterr()
    assert "dry run: SFTTrainer.train is left out" in said.out and "without building a trainer" in said.err
