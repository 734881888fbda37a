"""Replacement of TRL's GRPO and RLOO trainers and configs by trl-steady's while an unchanged script runs."""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import transformers
import trl

from trl_steady.cli.options import refuse_unknown
from trl_steady.cli.trl_commands import replaced_in_trl
from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.ppo import PPOConfig
from trl_steady.config.rloo import RLOOConfig
from trl_steady.config.shared import SharedOptions
from trl_steady.trainers.grpo import GRPOTrainer
from trl_steady.trainers.ppo import PPOTrainer
from trl_steady.trainers.rloo import RLOOTrainer
from trl_steady.trl_bridge.trainer import FeatureTrainerMixin

_KEPT = "_set_by_launcher"  # attribute of a config: the options of --set, with their values after the config's checks


@contextmanager
def swapped(settings: Mapping[str, object] | None = None, *, ppo: bool = False) -> Iterator[list[type]]:
    """Replace TRL's GRPO and RLOO trainers and configs by trl-steady's in all modules of TRL.

    Args:
        settings: Options that every config gets before its checks. They override what the script passes to it.
        ppo: True to put PPO in GRPO's place.

    Yields:
        The classes of trl-steady's trainers that have been built so far.

    Raises:
        ValueError: The script builds a trainer that would train GRPO or RLOO without trl-steady, or one whose config
            has lost an option of `settings`, or several processes train, each alone.
    """
    built, options = list[type](), dict(settings or {})
    theirs = (trl.GRPOConfig, trl.RLOOConfig)
    construct, check = transformers.Trainer.__init__, SharedOptions.__post_init__

    @functools.wraps(construct)
    def constructed(self: Any, *positional: Any, **keywords: Any) -> None:
        args = keywords.get("args", positional[1] if len(positional) > 1 else None)
        if isinstance(self, FeatureTrainerMixin):
            _refuse_changed(args)
            built.append(type(self))
        else:
            names = [base.__name__ for base in type(self).__mro__]
            if isinstance(args, theirs) or any(name.endswith(("GRPOTrainer", "RLOOTrainer")) for name in names):
                raise ValueError(
                    f"{type(self).__module__}.{type(self).__qualname__} would train without trl-steady. Derive it "
                    "from trl_steady.GRPOTrainer or trl_steady.RLOOTrainer, or run the script with python."
                )
        construct(self, *positional, **keywords)
        if isinstance(self, FeatureTrainerMixin):
            _refuse_processes_apart(self.accelerator.num_processes)

    @functools.wraps(check)
    def checked(self: SharedOptions) -> None:
        refuse_unknown(self, options)
        vars(self).update(options)
        check(self)
        vars(self)[_KEPT] = {name: getattr(self, name) for name in options}

    ours: dict[str, type] = {
        "GRPOTrainer": PPOTrainer if ppo else GRPOTrainer,
        "GRPOConfig": PPOConfig if ppo else GRPOConfig,
        "RLOOTrainer": RLOOTrainer,
        "RLOOConfig": RLOOConfig,
    }
    with ExitStack() as stack:
        stack.enter_context(replaced_in_trl(**ours))
        hooks = (transformers.Trainer, "__init__", constructed), (SharedOptions, "__post_init__", checked)
        for owner, name, hook in hooks:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, hook)
        yield built


def _refuse_changed(args: object) -> None:
    for name, value in getattr(args, _KEPT, {}).items():
        if getattr(args, name) != value:
            raise ValueError(
                f"--set {name} was given, but the trainer's config has {name}={getattr(args, name)!r}. The script "
                "changes it after it has built the config. Remove that change."
            )


def _refuse_processes_apart(together: int) -> None:
    started = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if together < started:
        raise ValueError(
            f"{started} processes were started, but each would train alone, because torch finds no GPU and the config "
            "does not ask for the CPU. Set use_cpu=True in the script, or --set use_cpu=true."
        )
