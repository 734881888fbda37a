"""The values of PPO's critic beside known ones: a chain of five states, and a bandit with a KL in the reward.

Run it to draw `critic.png` beside this file, in about half a minute. Both problems are text: the last letter is the
state, and the next token is the action. `PPOTrainer` trains a tiny model that sees no letter but the last one. Dynamic
programming therefore gives the exact values of its policy at each update.
"""

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from trl_steady import PPOConfig, PPOTrainer, StepRewards

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

STATES = "abcde"
ACTIONS = (*STATES, "stop")  # the last one is the end-of-sequence token
GAMMA = 0.7  # discount per token, in the chain
BETA = 0.5  # coefficient of the KL, in the bandit
WARM_UP = 60  # updates of the chain in which only the critic learns
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2")  # Okabe and Ito's, one for each state


def chain_rewards() -> Tensor:
    """Return (5, 6): stopping pays 3/4 at `a` and 1 at `e`. Stopping elsewhere costs 1, as all but steps by one do."""
    places = torch.arange(5)
    steps = torch.where((places[:, None] - places).abs() == 1, 0.0, -1.0)
    stops = torch.tensor([0.75, -1.0, -1.0, -1.0, 1.0])
    return torch.cat([steps, stops[:, None]], 1).double()


def bandit_rewards() -> Tensor:
    """Return (5, 6): a reward from 0 to 1 for each state and action."""
    return (torch.arange(30).view(5, 6) * 7 % 11 / 10).double()


@dataclass
class Problem:
    """A problem whose values are known.

    Args:
        rewards: (5, 6) float64, by state and action.
        tokens: Number of tokens after which a completion is cut off. With one token, no state follows: a bandit.
        updates: Number of updates to train.
        kl_coef: Coefficient of the KL in the reward.
        options: Further options of `PPOConfig`.
    """

    rewards: Tensor
    tokens: int
    updates: int
    kl_coef: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def discount(self) -> float:
        """The weight of the next state's value, which is 0 in a bandit."""
        return GAMMA if self.tokens > 1 else 0.0

    def values(self, policy: Tensor, reference: Tensor) -> Tensor:
        """Return the values (5,) of the states under a policy (5, 6), which solve Bellman's equation."""
        rewards = self.rewards
        if self.kl_coef:
            rewards = rewards - self.kl_coef * (policy / reference).log()
        moves = self.discount * policy[:, :5]
        return torch.linalg.solve(torch.eye(5, dtype=torch.float64) - moves, (policy * rewards).sum(1))

    def optimum(self, reference: Tensor) -> Tensor:
        """Return the best policy (5, 6)."""
        if self.kl_coef:
            return (reference.log() + self.rewards / self.kl_coef).softmax(1)
        values = torch.zeros(5, dtype=torch.float64)
        for _ in range(500):
            of_actions = self.rewards + self.discount * torch.cat([values, torch.zeros(1)])
            values = of_actions.max(1).values
        return torch.nn.functional.one_hot(of_actions.argmax(1), 6).double()

    def reward(self, prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[StepRewards]:
        """Return a reward for each token."""
        found = []
        for prompt, actions in zip(prompts, completion_ids, strict=True):
            states = [STATES.index(prompt), *actions]
            pairs = zip(states, actions, strict=False)
            found.append(
                StepRewards.at_tokens(
                    [float(self.rewards[state, action]) for state, action in pairs], range(1, len(actions) + 1)
                )
            )
        return found


# two tokens: a completion that goes on is cut off, and its value must follow
CHAIN = Problem(
    chain_rewards(),
    tokens=2,
    updates=180,
    options={
        "bootstrap_truncated": True,
        "value_warmup_steps": WARM_UP,
        "gamma": GAMMA,
        "lam": 0.9,
        "learning_rate": 0.01,
        "value_learning_rate": 0.005,
    },
)
BANDIT = Problem(bandit_rewards(), tokens=1, updates=120, kl_coef=BETA, options={"learning_rate": 0.005})


@dataclass
class Run:
    """Policies and values at the start and after each update, in float64."""

    policies: Tensor
    """(updates + 1, 5, 6). The first one is the reference."""
    values: Tensor
    """(updates + 1, 5) values of the critic."""
    known: Tensor
    """(updates + 1, 5) values of the same policies by dynamic programming."""
    optimum: Tensor
    """(5, 6) the best policy."""
    best: Tensor
    """(5,) values of the best policy."""

    @property
    def distances(self) -> Tensor:
        """Return (updates + 1,) the distance of the policy to the best one: total variation in the worst state."""
        return (self.policies - self.optimum).abs().sum(-1).max(-1).values / 2


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each action."""
    core = Tokenizer(BPE(vocab={action: i for i, action in enumerate(ACTIONS)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="stop", pad_token="stop", padding_side="left")


def model() -> Qwen2ForCausalLM:
    """Return a model that attends to the last token only."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(ACTIONS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=1,
        max_window_layers=0,
        initializer_range=0.2,
        eos_token_id=5,
        pad_token_id=5,
        use_cache=False,
    )
    return Qwen2ForCausalLM(config)


@torch.no_grad()
def read(trainer: PPOTrainer) -> tuple[Tensor, Tensor]:
    """Return the policy (5, 6) and the critic's values (5,), in float64."""
    ids = torch.arange(5)[:, None]
    policy = trainer.model(input_ids=ids).logits[:, -1].double().softmax(-1)
    # the value of a token is that of the state before it, so one more token follows
    longer = torch.cat([ids, ids], 1)
    values = trainer.critic(input_ids=longer, attention_mask=torch.ones_like(longer), labels=longer).log_probs[:, 0]
    return policy, values.double()


class _Reader(TrainerCallback):
    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self.found = [read(trainer)]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.append(read(self._trainer))


def train(problem: Problem, *, seed: int = 0, adapters: bool = False, **options: Any) -> Run:
    """Train and return what was found on the way.

    Args:
        problem: One of those above.
        seed: Seed of the rollouts. The model at the start is always the same.
        adapters: True to train policy and critic as LoRA adapters on one base, at twice the learning rate.
        options: Options of `PPOConfig` that replace those of the problem.
    """
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 200,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "max_completion_length": problem.tokens,
        "max_steps": problem.updates,
        "lr_scheduler_type": "linear",
        "kl_coef": problem.kl_coef,
        "cliprange_value": None,
        "logging_strategy": "no",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "trim_padding": False,  # faster for sequences of a few tokens
        "disable_tqdm": True,
        "generation_kwargs": {"use_cache": False},
    }
    options = {**defaults, **problem.options, **options}
    options["learning_rate"] *= 2 if adapters else 1
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model().save_pretrained(folder)  # TRL loads the reference of the KL from there
        trainer = PPOTrainer(
            folder,
            problem.reward,
            PPOConfig(output_dir=folder, seed=seed, **options),
            Dataset.from_dict({"prompt": list(STATES * 40)}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if adapters else None,
        )
        reader = _Reader(trainer)
        trainer.add_callback(reader)
        trainer.train()
    policies, values = (torch.stack(each) for each in zip(*reader.found, strict=True))
    reference, optimum = policies[0], problem.optimum(policies[0])
    known = torch.stack([problem.values(policy, reference) for policy in policies])
    return Run(policies, values, known, optimum, problem.values(optimum, reference))


def curves(axis: Axes, run: Run, title: str) -> None:
    """Draw the critic's values, the known ones and the best ones."""
    for state, colour in enumerate(COLOURS):
        axis.plot(run.values[:, state], color=colour, linewidth=1.8, label=f"state {STATES[state]}")
        axis.plot(run.known[:, state], "--", color="black", linewidth=0.8)
        axis.plot(len(run.values) - 1, run.best[state], "o", color=colour, markeredgecolor="black", clip_on=False)
    axis.set(title=title, xlabel="update", ylabel="value", xlim=(0, len(run.values) - 1))


def draw(path: Path, chain: Run, bandit: Run) -> None:
    """Draw the values of both problems over the updates."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    curves(left, chain, "A chain, discount 0.7")
    left.axvline(WARM_UP, color="grey", linewidth=0.8)
    left.text(WARM_UP + 3, left.get_ylim()[0] + 0.1, "the policy learns too", fontsize="small")
    curves(right, bandit, "A bandit with a KL in the reward")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    handles, _ = left.get_legend_handles_labels()
    handles += left.plot([], [], "--", color="black", linewidth=0.8, label="exact value of the policy")
    handles += left.plot([], [], "o", color="white", markeredgecolor="black", label="exact value of the best policy")
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(name: str, run: Run, updates: Sequence[int]) -> str:
    """Return the values after some of the updates, as text."""
    rows = [f"{name:<8} {'values of the critic':<41} {'exact values of the policy':<41} distance to the best policy"]
    for update in updates:
        critic, known = (" ".join(f"{v:7.4f}" for v in each[update].tolist()) for each in (run.values, run.known))
        rows.append(f"{update:>8} {critic:<41} {known:<41} {run.distances[update]:.4f}")
    return "\n".join([*rows, f"{'best':>8} {'':<41} {' '.join(f'{v:7.4f}' for v in run.best.tolist())}"])


if __name__ == "__main__":
    chain, bandit = train(CHAIN), train(BANDIT, adapters=True)
    print(table("chain", chain, (0, WARM_UP, 120, 180)))
    print(table("bandit", bandit, (0, 20, 60, 120)))
    draw(Path(__file__).with_suffix(".png"), chain, bandit)
