"""Generation ahead: which policy answers which prompts, and the trainer trains as on the same answers later."""

import gc
import multiprocessing
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

import trl_steady
from tests.features.dynamic_sampling import tools as rounds
from tests.features.generate_ahead import tools as ahead
from tests.features.generate_ahead.tools import Watched
from tests.tools import agent, engines, resumable, tiny
from tests.tools.cases import cases
from tests.tools.engines import COMPLETIONS, MASKED, RENDER, ROUTED, TOKENS, Server
from tests.tools.resumable import differences
from tests.trainers import images
from trl_steady.features.generate_ahead import GenerateAhead
from trl_steady.trl_bridge.generate_ahead import PendingRequest
from trl_steady.trl_bridge.rollout import generate_outside_training

llava = images.llava

pytestmark = pytest.mark.supports("async_generate", on="vLLM server", only="stand-in")


Train = Callable[..., Any]


@pytest.fixture
def trained(models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched) -> Train:
    """Trains on the server, which forgets what it was asked before."""

    def train(model: Path | None = None, **options: Any) -> Any:
        watched.asked.clear()
        watched.syncs = 0
        torch.manual_seed(0)
        return tiny.train(ahead.build(server.url, model or models["dense"], tmp_path, **options))

    return train


# a rollout of four prompts is 16 answers
ONE_STEP = {"per_device_train_batch_size": 16, "steps_per_generation": 1}


def rows_of(count: int) -> dict[str, Any]:
    return {"build": {"train_dataset": tiny.dataset(count)}}


ONE_EPOCH: dict[str, Any] = {**ONE_STEP, **rows_of(24)}  # of six steps


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("window", "options"),
    cases(
        {
            "a short last step in each epoch": {
                **{"per_device_train_batch_size": 8, "steps_per_generation": 2, "gradient_accumulation_steps": 3},
                **{"max_steps": -1, "num_train_epochs": 3},
            },
            "an epoch is two rollouts": {**ONE_STEP, "max_steps": 5, **rows_of(8)},
            "two passes, steps of two micro-batches": {
                "num_iterations": 2,
                "gradient_accumulation_steps": 2,
                "max_steps": 40,
            },
            "steps of four rollouts": {**ONE_STEP, "gradient_accumulation_steps": 4, "max_steps": 5, **rows_of(32)},
            "two passes, an epoch is two rollouts": {**ONE_STEP, "num_iterations": 2, "max_steps": 16, **rows_of(8)},
            "workers": {**ONE_STEP, "max_steps": 5, "dataloader_num_workers": 1, **rows_of(8)},
            "PPO": {**ONE_STEP, "method": "PPO", "num_generations": 4, "max_steps": 4, "lora": True},
        }.items(),
        fast=2,
    ),
)
@pytest.mark.filterwarnings("ignore:value_init", "ignore:.*fork")
def test_a_rollout_has_its_prompts_and_the_policy_of_the_rollout_before(
    trained: Train, watched: Watched, window: str, options: dict[str, Any]
) -> None:
    begins = list[int]()  # before which requests an epoch begins
    others = set(multiprocessing.active_children())

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begins.append(len(watched.asked))

    trained(is_ahead=False, **{**options, "build": {**options.get("build", {}), "callbacks": [Epochs()]}})
    usual, drawn = list(watched.asked), torch.rand(())
    watched.seconds = 0.02
    trainer = trained(**options)
    assert [each.prompts for each in watched.asked] == [each.prompts for each in usual]
    assert len(usual) >= 4 and torch.rand(()) == drawn  # the random state at the end
    versions = [each.version for each in usual]
    # an epoch's first rollout is not ahead
    expected = [versions[i - (i not in begins)] for i in range(len(versions))]
    assert [each.version for each in watched.asked] == expected
    assert all(each.is_steady for each in watched.asked)
    behind = logged(trainer, "async/versions_behind")
    assert behind[0] == 0 and sum(behind) > 0
    if len(behind) == len(usual):
        assert behind == [float(now - before) for before, now in zip(expected, versions, strict=True)]
    gc.collect()  # an iterator of a finished epoch may be part of a cycle
    assert alive() == [] and set(multiprocessing.active_children()) <= others


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in tiny.history(trainer) if name in row]


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, PendingRequest)]


def outcome(trainer: Any) -> dict[str, Any]:
    """Without what only a run ahead logs."""
    state = ahead.state(trainer)
    state["history"] = [{k: v for k, v in row.items() if "async/" not in k} for row in state["history"]]
    return state


SAMPLED = {"keep_sampling_mask": True, "top_k": 50, "top_p": 0.9}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("method", "options"),
    cases(
        {
            "R3 and kept sets": {"router_replay": "R3", **SAMPLED},
            "dynamic sampling": {"dynamic_sampling": True, "max_steps": 12, "build": {"reward_funcs": rounds.planted}},
            "PPO": {"method": "PPO", "lora": True},
            "images": {"gradient_checkpointing": False, **ONE_STEP},
            "LoRA, a KL to the sampler": {"lora": True, "beta": 0.1, "kl_ratio_denominator": "sampler"},
        }.items(),
        fast=4,
    ),
)
@pytest.mark.filterwarnings("ignore:value_init", "ignore:trim_padding")
def test_a_run_equals_one_that_gets_the_same_answers_when_it_asks(
    trained: Train,
    watched: Watched,
    server: Server,
    mixture: Path,
    llava: tuple[Path, Any],
    method: str,
    options: dict[str, Any],
) -> None:
    """Bit for bit: answers, the sampler's log-probs, routes and sets that reach the loss are those of the server."""
    server.config = {"model_config": {MASKED: "top_p" in options, ROUTED: "router_replay" in options}}
    model = mixture if "router_replay" in options else None
    if method == "images":
        model, processor = llava
        data = images.pictures(lengths=tuple(range(1, 9)))  # the server knows a prompt by its length
        build = {"train_dataset": data, "processing_class": processor, "reward_funcs": tiny.reward}
        options = {**options, "build": build}
    trainer = trained(model, **options)
    found = outcome(trainer)
    assert trainer.feature(GenerateAhead).notes == []  # no answer was thrown away
    if method == "images":  # four prompts a rollout; the second one of each epoch is asked about twice
        assert len(server.requests[RENDER]) == 4 * (6 + 3)
        assert all(body["features"] for body in server.requests[TOKENS])
    watched.replay()
    synchronous = outcome(trained(model, is_ahead=False, **options))
    assert differences(synchronous, found) == []
    assert not any(watched.replayed.values())
    assert differences(outcome(trained(model, is_ahead=False, **options)), found) != []  # newer policies


@pytest.mark.slow
def test_an_evaluation_asks_the_policy_as_it_is(trained: Train, watched: Watched) -> None:
    options = {
        **ONE_STEP,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "num_generations_eval": 4,
        "build": {"eval_dataset": tiny.dataset(1), **ONE_EPOCH["build"]},
    }
    watched.seconds = 0.3  # more than a step takes, so that an evaluation would send weights too early
    trainer = trained(**options)
    of_training = [each for each in watched.asked if len(each.prompts) == 4]
    of_evaluation = [each for each in watched.asked if len(each.prompts) == 1]
    # the policy is sent before each rollout, and before an evaluation instead of the rollout after it
    assert [each.version for each in of_training] == [1, 1, 2, 3, 4, 5]
    assert [each.version for each in of_evaluation] == [3, 5, 7]
    assert logged(trainer, "async/versions_behind") == [0, 1, 1, 1, 1, 1]
    trainer.predict(tiny.dataset(4))
    assert watched.asked[-1].version == watched.syncs and all(each.is_steady for each in watched.asked)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("case", "options", "rows", "notes"),
    [
        ("a sampler with a stage", ONE_STEP, 24, 0),
        ("a transform with a stage", ONE_STEP, 8, 0),
        ("epochs that end early", {**ONE_STEP, "max_steps": 14}, 24, 0),
        ("a rollout that is made again", {"max_steps": 14}, 24, 1),
    ],
)
def test_what_a_script_gives_is_read_as_without_the_option(
    trained: Train, monkeypatch: pytest.MonkeyPatch, case: str, options: dict[str, Any], rows: int, notes: int
) -> None:
    """An epoch never begins early, and no row is lost. Scripts also iterate by themselves, and change errors."""

    class Curriculum(TrainerCallback, Sampler[int]):
        """Eight rows in each epoch, by a stage that a callback sets when the epoch begins."""

        stage = 0

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.stage = round(state.epoch or 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = "end early" in case and state.global_step in (2, 5)

        def __len__(self) -> int:
            return 32

        def __iter__(self) -> Iterator[int]:
            for row in range(8 * self.stage, 8 * self.stage + 8):
                yield from [row] * 4

        def transform(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {"prompt": [f"{prompt}{self.stage}" for prompt in batch["prompt"]]}

    class Script(trl_steady.GRPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            sampler = super()._get_train_sampler(dataset)
            return given if "sampler" in case else sampler

        def get_batch_samples(self, epoch_iterator: Iterator[Any], *arguments: Any) -> Any:
            return super().get_batch_samples((batch for batch in epoch_iterator), *arguments)

        def _generate(self, prompts: list[Any]) -> Any:
            try:
                return super()._generate(prompts)
            except Exception as error:
                raise RuntimeError("the server cannot be reached") from error

        def _prepare_inputs(self, inputs: Any) -> Any:
            if "again" not in case:
                return super()._prepare_inputs(inputs)
            if self._step == 1:  # inside the first rollout, which had rows of its own
                self._buffered_inputs = None
            return super()._prepare_inputs(inputs if self._step else list(inputs))

    monkeypatch.setattr(trl_steady, "GRPOTrainer", Script)
    seen: dict[bool, list[list[str]]] = {False: [], True: []}
    for is_ahead, prompts_seen in seen.items():
        given, data = Curriculum(), tiny.dataset(rows)
        if "transform" in case:
            data.set_transform(given.transform)

        def reward(prompts: list[str], completion_ids: Any, seen: Any = prompts_seen, **_: Any) -> list[float]:
            seen.append(prompts)
            return tiny.reward(completion_ids)

        build = {"reward_funcs": reward, "callbacks": [given], "train_dataset": data}
        trainer = trained(is_ahead=is_ahead, build=build, **options)
    assert seen[True] == seen[False] and len({str(prompts) for prompts in seen[True]}) > 2
    assert len(trainer.feature(GenerateAhead).notes) == notes
    assert sum(logged(trainer, "async/versions_behind")) > 0


@pytest.mark.parametrize("error", [KeyError, IndexError])
def test_an_error_of_the_data_set_ends_the_run(trained: Train, error: type[Exception]) -> None:
    def read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if any(rounds.number(prompt) == 14 for prompt in batch["prompt"]):
            raise error("planted")
        return batch

    data = tiny.dataset()
    data.set_transform(read)
    with pytest.raises(error, match="planted"):
        trained(**ONE_STEP, shuffle_dataset=False, build={"train_dataset": data})


def test_rows_that_no_rollout_reads_are_not_kept(trained: Train) -> None:
    class Picture:
        """Stands for a large column."""

    most: list[int] = []
    for is_ahead in (False, True):
        alive, counts = weakref.WeakSet[Picture](), list[int]()

        def draw(batch: dict[str, list[Any]], alive: Any = alive, counts: Any = counts) -> dict[str, list[Any]]:
            pictures = [Picture() for _ in batch["prompt"]]
            alive.update(pictures)
            counts.append(len(alive))
            return {**batch, "picture": pictures}

        data = tiny.dataset()
        data.set_transform(draw)
        trained(is_ahead=is_ahead, num_iterations=4, max_steps=20, build={"train_dataset": data})
        most.append(max(counts))
    assert most[1] <= 2 * most[0]  # a rollout is for 16 micro-batches


def test_epochs_of_one_rollout_are_warned_of(trained: Train) -> None:
    with pytest.warns(UserWarning, match="async_generate=True: each epoch has one rollout only"):
        trainer = trained(**ONE_STEP, build={"train_dataset": tiny.dataset(4)})
    assert logged(trainer, "async/versions_behind") == [0] * 6


def test_a_training_that_begins_again_uses_no_older_answers(trained: Train, watched: Watched) -> None:
    class StopEarly(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    watched.seconds = 0.3
    trainer = trained(**ONE_STEP, build={"callbacks": [StopEarly()]})
    assert len(watched.asked) == 3 and alive() == []  # the third rollout was asked for, and never made
    first = watched.asked[0]
    trainer.train()
    assert watched.asked[3].prompts == first.prompts and watched.asked[3].version > first.version
    assert logged(trainer, "async/versions_behind") == [0, 1]


class Callback(TrainerCallback):
    """Calls a function with the trainer before each step."""

    def __init__(self, trainer: Any, function: Callable[[Any], None]) -> None:
        self.trainer, self.function = trainer, function

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.function(self.trainer)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("option", ["temperature", "presence_penalty"])
def test_the_result_of_another_request_is_thrown_away(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched, option: str
) -> None:
    """An option changes before the fourth step, after its request was sent, one of them in place."""

    def change(trainer: Any) -> None:
        engine = trainer.vllm_generation
        if trainer.state.global_step == 3:
            (vars(engine) if option == "temperature" else engine.generation_kwargs)[option] = 1.5

    options = {**ONE_EPOCH, "generation_kwargs": {"presence_penalty": 1.0}}
    trainer = ahead.build(server.url, models["dense"], tmp_path, **options)
    trainer.add_callback(Callback(trainer, change))
    with pytest.warns(UserWarning, match="async_generate=True: the request of a rollout is another one"):
        trainer.train()
    assert logged(trainer, "async/versions_behind") == [0, 1, 1, 0, 1, 1]
    assert [each.version for each in watched.asked] == [1, 1, 2, 3, 4, 4, 5]
    assert [body[option] for body in server.requests[COMPLETIONS]] == [1.0] * 4 + [1.5] * 3


def test_a_script_that_sends_weights_waits_too(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    """It also takes the option away, which then acts to the end of the run."""

    def send(trainer: Any) -> None:
        if trainer.state.global_step:
            trainer.vllm_generation.sync_weights()
        trainer.args.async_generate = False

    watched.seconds = 0.3  # more than a step takes
    trainer = ahead.build(server.url, models["dense"], tmp_path, lora=True, **ONE_EPOCH)
    trainer.add_callback(Callback(trainer, send))
    trainer.train()
    assert all(each.is_steady for each in watched.asked) and len(watched.asked) == 6
    assert logged(trainer, "async/versions_behind") == [0, 1, 1, 1, 1, 1]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("refusal", "message"),
    [((500, "the engine is dead"), r"Request failed: 500.*the engine is dead"), (None, "KeyError")],
    ids=["HTTP 500", "malformed"],
)
def test_an_error_of_the_server_ends_the_next_rollout(
    models: dict[str, Path],
    tmp_path: Path,
    server: Server,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
    refusal: tuple[int, str] | None,
    message: str,
) -> None:
    """The request for the third rollout fails while the second is trained on."""
    engines.without_pauses(monkeypatch)
    options = {**ONE_STEP, "lora": refusal is not None, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    post = server.post

    def failing(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == COMPLETIONS and len(watched.asked) >= 2:
            return {"choices": [{"text": "no token ids"}]}
        answer = post(path, body)
        if path == COMPLETIONS and len(watched.asked) == 2 and refusal is not None:
            server.refused[COMPLETIONS] = refusal
        return answer

    server.post = failing  # type: ignore[method-assign]
    trainer = ahead.build(server.url, models["dense"], tmp_path / "run", **options)
    with pytest.raises(RuntimeError, match=rf"(?s)async_generate=True: .*at step 2, .*({message}).*Resume from"):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    server.refused.clear()
    server.post = post  # type: ignore[method-assign]
    resumed = ahead.build(server.url, models["dense"], tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    # what the server did not answer is asked again, of the policy as it is now
    assert [row["async/versions_behind"] for row in tiny.history(resumed)[:-1]] == [0, 1, 0, 1]


def test_a_run_that_loses_its_machine_goes_on_with_the_answers_that_are_ahead(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    """SIGTERM comes while the third rollout is generated: the fourth is ahead in the checkpoint."""
    options = {**ONE_STEP, "save_strategy": "steps", "save_steps": 100, "max_steps": 4, "enable_jit_checkpoint": True}
    whole = tiny.train(ahead.build(server.url, models["dense"], tmp_path / "whole", **options))
    expected = outcome(whole)
    asked = len(watched.asked)
    stopped = ahead.build(server.url, models["dense"], tmp_path / "run", **options)
    resumable.interrupt(stopped, "rollout", 2)
    stopped.train()
    resumed = ahead.build(server.url, models["dense"], tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    assert differences(expected, outcome(resumed)) == []
    assert len(watched.asked) == 2 * asked
    assert [row["async/versions_behind"] for row in tiny.history(resumed)[:-1]] == [0, 1, 1, 1]


@pytest.mark.slow
def test_a_slow_server_is_waited_for(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    watched.seconds = 0.5
    trainer = tiny.train(ahead.build(server.url, models["dense"], tmp_path, **ONE_STEP, max_steps=3))
    waited = [row["async/waited"] for row in tiny.history(trainer)[:-1]]
    hidden = [row["async/overlap"] for row in tiny.history(trainer)[:-1]]
    assert waited[0] >= 0.5 and hidden[0] == 0
    for seconds, share in zip(waited[1:], hidden[1:], strict=True):
        assert seconds > 0 and 0 <= share < 1
        assert 0.49 <= seconds / (1 - share) < 20  # the generation, which a busy machine lengthens
    assert all(each.is_steady for each in watched.asked)
    adapters = trainer.vllm_generation.vllm_client.session.adapters.values()
    assert all(each.max_retries.raise_on_status for each in adapters)  # the thread had a session for itself


def test_rows_of_a_subclass_are_not_asked_ahead(
    trained: Train, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Renaming(trl_steady.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return super()._generate_and_score_completions([{**row, "prompt": "a" + row["prompt"]} for row in inputs])

    monkeypatch.setattr(trl_steady, "GRPOTrainer", Renaming)
    with pytest.warns(UserWarning, match="rows of a rollout are not those that transformers drew"):
        trainer = trained(**ONE_STEP)
    assert logged(trainer, "async/versions_behind") == [0] * 6 and len(watched.asked) == 6


READER = {"processing_class": agent.tokenizer()}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"rollout_func": lambda *_: {}}, "a rollout_func asks the server itself"),
        ({"tools": agent.tools([]), **READER}, "a newer policy would sample an agent's later turns"),
        ({"environment_factory": agent.Calculator, **READER}, "environments would begin the next"),
    ],
    ids=["rollout_func", "tools", "environments"],
)
def test_what_asks_the_server_in_turns_is_refused(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched, build: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"async_generate=True does not work here: {message}"):
        ahead.build(server.url, models["dense"], tmp_path, build=build)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"vllm_importance_sampling_correction": False}, True),
        ({"vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.1}, False),
        ({"vllm_importance_sampling_correction": False, "geometric_mask_range": (0.9, 1.1)}, False),
        ({"loss_type": "dppo"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_lag_that_nothing_corrects_is_warned_of(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched, options: dict[str, Any], warns: bool
) -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        ahead.build(server.url, models["dense"], tmp_path, **options)
    assert any("nothing corrects for that" in str(each.message) for each in given) == warns


def test_a_rollout_outside_of_the_training_has_no_place_in_its_order(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    """Such as those of a reward model's first training."""
    trainer = ahead.build(server.url, models["dense"], tmp_path)
    trainer.model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generate_outside_training(trainer, [dict(row) for row in tiny.dataset(4) for _ in range(4)])
