"""One scoring pass: TRL's method calls the model in parts, and proxies need to know which tokens they get.

This file knows the arguments of TRL's scoring method, and no part.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class IndexedModel:
    """Proxy that tells another proxy, whose `needs_token_indices` is True, which tokens of a batch (B, L) it gets.

    TRL passes the batch in parts, row after row.
    """

    def __init__(self, model: Callable[..., Any], token_indices: Tensor) -> None:
        self._model, self._token_indices, self._passed = model, token_indices, 0

    def __call__(self, *, input_ids: Tensor, **others: object) -> Any:
        """Return the model's outputs for the next rows. Raise a RuntimeError if the batch has no such rows."""
        token_indices = self._token_indices[self._passed : self._passed + len(input_ids)]
        self._passed += len(input_ids)
        self._refuse_unless(token_indices.shape == input_ids.shape)
        return self._model(input_ids=input_ids, token_indices=token_indices, **others)

    def refuse_rest(self) -> None:
        """Raise a RuntimeError if rows are left over. Call this after the last part."""
        self._refuse_unless(self._passed == len(self._token_indices))

    def _refuse_unless(self, is_in_order: bool) -> None:
        if not is_in_order:
            raise RuntimeError(
                f"the model got {self._passed} rows of a batch of shape {tuple(self._token_indices.shape)}, or rows "
                "of another width. keep_sampling_mask and router_replay need each row once and in order. Score whole "
                "batches with TRL's own method, or switch both options off."
            )


def needs_token_indices(model: Callable[..., Any]) -> bool:
    """Return True if a proxy must get `token_indices`, or one inside it."""
    return getattr(model, "needs_token_indices", False)
