"""Whole optimizer steps with a teacher are those of `tests/oracles/teacher.py`, in float64."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers

from tests.oracles import teacher as oracle
from tests.tools import tiny

RATE, EPSILON, UPDATES, LENGTH = 0.05, 0.2, 2, 8
SETTINGS: dict[str, Any] = {
    **{"optim": "sgd", "learning_rate": RATE, "max_grad_norm": 0.0, "beta": 0.0, "epsilon": EPSILON},
    **{"gradient_accumulation_steps": 4, "num_iterations": UPDATES, "max_steps": 2 * UPDATES},
}
LOSSES = {"weight": "grpo", "add": "dapo"}
COEFS = {"weight": 0.7, "add": 0.3}


class Answer(NamedTuple):
    """One sequence of a rollout."""

    row: dict[str, Any]
    prompt: list[int]
    ids: list[int]
    is_own: list[bool]
    """False for tokens that a tool has written."""


@pytest.fixture(autouse=True)
def in_float64(all_in_float64: None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def with_solution(row: dict[str, Any]) -> str:
    """Another length for each row."""
    return f"The answer is {len(row['prompt']) * 'x'}. {row['prompt']}"


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of unequal length, in which every third token is a tool's."""
    ids = [
        [(13 * i + 5 * t) % 200 + 45 for t in range(1 + (3 * i + 5 * len(p)) % LENGTH)] for i, p in enumerate(prompts)
    ]
    prompt_ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    is_own = [[int(t % 3 != 1) for t in range(len(row))] for row in ids]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": is_own}


def new_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(tiny.CONFIGS["dense"])).double()


def with_adapter(base: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**tiny.LORA)).double()


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def recorded(trainer: Any) -> list[list[Answer]]:
    """The rollouts that a trainer will make, with the row of each answer."""
    rollouts: list[list[Answer]] = []
    generate = trainer._generate_and_score_completions
    columns = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")

    def generate_and_record(inputs: list[dict[str, Any]]) -> dict[str, Any]:
        samples = generate(inputs)
        answers: list[Answer] = []
        for row, prompt, is_prompt, ids, is_token, is_own in zip(inputs, *map(samples.get, columns), strict=True):
            kept = is_token.bool()
            own = is_own[kept].bool().tolist()
            answers.append(Answer(row, prompt[is_prompt.bool()].tolist(), ids[kept].tolist(), own))
        rollouts.append(answers)
        return samples

    trainer._generate_and_score_completions = generate_and_record
    return rollouts


class Case:
    """A policy, the options of its trainer, and the teacher."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.policy, self.teacher = new_model(0), new_model(1)
        self.options: dict[str, Any] = {}
        if "adapter" in kind or "base" in kind:
            saved(self.policy, folder / "base")
            base = loaded(folder / "base")
            self.policy, self.teacher = with_adapter(base, 2), with_adapter(base, 3)
            self.options["teacher"] = str(folder / "base")
            if "adapter" in kind:
                self.options["teacher"] = saved(self.teacher, folder / "adapter")
            else:
                self.teacher = base
        elif "reference" in kind:
            saved(self.policy, folder / "policy")  # from which TRL makes the reference
            self.policy = loaded(folder / "policy")
            self.teacher = copy.deepcopy(self.policy)
            self.options = {"teacher": "reference", "sync_ref_model": True, "ref_model_sync_steps": UPDATES}
            self.options["ref_model_mixup_alpha"] = 0.6
        else:
            self.options["teacher"] = saved(self.teacher, folder / "teacher")
        if "KL" in kind:
            self.options["beta"] = 0.1
        if "prompt" in kind:
            self.options["teacher_prompt"] = with_solution

    def prompts(self, answers: Sequence[Answer]) -> list[list[int]]:
        """The prompts that the teacher reads."""
        if "prompt" not in self.kind:
            return [answer.prompt for answer in answers]
        reader = tiny.tokenizer()
        return [reader(with_solution(answer.row))["input_ids"] for answer in answers]

    def move(self, policy: Any) -> None:
        """The reference moves after the updates of a rollout."""
        if "reference" in self.kind:
            for own, new in zip(self.teacher.parameters(), policy.parameters(), strict=True):
                own.data.mul_(0.4).add_(new.data, alpha=0.6)


def expected(case: Case, rollouts: Sequence[Sequence[Answer]], mode: str, coef: float) -> tuple[Any, dict[str, float]]:
    """The policy after the steps, and the metrics of the last rollout."""
    policy = copy.deepcopy(case.policy)
    metrics: dict[str, float] = {}
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    beta = case.options.get("beta", 0.0)
    for answers in rollouts:
        prompts, ids = [answer.prompt for answer in answers], [answer.ids for answer in answers]
        masks = [answer.is_own for answer in answers]
        advantages = oracle.group_advantages(tiny.reward(ids), 4, scale=True)
        with torch.no_grad():
            old = oracle.sequence_logps(policy, prompts, ids)
            taught = oracle.sequence_logps(case.teacher, case.prompts(answers), ids)
            reference = oracle.sequence_logps(case.teacher, prompts, ids) if beta else None
        of_tokens = oracle.teacher_advantages(advantages, taught, old, mode, coef)
        scored = masks
        if mode == "weight":
            pairs = zip(masks, advantages.tolist(), strict=True)
            scored = [[own and advantage != 0 for own in mask] for mask, advantage in pairs]
        metrics["teacher/kl"] = oracle.teacher_kl(taught, old, scored)
        metrics["teacher/agreement"] = oracle.agreement(advantages, taught, old, masks)
        for _ in range(UPDATES):
            new = oracle.sequence_logps(policy, prompts, ids)
            losses = oracle.token_losses(new, old, of_tokens, masks, EPSILON, reference, beta)
            gradients = torch.autograd.grad(oracle.total_loss(losses, LOSSES[mode]), trained)
            with torch.no_grad():
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter -= RATE * gradient
        case.move(policy)
    return policy, metrics


def worst(trained: Any, model: torch.nn.Module) -> float:
    """The largest error of a trained parameter."""
    by_name = dict(model.named_parameters())
    errors: list[float] = []
    for name, value in trained.model.named_parameters():
        if value.requires_grad:
            errors.append((value - by_name[name]).abs().max().item())
    return max(errors)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("mode", ["weight", "add"])
@pytest.mark.parametrize(
    "kind",
    [
        "model, prompt",
        "model",
        "adapter",
        "adapter, prompt",
        "base",
        "reference",
        "reference, prompt",
        "reference, KL",
    ],
)
def test_steps_are_those_of_the_formulas(kind: str, mode: str, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    options = {**SETTINGS, **case.options, "loss_type": LOSSES[mode], "build": {"rollout_func": rollout}}
    policy = copy.deepcopy(case.policy)
    trainer = tiny.trainer(policy, tmp_path / "out", teacher_mode=mode, teacher_coef=COEFS[mode], **options)
    rollouts = recorded(trainer)
    trainer.train()
    assert len(rollouts) == 2 and all(False in answer.is_own for answer in rollouts[0] if len(answer.ids) > 1)
    untaught = copy.deepcopy(case)
    model, metrics = expected(case, rollouts, mode, COEFS[mode])
    assert worst(trainer, model) < 1e-10
    assert worst(trainer, expected(untaught, rollouts, mode, 0.0)[0]) > 1e-4
    logged = [row for row in tiny.history(trainer) if "teacher/kl" in row][-1]
    assert {name: logged[name] for name in metrics} == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_the_oracle_has_the_values_of_a_calculation_by_hand() -> None:
    """Two answers to a prompt, with rewards 1 and 0, and probabilities that are powers of 2. L is log 2.

    seq  token  old  teacher  difference  "add", coef 0.5   "weight", coef 0.25
    1    1      1/2  1/8      -2 L        1/2 - L           1/2 (0.75 + 0.25 * 0.8)
    1    2      1/4  1/2      L           1/2 + L/2         1/2 (0.75 + 0.25 * 1.2)
    2    1      1/2  1/2      0           -1/2              -1/2
    2    2      1/8  1/2      2 L         -1/2 + L          -1/2 (0.75 + 0.25 * 0.8)
    """
    log_2 = torch.tensor(2.0).log().item()
    advantages = oracle.group_advantages([1.0, 0.0], 2, scale=False)
    old = [torch.tensor([1 / 2, 1 / 4]).log(), torch.tensor([1 / 2, 1 / 8]).log()]
    taught = [torch.tensor([1 / 8, 1 / 2]).log(), torch.tensor([1 / 2, 1 / 2]).log()]
    tables = {
        ("add", 0.5): [0.5 - log_2, 0.5 + log_2 / 2, -0.5, -0.5 + log_2],
        ("weight", 0.25): [0.475, 0.525, -0.5, -0.475],
    }
    for (mode, coef), table in tables.items():
        found = torch.cat(oracle.teacher_advantages(advantages, taught, old, mode, coef))
        assert found.tolist() == pytest.approx(table, abs=1e-12)
    masks = [[True, True], [True, True]]
    assert oracle.teacher_kl(taught, old, masks) == pytest.approx(-log_2 / 4)
    assert oracle.agreement(advantages, taught, old, masks) == pytest.approx(1 / 3)
    ratios = [torch.tensor([1.5, 0.5]), torch.tensor([1.6, 1.5])]
    new = [before + ratio.log() for before, ratio in zip(old, ratios, strict=True)]
    of_tokens = oracle.teacher_advantages(advantages, taught, old, "add", 0.5)
    losses = oracle.token_losses(new, old, of_tokens, masks, 0.2)
    # the sign of the token's own advantage decides what is clipped
    by_hand = [-1.5 * (0.5 - log_2), -0.5 * (0.5 + log_2 / 2), 0.8, -1.2 * (log_2 - 0.5)]
    assert torch.cat(losses).tolist() == pytest.approx(by_hand)
    assert oracle.total_loss(losses, "dapo").item() == pytest.approx(sum(by_hand) / 4)
