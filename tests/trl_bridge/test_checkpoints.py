"""What a checkpoint holds, what is refused at a resume, and that what is saved loads without this package."""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import get_last_checkpoint

import trl_steady
from tests.features.reference.tools import adapter_tensors
from tests.tools import resumable, tiny
from trl_steady.trl_bridge.manifest import why_incomplete, write_manifest

WINDOW = {key: resumable.OPTIONS[key] for key in ("steps_per_generation", "num_iterations", "build")}
FROZEN: dict[str, Any] = {**WINDOW, "beta": 0.04, "max_steps": 18, "save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of finished runs, with checkpoints at 3 (inside a window), 6, 9, 12 (at the end of one), 15, 18."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("moving", "frozen", "trl", "model only")}
    tiny.train(resumable.build("lora", models["dense"], folders["moving"]))
    tiny.train(tiny.trainer(models["dense"], folders["frozen"], lora=True, padded=True, **FROZEN))
    tiny.train(tiny.trainer(models["dense"], folders["trl"], lora=True, ours=False, **FROZEN))
    options = {"max_steps": 3, "save_only_model": True}
    tiny.train(resumable.build("lora", models["dense"], folders["model only"], **options))
    return folders


def test_what_is_saved_is_plain_peft(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = resumable.build("lora", models["dense"], tmp_path, max_steps=9)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    policy = adapter_tensors(trainer.model, "default")
    for folder in (tmp_path / "checkpoint-9", tmp_path / "saved"):
        assert not [path for path in folder.rglob("*") if path.is_dir()]
        model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
        plain = peft.PeftModel.from_pretrained(model, folder)
        assert list(plain.peft_config) == ["default"]
        assert all(torch.equal(value, policy[name]) for name, value in adapter_tensors(plain, "default").items())


def test_a_checkpoint_of_trl_resumes_at_the_end_of_a_window_after_a_short_step(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """An epoch is one window of three micro-batches: a step with two of them, and one with the last."""
    window = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}
    window |= {"build": {"train_dataset": tiny.dataset(3)}, "max_steps": 4}
    tiny.trainer(models["dense"], tmp_path / "trl", ours=False, **window).train()
    ours = tiny.trainer(models["dense"], tmp_path / "ours", **window)
    ours.train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-2"))
    assert ours.state.global_step == 4
    with pytest.raises(ValueError, match="checkpoint-3 was taken inside a generation window"):
        ours.train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-3"))


MOVING = resumable.OPTIONS


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("run", "step", "options", "message"),
    [
        ("trl", 12, MOVING, r"holds no reference.safetensors.*begin a new run"),
        (
            "model only",
            3,
            MOVING,
            r"checkpoint-3 is incomplete: it holds no optimizer.*save_only_model=True.* model\.",
        ),
        ("moving", 12, FROZEN, r"checkpoint-12 holds a refreshed reference .*Set sync_ref_model=True"),
        ("trl", 3, FROZEN, r"checkpoint-3 was taken inside a generation window and has no .*4 micro-batches"),
        ("moving", 9, {**MOVING, "num_iterations": 4}, r"began with\s+num_iterations=2; this .*_iterations=4"),
    ],
)
def test_a_resume_that_would_go_on_otherwise_is_refused(
    models: dict[str, Path],
    runs: dict[str, Path],
    tmp_path: Path,
    run: str,
    step: int,
    options: dict[str, Any],
    message: str,
) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, lora=True, **options)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(runs[run] / f"checkpoint-{step}"))
    assert trainer.state.global_step in (0, step)  # refused before a step was taken


def test_a_run_of_trl_resumes_exactly_too(models: dict[str, Path], runs: dict[str, Path], tmp_path: Path) -> None:
    """From its checkpoint at the end of a window."""
    trainer = tiny.trainer(models["dense"], tmp_path, lora=True, padded=True, **FROZEN)
    trainer.train(resume_from_checkpoint=str(runs["trl"] / "checkpoint-12"))
    whole = torch.load(runs["frozen"] / "checkpoint-18" / "optimizer.pt", weights_only=True)["state"]
    assert resumable.differences(whole, trainer.optimizer.state_dict()["state"]) == []


def test_metrics_between_two_logs_are_kept(models: dict[str, Path], tmp_path: Path) -> None:
    """Saved after step 3, logged after steps 5, 10 and 15: the KL of steps 1 to 3 is in the first of these."""
    options = {"logging_steps": 5, "off_policy_mask_threshold": 0.0}
    trainer = tiny.train(resumable.build("lora", models["dense"], tmp_path, **options))
    resumed = resumable.build("lora", models["dense"], tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    expected, found = (
        [{k: v for k, v in row.items() if k != "loss" and not k.startswith("train_")} for row in tiny.history(t)]
        for t in (trainer, resumed)  # transformers averages the loss over the steps since the resume
    )
    assert found == expected
    window = torch.load(tmp_path / "checkpoint-3" / "rollouts_0.pt")
    # which `map_location` would move to the device, where the next totals are not
    assert not any(isinstance(totals, torch.Tensor) for totals in window["pool"].values())


def test_a_scripts_own_objects_are_saved(models: dict[str, Path], tmp_path: Path) -> None:
    """In TRL's metrics, its table of completions and a column. A log is JSON, and has numbers."""
    values = np.float32(0.1), torch.tensor(0.2), np.int64(3)
    seen: list[Any] = []

    class Mine(trl_steady.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            samples = super()._generate_and_score_completions(inputs)
            self._metrics["train"]["mine"].extend(values)
            self._logs["extra"]["mine"].extend([np.float64(0.3), np.ones(2)])
            count = len(samples["completion_ids"])
            return {**samples, "where": [Path("a", str(i)) for i in range(count)], "how": [np.ones(2)] * count}

        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            seen.append((inputs["where"], [how.tolist() for how in inputs["how"]]))
            return super()._compute_loss(model, inputs)

    def build(folder: str) -> Any:
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 3}
        args = tiny.arguments(trl_steady.GRPOConfig, tmp_path / folder, **options)
        keywords = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
        return Mine(str(models["dense"]), tiny.reward, args, **keywords)

    whole = tiny.train(build("whole"))
    assert whole.state.log_history[0]["mine"] == pytest.approx((0.1 + 0.2 + 3) / 3)
    micro_batches = seen[1:]
    for step in (1, 3):
        seen.clear()
        resumed = build("resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert seen == micro_batches[step - 1 :]
        logs = [tiny.history(each)[0] for each in (whole, resumed)]
        assert logs[0].pop("loss") and logs[1].pop("loss") and logs[0] == logs[1]  # a loss is that since the resume
        assert resumed._logs["extra"]["mine"][0] == 0.3


def test_old_checkpoints_are_rotated_and_the_best_is_kept(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = resumable.build(
        "lora",
        models["dense"],
        tmp_path,
        build={**MOVING["build"], "eval_dataset": tiny.dataset(4)},
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=3,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
    )
    trainer.train()
    rewards = {row["step"]: row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert best < 15  # so that it is kept for being the best
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-18"}
    saved = transformers.TrainerState.load_from_json(str(tmp_path / "checkpoint-18" / "trainer_state.json"))
    assert saved.best_model_checkpoint == trainer.state.best_model_checkpoint
    assert not (tmp_path / "_unfinished").exists()


def test_a_checkpoint_written_again_replaces_the_old_one(models: dict[str, Path], tmp_path: Path) -> None:
    tiny.train(resumable.build("lora", models["dense"], tmp_path, max_steps=6))
    (tmp_path / "checkpoint-6" / "left over").touch()
    resumed = resumable.build("lora", models["dense"], tmp_path, max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert not (tmp_path / "checkpoint-6" / "left over").exists()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-6")
    assert not (tmp_path / "_unfinished").exists()


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        pytest.param("optimizer.pt", lambda folder: (folder / "optimizer.pt").unlink(), id="missing"),
        pytest.param(
            "adapter_model.safetensors",
            lambda folder: os.truncate(folder / "adapter_model.safetensors", 9),
            id="cut off",
        ),
        pytest.param("steady.json", lambda folder: os.truncate(folder / "steady.json", 9), id="a record"),
        pytest.param(
            "steady.json",
            lambda folder: (folder / "steady.json").write_bytes(bytes((folder / "steady.json").stat().st_size)),
            id="zeros of a disk",
        ),
        pytest.param("manifest.json", lambda folder: os.truncate(folder / "manifest.json", 9), id="manifest"),
        pytest.param(
            "optimizer.pt",
            lambda folder: [(folder / "optimizer.pt").unlink(), (folder / "optimizer.pt").symlink_to(folder / "gone")],
            id="a broken link",
        ),
        pytest.param("trainer_state.json", lambda folder: [path.unlink() for path in folder.iterdir()], id="begun"),
        pytest.param("manifest.json", lambda folder: (folder / "manifest.json").unlink(), id="no manifest"),
    ],
)
def test_the_newest_complete_checkpoint_is_taken(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path, file: str, spoil: Callable[[Path], object]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["frozen"], folder)
    trainer = tiny.trainer(models["dense"], folder, lora=True, padded=True, **FROZEN)
    assert trainer.checkpoints.newest() == str(folder / "checkpoint-18")
    spoil(folder / "checkpoint-18")
    said = rf"^checkpoint-18 is incomplete: {file} is missing or cut off\. checkpoint-15 is complete, and is taken"
    with pytest.warns(UserWarning, match=said) as caught:
        trainer.train(resume_from_checkpoint=True)
    assert [row["step"] for row in trainer.state.log_history[-4:]] == [16, 17, 18, 18]
    assert __file__ in [each.filename for each in caught]


@pytest.mark.parametrize(
    ("run", "file"),
    [
        ("moving", "optimizer.pt"),
        ("moving", "reference.safetensors"),
        ("moving", "rollouts_0.pt"),
        ("moving", "rng_state.pth"),
        ("moving", "steady.json"),
        ("moving", "trainer_state.json"),
        ("moving", "manifest.json"),
        ("trl", "trainer_state.json"),
        ("trl", "optimizer.pt"),
        ("trl", "scheduler.pt"),
    ],
)
@pytest.mark.parametrize("by_name", [True, False], ids=["by its name", "as the newest"])
def test_an_incomplete_checkpoint_is_refused_if_there_is_no_other(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path, run: str, file: str, by_name: bool
) -> None:
    checkpoint = tmp_path / "checkpoint-12"
    shutil.copytree(runs[run] / "checkpoint-12", checkpoint)
    (checkpoint / file).unlink()
    trainer = tiny.trainer(models["dense"], tmp_path, lora=True, **(MOVING if run == "moving" else FROZEN))
    why = "it holds no optimizer or no scheduler"
    if run == "moving" or file == "trainer_state.json":
        why = f"{file} is missing or cut off"
    with pytest.raises(ValueError, match=rf"^{re.escape(str(checkpoint))} is incomplete: {why}"):
        trainer.train(resume_from_checkpoint=str(checkpoint) if by_name else True)
    assert trainer.state.global_step == 0


def test_all_processes_refuse_a_checkpoint_that_one_has_in_part(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine may have a disk of its own. The others would wait for the one that raises."""
    elsewhere = "rng_state_1.pth is missing or cut off"
    monkeypatch.setattr("trl_steady.core.processes.gather_object", lambda reasons: [*reasons, elsewhere])
    trainer = tiny.trainer(models["dense"], tmp_path, lora=True, **FROZEN)
    with pytest.raises(ValueError, match=f"checkpoint-12 is incomplete: {elsewhere}"):
        trainer.train(resume_from_checkpoint=str(runs["frozen"] / "checkpoint-12"))


@pytest.mark.parametrize(
    ("file", "is_read"),
    [
        ("optimizer_0/.metadata", True),
        ("latest", True),
        ("global_step3/mp_rank_00_model_states.pt", True),
        ("model-00002-of-00002.safetensors", True),
        ("tokenizer.json", False),
        ("video_preprocessor_config.json", False),
        ("README.md", False),
    ],
)
def test_a_manifest_lists_what_a_resume_reads(tmp_path: Path, file: str, is_read: bool) -> None:
    """Files of FSDP2 and DeepSpeed too, but none that describes the model to others."""
    for name in ("optimizer.bin", "scheduler.pt", "trainer_state.json", file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    write_manifest(tmp_path, "run", "sampler")
    assert why_incomplete(tmp_path) is None
    (tmp_path / file).unlink()
    assert why_incomplete(tmp_path) == (f"{file} is missing or cut off" if is_read else None)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["global_step3/zero_pp_rank_0_optim_states.pt"], None),  # DeepSpeed's, with the scheduler
        (["optimizer_0/.metadata", "scheduler.pt"], None),  # FSDP2's
        (["optimizer_0/.metadata"], "it holds no optimizer or no scheduler"),
        (["scheduler.pt"], "it holds no optimizer or no scheduler"),
    ],
)
def test_an_optimizer_is_found_in_the_form_of_each_backend(tmp_path: Path, names: list[str], why: str | None) -> None:
    for name in ("trainer_state.json", *names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert str(why_incomplete(tmp_path)).startswith(str(why))


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "TRL's"])
def test_a_checkpoint_of_the_model_only_is_refused(models: dict[str, Path], tmp_path: Path, ours: bool) -> None:
    """Also at the end of a window. A newer one is passed over."""
    options = {"steps_per_generation": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    options |= {"max_steps": 4, "save_steps": 4, "save_only_model": True}
    model_only = tiny.train(tiny.trainer(models["dense"], tmp_path, ours=ours, **options))
    trainer = tiny.trainer(models["dense"], tmp_path, **options)
    with pytest.raises(ValueError, match=r"checkpoint-4 is incomplete: it holds no optimizer .*save_only_model=True"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with pytest.warns(UserWarning, match="^checkpoint-4 is incomplete: .* checkpoint-2 is complete, and is taken"):
        trainer.train(resume_from_checkpoint=True)
    assert [row["step"] for row in trainer.state.log_history] == [1, 2, 3, 4, 4]
    if ours:
        assert model_only.last_checkpoint is None


def test_an_edited_checkpoint_and_one_of_trl_are_complete(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    """A text or a tensor may be smaller than it was, files may be links, and a script may keep copies."""
    for name in ("frozen", "trl"):
        folder = tmp_path / name
        shutil.copytree(runs[name], folder)
        for text in ("README.md", "trainer_state.json"):
            (folder / "checkpoint-18" / text).write_text("{}")
        weights, state = (folder / "checkpoint-18" / file for file in ("adapter_model.safetensors", "optimizer.pt"))
        save_file({key: value.bfloat16() for key, value in load_file(weights).items()}, weights)
        torch.save({"state": {}}, state)
        os.symlink(os.replace(state, tmp_path / f"{name}.pt") or tmp_path / f"{name}.pt", state)
        shutil.copytree(folder / "checkpoint-18", folder / "checkpoint-18-merged")
        (folder / "checkpoint-20-half").mkdir()
        assert tiny.trainer(models["dense"], folder).checkpoints.newest() == str(folder / "checkpoint-18")
    assert tiny.trainer(models["dense"], tmp_path / "none").checkpoints.newest() is None


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("steps", "said"),
    [(5, "resume_from_checkpoint=True continues from checkpoint-3"), (2, "no complete checkpoint has been saved")],
)
def test_ctrl_c_says_what_continues_the_run_in_few_lines(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, said: str
) -> None:
    class Interrupted(transformers.TrainerCallback):
        """Ctrl-C, after a number of steps."""

        def __init__(self, steps: int) -> None:
            self.steps = steps

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.steps:
                raise KeyboardInterrupt

    build = {**WINDOW["build"], "callbacks": [Interrupted(steps)]}
    trainer = tiny.trainer(models["dense"], tmp_path, **{**FROZEN, "build": build})
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.train()
    assert len(stopped.traceback) <= 2  # this line, and perhaps the one of ours that raises
    assert f"stopped at step {steps}; {said}\n" in capsys.readouterr().err
    assert steps == 2 or tiny.trainer(models["dense"], tmp_path, **FROZEN).train(True).global_step == 18


def test_the_hub_gets_the_finished_checkpoint(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, bool]] = []

    def push(self: Any, folder: str) -> None:
        pushed.append((folder, (Path(folder) / "reference.safetensors").exists()))

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    trainer = resumable.build("lora", models["dense"], tmp_path, max_steps=6)
    monkeypatch.setattr(trainer.args, "push_to_hub", True)
    monkeypatch.setattr(trainer, "push_to_hub", lambda **_: None)
    trainer.train()
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), True) for step in (3, 6)]


def test_the_table_of_completions_is_kept(models: dict[str, Path], tmp_path: Path) -> None:
    """TRL's table of a resumed window would be empty."""
    options = {"log_completions": True, "max_steps": 9}
    tiny.train(resumable.build("lora", models["dense"], tmp_path, **options))
    folder = tmp_path / "completions"
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(expected) == 9
    resumable.build("lora", models["dense"], tmp_path, **options).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-6")
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def streamed(model: Path, output: Path, **options: Any) -> Any:
    """A run over a stream that begins again after 12 steps."""
    stream = tiny.dataset(6).to_iterable_dataset()
    return resumable.build("lora", model, output, build={"train_dataset": stream}, **options)


@pytest.fixture(scope="module")
def of_stream(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run of 18 steps over such a stream."""
    return tiny.train(streamed(models["dense"], tmp_path_factory.mktemp("stream")))


def test_a_stream_that_has_begun_again_is_refused_unless_the_run_has_ended(
    models: dict[str, Path], tmp_path: Path, of_stream: Any
) -> None:
    resumed = streamed(models["dense"], tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint-15 was taken after the stream .* started again.*has a length"):
        resumed.train(resume_from_checkpoint=f"{of_stream.args.output_dir}/checkpoint-15")
    resumed = streamed(models["dense"], tmp_path)
    resumed.train(resume_from_checkpoint=f"{of_stream.args.output_dir}/checkpoint-18")
    assert resumed.state.global_step == 18
    assert resumable.differences(tiny.parameters(of_stream), tiny.parameters(resumed)) == []


def test_a_run_over_a_stream_that_ended_in_its_first_pass_can_be_made_longer(
    models: dict[str, Path], tmp_path: Path, of_stream: Any
) -> None:
    """transformers writes epoch 1.0 into the last checkpoint, which is no second pass."""
    short = tiny.train(streamed(models["dense"], tmp_path, max_steps=9))
    assert short.state.epoch == 1.0
    longer = streamed(models["dense"], tmp_path)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert resumable.differences(tiny.parameters(of_stream), tiny.parameters(longer)) == []


class Repeated(torch.utils.data.Sampler[int]):
    """Each prompt `times` times, in an order that depends on the epoch, if that is told."""

    def __init__(self, prompts: int, times: int) -> None:
        self.prompts, self.times, self.epoch = prompts, times, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for i in range(self.prompts):
            yield from [(i + self.epoch) % self.prompts] * self.times

    def __len__(self) -> int:
        return self.prompts * self.times


def loader_of_a_script(trainer: Any) -> torch.utils.data.DataLoader[Any]:
    args, data = trainer.args, trainer.train_dataset
    sampler = None
    if hasattr(data, "__len__"):
        sampler = Repeated(len(data), trainer.num_generations)
    size = args.per_device_train_batch_size * args.steps_per_generation
    return torch.utils.data.DataLoader(data, batch_size=size, collate_fn=lambda rows: rows, sampler=sampler)


class OwnLoader(trl_steady.GRPOTrainer):
    def get_train_dataloader(self) -> Any:
        return loader_of_a_script(self)


class PreparedLoader(trl_steady.GRPOTrainer):
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(loader_of_a_script(self))


class OtherLoader(trl_steady.GRPOTrainer):
    """It replaces what `super()` returns, as some do that change its arguments."""

    def get_train_dataloader(self) -> Any:
        super().get_train_dataloader()
        return loader_of_a_script(self)


class OwnSampler(trl_steady.GRPOTrainer):
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return Repeated(len(self.train_dataset), self.num_generations)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", [OwnLoader, PreparedLoader, OtherLoader, OwnSampler])
@pytest.mark.parametrize("steps", [6, 11])  # in the second epoch, and in the third
def test_a_run_with_an_order_of_its_own_resumes_as_trls(
    models: dict[str, Path], tmp_path: Path, kind: Any, steps: int
) -> None:
    """After the first epoch, whose four prompts are four steps. A warning tells that the order is not known."""
    options = {"steps_per_generation": 1, "max_steps": 12, "save_strategy": "steps", "save_steps": 1}
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, **options)

    def build() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            built = kind(str(models["dense"]), tiny.reward, args, tiny.dataset(4), processing_class=tiny.tokenizer())
        said = [str(each.message) for each in caught if "decides the order of the training data" in str(each.message)]
        assert len(said) == (kind in (OwnLoader, PreparedLoader)) and all(kind.__name__ in each for each in said)
        return built

    whole, resumed = tiny.train(build()), build()
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert resumable.differences(tiny.parameters(whole), tiny.parameters(resumed)) == []
    assert tiny.history(resumed)[:-1] == tiny.history(whole)[:-1]


class EndsEpoch(transformers.TrainerCallback):
    """Ends the first epoch at its third step, as a curriculum may."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 3


@pytest.mark.parametrize(("step", "is_exact"), [(2, True), (3, False), (6, False)])
def test_a_resume_after_an_epoch_that_a_callback_has_ended_is_refused(
    models: dict[str, Path], tmp_path: Path, step: int, is_exact: bool
) -> None:
    """transformers finds the position from the length of whole epochs, here of four steps."""
    options = {"gradient_accumulation_steps": 4, "max_steps": 8, "build": {"callbacks": [EndsEpoch()]}}
    whole = tiny.trainer(models["dense"], tmp_path, **options, save_strategy="steps", save_steps=1)
    whole.train()
    resumed = tiny.trainer(models["dense"], tmp_path / "resumed", **options)
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    if not is_exact:
        with pytest.raises(ValueError, match=f"checkpoint-{step} was taken after a callback had ended an epoch"):
            resumed.train(resume_from_checkpoint=checkpoint)
        return
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumable.differences(tiny.parameters(whole), tiny.parameters(resumed)) == []


def test_a_run_whose_resume_began_an_epoch_again_is_resumed_so_again(models: dict[str, Path], tmp_path: Path) -> None:
    """With `ignore_data_skip`, epochs end at other steps than transformers would find."""
    options = {"gradient_accumulation_steps": 4, "max_steps": 8, "save_strategy": "steps", "save_steps": 1}

    def resume(name: str, checkpoint: str, **others: Any) -> Any:
        trainer = tiny.trainer(models["dense"], tmp_path / name, **options, **others)
        trainer.train(resume_from_checkpoint=str(tmp_path / checkpoint))
        return trainer

    tiny.train(tiny.trainer(models["dense"], tmp_path / "a", **options))  # an epoch has four steps
    whole = resume("b", "a/checkpoint-2", ignore_data_skip=True)
    again = resume("c", "b/checkpoint-5", ignore_data_skip=True)
    assert again.state.global_step == whole.state.global_step == 8
    with pytest.raises(ValueError, match=r"a resume with ignore_data_skip=True had begun one again.* or set ignore_"):
        resume("d", "b/checkpoint-5")


def test_a_sampler_without_a_length_is_saved(models: dict[str, Path], tmp_path: Path) -> None:
    class Endless(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from (row for row in range(16) for _ in range(4))

    class Mine(trl_steady.GRPOTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return Endless()

    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    data = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    Mine(str(models["dense"]), tiny.reward, args, **data).train()
    assert (tmp_path / "checkpoint-2/manifest.json").is_file()
