"""TRL's trainers, with public methods of trl-steady in place of TRL's private ones, and with parts.

Only this package names private attributes of TRL. `tests/host/contract.py` lists everything that TRL's `_compute_loss`
reads. A test compares it with the installed TRL and names each difference.
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
        "_compute_loss. trl-steady needs TRL's own trainer. Import trl_steady without the package that patches TRL."
    )

from trl_steady.host.loss import MicroBatch, Terms  # noqa: E402
from trl_steady.host.names import overridden  # noqa: E402
from trl_steady.host.part import Part  # noqa: E402
from trl_steady.trl_bridge.trainer import FeatureTrainerMixin as Steady  # noqa: E402

__all__ = ["MicroBatch", "Part", "Steady", "Terms", "overridden"]
