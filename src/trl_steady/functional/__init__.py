"""The mathematics of all methods as pure functions of tensors.

These modules import torch only, so you can read and test them without a trainer.

Axes: `B` sequences, `T` completion tokens. Masks are boolean. True means that a token takes part in the loss. In a
mask that drops tokens or sequences, True means that they are kept. Values where a mask of tokens is False may be
anything, including NaN. Functions take log-ratios. A docstring says where a value is a ratio.
"""

from trl_steady.functional import advantages, answers, kl, masks, pooling, ratios, reward_models, values

__all__ = ["advantages", "answers", "kl", "masks", "pooling", "ratios", "reward_models", "values"]
