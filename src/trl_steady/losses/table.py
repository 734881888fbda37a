"""All losses of GRPO in one table. To add one, write its file beside this one, and its line here."""

from trl_steady.losses.gmpo import GMPO
from trl_steady.losses.gspo import GSPO
from trl_steady.losses.gspo_token import GSPO_TOKEN
from trl_steady.losses.loss import Loss

__all__ = ["LOSSES", "Loss"]

LOSSES: dict[str, Loss] = {
    # TRL's
    "grpo": Loss("sequence_mean"),
    "bnpo": Loss("micro_batch_tokens"),
    "dr_grpo": Loss("constant"),
    "dapo": Loss("step_tokens"),
    # a sequence's ratio gives all tokens the same gradient, unless it is only a weight, as in cispo and vespo
    "cispo": Loss("step_tokens", clip="cap", advantages="token"),
    "sapo": Loss("sequence_mean", clip=None),
    "luspo": Loss("sequence_sum"),
    "vespo": Loss("step_tokens", clip=None, advantages="token"),
    # ours
    "gmpo": GMPO,
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
}
"""`loss_type` -> what the loss is."""
