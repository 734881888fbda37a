"""GSPO (arXiv 2507.18071, section 4.1): one clipped ratio and one advantage for each sequence.

s_i = (prod_t ρ_it)^(1/|y_i|), the geometric mean of the token ratios, and the loss is -min(s_i A_i, clip(s_i) A_i).
TRL's loss computes it at the sequence level. The micro-batch it gets has 0 in place of padding, which TRL would read.
"""

from trl_steady.losses.loss import Loss

EPSILON, EPSILON_HIGH = 3e-4, 4e-4  # section 5.1: left and right clipping range

GSPO = Loss(
    "sequence_mean",
    advantages="sequence",
    name="GSPO",
    level="sequence",
    epsilon=EPSILON,
    epsilon_high=EPSILON_HIGH,
)
