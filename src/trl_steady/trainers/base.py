"""The base of all trainers: it takes their config and shows their records of refreshes."""

from typing import Any, ClassVar

from trl.trainer.utils import get_config_model_id

from trl_steady.config.shared import SharedOptions
from trl_steady.host import Steady
from trl_steady.host.names import overridden
from trl_steady.losses.old_pass import OldPassPart
from trl_steady.reference.callback import Refresh
from trl_steady.reference.part import ReferencePart
from trl_steady.reward_model.callback import RewardRefresh
from trl_steady.reward_model.part import RewardModelPart


class SteadyTrainer(Steady):
    """A trainer of trl-steady."""

    CONFIG: ClassVar[type[SharedOptions]]
    """Class of `args`."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: SharedOptions | None,
        *positional: Any,
        **keywords: Any,
    ) -> None:
        args = _own_config(self.CONFIG, model, args)
        with overridden(args, {"is_of_our_trainer": True}):
            super().__init__(model, reward_funcs, args, *positional, **keywords)

    @property
    def skips_old_pass(self) -> bool:
        """True if rollouts are not scored by the old policy, because each one feeds one update (`skip_old_pass`)."""
        return self.part(OldPassPart).is_skipped

    @property
    def reference_refreshes(self) -> list[Refresh]:
        """The refreshes of the reference so far, including those before a resume."""
        return self.part(ReferencePart).refreshes

    @property
    def reward_model(self) -> Any:
        """The reward model of a `RewardAdapter`, with `backbone`, `head` and the name of its `adapter`; or None."""
        return self.part(RewardModelPart).model

    @property
    def reward_refreshes(self) -> list[RewardRefresh]:
        """The retrainings of the reward model so far, including those before a resume."""
        refresher = self.part(RewardModelPart).refresher
        return refresher.refreshes if refresher else []


def _own_config(kind: type[SharedOptions], model: Any, args: object) -> SharedOptions:
    """Return `args`, or a config with TRL's output folder if it is None.

    Raises:
        ValueError: `args` is the config of another trainer.
    """
    method = kind.METHOD
    if args is None:
        model_id = model if isinstance(model, str) else get_config_model_id(model.config)
        args = kind(f"{model_id.split('/')[-1]}-{method}")
    if isinstance(args, kind) and method == args.METHOD:
        return args
    raise ValueError(
        f"trl_steady.{method}Trainer takes a trl_steady.{method}Config, and args is a {type(args).__module__}."
        f"{type(args).__qualname__}. Import both: from trl_steady import {method}Config, {method}Trainer."
    )
