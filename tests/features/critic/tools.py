"""PPO trainers with a critic that is not zero, known rollouts for them, and the values of a critic computed again."""

import contextlib
import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.tools import tiny, wide
from trl_steady import StepRewards
from trl_steady.features.scalar_head import optimizer as learner

KINDS: dict[str, dict[str, Any]] = {"lora": {"lora": True}, "full": {}, "nf4": {"lora": True, "nf4": True}}
Samples = dict[str, Any]
EOS = tiny.SIZES["eos_token_id"][0]
OTHER_EOS = 7  # a further end of the generation config


class Answer(NamedTuple):
    """A completion that a rollout function returns, and what it earns."""

    ids: list[int]
    mask: list[int]  # 1 = action token
    is_cut: bool
    steps: StepRewards | float | None
    score: float | None

    def earned(self, weights: tuple[float, float]) -> list[tuple[int, float]]:
        """Ends and weighted rewards of its steps. A number is a step that ends with the answer."""
        steps: list[tuple[int, float]] = []
        for weight, own in zip(weights, (self.steps, self.score), strict=True):
            if isinstance(own, StepRewards):
                steps += [(end, weight * value) for end, value in zip(own.ends, own.values, strict=True)]
            elif own is not None:
                steps.append((len(self.ids), weight * own))
        return steps

    @property
    def is_scored(self) -> bool:
        return self.steps is not None or self.score is not None


ANSWERS = [
    # tools in the middle; the second step ends inside a tool's tokens
    Answer(
        [60, 61, 62, 63, 64, 65, 66, EOS],
        [1, 1, 0, 0, 1, 1, 0, 1],
        False,
        StepRewards.at_tokens([0.5, -1.25, 2.0], [1, 4, 8]),
        1.5,
    ),
    Answer([OTHER_EOS], [1], False, 1.0, None),
    Answer([70, 71, 72, 73, 74, 75, 76, 77], [1] * 8, True, StepRewards.at_tokens([0.75], [3]), -2.0),
    # cut off after a tool's tokens
    Answer([80, 81, 82, 83, 84], [1, 1, 1, 0, 0], True, None, 0.25),
    Answer([90, 91, EOS], [1, 1, 1], False, None, None),
    # no action token, which no policy learns from
    Answer([100, EOS], [0, 0], False, 3.0, 1.0),
    Answer([110, 111, 112, 113, EOS], [1, 1, 1, 0, 1], False, -0.5, 0.5),
    Answer([120, 121], [1, 1], True, None, None),
]
PROMPTS = ["1+1=", "abab22+2=", "abab22+2=", "ab3+3="]  # some twice, of unequal lengths


def answer(number: int) -> Answer:
    return ANSWERS[number % len(ANSWERS)]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """All answers in turn."""
    answers = [answer(number) for number in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [[*own.ids] for own in answers],
        "env_mask": [[*own.mask] for own in answers],
        "logprobs": None,
    }


def steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return [answer(number).steps for number in range(len(completion_ids))]


def score(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return [answer(number).score for number in range(len(completion_ids))]


WEIGHTS = (1.0, -0.5)
KNOWN = {"reward_funcs": [steps, score], "rollout_func": rollout}
"""For the constructor of a trainer whose rollouts are the answers."""


def rows(count: int = len(ANSWERS)) -> list[dict[str, Any]]:
    return [{"prompt": PROMPTS[number % len(PROMPTS)]} for number in range(count)]


def build(
    model: Any, folder: Path, *, exact: bool = False, nf4: bool = False, known: bool = False, **options: Any
) -> Any:
    """A PPO trainer whose policy, critic and reference differ; in float64 if `exact`, on rollouts of `known` answers.

    `nf4` quantises the base and needs `lora`. `options` are those of `tiny.trainer`.
    """
    built = {**(KNOWN if known else {}), **options.pop("build", {})}
    if known:
        options.setdefault("reward_weights", [*WEIGHTS])
    if "peft_config" in built:
        options["lora"] = False  # which would be another adapter
    model = wide.load(model, "nf4") if nf4 else model
    trainer = tiny.trainer(model, folder, method="PPO", build=built, **{"num_generations": 1, **options})
    if exact:
        reference = [] if trainer.ref_model is None else [trainer.ref_model]
        for own in (trainer.model, trainer.critic.backbone, trainer.critic.head, *reference):
            own.double()
    stir(trainer)
    trainer.model.train()
    return trainer


@torch.no_grad()
def stir(trainer: Any, seed: int = 0, *, by: float = 0.1) -> None:
    """Move all that is trained, the head most."""
    generator = torch.Generator().manual_seed(seed)
    own = dict(trainer.critic.named_parameters())
    policy = {name: p for name, p in policy_parameters(trainer).items() if p.requires_grad}
    for name, parameter in {**policy, **own}.items():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_((noise * (5 * by if name.startswith("score") else by)).to(parameter.dtype))


def policy_parameters(trainer: Any) -> dict[str, nn.Parameter]:
    """Policy and base, without the critic."""
    critic = {id(parameter) for _, parameter in trainer.critic.named_parameters()}
    return {name: own for name, own in trainer.model.named_parameters() if id(own) not in critic}


def descend(monkeypatch: Any) -> None:
    """Let critics take steps of SGD, which are proportional to gradients."""
    monkeypatch.setattr(learner, "AdamW", lambda groups, **_: torch.optim.SGD(groups))


def snapshot(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: own.detach().clone() for name, own in parameters.items()}


def same(ones: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return ones.keys() == others.keys() and all(torch.equal(own, others[name]) for name, own in ones.items())


class Twin:
    """A copy of the models, run by transformers and PEFT alone: each sequence goes by itself, without padding.

    Forwards that TRL or accelerate have replaced are not used. A copy of them would run the first model.
    """

    def __init__(self, trainer: Any, *, exact: bool = False) -> None:
        whole = trainer.accelerator.unwrap_model(trainer.model)
        self.is_lora = hasattr(whole, "peft_config")
        copied = [whole, trainer.critic.head, trainer.ref_model, None if self.is_lora else trainer.critic.backbone]
        self.whole, self.head, self._reference, self._critic = (copy.deepcopy(own) for own in copied)
        for own in (self.whole, self.head, self._reference, self._critic) if exact else ():
            if own is not None:
                own.double()
        for own in self.parameters.values():  # which the critic's need only while it is trained
            own.requires_grad_(True)

    @property
    def _body(self) -> Any:
        return (self.whole.get_base_model() if self.is_lora else self._critic).base_model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of the critic, by the names that the critic gives them."""
        body = self._body.named_parameters()
        own = {name: parameter for name, parameter in body if not self.is_lora or ".value." in name}
        return {**own, "score.weight": self.head.weight}

    def values(self, samples: dict[str, Any]) -> Tensor:
        """(B, T + 1) values before each token of a completion and, after its last token, the value of the end."""
        if self.is_lora:
            self.whole.set_adapter("value")
        width, rows = samples["completion_ids"].size(1) + 1, []
        for prompt, completion in _sequences(samples):
            hidden = self._body(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).last_hidden_state
            own = (hidden.to(self.head.weight.dtype) @ self.head.weight.T).flatten()[len(prompt) - 1 :]
            rows.append(torch.cat([own, own.new_zeros(width - len(own))]))
        return torch.stack(rows)

    def logps(self, samples: dict[str, Any], *, of_reference: bool = False) -> Tensor:
        """(B, T) log-probs of the completions under the policy or the reference."""
        rows, width = [], samples["completion_ids"].size(1)
        for prompt, completion in _sequences(samples):
            logps = self.logits(torch.cat([prompt, completion]), of_reference=of_reference).log_softmax(-1)
            own = logps[len(prompt) - 1 : -1].gather(1, completion.unsqueeze(1)).flatten()
            rows.append(torch.cat([own, own.new_zeros(width - len(own))]))
        return torch.stack(rows)

    def logits(self, ids: Tensor, *, of_reference: bool = False) -> Tensor:
        """(L, V) of the policy or the reference, for one sequence of L tokens."""
        if not self.is_lora:
            return _logits(self._reference if of_reference else self.whole, ids)
        self.whole.set_adapter("default")
        with self.whole.disable_adapter() if of_reference else contextlib.nullcontext():
            return _logits(self.whole.get_base_model(), ids)


def _sequences(samples: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    columns = (samples[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"))
    return [(prompt[own.bool()], ids[mask.bool()]) for prompt, own, ids, mask in zip(*columns, strict=True)]


def _logits(model: Any, ids: Tensor) -> Tensor:
    return model.lm_head(model.base_model(input_ids=ids.unsqueeze(0)).last_hidden_state[0])


def critic_parameters(trainer: Any) -> dict[str, torch.nn.Parameter]:
    return dict(trainer.critic.named_parameters())


def gradients(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """0 for those without one."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of a tensor, relative to all of them together."""
    assert found.keys() == expected.keys()
    size = torch.stack([own.double().norm() for own in expected.values()]).norm()
    return max(((found[name] - own).double().norm() / size).item() for name, own in expected.items())


def refused(trainer: Any, checkpoint: Path, message: str) -> None:
    """A resume is refused with this message, before a step."""
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step in (0, int(checkpoint.name.split("-")[1]))
