"""Options on the command line of `trl-steady run`: set by the launcher, or given to a script that drops them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import trl_steady
from tests.tools import scripts as own_scripts
from tests.tools.scripts import IMPORTS, Scripts
from trl_steady.launcher import options

scripts = own_scripts.scripts
ROOT = Path(__file__).parents[2]

DROPPED: list[tuple[list[str], dict[str, Any], str, str]] = [
    (["--loss_type", "gspo"], {}, "loss_type='gspo'", "loss_type=gspo"),
    (["--loss_type=gspo"], {"loss_type": "grpo"}, "loss_type='gspo'", "loss_type=gspo"),
    (["--loss-type", "gspo"], {}, "loss_type='gspo'", "loss_type=gspo"),
    (["--loss_type", "dapo", "--loss_type", "gspo"], {}, "loss_type='gspo'", "loss_type=gspo"),
    (["--share_prompts"], {}, "share_prompts=True", "share_prompts=True"),
    (["--share_prompts", "data.json"], {}, "share_prompts=True", "share_prompts=True"),
    (["--no_trim_padding"], {}, "trim_padding=False", "trim_padding=False"),
    (["--trim_padding", "false"], {}, "trim_padding=False", "trim_padding=False"),
    (["--loss_type", "GSPO"], {}, "loss_type='gspo'", "loss_type=gspo"),  # the script may lower it
    (["--token_budget", "none"], {"token_budget": 64}, "token_budget=None", "token_budget=None"),
    (["--geometric_mask_range", "0.9,1.1"], {}, "geometric_mask_range=[0.9, 1.1]", "geometric_mask_range=0.9,1.1"),
    (["--geometric_mask_range", "0.9", "1.1"], {}, "geometric_mask_range=[0.9, 1.1]", "geometric_mask_range=0.9,1.1"),
    (["--off_policy_mask_threshold", "0.5"], {}, "off_policy_mask_threshold=0.5", "off_policy_mask_threshold=0.5"),
]


@pytest.mark.parametrize(("arguments", "config", "given", "setting"), DROPPED, ids=lambda value: str(value))
def test_an_option_that_the_script_does_not_read_is_refused(
    arguments: list[str], config: dict[str, Any], given: str, setting: str, scripts: Scripts
) -> None:
    with pytest.raises(ValueError) as refused:
        scripts.run(IMPORTS["from trl"], arguments=arguments, **config)
    said = str(refused.value)
    name = given.split("=")[0]
    has = getattr(trl_steady.GRPOConfig("x", use_cpu=True, bf16=False, **config), name)
    assert f"script.py was given {given} on" in said and f"config has {name}={has!r}: the script does not" in said
    assert f"GRPOConfig(..., {given})" in said
    assert f"`trl-steady run --set {setting} {scripts.folder / 'script.py'}`" in said


FILLED = {"epsilon_high": 4e-4, "importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (["--loss_type", "gspo", "--share_prompts", "--no-trim-padding"], {}),
        (["--geometric_mask_range", "0.9", "1.1", "--share_prompts=yes"], {"geometric_mask_range": (0.9, 1.1)}),
        (["--off_policy_mask_threshold", "inf", "--loss", "dapo"], {"off_policy_mask_threshold": float("inf")}),
        (["--beta", "7", "--epsilon", "1e-8", "--learning_rate", "0.5"], {}),  # of the script's own, perhaps
        (["--config", "missing.yaml", "--share"], {}),
        (["--loss_type", "GSPO", "--token_budget", "none"], {"token_budget": None}),
        (["--geometric_mask_range", "0.99,1.01"], {"geometric_mask_range": (0.99, 1.01)}),
        (["--epsilon_high", "null", "--importance_sampling_level", "None"], FILLED),
    ],
    ids=str,
)
def test_an_option_that_the_config_has_is_none(arguments: list[str], config: dict[str, Any]) -> None:
    known = {"loss_type": "gspo", "share_prompts": True, "trim_padding": False, **config}
    args = object.__new__(trl_steady.GRPOConfig)
    vars(args).update(known)
    options.refuse_dropped(args, {}, options.given_to_script(arguments), ["train.py"])


@pytest.mark.parametrize(
    "argument",
    [
        "--loss_type cross_entropy",
        "--token_budget many",
        "--token_budget",
        "--geometric_mask_range 0.9 high",
        "--router_replay none",
        "loss_type: cross_entropy",
        "loss_type: [gspo, dapo]",
        "token_budget: {train: 4096}",
        "trim_padding: null",
    ],
)
def test_a_value_that_the_option_cannot_have_is_the_scripts_own(argument: str, tmp_path: Path) -> None:
    arguments = argument.split()
    if not argument.startswith("--"):
        (tmp_path / "own.yaml").write_text(argument)
        arguments = ["--config", str(tmp_path / "own.yaml")]
    assert options.given_to_script(arguments) == {}


def test_an_explicit_null_is_not_dropped_where_the_config_fills_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    nulls = dict.fromkeys(("epsilon_high", "importance_sampling_level", "token_budget"))
    path.write_text(yaml.safe_dump({"loss_type": "gspo", **nulls}))
    args = trl_steady.GRPOConfig(
        "x", use_cpu=True, bf16=False, steps_per_generation=4, **yaml.safe_load(path.read_text())
    )
    given = options.given_to_script(["--config", str(path)])
    assert given == {"loss_type": "gspo", **nulls}
    options.refuse_dropped(args, {}, given, ["train.py"])
    args.token_budget = 64
    with pytest.raises(ValueError, match="token_budget=None on its command line or in its --config"):
        options.refuse_dropped(args, {}, given, ["train.py"])


def test_a_yaml_that_the_script_does_not_read_is_refused(scripts: Scripts) -> None:
    """The command line has the last word, as in TRL's parser."""
    path = scripts.folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"loss_type": "gspo", "token_budget": "64", "model": {"loss_type": 1}}))
    for arguments, given in (
        (["--config", str(path)], "loss_type='gspo'"),
        ([f"--config={path}", "--loss_type", "dapo"], "token_budget=64"),
    ):
        with pytest.raises(ValueError, match=f"script.py was given {given} on its command line or in its --config"):
            scripts.run(IMPORTS["from trl"], arguments=arguments)
    for text in ("a: [", "just text", "- loss_type"):
        path.write_text(text)
        assert options.given_to_script(["--config", str(path)]) == {}


OWN_CONFIG = """
import dataclasses
@dataclasses.dataclass
class Own(GRPOConfig):
    mine: int = 1
    def __post_init__(self):
        super().__post_init__()
def copied(*arguments, **options):
    return dataclasses.replace(Own(*arguments, **options), mine=2, generation_batch_size=None)
"""
CHECK = """
assert (args.loss_type, args.epsilon, args.top_k, args.temperature) == ("gspo", 3e-4, 5, 0.9)
assert getattr(args, "mine", 2) == 2
"""


@pytest.mark.parametrize(("own", "config"), [("", "GRPOConfig"), (OWN_CONFIG, "copied")], ids=["ours", "a copy"])
def test_what_is_set_is_set_before_the_checks(
    own: str, config: str, scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the paper's clip range follows. It goes before what the script is given."""
    settings, arguments = ["--set", "loss_type=gspo", "--set=top_k=5"], ["--loss_type", "dapo"]
    train = f"""
    from pathlib import Path
    from tests.tools import tiny
    args = tiny.arguments({config}, Path({str(scripts.folder)!r}), temperature=0.9, max_steps=1)
    {CHECK.strip().replace(chr(10), chr(10) + "    ")}
    data = {{"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}}
    GRPOTrainer({str(scripts.model)!r}, reward_funcs=tiny.reward, args=args, **data).train()
    """
    parts = (IMPORTS["from trl"], own, train)
    assert scripts.run(*parts, trainer="", settings=settings, arguments=arguments) == 0
    assert "'ratio/sequence_mean'" in capsys.readouterr().out


def test_what_the_script_changes_afterwards_is_refused(scripts: Scripts) -> None:
    late = "Trainer = lambda *a, args, **k: (setattr(args, 'loss_type', 'grpo'), GRPOTrainer(*a, args=args, **k))[1]"
    with pytest.raises(
        ValueError, match=r"--set loss_type=gspo was given, but the trainer's config has loss_type='gr"
    ):
        scripts.run(IMPORTS["from trl"], late, trainer="Trainer", settings=["--set", "loss_type=gspo"])


def test_a_config_that_the_trainer_builds_has_it_too(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    without = f"""
    import os
    os.chdir({str(scripts.folder)!r})
    from tests.tools import tiny
    from trl import GRPOTrainer
    GRPOTrainer({str(scripts.model)!r}, tiny.reward, train_dataset=tiny.dataset(), processing_class=tiny.tokenizer())
    """
    settings = ["--set", "loss_type=gspo", "--set", "use_cpu=true", "--set", "bf16=no"]
    assert scripts.run(without, trainer="", settings=settings) == 0
    assert "loss_type='gspo'" in capsys.readouterr().out


def test_afterwards_nothing_is_set() -> None:
    from trl_steady.launcher.swap import swapped

    with swapped({"loss_type": "gspo"}):
        pass
    assert trl_steady.GRPOConfig("x", use_cpu=True, bf16=False).loss_type == "dapo"


READ: list[tuple[str, Any]] = [
    ("loss_type=gspo", "gspo"),
    ("beta=0.04", 0.04),
    ("beta=-1", -1.0),
    ("off_policy_mask_threshold=inf", float("inf")),
    ("share_prompts=true", True),
    ("trim_padding=no", False),
    ("token_budget=None", None),
    ("token_budget=none", None),
    ("token_budget=4096", 4096),
    ("epsilon=null", None),
    ("geometric_mask_range=0.9,1.1", [0.9, 1.1]),
    ("geometric_mask_range=[0.9, 1.1]", [0.9, 1.1]),
    ("geometric_mask_range=0.9 1.1", [0.9, 1.1]),
    ("geometric_mask_range=None", None),
    ('generation_kwargs={"top_k": 5}', {"top_k": 5}),
    ("report_to=none", "none"),
    ("run_name=a=b", "a=b"),
]


@pytest.mark.parametrize(("setting", "value"), READ, ids=[setting for setting, _ in READ])
def test_values_are_read_as_trls_command_line_reads_them(setting: str, value: Any) -> None:
    assert options.parse_settings([setting]) == {setting.split("=")[0]: value}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("los_type=gspo", "GRPOConfig has no option 'los_type'. Did you mean loss_type?"),
        ("nothing_like_it=1", "GRPOConfig has no option 'nothing_like_it'."),
        ("loss_type", "'loss_type' has no value. Write --set NAME=VALUE."),
        ("beta=None", "--set beta=None: invalid float value: 'None'"),
        ("share_prompts=perhaps", "--set share_prompts=perhaps: Truthy value expected"),
        ("token_budget=1e3", "invalid int value: '1e3'"),
        ("geometric_mask_range=0.9,high", "invalid float value: 'high'"),
        ("geometric_mask_range=", "expected at least one argument"),
        ("generation_kwargs={", "--set generation_kwargs={: "),
    ],
)
def test_what_cannot_be_set_is_refused(setting: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        options.parse_settings([setting])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "launch",
    [["accelerate", "launch", "--cpu", "--num_processes", "1"], pytest.param(["torchrun"], marks=pytest.mark.slow)],
    ids=str,
)
def test_it_is_set_however_the_script_is_launched(launch: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, trl\n"
        "args = trl.GRPOConfig('x', use_cpu=True, bf16=False)\n"
        "print('has', args.loss_type, args.epsilon, sys.argv[1:])\n"
    )
    command = [Path(sys.executable).with_name(launch[0]), *launch[1:], "-m", "trl_steady", "run"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "--set", "loss_type=gspo", "-m", "train", "--seed", "1"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert "has gspo 0.0003 ['--seed', '1']" in done.stdout, done.stderr[-2000:]
