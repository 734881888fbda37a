"""A model that gives a number for each token."""

from typing import Any

import torch


class Scorer:
    """A model that scores tokens by other means than an LM head. It runs a backbone, and is called as a policy is."""

    def __init__(self, backbone: torch.nn.Module) -> None:
        self.backbone = backbone

    def __call__(self, **batch: object) -> Any:
        """Return outputs with one number per token as `log_probs`."""
        raise NotImplementedError
