"""Draw `resume.png` beside this file: a run of each trainer, and the same run resumed in the middle of a rollout.

The curves are those of `resume.json`. `python docs/figures/resume.py --record` trains SmolLM2-135M to write it,
each run in a process of its own, with one thread.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[2]
STOP, STEPS, UPDATES_PER_ROLLOUT = 10, 40, 4  # the third rollout feeds updates 9 to 12
NAMES = {"trl": "TRL", "trl_steady": "trl-steady"}


def train(package: str, output: Path, checkpoint: str) -> None:
    """Train a LoRA on which of two numbers is larger, from a checkpoint if one is named, and save log and adapter."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model_state_dict

    sys.path.insert(0, str(ROOT))
    from recipes.common import smollm2

    import trl_steady

    torch.set_num_threads(1)
    model, tokenizer = smollm2.load(output.parent / "model", quantised=False)
    random.seed(0)
    pairs = [random.sample(range(10, 100), 2) for _ in range(256)]
    solved = "<|endoftext|>max(55, 98) = 98\nmax(71, 26) = 71\n"
    rows = [{"prompt": f"{solved}max({a}, {b}) =", "answer": f" {max(a, b)}"} for a, b in pairs]

    def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]

    source: Any = {"trl": trl, "trl_steady": trl_steady}[package]
    args = source.GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=8,
        steps_per_generation=UPDATES_PER_ROLLOUT,
        max_completion_length=3,
        max_steps=STEPS,
        learning_rate=2e-4,
        logging_steps=1,
        save_steps=STOP,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = source.GRPOTrainer(
        model=model,
        reward_funcs=is_right,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train(resume_from_checkpoint=checkpoint or None)
    rewards = {row["step"]: row["reward"] for row in trainer.state.log_history if "reward" in row}
    weights = get_peft_model_state_dict(trainer.model)
    torch.save({"rewards": rewards, "weights": weights}, output / "run.pt")


def record() -> dict[str, Any]:
    """Train both runs of both trainers. Return rewards by update, and the largest difference of two final weights."""
    import torch
    import trl

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for package in NAMES:
            runs: list[dict[str, Any]] = []
            for name, checkpoint in (("whole", ""), ("resumed", f"{folder}/{package}-whole/checkpoint-{STOP}")):
                output = Path(folder, f"{package}-{name}")
                subprocess.run([sys.executable, __file__, package, str(output), checkpoint], check=True)
                runs.append(torch.load(output / "run.pt"))
            whole, resumed = (run["weights"] for run in runs)
            apart = max((whole[key] - resumed[key]).abs().max().item() for key in whole)
            found[package] = {"rewards": [run["rewards"] for run in runs], "apart": apart}
    return {"trl": trl.__version__, "stop": STOP, "runs": found}


def draw(path: Path) -> None:
    """Draw a panel for each trainer. The picture is legible at a width of 400 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    recorded = json.loads(RECORDED.read_text())
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, sharey=True, layout="constrained")
    for axis, (package, run) in zip(axes, recorded["runs"].items(), strict=True):
        whole, resumed = ({int(step): 100 * value for step, value in of.items()} for of in run["rewards"])
        later = {step: value for step, value in resumed.items() if step > recorded["stop"]}
        colour, verdict = ("#D55E00", "another run") if run["apart"] else ("#0072B2", "the same run")
        axis.plot(whole.keys(), whole.values(), color="#BBBBBB", linewidth=8)
        axis.plot(later.keys(), later.values(), "o--", color=colour, linewidth=2.5, markersize=7)
        axis.axvline(recorded["stop"], color="black", linewidth=1.2, linestyle=":")
        axis.text(recorded["stop"] + 0.7, 97, "stopped here", fontsize=12, va="top")
        axis.text(39, 38, "never stopped", color="#888888", fontsize=14, weight="bold", ha="right")
        axis.text(39, 30, "stopped and resumed", color=colour, fontsize=14, weight="bold", ha="right")
        name = NAMES[package] + (f" {recorded['trl']}" if package == "trl" else "")
        axis.set_title(f"{name}: {verdict}", color=colour, fontsize=16, weight="bold")
        axis.set_xlabel("update", fontsize=13)
        axis.tick_params(labelsize=12)
        axis.set(ylim=(25, 100), xlim=(0, 40), xticks=range(0, 41, 10))
        axis.set_yticks(range(40, 101, 20), [f"{share} %" for share in range(40, 101, 20)])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("right answers", fontsize=13)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        RECORDED.write_text(json.dumps(record()) + "\n")
    elif len(sys.argv) > 1:
        train(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
        sys.exit()
    draw(Path(__file__).with_suffix(".png"))
