"""The mathematics as pure functions of tensors. Imports torch only, so it can be read and tested without a trainer.

Axes: `B` sequences, `T` completion tokens. Masks are boolean, True = the token takes part in the loss. Log-ratios, not
ratios, cross function boundaries. Values where the mask is False may be anything, NaN included.
"""

from trl_steady.functional import advantages, importance, kl, masks, pooling, reduction

__all__ = ["advantages", "importance", "kl", "masks", "pooling", "reduction"]
