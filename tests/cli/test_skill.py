"""The skill for coding agents is short, has the form of Agent Skills, and names nothing that does not exist."""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import peft
import pytest
import yaml
from trl.trainer import grpo_trainer

import trl_steady
from trl_steady.cli import main as cli
from trl_steady.cli.schema import schema
from trl_steady.report import command

TEXT = cli.SKILL.read_text()
_, FRONT, BODY = TEXT.split("---\n", 2)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", BODY, re.DOTALL | re.MULTILINE)
INLINE = sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", BODY, flags=re.DOTALL | re.MULTILINE))))
PYTHON = [source for language, source in BLOCKS if language == "python"]
COMMANDS = [line for language, source in BLOCKS if language == "bash" for line in source.splitlines()]
COMMANDS += [span for span in INLINE if span.startswith("trl-steady ")]
METRICS = (Path(__file__).parents[2] / "docs/metrics.md").read_text() + inspect.getsource(grpo_trainer)
CALLED = {"trainer": trl_steady.GRPOTrainer, "PeftModel": peft.PeftModel}


@pytest.fixture(scope="module")
def options() -> jsonschema.Draft7Validator:
    """Of all options, with their values."""
    made = json.loads(schema([], cli._launch_parser()))  # pyright: ignore[reportPrivateUsage]
    return jsonschema.Draft7Validator({**made, "additionalProperties": False})


def known(span: str, options: jsonschema.Draft7Validator) -> bool:
    """Return whether a span is an option, one with a value, a metric, a public name, a call or an argument."""
    name, _, value = span.partition("=")
    if name in options.schema["properties"]:
        return not value or options.is_valid({name: ast.literal_eval(value)})
    if re.search(rf"""["'`]{re.escape(span)}["'`]""", METRICS):
        return True
    if hasattr(trl_steady, span) or span in inspect.signature(grpo_trainer.GRPOTrainer.__init__).parameters:
        return True
    if span.startswith("eval_"):  # TRL's metrics of an evaluation; one of ours has the name of its function
        name = span.removeprefix("eval_")
        return f'"{name}"' in inspect.getsource(grpo_trainer) or any(f"def {name}(" in source for source in PYTHON)
    return is_call(span)


def is_call(span: str) -> bool:
    """Return whether a span calls a method that exists with arguments that it has."""
    try:
        called: Any = ast.parse(span, mode="eval").body
        method = getattr(CALLED[called.func.value.id], called.func.attr)
    except (SyntaxError, AttributeError, KeyError):
        return False
    return {word.arg for word in called.keywords} <= inspect.signature(method).parameters.keys()


@pytest.mark.parametrize("span", [span for span in INLINE if not span.startswith("trl-steady ")])
def test_a_name_exists(span: str, options: jsonschema.Draft7Validator) -> None:
    assert known(span, options)


@pytest.mark.parametrize(
    "span",
    ["no_such_option", 'loss_type="xpo"', "kl/none", "GRPOTuner", "eval_nothing", "trainer.train(resume=True)"],
)
def test_a_name_that_does_not_exist_is_found(span: str, options: jsonschema.Draft7Validator) -> None:
    assert not known(span, options)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_its_flags(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = line.split("#")[0].split()
    assert words[0] == "trl-steady"
    cli.main([])
    listed = capsys.readouterr().out
    assert f"\n  {words[1]} " in listed
    if words[1] == "report":
        with pytest.raises(SystemExit):
            command.report(["--help"], lambda message: pytest.fail(message))
        listed = capsys.readouterr().out
    for word in words[2:]:
        assert not word.startswith("--") or word in listed


def test_the_code_builds_its_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(PYTHON) == 2
    for source in PYTHON:
        exec(source.replace("GRPOConfig(\n", "GRPOConfig(\n    bf16=False, use_cpu=True,\n"), {})


def test_the_front_matter_is_that_of_agent_skills() -> None:
    found = yaml.safe_load(FRONT)
    assert found["name"] == cli.SKILL.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found["name"])
    assert 0 < len(found["description"]) <= 1024
    assert {*found} <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert found["license"] == "Apache-2.0"


def test_it_is_short_and_where_agents_look() -> None:
    assert len(TEXT.splitlines()) <= 120
    package = Path(trl_steady.__file__).parent
    assert cli.SKILL.relative_to(package).as_posix() == ".agents/skills/trl-steady/SKILL.md"


def test_env_prints_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    path = capsys.readouterr().out.splitlines()[-1].split(": ")[1]
    assert Path(path).read_text() == TEXT
