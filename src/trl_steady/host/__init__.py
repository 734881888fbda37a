"""TRL's `GRPOTrainer` with its private seam under names of ours.

The only package that names private attributes of TRL. `CONTRACT` lists all that TRL's `_compute_loss` reads, each with
how it is honoured under our losses; a test holds it against the installed TRL and says by name what moved.
"""

from importlib.metadata import version

import trl
from packaging.version import Version

_TRL = Version(version("trl"))

if Version("1.16") > _TRL or _TRL.major >= 2:  # 2.0.dev0 counts as 2
    raise ImportError(f"trl-steady supports trl>=1.16,<2, found {_TRL}. Install a TRL in that range.")
if not trl.GRPOTrainer.__module__.startswith("trl."):
    raise ImportError(
        f"trl.GRPOTrainer has been replaced by {trl.GRPOTrainer.__module__}, whose loss does not pass through TRL's "
        "_compute_loss. trl-steady works with TRL's own trainer: import it without the package that patches TRL."
    )

from trl_steady.host.contract import CONTRACT, Contract  # noqa: E402
from trl_steady.host.loss import HostTrainer, MicroBatch  # noqa: E402
from trl_steady.host.names import (  # noqa: E402
    default_output_dir,
    generation_interval,
    is_before_generation,
    log_last,
    logged,
    overridden,
    rollout_number,
)

__all__ = [
    "CONTRACT",
    "Contract",
    "HostTrainer",
    "MicroBatch",
    "default_output_dir",
    "generation_interval",
    "is_before_generation",
    "log_last",
    "logged",
    "overridden",
    "rollout_number",
]
