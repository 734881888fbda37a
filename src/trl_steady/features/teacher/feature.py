"""The teacher's part in the advantages of a rollout. `features/advantages.py` asks for it."""

import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from trl_steady.config.grpo import GRPOConfig
from trl_steady.core.devices import copy_async, padded
from trl_steady.core.feature import Feature
from trl_steady.core.processes import first_reason
from trl_steady.core.sequences import rows_to_compute, select_sequences
from trl_steady.core.types import Construction, Rollout, forward_inputs
from trl_steady.features.adapters.base_model import BaseModel, base_changing_init
from trl_steady.features.adapters.saved import warn_of_other_base
from trl_steady.features.teacher.server import FAILURES, TeacherServer
from trl_steady.functional import advantages
from trl_steady.trl_bridge import models, teacher
from trl_steady.trl_bridge.generation import tokenize_prompts
from trl_steady.trl_bridge.log_probs import policy_log_probs
from trl_steady.trl_bridge.models import REFERENCE_ADAPTER, TEACHER_ADAPTER


class Teacher(Feature):
    """Scores a rollout with `teacher`: once, without gradient, and without the sequences that need no score."""

    args: GRPOConfig
    _server: TeacherServer | None = None
    _model: torch.nn.Module | None = None
    """A model of its own. None: the reference, or the policy with another adapter."""
    _adapter: str | None = None
    """The adapter of the policy with which the teacher scores; None for the base."""

    # construction

    def around_init(self, construction: Construction, call_next: Callable[[Construction], None]) -> None:
        """Let TRL's constructor make the reference, also if the loss has no KL."""
        if self.args.teacher == "reference" and not self.args.beta:
            construction.seen_by_trl["beta"] = 1.0
        call_next(construction)

    def on_init_end(self) -> None:
        """Load the teacher, or ask its server. Refuse one that reads other tokens, or that cannot be loaded here."""
        name = self.args.teacher
        if name is None:
            return
        config = models.bare(self.trainer, self.trainer.model).config
        if config.get_text_config() is not config:
            self.refuse(f"teacher={name!r}", "the model takes other inputs than text")
        if self.args.teacher_is_server:
            self._connect(name)
        elif name != "reference":
            if self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled:
                why = "FSDP or DeepSpeed would not shard it"
                self.refuse(f"teacher={name!r}", why, "Use a server, 'reference' or DDP.")
            self._load(name)
        elif isinstance(self._policy, PeftModel) and REFERENCE_ADAPTER in self._policy.peft_config:
            self._adapter = REFERENCE_ADAPTER

    def _connect(self, url: str) -> None:
        try:
            self._server = TeacherServer(url)
            has_same_tokens = self._server.has_tokens_of(models.text_tokenizer(self.trainer))
        except FAILURES as error:
            raise ValueError(f"teacher={url!r} is no server that scores prompts: {error}. Start it.") from error
        self._refuse_other_tokens(self._server.model, has_same_tokens)

    def _load(self, path: str) -> None:
        policy = self._policy
        if Path(path, ADAPTER_CONFIG_NAME).is_file():
            self._load_adapter(policy, path)
        elif isinstance(policy, PeftModel) and _is_base(policy, path):
            self._adapter = None  # the policy without its adapter
        else:
            tokenizer = teacher.load_tokenizer(self.trainer, path)
            own = models.text_tokenizer(self.trainer).get_vocab()
            self._refuse_other_tokens(tokenizer.name_or_path, own.items() <= tokenizer.get_vocab().items())
            self._model = teacher.load_model(self.trainer, path)

    def _load_adapter(self, policy: torch.nn.Module, path: str) -> None:
        setting = f"teacher={path!r}"
        if not isinstance(policy, PeftModel):
            raise ValueError(
                f"{setting} is the folder of an adapter, and this run trains no adapter on whose base it could act. "
                "Set peft_config, or merge that adapter into its base and name the folder of the whole model."
            )
        base = BaseModel(policy)
        config = PeftConfig.from_pretrained(path)
        if base.changing_init or base.trained or base_changing_init(config):
            self.refuse(setting, "one of the two adapters changes the base that they share")
        warn_of_other_base(config, base, TEACHER_ADAPTER)
        teacher.load_adapter(policy, path)
        self._adapter = TEACHER_ADAPTER

    def _refuse_other_tokens(self, name: str, has_same_tokens: bool) -> None:
        if not has_same_tokens:
            own = models.text_tokenizer(self.trainer).name_or_path
            raise ValueError(
                f"teacher={self.args.teacher!r} has the tokenizer of {name!r}, in which a token is not what it is in "
                f"that of the policy, {own!r}. Use a teacher of the policy's family."
            )

    @property
    def _policy(self) -> torch.nn.Module:
        return self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)

    # a rollout

    def taught(self, rollout: Rollout) -> Tensor:
        """Return the advantages (B, T) of a rollout with the teacher's part, and log how far the teacher is."""
        before = rollout.advantages
        is_scored = rollout.is_sampled
        if self.args.teacher_mode == "weight":
            has_advantage = before.reshape(len(before), -1).any(1, keepdim=True)
            is_scored = is_scored & has_advantage
        log_ratio = self._log_ratio(rollout, is_scored)
        signs = before.reshape(len(before), -1).sign() * log_ratio.sign()
        means = {"teacher/kl": (-log_ratio, is_scored), "teacher/agreement": (signs > 0, signs != 0)}
        self.trainer.metrics.pooled(rare_means=means)
        taught = advantages.with_teacher(before, log_ratio, mode=self.args.teacher_mode, coef=self.args.teacher_coef)
        return taught.where(rollout.is_sampled, 0)

    def _log_ratio(self, rollout: Rollout, is_scored: Tensor) -> Tensor:
        """Return log π_T - log π_old (B, T) of the tokens that are scored, and 0 for the others."""
        old_logps = rollout.samples.get("old_per_token_logps")
        if old_logps is None:
            old_logps = policy_log_probs(self.trainer, rollout)
        rows = list(range(len(is_scored)))
        if self.args.teacher_mode == "weight":
            rows = rows_to_compute(is_scored.any(1).tolist())
        teacher_logps = torch.zeros_like(old_logps)
        if rows:
            index = copy_async(torch.tensor(rows), old_logps.device)
            teacher_logps[index] = self._log_probs(rollout, rows).to(old_logps.dtype)
        return (teacher_logps - old_logps).where(is_scored, 0)

    def _log_probs(self, rollout: Rollout, rows: list[int]) -> Tensor:
        """Return the teacher's log-probs (R, T) of R rows of a rollout."""
        samples = select_sequences(rollout.samples, rows)
        if self.args.teacher_prompt is not None:
            samples |= self._prompts([rollout.inputs[row] for row in rows])
            samples.pop("lengths", None)  # of the policy's prompts
        elif self.args.teacher == "reference" and "ref_per_token_logps" in samples:
            return samples["ref_per_token_logps"]
        return self._score(samples)

    def _prompts(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return the ids and the mask of the teacher's prompts for rows of the data set."""
        read = self.args.teacher_prompt
        if not callable(read):
            read = operator.itemgetter(read)
        ids = tokenize_prompts(self.trainer, [read(row) for row in inputs], inputs)
        pad = cast(int, models.text_tokenizer(self.trainer).pad_token_id)
        prompt_ids, prompt_mask = padded(ids, pad, "left", self.trainer.accelerator.device)
        return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask}

    def _score(self, samples: Mapping[str, Any]) -> Tensor:
        trainer = self.trainer
        batch_size = self.args.per_device_eval_batch_size
        if trainer.model.training:
            batch_size = self.args.per_device_train_batch_size
        if self._server is not None:
            return self._ask(self._server, samples, batch_size)
        model = self._model
        if model is None:
            model = trainer.ref_model
        if model is not None:
            return trainer.teacher_log_probs(model, samples, batch_size)
        with teacher.active_adapter(cast(PeftModel, self._policy), self._adapter):
            return trainer.teacher_log_probs(trainer.model, samples, batch_size)

    def _ask(self, server: TeacherServer, samples: Mapping[str, Any], batch_size: int) -> Tensor:
        ids, mask, width = forward_inputs(samples)
        on_host = zip(ids.cpu(), mask.bool().cpu(), strict=True)
        sequences = [of_row[is_token].tolist() for of_row, is_token in on_host]
        logps = torch.zeros(len(sequences), width)
        why: str | None = None
        try:
            scores = server.log_probs(sequences, batch_size)
            for row, length in enumerate(samples["completion_mask"].sum(1).tolist()):
                logps[row, :length] = torch.tensor(scores[row][len(scores[row]) - length :])
        except FAILURES as error:
            why = str(error)
        why = first_reason(why)  # of any process, so that all stop
        if why is not None:
            raise RuntimeError(
                f"teacher={server.url!r} ({server.model}) has not scored a rollout: {why}. Start it again, and resume "
                f"with resume_from_checkpoint=True. The last checkpoint is {self.trainer.last_checkpoint}."
            )
        return copy_async(logps, ids.device)

    # saving

    def around_save_model(self, folder: Path | None, call_next: Callable[[Path | None], None]) -> None:
        """Save the policy without the teacher's adapter."""
        if self._adapter != TEACHER_ADAPTER:
            return call_next(folder)
        with models.save_without(cast(PeftModel, self._policy), TEACHER_ADAPTER):
            call_next(folder)


def _is_base(policy: PeftModel, path: str) -> bool:
    """Return True if the base of a policy is the model of this name or path, as it was loaded."""
    base = BaseModel(policy)
    if base.changing_init or base.trained:
        return False
    return base.model.config.name_or_path == path
