"""The mathematics of all methods as pure functions of tensors.

These modules import torch only, so you can read and test them without a trainer.

Axes: `B` sequences, `T` completion tokens. Masks are boolean, and True means that the token takes part in the loss.
Functions take and return log-ratios, not ratios. Values where the mask is False may be anything, including NaN.
"""

from trl_steady.functional import advantages, answers, kl, masks, pooling, ratios, reward_models, values

__all__ = ["advantages", "answers", "kl", "masks", "pooling", "ratios", "reward_models", "values"]
