"""The outer loop of Algorithm 1: what is retrained when, on which examples, and what it leaves alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from tests.features.critic import tools as critics
from tests.features.reward_model import tools as rewarding
from tests.features.reward_model.tools import is_right, refreshed, refresher
from tests.tools import tiny
from trl_steady import RewardAdapter, RewardModelRefreshCallback
from trl_steady.features.active_features import ActiveFeatures
from trl_steady.features.reference import callback as reference
from trl_steady.features.reward_model import callback as loop
from trl_steady.features.reward_model import training
from trl_steady.features.reward_model.examples import Example, prompt_key
from trl_steady.features.reward_model.feature import RewardModel
from trl_steady.features.reward_model.training import fit, measure


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", ["lora", "full", pytest.param("nf4", marks=pytest.mark.slow)])
def test_the_order_is_algorithm_1s_and_each_part_changes_only_its_own(
    kind: str, model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Score, ... , train the reward model, refresh the reference, score with the new one."""

    def tensors(trainer: Any) -> dict[str, dict[str, Tensor]]:
        """Copies of the parameters: base, policy, reference and reward model."""
        found: dict[str, dict[str, Tensor]] = {"base": {}, "policy": {}, "reference": {}, "reward": {}}
        for name, parameter in trainer.model.named_parameters():
            whose = next((of for of in ("ref", "reward", "default") if f".{of}." in name), "base")
            whose = {"ref": "reference", "default": "policy"}.get(whose, whose)
            found[whose if trainer.ref_model is None else "policy"][name] = parameter.detach().clone()
        for name, parameter in trainer.ref_model.named_parameters() if trainer.ref_model is not None else ():
            found["reference"][name] = parameter.detach().clone()
        found["reward"] |= critics.snapshot(dict(trainer.reward_model.named_parameters()))
        return found

    def watch(monkeypatch: pytest.MonkeyPatch, trainer: Any) -> list[tuple[str, Any]]:
        """What happens in a run, in order, with copies of the tensors."""
        seen: list[tuple[str, Any]] = []
        adapter = trainer.feature(RewardModel).adapter
        for owner, name in ((loop, "fit"), (reference, "refresh"), (adapter, "compute_rewards")):
            own = getattr(owner, name)

            def spy(*arguments: Any, own: Any = own, name: str = name, **options: Any) -> Any:
                before = tensors(trainer)
                returned = own(*arguments, **options)
                seen.append((name, (before, tensors(trainer), returned)))
                return returned

            monkeypatch.setattr(owner, name, spy)
        return seen

    trainer = refreshed(kind, model_of(kind), tmp_path)
    rewarding.stir(trainer)  # scores of 0 would teach the policy nothing before the first refresh
    seen = watch(monkeypatch, trainer)
    tiny.train(trainer)
    assert [name for name, _ in seen] == [*["compute_rewards", "fit", "refresh"] * 2, "compute_rewards"]
    for name, (before, after, _) in seen:
        changes = {whose for whose in before if not critics.same(before[whose], after[whose])}
        assert changes == {"compute_rewards": set(), "fit": {"reward"}, "refresh": {"reference"}}[name], name
    for (_, (_, trained, _)), (_, (scoring, _, _)) in zip(seen[1::3], seen[3::3], strict=True):
        assert critics.same(trained["reward"], scoring["reward"])  # and training the policy in between leaves it
        pairs = zip(scoring["policy"].values(), scoring["reference"].values(), strict=True)
        assert all(torch.equal(policy, reference) for policy, reference in pairs)
    first, last = seen[0][1][0], seen[-1][1][1]
    assert critics.same(first["base"], last["base"]) and not critics.same(first["policy"], last["policy"])
    rows = [row for row in trainer.state.log_history if "reward_model/refreshes" in row]
    logged = [(row["step"], row["reward_model/refreshes"], row["ref/refreshes"]) for row in rows]
    assert logged == [(5, 1, 1), (9, 2, 2)]
    assert [record.step for record in trainer.reward_refreshes] == [4, 8]
    assert [refresh.step for refresh in trainer.reference_refreshes] == [4, 8]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("fraction", "replayed"), [(0.0, [0, 0, 0]), (0.1, [0, 1, 1]), (0.5, [0, 12, 12])])
def test_a_share_is_replayed_but_no_held_out_answer(
    fraction: float, replayed: list[int], models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh = {"replay_fraction": fraction, "epochs": 1}
    data = {"train_dataset": tiny.dataset(8)}  # prompts come again
    trainer = refreshed("lora", models["dense"], tmp_path, max_steps=13, refresh=refresh, build=data)
    sets: list[dict[str, Any]] = []
    callback = refresher(trainer)
    measured = callback._log_accuracy
    monkeypatch.setattr(callback, "_log_accuracy", lambda which, given: sets.append(given) or measured(which, given))
    tiny.train(trainer)
    assert [record.replayed for record in trainer.reward_refreshes] == replayed
    assert [record.samples for record in trainer.reward_refreshes] == [12] * 3  # a quarter of 4 prompts is held out
    texts = lambda rows: {(*row.prompt.tolist(), -1, *row.completions[0].tolist()) for row in rows}
    out: set[tuple[int, ...]] = set()
    for given in sets[-5::2]:
        assert given["held_out"] and not set(map(prompt_key, given["fresh"])) & set(map(prompt_key, given["held_out"]))
        assert not set(map(prompt_key, given["replayed"])) & set(map(prompt_key, given["held_out"]))
        assert not texts(given["replayed"]) & out  # short answers may come twice in a run, but not these
        out |= texts(given["held_out"]) - texts(given["fresh"])


@pytest.mark.slow
def test_it_learns_the_rule_and_says_so(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_long(prompts: list[str], completions: list[str], **_: Any) -> list[bool]:
        """A rule that is easy to learn."""
        return [len(completion) > 3 for completion in completions]

    refresh = {"epochs": 24, "learning_rate": 3e-2, "label_fn": is_long}
    trainer = refreshed("lora", models["dense"], tmp_path, refresh=refresh)
    refresher(trainer).fit(list(tiny.dataset(16)))
    (record,) = trainer.reward_refreshes
    logged = {name: trainer._metrics["train"][name][0] for name in trainer._metrics["train"]}
    assert logged["reward_model/new/fresh/accuracy"] > 0.8
    assert logged["reward_model/new/fresh/loss"] < 0.75 * math.log(2)  # with a score of 0
    assert record.step == 0 and record.replayed == 0 and record.accepted
    assert record.old is None and not [name for name in logged if "/old/" in name]  # a new one knows nothing
    assert record.new == logged["reward_model/new/held_out/accuracy"]
    assert not [name for name in logged if name.startswith(("completions", "rewards"))]  # they are not of training
    trainer.args.max_steps = 1
    tiny.train(trainer)
    trainer.feature(ActiveFeatures).on_train_begin()  # as in a second training
    assert capsys.readouterr().out.count("  on: reward model retrained before the reference moves: ") == 1
    row = trainer.state.log_history[0]
    assert row["reward_model/refreshes"] == 1 and 0 <= row["reward_model/true"] <= 1


def test_the_true_reward_is_the_rules(models: dict[str, Path], tmp_path: Path) -> None:
    said: list[list[bool | None]] = []

    def rule(prompts: Any, completions: Any, **columns: Any) -> list[bool | None]:
        assert columns.keys() == {"answer"} and len(columns["answer"]) == len(prompts)
        verdicts = is_right(prompts, completions)
        said.append([None if number % 8 == 3 else verdict for number, verdict in enumerate(verdicts)])
        return said[-1]

    data = tiny.dataset().add_column("answer", list(range(16)))
    trainer = refreshed("lora", models["dense"], tmp_path, refresh={"label_fn": rule}, build={"train_dataset": data})
    tiny.train(trainer)
    rows = [row for row in trainer.state.log_history if "reward_model/true" in row]
    assert [row["step"] for row in rows] == [1, 5, 9] and len(said) == 3
    for row, verdicts in zip(rows, said, strict=True):
        known = [verdict for verdict in verdicts if verdict is not None]
        assert len(known) == 14 and row["reward_model/true"] == pytest.approx(sum(known) / 14, rel=1e-6)
    # answers without a verdict are no examples: of 16, 4 are held out
    assert [record.samples for record in trainer.reward_refreshes] in ([10, 10], [10, 11], [11, 10], [11, 11])


def test_a_step_without_a_verdict_is_no_example(models: dict[str, Path], tmp_path: Path) -> None:
    """The rule knows nothing of two texts in three."""

    def rule(prompts: Any, completions: Any, **columns: Any) -> list[bool | None]:
        return [None if number % 3 else number % 2 == 0 for number in (sum(map(ord, text)) for text in completions)]

    refresh = {"label_fn": rule, "continuations": 1}
    trainer = refreshed("lora", models["dense"], tmp_path, objective="steps", refresh=refresh, max_steps=1)
    tiny.train(trainer)
    answers, read = refresher(trainer)._completions, trainer.processing_class.decode
    assert 0 < len(answers) < 16 and all({*answer.labels} <= {0.0, 1.0} for answer in answers)
    assert all(len(answer.ends) == len(answer.labels) for answer in answers)
    texts = [rewarding.STEPS(read(answer.completion, skip_special_tokens=True)).texts for answer in answers]
    assert sum(len(answer.ends) for answer in answers) < sum(map(len, texts))


@pytest.mark.slow
def test_evaluation_has_a_true_reward_and_gives_no_examples(models: dict[str, Path], tmp_path: Path) -> None:
    data = tiny.dataset(8)
    options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = refreshed("lora", models["dense"], tmp_path, build={"eval_dataset": data}, **options)
    tiny.train(trainer)
    assert [record.samples for record in trainer.reward_refreshes] == [12, 12]  # as without evaluations
    assert [row for row in trainer.state.log_history if "eval_reward_model/true" in row]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("accept", "is_worse", "accepted"),
    [("held_out_not_worse", True, False), ("always", True, True), ("held_out_not_worse", False, True)],
)
def test_accept_keeps_the_old_one_where_the_new_one_knows_less(
    accept: str,
    is_worse: bool,
    accepted: bool,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoil(scorer: Any, optimizer: Any, examples: Any, **_: Any) -> None:
        """Turn all scores around, as an update of the optimizer would."""
        optimizer.adamw.state[scorer.model.head.weight]["step"] += 1
        scorer.model.head.weight.data.neg_()

    trainer = refreshed("lora", models["dense"], tmp_path, refresh={"accept": accept})
    callback = refresher(trainer)
    callback.fit(list(tiny.dataset(16)))
    scorer, scores = trainer.feature(RewardModel).scorer, list[Tensor]()
    score = scorer.scores
    scorer.scores = lambda *given, **options: scores.append(score(*given, **options)) or scores[-1]
    # the old one is right about all answers
    callback.label_fn = lambda **_: [score > 0 for score in scores[-1][:, 0].tolist()]
    state = lambda: {**critics.snapshot(trainer.reward_model.state()), **callback.optimizer.state_dict()}
    before = state()
    monkeypatch.setattr(loop, "fit", spoil if is_worse else lambda *_, **__: None)
    trainer._generate_and_score_completions(
        [{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"] for _ in range(4)]
    )
    callback.refresh(1)
    record = trainer.reward_refreshes[-1]
    assert record.accepted == accepted and record.old == 1 and record.new == (0 if is_worse else 1)
    assert critics.same(before, state()) == (not is_worse or not accepted)


def test_accept_without_held_out_answers_is_warned_of(models: dict[str, Path], tmp_path: Path) -> None:
    refresh = {"accept": "held_out_not_worse"}
    options = {"num_generations": 16, "max_steps": 5, "refresh": refresh}  # one prompt an iteration
    trainer = refreshed("lora", models["dense"], tmp_path, **options)
    rewarding.stir(trainer)
    with pytest.warns(UserWarning, match="'held_out_not_worse' has nothing to compare"):
        tiny.train(trainer)
    assert trainer.reward_refreshes[0].accepted


def test_three_pairs_train_it_as_trls_reward_trainer_does(models: dict[str, Path], tmp_path: Path) -> None:
    """Step for step in float64: the same loss, gradient norm and parameters."""
    torch.manual_seed(0)
    whole = AutoModelForSequenceClassification.from_pretrained(models["dense"], num_labels=1)
    whole.score.weight.data.normal_(std=0.3)
    whole.save_pretrained(tmp_path / "start")
    prompts, answers = [[10, 11], [12], [13, 14, 15]], [([60, 61], [62]), ([63], [64, 65, 66]), ([67, 68], [69, 70])]

    rows = [{"chosen_ids": p + r, "rejected_ids": p + w} for p, (r, w) in zip(prompts, answers, strict=True)]
    args = RewardConfig(
        **{"output_dir": str(tmp_path / "trl"), "per_device_train_batch_size": 3, "max_steps": 5, "logging_steps": 1},
        **{"learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0, "report_to": "none"},
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no"},
        **{"disable_tqdm": True, "optim": "adamw_torch", "max_grad_norm": 1.0},
    )
    model = type(whole).from_pretrained(tmp_path / "start", num_labels=1).double()
    theirs = RewardTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer()
    )
    theirs.train()

    options = {"per_device_train_batch_size": 3, "num_generations": 3, "steps_per_generation": 1}
    ours = rewarding.build(
        "full", models["dense"], tmp_path / "ours", adapter=RewardAdapter(tmp_path / "start"), **options
    )
    callback = RewardModelRefreshCallback(ours, label_fn=is_right, objective="pairs", learning_rate=1e-2)
    scorer = ours.feature(RewardModel).scorer
    scorer.model.backbone.double()
    scorer.model.head.double()
    examples = [
        Example(torch.tensor(p), [torch.tensor(r), torch.tensor(w)], [[len(r)], [len(w)]], [1.0])
        for p, (r, w) in zip(prompts, answers, strict=True)
    ]
    losses = []
    for _ in range(5):
        found = measure(scorer, examples)
        losses.append(found["loss"])
        generator = torch.Generator().manual_seed(0)
        fit(scorer, callback.optimizer, examples, epochs=1, learning_rate=1e-2, generator=generator)
    logged = [row["loss"] for row in theirs.state.log_history if "loss" in row]
    assert losses == pytest.approx(logged, rel=1e-4)  # TRL rounds what it logs
    expected = {name.removeprefix("model."): own.detach() for name, own in theirs.model.named_parameters()}
    state = scorer.model.state()
    assert state.keys() == expected.keys() and losses[-1] < losses[0] / 2
    for name, own in state.items():  # sums in another order, over five updates
        torch.testing.assert_close(own, expected[name], rtol=1e-8, atol=1e-10, msg=name)


def test_shared_prompts_and_budgets_change_passes_and_no_gradient(models: dict[str, Path], tmp_path: Path) -> None:
    """A prompt has four tokens before its last. An answer has this last one, two of its own, and one to be scored."""

    def trained_once(
        model: Path, output: Path, examples: list[Example], **options: Any
    ) -> tuple[list[int], list[Tensor]]:
        """Tokens of each pass of one epoch, and means of the gradients."""
        trainer = refreshed("lora", model, output, steps_per_generation=2, **options)
        rewarding.stir(trainer)
        read: list[int] = []
        trainer.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs: read.append(inputs[0].numel())
        )
        optimizer, generator = refresher(trainer).optimizer, torch.Generator().manual_seed(0)
        fit(
            trainer.feature(RewardModel).scorer, optimizer, examples, epochs=1, learning_rate=1e-2, generator=generator
        )
        return read, [value for name, value in optimizer.state_dict().items() if name.endswith("exp_avg")]

    examples = [
        Example(torch.full((5,), 10 + prompt), [torch.tensor([60 + prompt, 70 + number])], [[2]], [float(number % 2)])
        for number in range(4)
        for prompt in range(3)
    ]
    run = lambda batch=12, **options: trained_once(
        models["dense"], tmp_path, examples, per_device_train_batch_size=batch, **options
    )
    assert sum(run(4, share_prompts=True)[0]) == 3 * (4 + 4 * 4)  # a batch is a prompt with its answers
    (whole, expected), (shared, once), (cut, parts) = run(), run(share_prompts=True), run(token_budget=30)
    assert whole == [12 * 8] and shared == [3 * (4 + 4 * 4)] and cut == [24] * 4
    largest = max(gradient.abs().max().item() for gradient in expected)
    assert largest > 0
    for found in (once, parts):  # one batch: its order changes rounding only
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * largest)


def test_an_error_in_its_training_leaves_nothing_that_the_policy_would_train(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_step", interrupted)
    trainer = refreshed("lora", models["dense"], tmp_path)
    with pytest.raises(KeyboardInterrupt):
        refresher(trainer).fit(list(tiny.dataset(16)))
    assert not any(parameter.requires_grad for parameter in trainer.reward_model.parameters)


def test_a_new_one_is_said_to_teach_nothing_yet(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = refreshed("lora", models["dense"], tmp_path, max_steps=1)
    with pytest.warns(UserWarning, match=r"is new: the policy learns nothing from it .* fit\(rows\)"):
        trainer.train()


def test_the_first_training_leaves_ppos_kl_coefficient(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"kl_coef": 0.1, "kl_target": 6.0, "kl_horizon": 100, "per_device_train_batch_size": 8}
    options |= {"method": "PPO", "num_generations": 1, "steps_per_generation": 2, "beta": 0.0}
    trainer = refreshed("lora", models["dense"], tmp_path, **options)
    refresher(trainer).fit(list(tiny.dataset(16)))
    assert trainer.kl_coef == 0.1


def test_an_iteration_without_examples_leaves_it_as_it_is(models: dict[str, Path], tmp_path: Path) -> None:
    how = {"label_fn": lambda prompts, **_: [True] * len(prompts)}
    trainer = refreshed("lora", models["dense"], tmp_path, objective="pairs", refresh=how)
    before = critics.snapshot(dict(trainer.reward_model.named_parameters()))
    with pytest.warns(
        UserWarning, match=r"was not retrained before step 5: the 16 completions .* Pairs need a right and"
    ):
        tiny.train(trainer)
    assert critics.same(before, critics.snapshot(dict(trainer.reward_model.named_parameters())))
    assert [(record.samples, record.replayed) for record in trainer.reward_refreshes] == [(0, 0)] * 2
    assert len(trainer.reference_refreshes) == 2


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_ppos_critic_may_begin_as_the_reward_model(kind: str, model_of: Any, tmp_path: Path) -> None:
    first = rewarding.build(kind, model_of(kind), tmp_path / "a")
    rewarding.stir(first)
    first.save_model(str(tmp_path / "saved"))
    options = {"method": "PPO", "num_generations": 1, "value_init": "reward"}
    adapter = RewardAdapter(tmp_path / "saved" / "reward")
    trainer = refreshed(kind, model_of(kind), tmp_path / "b", adapter=adapter, **options)
    states = [own.state() for own in (trainer.critic, trainer.reward_model)]
    names = [[name.replace(".value.", ".").replace(".reward.", ".") for name in state] for state in states]
    assert names[0] == names[1]
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))
    tiny.train(trainer)
    critic, reward = (own.state() for own in (trainer.critic, trainer.reward_model))
    assert not torch.equal(critic["score.weight"], reward["score.weight"])
    assert len(trainer.reward_refreshes) == 2
    trainer.save_model(str(tmp_path / "both"))
    assert {file.name for file in (tmp_path / "both").iterdir() if file.is_dir()} == {"value", "reward"}


def test_wrong_arguments_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = rewarding.build("lora", models["dense"], tmp_path)
    for option, value, message in (
        ("objective", "best", r"'best' .*'pairs' or 'pointwise'"),
        ("objective", "steps", r"'steps' .*with RewardAdapter\(head='steps'\)"),
        ("accept", "never", r"'never' .*'always' or 'held_out_not_worse'"),
        ("replay_fraction", 1.0, r"1\.0 .*below 1"),
        ("learning_rate", 0, "0 .*above 0"),
        ("epochs", 0, "0 .*1 or more"),
    ):
        with pytest.raises(ValueError, match=rf"{option}={message}"):
            RewardModelRefreshCallback(trainer, **{"label_fn": is_right, option: value})
    for unfit in (
        tiny.trainer(models["dense"], tmp_path),
        rewarding.build("lora", models["dense"], tmp_path, sync_ref_model=False),
        refreshed("lora", models["dense"], tmp_path),
    ):
        with pytest.raises(ValueError, match=r"Make one for a trainer .*RewardAdapter in reward_funcs, sync_ref_mode"):
            RewardModelRefreshCallback(unfit, label_fn=is_right)


@pytest.mark.parametrize("verdicts", [[True], [0.5] * 16])
def test_verdicts_that_are_none_are_refused(verdicts: list[Any], models: dict[str, Path], tmp_path: Path) -> None:
    trainer = refreshed("lora", models["dense"], tmp_path, refresh={"label_fn": lambda **_: verdicts})
    with pytest.raises(ValueError, match=r"label_fn returned \[.* for 16 completions\. Return True"):
        tiny.train(trainer)
