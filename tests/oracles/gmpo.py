"""Reference values for the GMPO loss, written from the paper's formula alone: arXiv 2507.20673, eq. 4.

Loops, gradients and notation are those of `losses.py`; the paper writes o_i for the sequence y_i. The product is the
paper's product: the code takes no mean of log-ratios. Keep the sequences short.

Example, by hand: G = 1, two tokens, rho = (1.2, 0.5), low = high = 0.4. The bounds are e^-0.4 = 0.670320 and
e^0.4 = 1.491825.

    A = 2:   token 1: min(1.2 * 2, 1.2 * 2) = 2.4, free.
             token 2: min(0.5 * 2, 0.670320 * 2) = min(1, 1.340640) = 1, free: the unclipped branch is the smaller one.
             J = (2.4 * 1)^(1/2) = 1.549193, which is also A (1.2 * 0.5)^(1/2).
             loss = -1.549193, grad = (-0.774597, -0.774597), clipped_share = (0, 0).

    A = -2:  token 1: min(-2.4, -2.4) = -2.4, free.
             token 2: min(-1, -1.340640) = -1.340640, held at the lower bound.
             J = -(2.4 * 1.340640)^(1/2) = -(3.217536)^(1/2) = -1.793749.
             loss = 1.793749, grad = (0.896875, 0), clipped_share = (0.5, 0).
"""

import math

from torch import Tensor

from tests.oracles.losses import Result, _loss_tokens, _token_ratio, _zero_grad


def _factor(rho: float, a: float, low: float, high: float, delta: float | None) -> tuple[float, bool]:
    """Return |min( rho A, clip(rho, e^-low, e^high) A )| and whether the active branch moves with rho.

    With ``delta``, the unclipped branch is min(rho, delta) A. If both branches are equal, the unclipped one is active.
    """
    bounded = rho if delta is None else min(rho, delta)
    clipped = min(max(rho, math.exp(-low)), math.exp(high))
    active = bounded if bounded * a <= clipped * a else clipped
    return abs(active * a), active == rho


def gmpo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    delta: float | None = None,
    keep: Tensor | None = None,
    weights: Tensor | None = None,
) -> Result:
    """GMPO, arXiv 2507.20673, eq. 4. ``advantages`` and ``keep`` are (B,), ``weights`` is (B, 1) or (B, T).

    J_i  = ( prod_t | min( rho_it A_i, clip(rho_it, e^-low, e^high) A_i ) | )^(1/|o_i|) sgn(A_i)
    loss = -(1/G) sum_i M_i w_i J_i,   w_i = (1/|o_i|) sum_t w_it

    M_i = ``keep[i]`` and w_it = ``weights[i, t]`` are constants, 1 if not given. The paper has neither them nor
    ``delta``. A row without a loss token, or with A_i = 0, adds 0 and still counts in G.

    A factor that moves with rho_it is proportional to it, so d J_i / d log pi_theta(o_it) = J_i / |o_i| there, and
    d loss / d log pi_theta(o_it) = -M_i w_i J_i / (G |o_i|). A factor that is held at a bound, or at ``delta``, stays
    in the product, and its own token has gradient 0.
    """
    g = logps.shape[0]
    grad = _zero_grad(logps)
    objective = 0.0
    for i in range(g):
        tokens, a = _loss_tokens(mask, i), float(advantages[i])
        if len(tokens) == 0 or a == 0.0:
            continue
        factors = [_factor(_token_ratio(logps, old_logps, i, t), a, low, high, delta) for t in tokens]
        product = math.prod(value for value, _ in factors)
        j_i = product ** (1.0 / len(tokens)) * math.copysign(1.0, a)

        m_i = 1.0 if keep is None else float(keep[i])
        w_i = 1.0
        if weights is not None:
            w_i = sum(float(weights[i, t if weights.shape[1] > 1 else 0]) for t in tokens) / len(tokens)
        objective += m_i * w_i * j_i / g
        for t, (_, moves) in zip(tokens, factors, strict=True):
            grad[i, t] = -m_i * w_i * j_i / (g * len(tokens)) if moves else 0.0
    return Result(loss=-objective, grad=grad)


def clipped_share(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float
) -> tuple[float, float]:
    """Return the shares of all loss tokens that are held at the lower and at the upper bound; 0 without loss tokens.

    Lower: A_i < 0 and rho_it < e^-low. Upper: A_i > 0 and rho_it > e^high. Rows with A_i = 0 count in the denominator.
    """
    count = at_low = at_high = 0
    for i in range(logps.shape[0]):
        for t in _loss_tokens(mask, i):
            rho, a = _token_ratio(logps, old_logps, i, t), float(advantages[i])
            count += 1
            at_low += a < 0.0 and rho < math.exp(-low)
            at_high += a > 0.0 and rho > math.exp(high)
    return at_low / max(count, 1), at_high / max(count, 1)
