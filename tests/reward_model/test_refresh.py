"""The outer loop of Algorithm 1: what is retrained when, on which examples, and what it leaves alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import RewardConfig, RewardTrainer

from tests.tools import critics, rewarding, tiny
from tests.tools.rewarding import KINDS, is_right, refreshed, refresher
from trl_steady import RewardAdapter, RewardModelRefreshCallback
from trl_steady.critic.model import copied_from
from trl_steady.reference import callback as reference
from trl_steady.reward_model import callback as loop
from trl_steady.reward_model.examples import Example
from trl_steady.reward_model.part import RewardModelPart
from trl_steady.reward_model.training import fit, measure


@pytest.fixture
def model_of(models: dict[str, Path], wide: Path) -> Any:
    return lambda kind: wide if kind == "nf4" else models["dense"]


def is_long(prompts: list[str], completions: list[str], **_: Any) -> list[bool]:
    """A rule that is easy to learn."""
    return [len(completion) > 3 for completion in completions]


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
    part = trainer.part(RewardModelPart)
    for owner, name in ((loop, "fit"), (reference, "move"), (part, "rewards")):
        own = getattr(owner, name)

        def spy(*arguments: Any, own: Any = own, name: str = name, **options: Any) -> Any:
            before = tensors(trainer)
            returned = own(*arguments, **options)
            seen.append((name, (before, tensors(trainer), returned)))
            return returned

        monkeypatch.setattr(owner, name, spy)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_algorithm_1s_and_each_part_changes_only_its_own(
    kind: str, model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Score, ... , train the reward model, move the reference, score with the new one."""
    trainer = refreshed(kind, model_of(kind), tmp_path)
    rewarding.stir(trainer)  # scores of 0 would teach the policy nothing before the first move
    seen = watch(monkeypatch, trainer)
    tiny.train(trainer)
    assert [name for name, _ in seen] == ["rewards", "fit", "move", "rewards", "fit", "move", "rewards"]
    for name, (before, after, _) in seen:
        changes = {whose for whose in before if not critics.same(before[whose], after[whose])}
        assert changes == {"rewards": set(), "fit": {"reward"}, "move": {"reference"}}[name], name
    for (_, (_, trained, _)), (_, (scoring, _, _)) in zip(seen[1::3], seen[3::3], strict=True):
        assert critics.same(trained["reward"], scoring["reward"])  # and training the policy in between leaves it
        policy = [own for name, own in scoring["policy"].items()]
        assert all(torch.equal(a, b) for a, b in zip(policy, scoring["reference"].values(), strict=True))
    first, last = seen[0][1][0], seen[-1][1][1]
    assert critics.same(first["base"], last["base"]) and not critics.same(first["policy"], last["policy"])
    rows = [row for row in trainer.state.log_history if "reward_model/refreshes" in row]
    assert [(row["step"], row["reward_model/refreshes"], row["ref/refreshes"]) for row in rows] == [
        (5, 1, 1),
        (9, 2, 2),
    ]
    assert [record.step for record in trainer.reward_refreshes] == [4, 8]
    assert [refresh.step for refresh in trainer.reference_refreshes] == [4, 8]


def test_a_tenth_is_replayed_to_within_one_example(models: dict[str, Path], tmp_path: Path) -> None:
    for fraction in (0.0, 0.1, 0.5):
        how = {"replay_fraction": fraction, "epochs": 1}
        trainer = refreshed("lora", models["dense"], tmp_path, max_steps=13, refresh=how)
        tiny.train(trainer)
        first, *others = trainer.reward_refreshes
        assert first.replayed == 0 and first.samples == 12 and len(others) == 2  # a quarter of 4 prompts is held out
        for number, record in enumerate(others, start=1):
            whole = record.samples + record.replayed
            assert abs(record.replayed - fraction * whole) <= 1 and record.replayed <= number * 12
        if fraction == 0.5:
            assert [record.replayed for record in others] == [12] * 2


def test_held_out_answers_are_not_trained_on_nor_replayed(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = refreshed("lora", models["dense"], tmp_path, max_steps=21, refresh={"replay_fraction": 0.5})
    sets: list[dict[str, Any]] = []
    callback = refresher(trainer)
    own = callback._measured
    monkeypatch.setattr(callback, "_measured", lambda which, given: sets.append(given) or own(which, given))
    tiny.train(trainer)
    out: set[tuple[int, ...]] = set()
    for given in sets[::2]:
        trained = {(*own.prompt.tolist(), -1, *own.completions[0].tolist()) for own in given["fresh"]}
        replayed = {(*own.prompt.tolist(), -1, *own.completions[0].tolist()) for own in given["replayed"]}
        held = {(*own.prompt.tolist(), -1, *own.completions[0].tolist()) for own in given["held_out"]}
        prompts = [{own.prompt.numpy().tobytes() for own in given[name]} for name in ("fresh", "held_out")]
        assert held and trained and not prompts[0] & prompts[1]
        assert not replayed & out  # short answers may come twice in a run, but not these
        out |= held - trained


@pytest.mark.parametrize("objective", ["pointwise", "pairs"])
def test_it_learns_the_rule_and_says_so(objective: str, models: dict[str, Path], tmp_path: Path) -> None:
    how = {"epochs": 24, "learning_rate": 3e-2, "label_fn": is_long}
    trainer = refreshed("lora", models["dense"], tmp_path, objective=objective, refresh=how)
    refresher(trainer).fit(list(tiny.dataset(16)))
    (record,) = trainer.reward_refreshes
    logged = {name: trainer._metrics["train"][name][0] for name in trainer._metrics["train"]}
    assert logged["reward_model/new/fresh/accuracy"] > 0.8
    assert logged["reward_model/new/fresh/loss"] < 0.75 * math.log(2)  # with a score of 0
    assert record.step == 0 and record.replayed == 0 and record.accepted
    assert record.old is None and not [name for name in logged if "/old/" in name]  # a new one knows nothing
    assert record.new == logged["reward_model/new/held_out/accuracy"]
    assert not [name for name in logged if name.startswith(("completions", "rewards"))]  # they are not of training
    tiny.train(trainer)
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


def test_a_step_without_a_verdict_has_no_label(models: dict[str, Path], tmp_path: Path) -> None:
    """The rule knows nothing of two texts in three. Answers and continuations of the first rollout are the same."""

    def rule(prompts: Any, completions: Any, **columns: Any) -> list[bool | None]:
        return [None if own % 3 else own % 2 == 0 for own in (sum(map(ord, text)) for text in completions)]

    kept = {}
    for name, label_fn in (("all", rewarding.is_right), ("some", rule)):
        refresh = {"label_fn": label_fn, "continuations": 1}
        trainer = rewarding.refreshed(
            "lora", models["dense"], tmp_path / name, objective="steps", refresh=refresh, max_steps=1
        )
        tiny.train(trainer)
        kept[name] = {own.index: own for own in rewarding.refresher(trainer)._answers if own.rollout == 0}
    assert 0 < len(kept["some"]) < len(kept["all"])
    lost = 0
    for index, own in kept["some"].items():
        whole = kept["all"][index]
        assert torch.equal(own.completion, whole.completion) and set(own.ends) <= set(whole.ends)
        assert len(own.ends) == len(own.labels) and set(own.labels) <= {0.0, 1.0}
        lost += len(whole.ends) - len(own.ends)
    assert lost > 0


def test_evaluation_has_a_true_reward_and_gives_no_examples(models: dict[str, Path], tmp_path: Path) -> None:
    data = tiny.dataset(8)
    options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = refreshed("lora", models["dense"], tmp_path, build={"eval_dataset": data}, **options)
    tiny.train(trainer)
    plain = refreshed("lora", models["dense"], tmp_path)
    tiny.train(plain)
    assert [record.samples for record in trainer.reward_refreshes] == [
        record.samples for record in plain.reward_refreshes
    ]
    assert [row for row in trainer.state.log_history if "eval_reward_model/true" in row]


def test_accept_keeps_the_old_one_where_the_new_one_knows_less(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(part: Any, optimizer: Any, examples: Any, **_: Any) -> None:
        """Turn all scores around."""
        for parameter in (part.model.head.weight,):
            optimizer.state[parameter]["step"] = torch.tensor(1.0)
            parameter.data.neg_()

    def nothing(*_: Any, **__: Any) -> None:
        """Leave the reward model as it is, which is not worse."""

    def runs(accept: str, instead: Any) -> Any:
        trainer = refreshed("lora", models["dense"], tmp_path, refresh={"accept": accept})
        refresher(trainer).fit(list(tiny.dataset(16)))
        part, scores = trainer.part(RewardModelPart), list[Tensor]()
        own = part.scores
        part.scores = lambda *given, **options: scores.append(own(*given, **options)) or scores[-1]
        # the old one is right about all answers
        refresher(trainer).label_fn = lambda **_: [score > 0 for score in scores[-1][:, 0].tolist()]
        before = critics.snapshot(dict(trainer.reward_model.named_parameters()))
        state = refresher(trainer).optimizer.state_dict()["state"]
        steps = {number: own["step"].item() for number, own in state.items()}
        monkeypatch.setattr(loop, "fit", instead)
        trainer.rollout([{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"] for _ in range(4)])
        refresher(trainer).refresh(1)
        monkeypatch.undo()
        same = critics.same(before, critics.snapshot(dict(trainer.reward_model.named_parameters())))
        after = refresher(trainer).optimizer.state_dict()["state"]
        return trainer.reward_refreshes[-1], same, steps == {n: own["step"].item() for n, own in after.items()}

    record, is_same, has_state = runs("held_out_not_worse", spoil)
    assert not record.accepted and record.old == 1 and record.new == 0
    assert is_same
    assert has_state
    record, is_same, _ = runs("always", spoil)
    assert record.accepted and not is_same and record.new == 0
    record, is_same, _ = runs("held_out_not_worse", nothing)
    assert record.accepted and is_same and record.new == record.old


def test_three_pairs_train_it_as_trls_reward_trainer_does(models: dict[str, Path], tmp_path: Path) -> None:
    """Step for step in float64: the same loss, gradient norm and parameters."""
    torch.manual_seed(0)
    policy = tiny.trainer(models["dense"], tmp_path / "policy").model
    whole = copied_from(policy)
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
    part = ours.part(RewardModelPart)
    part.model.backbone.double()
    part.model.head.double()
    examples = [
        Example(torch.tensor(p), [torch.tensor(r), torch.tensor(w)], [[len(r)], [len(w)]], [1.0])
        for p, (r, w) in zip(prompts, answers, strict=True)
    ]
    losses = []
    for _ in range(5):
        found = measure(part, examples)
        assert found is not None
        losses.append(found.loss)
        fit(part, callback.optimizer, examples, epochs=1, generator=torch.Generator().manual_seed(0))
    logged = [row["loss"] for row in theirs.state.log_history if "loss" in row]
    assert losses == pytest.approx(logged, rel=1e-4)  # TRL rounds what it logs
    expected = {name.removeprefix("model."): own.detach() for name, own in theirs.model.named_parameters()}
    state = part.model.state()
    assert state.keys() == expected.keys() and losses[-1] < losses[0] / 2
    for name, own in state.items():  # sums in another order, over five updates
        torch.testing.assert_close(own, expected[name], rtol=1e-8, atol=1e-10, msg=name)


def test_shared_prompts_are_computed_once_for_their_answers(models: dict[str, Path], tmp_path: Path) -> None:
    """A prompt has four tokens before its last. An answer has this last one, two of its own, and one to be scored."""
    examples = [
        Example(torch.full((5,), 10 + prompt), [torch.tensor([60 + prompt, 70 + number])], [[2]], [float(number % 2)])
        for number in range(4)
        for prompt in range(3)
    ]

    def trained(share: bool, batch: int) -> tuple[int, list[Tensor]]:
        """Tokens that the model has read, and means of the gradients."""
        options = {"share_prompts": share, "per_device_train_batch_size": batch, "steps_per_generation": 2}
        trainer = refreshed("lora", models["dense"], tmp_path / f"{share}-{batch}", **options)
        rewarding.stir(trainer)
        read: list[int] = []
        embedding = trainer.model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel()))
        generator = torch.Generator().manual_seed(0)
        optimizer = refresher(trainer).optimizer
        fit(trainer.part(RewardModelPart), optimizer, examples, epochs=1, generator=generator)
        return sum(read), [own["exp_avg"] for own in optimizer.state.values()]

    assert trained(True, 4)[0] == 3 * (4 + 4 * 4)  # a batch is a prompt with its answers
    (once, shared), (often, apart) = trained(True, 12), trained(False, 12)
    assert (once, often) == (3 * (4 + 4 * 4), 12 * (4 + 4))
    largest = max(own.abs().max().item() for own in apart)
    for own, other in zip(shared, apart, strict=True):  # one batch: its order changes rounding only
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5 * largest)


def test_a_budget_of_tokens_holds_in_the_training_of_the_reward_model(models: dict[str, Path], tmp_path: Path) -> None:
    """Passes have at most 16 tokens, and the update is that of one pass."""
    examples = [
        Example(torch.full((3,), 10 + n), [torch.tensor([60 + n, 61])], [[2]], [float(n % 2)]) for n in range(8)
    ]
    found = {}
    for budget in (16, None):
        options = {"token_budget": budget, "per_device_train_batch_size": 8, "steps_per_generation": 2}
        trainer = refreshed("lora", models["dense"], tmp_path / str(budget), **options)
        rewarding.stir(trainer)
        read: list[int] = []
        embedding = trainer.model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda _, inputs, read=read: read.append(inputs[0].numel()))
        optimizer = refresher(trainer).optimizer
        generator = torch.Generator().manual_seed(0)
        fit(trainer.part(RewardModelPart), optimizer, examples, epochs=1, generator=generator)
        found[budget] = [own["exp_avg"] for own in optimizer.state.values()]
        assert sum(read) == 8 * 6 and max(read) == (12 if budget else 48)
    largest = max(own.abs().max().item() for own in found[None])
    for own, other in zip(found[16], found[None], strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5 * largest)


def test_the_first_training_leaves_ppos_kl_coefficient(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"kl_coef": 0.1, "kl_target": 6.0, "kl_horizon": 100, "per_device_train_batch_size": 8}
    options |= {"method": "PPO", "num_generations": 1, "steps_per_generation": 2, "beta": 0.0}
    trainer = refreshed("lora", models["dense"], tmp_path, **options)
    refresher(trainer).fit(list(tiny.dataset(16)))
    (coefficient,) = (part.kl_coef for part in trainer.parts if hasattr(part, "kl_coef"))
    assert coefficient == 0.1


def test_a_new_reward_model_that_nobody_fits_is_warned_of(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"all its scores are 0, and the policy learns nothing from them before"):
        tiny.train(refreshed("lora", models["dense"], tmp_path, max_steps=1))


def test_a_model_of_its_own_recomputes_its_layers(models: dict[str, Path], tmp_path: Path) -> None:
    """As the policy does, in training alone, and without dropout."""
    trainer = refreshed("full", models["dense"], tmp_path, gradient_checkpointing=True, max_steps=5)
    bare = trainer.reward_model.bare
    modes: list[bool] = []
    attention = bare.base_model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda module, *_: modes.append(module.training))
    with pytest.warns(UserWarning, match="all its scores are 0"):
        tiny.train(trainer)
    assert bare.is_gradient_checkpointing and not bare.training
    (record,) = trainer.reward_refreshes
    batches = 2 * record.samples // trainer.args.per_device_train_batch_size  # two epochs
    assert modes.count(True) == 2 * batches > 0 and False in modes  # each pass is computed again


def test_an_iteration_without_examples_leaves_it_as_it_is(models: dict[str, Path], tmp_path: Path) -> None:
    how = {"label_fn": lambda prompts, **_: [True] * len(prompts)}
    trainer = refreshed("lora", models["dense"], tmp_path, objective="pairs", refresh=how)
    before = critics.snapshot(dict(trainer.reward_model.named_parameters()))
    with pytest.warns(UserWarning, match=r"was not retrained before step 5: the 16 answers .* Pairs need a right and"):
        tiny.train(trainer)
    assert critics.same(before, critics.snapshot(dict(trainer.reward_model.named_parameters())))
    assert (
        [record.samples for record in trainer.reward_refreshes]
        == [0, 0]
        == [record.replayed for record in trainer.reward_refreshes]
    )
    assert len(trainer.reference_refreshes) == 2


@pytest.mark.parametrize("kind", ["lora", "nf4", "full"])
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
    def refused(message: str, trainer: Any = None, **options: Any) -> None:
        trainer = trainer or rewarding.build("lora", models["dense"], tmp_path)
        with pytest.raises(ValueError, match=message):
            RewardModelRefreshCallback(trainer, **{"label_fn": is_right, **options})

    refused(r"this GRPOTrainer has none\. Put a RewardAdapter into", tiny.trainer(models["dense"], tmp_path))
    still = rewarding.build("lora", models["dense"], tmp_path, sync_ref_model=False)
    refused(r"sync_ref_model=False keeps it where it is\. Set sync_ref_model=True", still)
    half = rewarding.build("lora", models["dense"], tmp_path)
    half.args.fp16 = True  # transformers would refuse it on a CPU
    refused(r"fp16=True does not work with RewardModelRefreshCallback.*Set bf16=True", half)
    refused(r"objective='best' is unknown\. Set it to one of pairs, pointwise, steps", objective="best")
    refused(r"objective='steps' trains a reward model with head='steps'.*head='outcome'", objective="steps")
    refused(r"accept='never' is unknown", accept="never")
    refused(
        r"replay_fraction=1\.0 cannot work\. Set replay_fraction to a value at least 0 and below", replay_fraction=1.0
    )
    refused(r"replay_fraction=-0\.1 cannot work", replay_fraction=-0.1)
    refused(r"learning_rate=0 cannot work", learning_rate=0)
    refused(r"epochs=0 cannot work", epochs=0)
    refused(r"continuations=0 cannot work", continuations=0)
    refused(r"history=0 cannot work", history=0)
    alone = rewarding.build("lora", models["dense"], tmp_path, method="PPO", num_generations=1)
    refused(r"objective='pairs' needs two answers to a prompt, and num_generations=1", alone, objective="pairs")
    twice = refreshed("lora", models["dense"], tmp_path)
    refused(r"has a RewardModelRefreshCallback already", twice)
    with pytest.raises(ValueError, match=r"fit got 3 rows, and a rollout has 4 prompts"):
        refresher(twice).fit(list(tiny.dataset(3)))
    forgotten = rewarding.build("lora", models["dense"], tmp_path)
    RewardModelRefreshCallback(forgotten, label_fn=is_right)
    with pytest.raises(ValueError, match=r"is not among the trainer's callbacks\. Add it with"):
        forgotten.train()
    for verdicts, message in (
        ([True], r"returned 1 verdicts for 16"),
        ([0.5] * 16, r"returned 0\.5\. Return True, False"),
    ):
        how = {"label_fn": lambda verdicts=verdicts, **_: verdicts}
        with pytest.raises(ValueError, match=message):
            tiny.train(refreshed("lora", models["dense"], tmp_path, refresh=how))
