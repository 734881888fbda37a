"""A model that gives a number for each token."""

from typing import Any

import torch


class Scorer:
    """A model that gives tokens numbers by other means than an LM head. TRL's method for log-probs can call it."""

    def __init__(self, backbone: torch.nn.Module) -> None:
        self.backbone = backbone

    def __call__(self, **inputs: object) -> Any:
        """Return outputs with one number per token as `log_probs`."""
        raise NotImplementedError
