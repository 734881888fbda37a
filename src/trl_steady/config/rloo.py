"""`trl.RLOOConfig` with the options of trl-steady that apply to RLOO."""

from dataclasses import dataclass
from typing import ClassVar

import trl

from trl_steady.config.shared import SharedOptions


@dataclass
class RLOOConfig(SharedOptions, trl.RLOOConfig):
    """`trl.RLOOConfig` with a moving reference, padding-free passes, routing replay and the kept sampling mask.

    All other options are TRL's and keep TRL's defaults. `trl-steady rloo --help` lists all.

    `sync_ref_model` also works with PEFT, on quantised bases and across resumes. The reference moves to the policy
    every `ref_model_sync_steps` optimizer steps, before the next generation. `ref_model_mixup_alpha=1` copies the
    policy; TRL's default, 0.6, mixes the two.

    Raises:
        ValueError: An option is invalid. The message names the option, its value and the fix.

    Warns:
        UserWarning: An option has no effect because of another one.
    """

    METHOD = "RLOO"
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *trl.RLOOConfig._VALID_DICT_FIELDS,
        "vllm_engine_kwargs",
        "eval_generation",
    ]
