"""A teacher in this process: load it as TRL loads a reference, or as an adapter, and score with that adapter.

This file knows how TRL loads models, patches their heads and switches adapters.
"""

from collections.abc import Generator
from contextlib import contextmanager

import trl.trainer.utils
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.models import (
    TEACHER_ADAPTER,
    drop_adapter,
    keep_dtypes_and_trainability,
    keep_random_state,
)


def load_model(trainer: Trainer, path: str) -> PreTrainedModel:
    """Return a model in eval mode, in its own dtype or quantisation, whose head is that of the policy."""
    args = trainer.args
    with keep_random_state():
        model = trl.trainer.utils.create_model_from_path(
            path,
            dtype="auto",
            device_map={"": trainer.accelerator.device},
            attn_implementation=trainer.accelerator.unwrap_model(trainer.model).config._attn_implementation,
            trust_remote_code=args.trust_remote_code,
        )
    trl.trainer.utils.add_fused_lm_head(model, temperature=args.temperature, cast_lm_head_to_fp32=False)
    return model.requires_grad_(False).eval()


def load_tokenizer(trainer: Trainer, path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model."""
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trainer.args.trust_remote_code)


def load_adapter(policy: PeftModel, folder: str) -> None:
    """Load a saved adapter beside the policy's, on the same base, and freeze it. Nothing else changes."""
    drop_adapter(policy, TEACHER_ADAPTER)
    with keep_dtypes_and_trainability(policy), keep_random_state():
        policy.load_adapter(folder, TEACHER_ADAPTER, is_trainable=True)  # otherwise PEFT sets eval mode
    for name, parameter in policy.named_parameters():
        if TEACHER_ADAPTER in name.split("."):
            parameter.requires_grad_(False)


@contextmanager
def active_adapter(policy: PeftModel, name: str | None) -> Generator[None]:
    """Let one adapter of a policy act; None for none. On exit, the policy is as before."""
    with keep_dtypes_and_trainability(policy), trl.trainer.utils.use_adapter(policy, name):
        yield
