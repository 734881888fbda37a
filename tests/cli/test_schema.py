"""The JSON schema of recipes: it takes what the launcher takes, and finds what the launcher refuses."""

import json
import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from trl.scripts import grpo

from trl_steady import PPOConfig
from trl_steady.cli import main as cli
from trl_steady.cli.run import swapped
from trl_steady.cli.schema import schema
from trl_steady.config.options import Range, marked

ROOT = Path(__file__).parents[2]
FILE = ROOT / "recipes/schema.json"
MODELINE = "\n# yaml-language-server: $schema=../schema.json\n"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    made = json.loads(schema([], cli._launch_parser()))  # pyright: ignore[reportPrivateUsage]
    jsonschema.Draft7Validator.check_schema(made)
    return made


def takes(schema: dict[str, Any], options: object) -> bool:
    return jsonschema.Draft7Validator(schema).is_valid(options)


@pytest.mark.slow
def test_the_committed_schema_is_what_the_command_prints() -> None:
    """With other versions than the pinned ones, options differ."""
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    if any(version(name) != pins[name] for name in ("trl", "transformers", "accelerate")):
        pytest.skip("other versions than those of constraints.txt")
    scripts = sorted(map(str, ROOT.glob("recipes/*/train.py")))
    command = [sys.executable, "-m", "trl_steady", "schema", *scripts]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert printed == FILE.read_text(), "run `make schema`"


def test_every_recipe_is_valid_and_names_the_schema() -> None:
    validator = jsonschema.Draft7Validator(json.loads(FILE.read_text()))
    recipes = sorted(ROOT.glob("recipes/*/*.yaml"))
    assert len(recipes) > 35
    for path in recipes:
        text = path.read_text()
        options = yaml.safe_load(text)
        grid = options.get("grid", {"cells": {}, "settings": {}})
        arms = [*options.get("arms", {}).values(), *grid["cells"].values(), *grid["settings"].values()]
        if arms:  # an experiment
            parts = [each.get("options", {}) for each in (options, *arms)]
        elif path.parent.name != "accelerate":
            assert MODELINE in text, path
            parts = [options]
        else:
            continue
        for part in parts:
            validator.validate(part)


TAKEN = """
learning_rate: 1e-5 | learning_rate: 1.0e-5 | learning_rate: .5 | learning_rate: 1 | learning_rate: "1_0.5"
off_policy_mask_threshold: .inf | token_budget: 16384 | token_budget: "16_384" | token_budget: null
token_budget: none | max_steps: "32" | trim_padding: yes | trim_padding: "No" | skip_old_pass: "true"
skip_old_pass: null | bf16: off | loss_type: gmpo | kl_estimator: k2 | importance_sampling_level: null
dynamic_sampling_filter: [0.1, 0.9] | geometric_mask_range: [0.9, 1.1] | vllm_engine_kwargs: {enforce_eager: true}
vllm_engine_kwargs: '{"enforce_eager": true}' | model_init_kwargs: {dtype: bfloat16} | report_to: none
report_to: [none] | optim: sgd | lr_scheduler_type: cosine | eval_strategy: "no" | save_steps: 0.5
lora_target_modules: all-linear | lora_target_modules: [q_proj] | reward_funcs: [a.b] | reward_weights: [1, 0.5]
datasets: [{path: a, split: train}] | env: {A: 1} | num_processes: 8 | num_processes: "8" | main_process_port: 0
scale_rewards: false | fsdp: true | resume_from_checkpoint: true
accelerate_config: fsdp2 | fsdp_version: 2 | mixed_precision: bf16 | engine_check: 2 | beta: 0
"""
REFUSED = """
los_type: gspo | loss_type: gpso | kl_estimator: k4 | router_replay: r3 | learning_rate: fast | max_steps: many
learning_rate: 1e | token_budget: 0 | token_budget: -5 | token_budget: 1e3 | epsilon: -0.1 | epsilon: small
token_veto_threshold: 1 | engine_check: 0 | skip_nonfinite_steps: 0 | dynamic_sampling_max_rounds: 1
geometric_mask_range: [0.9] | geometric_mask_range: 0.9 | dynamic_sampling_filter: zero
dynamic_sampling_filter: [0, 1, 2] | vllm_engine_kwargs: fp8 | trim_padding: maybe | trim_padding: 2
share_prompts: [true] | optim: adam | save_strategy: sometimes | datasets: [{pth: a}] | num_procesess: 8
skip_old_pass: none | num_processes: many | multi_gpu: true | mixed_precision: fp64 | kl_coff: 0.1
"""


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("table", "is_taken"), [(TAKEN, True), (REFUSED, False)])
def test_it_takes_what_the_launcher_takes(
    table: str, is_taken: bool, found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def launcher_takes(text: str) -> bool:
        """True if `trl-steady grpo --config` starts a run with these lines, as far as its parsers and configs know."""
        path = tmp_path / "x.yaml"
        path.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n{text}\n")
        try:
            with swapped(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                *_, launch, _ = grpo.make_parser().parse_args_and_config(
                    ["--config", str(path)], return_remaining_strings=True, separate_remaining_strings=True
                )
            parser = cli._launch_parser()  # pyright: ignore[reportPrivateUsage]
            return parser.parse_args([*launch, "train.py"]).training_script == "train.py"
        except (Exception, SystemExit):
            return False

    for row in re.findall(r"[^|\s][^|\n]*[^|\s]", table):
        assert launcher_takes(row) == is_taken, row
        assert takes(found, yaml.safe_load(row)) == is_taken, row


def test_an_editor_reads_numbers_and_switches_as_another_yaml(found: dict[str, Any]) -> None:
    """YAML 1.2 takes these for strings, and PyYAML does not."""
    for text in ("yes", "no", "on", "Off"):
        assert isinstance(yaml.safe_load(text), bool) and takes(found, {"bf16": text})
    assert yaml.safe_load("1_024") == 1024 and takes(found, {"token_budget": "1_024"})
    assert isinstance(yaml.safe_load("1e-5"), str) and takes(found, {"learning_rate": 1e-5})


def test_ranges_are_those_of_our_configs(found: dict[str, Any]) -> None:
    ranges = {name: each for name, each in marked(PPOConfig, Range).items() if each.keywords}
    numbers = {name for name, each in ranges.items() if any("imum" in word for word in each.keywords)}
    assert len(numbers) > 15
    for name in numbers:
        for value in (-2, -0.5, 0, 0.25, 1, 2, 3, 7):
            assert takes(found, {name: value}) == bool(ranges[name].has(value)), (name, value)


def test_a_script_adds_its_own_options_and_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    lines = [
        "from dataclasses import dataclass",
        "from typing import Literal",
        "from trl import GRPOConfig, TrlParser",
    ]
    lines += ["@dataclass", "class Mine:", "    task: Literal['max', 'sums'] = 'max'"]
    lines = ["from pathlib import Path", *lines, "    start: Path = Path()"]
    lines += ["TrlParser((Mine, GRPOConfig)).parse_args_and_config()", "raise KeyError"]
    path.write_text("\n".join(lines))
    assert cli.main(["schema", str(path)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert takes(made, {"task": "sums", "loss_type": "gspo", "start": "a/b"}) and not takes(made, {"task": "digits"})
    assert not takes(made, {"tsk": "sums"})
    path.write_text("from trl import GRPOTrainer\nGRPOTrainer.train(None)\nraise KeyError")  # without a parser
    assert cli.main(["schema", str(path)]) == 0
    assert cli.main(["schema", "missing.py"]) == 2
