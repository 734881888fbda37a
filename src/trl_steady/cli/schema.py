"""`trl-steady schema`: a JSON schema with which an editor checks the YAML files that `--config` takes."""

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, cast

from trl.scripts import grpo, rloo

from trl_steady.cli.run import dataclasses_of, swapped
from trl_steady.config.schema import Schema, merged, properties, values

_PACKAGES = ("trl", "transformers", "accelerate")
# what works in a YAML file beside the type that the option has
_ALSO = {
    "resume_from_checkpoint": "boolean",
    "fsdp": "boolean",
    "lora_target_modules": "string",
}


def schema(scripts: Sequence[str], launcher: argparse.ArgumentParser) -> str:
    """Return the schema of the files for `trl-steady grpo`, `rloo` and `ppo`, in JSON with a line for each option.

    Args:
        scripts: Scripts whose parsers add their options. They are run up to where they parse their command line.
        launcher: The parser of launch options.
    """
    kinds: list[type] = []
    for module, ppo in ((grpo, False), (rloo, False), (grpo, True)):
        with swapped(ppo=ppo):
            kinds += cast(Any, module).make_parser().dataclass_types
    for script in scripts:
        kinds += dataclasses_of(script)
    options = merged(properties(kind) for kind in dict.fromkeys(kinds))
    for name, kind in _ALSO.items():
        options[name]["type"].append(kind)
    options = {**_launch_options(launcher), **options}
    options["env"] = {"type": "object", "description": "Environment variables."}
    versions = [f"{name} {version(name)}" for name in _PACKAGES]
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": f"trl-steady schema, {', '.join(versions)}",
        "type": "object",
        "additionalProperties": False,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(option)}" for name, option in sorted(options.items())]
    separator = ",\n"
    return f'{json.dumps(head, indent=0)[:-2]},\n"properties": {{\n{separator.join(lines)}\n}}\n}}'


def _launch_options(parser: argparse.ArgumentParser) -> dict[str, Schema]:
    """Return the options that take a value: a YAML file cannot set a flag."""
    options: dict[str, Schema] = {}
    for action in parser._actions:
        if action.nargs == 0:
            continue
        schema: Schema = {"type": ["string", "number", "boolean"]}
        if action.choices:
            choices = list(action.choices)
            choices += [int(choice) for choice in choices if str(choice).isdigit()]  # YAML reads these as numbers
            schema = {"enum": choices}
        elif action.type in (int, float):
            schema = values(action.type)
        for name in action.option_strings:
            if name.startswith("--") and "-" not in name[2:]:
                options[name[2:]] = {**schema, "description": f"Of accelerate launch: {action.help}"}
    return options
