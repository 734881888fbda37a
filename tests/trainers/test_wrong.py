"""What users get wrong: each is said before the first step, by name and value, with what to do.

The tables are `tests/tools/wrong_options.py`, `tests/tools/wrong_inputs.py` and `tests/tools/wrong_rewards.py`.
"""

import contextlib
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import TrlParser

import trl_steady
from tests.config.test_config import config
from tests.tools import tiny
from tests.tools.wrong_inputs import INPUTS, Input
from tests.tools.wrong_options import COMMANDS, OPTIONS, Command, Options
from tests.tools.wrong_rewards import ROLLOUTS
from trl_steady.config.shared import SharedOptions

WAY_OUT = re.compile(
    r"[.?] (?:Set|Use|Leave|Return|Pass|Rename|Give|Import|Delete|Check|Train|Override|Switch|Change)\b"
)
"""A sentence that says what to do."""


class Ended(Exception):
    """A first optimizer step is about to be taken."""


class Accepted(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        raise Ended


def message_of(make: Any, kind: Any, pattern: str) -> str:
    """The first message of that kind that has the pattern."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make()
        except tuple(each for each in kinds if not issubclass(each, Warning)) as error:
            said.append(str(error))
    if any(issubclass(each, Warning) for each in kinds):
        said += [str(warning.message) for warning in caught if issubclass(warning.category, kinds)]
    (message, *_) = [text for text in said if re.search(pattern, text)] or [None]
    assert message is not None, f"{pattern!r} is in none of {said}"
    return message


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: str(case.given)[:80])
def test_options(tmp_path: Path, case: Options) -> None:
    message = message_of(lambda: config(tmp_path, **{"loss_type": "gspo", **case.given}), case.kind, case.message)
    option, value = next(iter(case.given.items()))
    assert (case.shown or f"{option}={value!r}") in message
    assert WAY_OUT.search(message) or not case.is_ours


@pytest.mark.parametrize("case", COMMANDS, ids=lambda case: case.given)
def test_command_lines_and_files(tmp_path: Path, case: Command) -> None:
    command = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    if case.is_yaml:
        (tmp_path / "config.yaml").write_text(case.given)
        command += ["--config", str(tmp_path / "config.yaml")]
    else:
        command += case.given.split()
    parser = TrlParser(trl_steady.GRPOConfig)
    assert WAY_OUT.search(message_of(lambda: parser.parse_args_and_config(command), ValueError, case.message))


@pytest.mark.parametrize("case", [*INPUTS, *ROLLOUTS], ids=lambda case: f"{case.stage}: {case.name}")
def test_inputs(models: dict[str, Path], tmp_path: Path, case: Input) -> None:
    if case.stage == "trainer":
        message = message_of(lambda: case.make(models, tmp_path), case.kind, case.message)
    else:
        trainer = case.make(models, tmp_path)
        before = tiny.parameters(trainer)
        trainer.add_callback(Accepted())

        def train() -> None:
            with contextlib.suppress(Ended):
                trainer.train()

        message = message_of(train, case.kind, case.message)
        after = tiny.parameters(trainer)
        assert trainer.state.global_step == 0
        assert all(torch.equal(before[name], value) for name, value in after.items())
    assert WAY_OUT.search(message) or not case.is_ours


def test_a_reward_function_without_its_column_is_told_what_trl_passes(models: dict[str, Path], tmp_path: Path) -> None:
    def wants_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    with pytest.raises(TypeError, match="answer") as caught:
        tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": wants_answer}).train()
    assert "passes to a reward function by name: prompts, completions, completion_ids" in caught.value.__notes__[0]


def test_every_option_of_ours_is_in_the_table() -> None:
    refused = {next(iter(case.given)) for case in OPTIONS if case.kind is ValueError}
    ours = inspect.get_annotations(trl_steady.GRPOConfig).keys() | inspect.get_annotations(SharedOptions).keys()
    assert not {name for name in ours if not name.startswith("_")} - {"METHOD"} - refused
