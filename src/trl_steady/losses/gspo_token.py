"""GSPO-token (arXiv 2507.18071, section 4.3): GSPO's ratio in value, with the advantage of each token.

s_it = sg[s_i] π(y_it) / sg[π(y_it)], where sg stops the gradient.
"""

from dataclasses import replace

from trl_steady.core.types import MicroBatch
from trl_steady.functional.importance import gspo_token_surrogate
from trl_steady.losses.gspo import EPSILON, EPSILON_HIGH
from trl_steady.losses.loss import Loss


def as_gspo_token(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with log-probs that make TRL's token-level loss GSPO-token.

    The old log-probs are those of the surrogate, and all log-probs are relative to the policy's own. TRL's loss
    depends only on differences of log-probs, so this shift changes nothing else.
    """
    logps, old_logps = gspo_token_surrogate(batch.logps, batch.old_logps, batch.mask)
    ref_logps = None if batch.ref_logps is None else batch.ref_logps - batch.logps.detach()
    return replace(batch, logps=logps, old_logps=old_logps, ref_logps=ref_logps)


GSPO_TOKEN = Loss(
    "sequence_mean",
    advantages="token",
    name="GSPO-token",
    level="sequence",
    epsilon=EPSILON,
    epsilon_high=EPSILON_HIGH,
    rewrite=as_gspo_token,
)
