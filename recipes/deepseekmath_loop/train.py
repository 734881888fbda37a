"""DeepSeekMath's Algorithm 1 with its reward model: it learns from the policy's answers before the reference moves.

python recipes/deepseekmath_loop/train.py --config recipes/deepseekmath_loop/smollm2-135m.yaml [--arm rule]
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run, tasks
from deepseekmath_loop import arms
from trl_steady import GRPOConfig, GRPOTrainer, RewardAdapter, RewardModelRefreshCallback

OBJECTIVE = ("loss_type", "epsilon", "beta", "scale_rewards", "ref_model_sync_steps", "learning_rate")
OF_REWARD = ("reward_objective", "reward_learning_rate", "reward_epochs", "initial_prompts", "reward_model")


@dataclass
class RecipeArguments(tasks.RecipeArguments):
    """The arguments of every recipe, with the reward and the training of the reward model."""

    arm: str = field(
        default="retrained",
        metadata={
            "help": "'rule': the task's rule is the reward. The others have a reward model. 'frozen': it keeps its "
            "initial weights. 'retrained': trained before each move of the reference, with replay. "
            "'without_replay': the same, without replay.",
            "choices": list(arms.ARMS),
        },
    )
    reward_model: str | None = field(
        default=None,
        metadata={"help": "Folder of the initial reward model; None: a new one, trained on the policy's answers."},
    )
    reward_objective: str = field(
        default="pointwise",
        metadata={"help": "What the reward model learns from.", "choices": ["pointwise", "pairs", "steps"]},
    )
    replay_fraction: float = field(
        default=0.1, metadata={"help": "Share of historical examples in each training set of the arm 'retrained'."}
    )
    reward_learning_rate: float = field(default=2e-5, metadata={"help": "Learning rate of the reward model."})
    reward_epochs: int = field(default=1, metadata={"help": "Passes of the reward model over each training set."})
    initial_prompts: int = field(
        default=32, metadata={"help": "Prompts whose answers train the initial reward model, in whole rollouts."}
    )


class Frozen(RewardModelRefreshCallback):
    """Train the initial reward model, and never again."""

    def refresh(self, step: int) -> None:
        """Train in `fit`, which is before the first optimizer step."""
        if step == 0:
            super().refresh(step)


class Trainings(run.TrainerCallback):
    """Print one line per training of the reward model."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.told = trainer, 0

    def on_step_end(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Print the trainings since the last step, before the trainer prints its log."""
        for training in self.trainer.reward_refreshes[self.told :] if state.is_world_process_zero else ():
            self.told += 1
            print(f"-- reward model after update {training.step}: {told(training)}", flush=True)

    def on_train_begin(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Skip the trainings from before a resume, but not the initial one."""
        self.told = len(self.trainer.reward_refreshes) if state.global_step else 0


def told(training: Any) -> str:
    """Describe one training of the reward model."""
    shares = ("none" if share is None else f"{share:.1%}" for share in (training.old, training.new))
    return (
        f"{training.samples} new and {training.replayed} replayed examples, "
        f"right on held-out answers: {' before, '.join(shares)} after"
    )


def refresher(recipe: RecipeArguments, trainer: GRPOTrainer) -> RewardModelRefreshCallback:
    """Return the callback of an arm with a reward model. Train the initial one, unless it comes from a folder."""
    callback = (Frozen if recipe.arm == "frozen" else RewardModelRefreshCallback)(
        trainer,
        label_fn=tasks.rule(recipe),
        objective=recipe.reward_objective,  # pyright: ignore[reportArgumentType]
        replay_fraction=recipe.replay_fraction if recipe.arm == "retrained" else 0.0,
        learning_rate=recipe.reward_learning_rate,
        epochs=recipe.reward_epochs,
    )
    args: Any = trainer.args
    is_resumed = args.resume_from_checkpoint and trainer.checkpoints.newest() is not None
    if recipe.reward_model is None and not is_resumed:
        rows: Any = trainer.train_dataset
        if trainer.is_world_process_zero():
            print(f"Training the initial reward model on answers to {recipe.initial_prompts} prompts", flush=True)
        callback.fit(list(rows.shuffle(seed=args.seed).select(range(recipe.initial_prompts))))
    return callback


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train one arm. Return the contents of `results.json`."""
    is_rule = recipe.arm == "rule"
    head = "steps" if recipe.reward_objective == "steps" else "outcome"
    reward = tasks.rule(recipe) if is_rule else RewardAdapter(recipe.reward_model, head=head)

    def callbacks(trainer: GRPOTrainer) -> list[run.TrainerCallback]:
        trainings: list[run.TrainerCallback] = [] if is_rule else [refresher(recipe, trainer), Trainings(trainer)]
        set_seed(args.seed, device_specific=True)  # all arms have the same first rollout
        return trainings

    trainer, found = tasks.train(recipe, args, callbacks, reward=reward)
    names = ("arm", *(() if is_rule else OF_REWARD))
    found["objective"] = {name: getattr(recipe, name) for name in names}
    found["objective"] |= {name: getattr(args, name) for name in OBJECTIVE}
    found["refreshes"] = [refresh._asdict() for refresh in trainer.reference_refreshes]
    found["reward_refreshes"] = [refresh._asdict() for refresh in trainer.reward_refreshes]
    return run.finish(trainer, recipe, found)


if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
