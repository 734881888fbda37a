"""The old names of what moved to core/ and trl_bridge/."""

from trl_steady.core.types import LossTerms as Terms
from trl_steady.core.types import MicroBatch, loss_mask
from trl_steady.core.types import forward_inputs as scored
from trl_steady.trl_bridge.log_probs import OTHER_INPUTS as FORWARDED
from trl_steady.trl_bridge.log_probs import other_inputs as forwarded
from trl_steady.trl_bridge.loss import backward_of, divided_by, token_weights

__all__ = [
    "FORWARDED",
    "MicroBatch",
    "Terms",
    "backward_of",
    "divided_by",
    "forwarded",
    "loss_mask",
    "scored",
    "token_weights",
]
