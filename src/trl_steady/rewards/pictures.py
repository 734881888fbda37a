"""A page of completions with each token coloured by its advantage: green if positive, red if negative."""

import html
from collections.abc import Sequence

_GREEN, _RED = (34, 139, 34), (205, 45, 45)


def advantages_html(completions: Sequence[Sequence[tuple[str, float]]]) -> str:
    """Return a self-contained HTML page of completions with each token coloured by its advantage.

    The page shows a token's advantage when the pointer rests on it.
    `completions` are `trainer.last_step_advantages` or a part of it: pairs of a token's text and its advantage.

    >>> page = advantages_html([[("2 + 2 ", 0.5), ("< 3", -1.0)]])
    >>> 'title="-1">&lt; 3</span>' in page
    True
    """
    largest = largest_advantage(completions)

    def span(text: str, value: float) -> str:
        shown = html.escape(text).replace("\n", "\u21b5\n") or "\u2205"
        return f'<span style="background:rgb{colour(value / largest)}" title="{value:.4g}">{shown}</span>'

    body = "\n".join(f"<pre>{''.join(span(*token) for token in completion)}</pre>" for completion in completions)
    return (
        '<!doctype html><meta charset="utf-8"><title>Advantages by token</title>\n'
        "<style>pre{white-space:pre-wrap;border:1px solid #ccc;padding:.6em;line-height:1.6}</style>\n"
        f"<p>Advantage from -{largest:.3g} (red) to {largest:.3g} (green)</p>\n{body}\n"
    )


def largest_advantage(completions: Sequence[Sequence[tuple[str, float]]]) -> float:
    """Return the largest size of an advantage, or 1 if all are 0."""
    return max((abs(value) for completion in completions for _, value in completion), default=0.0) or 1.0


def colour(share: float) -> tuple[int, int, int]:
    """Return the RGB colour of a share of the largest advantage: white at 0, green at 1, red at -1."""
    red, green, blue = (round(255 + (c - 255) * 0.75 * min(abs(share), 1.0)) for c in (_GREEN if share > 0 else _RED))
    return red, green, blue
