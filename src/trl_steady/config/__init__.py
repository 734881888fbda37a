"""Options: one config for each trainer, valid values, contradictions, and options without effect."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "GRPOConfig":  # checkpoints of earlier versions name it here, in training_args.bin
        from trl_steady.config.grpo import GRPOConfig

        return GRPOConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
