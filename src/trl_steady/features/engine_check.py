"""The engine check: compare number formats, and a rollout's log-probs of the sampler with those of the policy."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature
from trl_steady.core.types import Rollout, Turn
from trl_steady.functional import kl
from trl_steady.trl_bridge.log_probs import policy_log_probs
from trl_steady.trl_bridge.models import random_setting
from trl_steady.trl_bridge.number_formats import Passes, coarser, engine_format, trainer_format
from trl_steady.trl_bridge.vllm import record_log_probs

_MOST = 10.0
"""Most nats that a token counts: an outlier among hundreds, such as a flipped expert, is not another model."""
_ADAPTER_LIMIT = 0.1
"""The limit that the default means where vLLM gets the adapter alone, and has loaded the base itself.

Rounding in bf16 gives a mean k3 of 1e-3 to 2e-3, in a mixture of experts too. Other checkpoints give tenths or more.
"""
COSTS = {"bfloat16": "1e-3", "float16": "2e-5"}
"""The coarser of two number formats -> mean k3 in nats per token, as docs/figures/evidence/precision.json has it."""
COST_OF_FLOAT16 = "3e-5"
"""Mean k3 if engine and trainer are in float16."""


class EngineCheck(Feature):
    """Prints the number formats of engine and trainer, and refuses an engine that serves another model.

    An engine that gets an adapter alone has loaded the base itself. With `engine_check`, each call of `train` compares
    the first rollout that its engine generates, also after a resume.
    """

    args: SharedOptions
    formats: Mapping[str, str | None] | None = None
    """"engine" and "trainer" -> number format, None if vLLM does not say it; "about" -> what decides the trainer's.

    None without a vLLM engine, before a training, and on other processes than the main one.
    """
    _is_due = False

    def on_init_end(self) -> None:
        """Find out if there is an engine to compare. Warn if a setting of sampling rules that out."""
        trainer, args = self.trainer, self.args
        self._is_on = args.engine_check is not None and (trainer.use_vllm or trainer.rollout_func is not None)
        if self._is_on and args.uncorrected:
            self._is_on = False
            self._skip(f"the log-probs of the policy are without {' and '.join(args.uncorrected)}")

    def on_train_begin(self) -> None:
        """Compare the number formats now, and the next rollout of the training."""
        self._is_due = self._is_on
        if self.trainer.use_vllm and self.trainer.accelerator.is_main_process:
            self._compare_formats()

    def _compare_formats(self) -> None:
        """Print the number formats of engine and trainer, and warn if they differ."""
        trainer = self.trainer
        engine = engine_format(trainer.vllm_generation)
        passes = trainer_format(trainer)
        self.formats = {"engine": engine, "trainer": passes.dtype, "about": passes.about}
        trainer.accelerator.print(
            f"trl-steady: engine {engine or 'unknown'}, trainer {passes.dtype} ({passes.about})", flush=True
        )
        if engine is None or engine == passes.dtype:
            return
        can_fp16 = trainer.accelerator.device.type != "cpu"
        self.warn(different_formats(engine, passes, trainer.vllm_mode, can_fp16=can_fp16))

    def on_rollout_begin(self, rollout: Rollout) -> None:
        """Decide if this rollout is compared."""
        self._compares = self._is_due and self.trainer.model.training
        self._logps: dict[tuple[int, ...], list[float]] = {}  # tokens of a sequence -> those of its last turn

    def around_generate(self, turn: Turn, call_next: Callable[[Turn], Any]) -> Any:
        """Record the log-probs of the engine, which RLOO's trainer drops."""
        if turn.rollout is None or not self._compares or not self.trainer.use_vllm:
            return call_next(turn)
        with record_log_probs(self.trainer.vllm_generation) as results:
            generated = call_next(turn)
        for prompt, ids, candidates in zip(turn.prompt_ids, turn.completion_ids, results[0][2], strict=True):
            logps: list[float] = []
            for of_token in candidates:
                sampled = of_token[0]
                logps.append(torch.nan if sampled is None else sampled)
            self._logps[tuple(prompt) + tuple(ids)] = logps
        return generated

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Compare the rollout if that is due, and refuse another model."""
        if not self._compares or rollout.from_checkpoint:
            return
        trainer = self.trainer
        limit = self._limit()
        logps = rollout.samples.get("old_per_token_logps")
        if logps is None or random_setting(trainer.model):  # with dropout, two passes of one model differ
            logps = policy_log_probs(trainer, rollout)
        sums = disagreement(logps, self._sampler_logps(rollout, logps), rollout.is_sampled)
        reduced = cast(Tensor, trainer.accelerator.reduce(sums, "sum"))
        total, compared, sampled = cast(list[float], reduced.tolist())
        self._is_due = not sampled  # all completions were cut off and masked
        if sampled and not compared:
            self._skip("the rollout has no log-probs of the sampler")
        elif sampled and not total / compared <= limit:  # NaN too
            raise ValueError(
                f"engine_check={self.args.engine_check}: engine and policy differ by a mean k3 of "
                f"{total / compared:.3g} nats per token, more than {limit}. {self._way_out()}, or set engine_check to "
                "a larger value if you expect it."
            )

    def _limit(self) -> float:
        """Return the largest mean k3 that passes. The default is lower where vLLM gets the adapter alone."""
        limit = cast(float, self.args.engine_check)
        if limit != SharedOptions.engine_check or not self.trainer.use_vllm:
            return limit
        gets_adapter = getattr(self.trainer.vllm_generation, "active_sync", None) is not None
        is_quantised = "quantization" in (self.args.vllm_engine_kwargs or {})  # by the user: the base differs a little
        if gets_adapter and not is_quantised:
            return _ADAPTER_LIMIT
        return limit

    def _way_out(self) -> str:
        if not self.trainer.use_vllm:
            return "rollout_func returns log-probs of another policy. Give it the policy's weights"
        return (
            "The engine has another base or no adapter. Start it with the policy's base, set vllm_adapter_sync=False"
        )

    def _sampler_logps(self, rollout: Rollout, like: Tensor) -> Tensor:
        column: Tensor | None = rollout.samples.get("sampling_per_token_logps")
        if column is not None:
            return column
        logps_of_rows = torch.full(like.shape, torch.nan)
        ends = rollout.samples["completion_mask"].sum(1).tolist()
        tokens = zip(rollout.input_ids.cpu(), rollout.attention_mask.cpu(), strict=True)
        for row, (ids, mask), end in zip(logps_of_rows, tokens, ends, strict=True):
            key = cast(list[int], ids[mask].tolist())
            logps = self._logps.get(tuple(key), [])  # none if dynamic sampling has moved it to this process
            row[end - len(logps) : end] = torch.tensor(logps)
        return logps_of_rows.to(like.device)

    def _skip(self, why: str) -> None:
        if self.trainer.accelerator.is_main_process:
            self.warn(
                f"engine_check={self.args.engine_check} has no effect because {why}. Change that, or set "
                "engine_check=None."
            )


def different_formats(engine: str, passes: Passes, mode: str, *, can_fp16: bool) -> str:
    """Return a warning of two number formats: what they cost, and the settings that make them one."""
    engine_setting = 'vllm_engine_kwargs={{"dtype": "{}"}}'
    if mode == "server":
        engine_setting = "--dtype {} for the server"
    ways: list[str] = []
    if can_fp16 and passes.dtype != "float16":
        beside: list[str] = []
        if passes.is_4bit:
            beside.append('bnb_4bit_compute_dtype="float16"')
        if engine != "float16":
            beside.append(engine_setting.format("float16"))
        fp16 = "fp16=True"
        if beside:
            fp16 = f"fp16=True with {' and '.join(beside)}"
        ways.append(fp16)
    ways.append(engine_setting.format(passes.dtype))
    coarse = coarser(engine, passes.dtype)
    cost = f"a mean k3 of {COSTS.get(coarse, COSTS['bfloat16'])} nats per token"
    if coarse == "bfloat16":
        cost = f"{cost}, and float16 on both sides {COST_OF_FLOAT16}"
    return (
        f"the engine computes in {engine}, and the trainer in {passes.dtype} ({passes.about}). For SmolLM2-135M, this "
        f"alone is {cost} (docs/corrections.md#one-number-format). Set {', or '.join(ways)}."
    )


def disagreement(logps: Tensor, sampler_logps: Tensor, is_sampled: Tensor) -> Tensor:
    """Return sums (3,) of one process, which add up over processes: of k3 in nats, of its tokens, of sampled tokens.

    All tensors are (B, T). The sampler's log-probs are NaN for tokens that it has no log-prob for.
    """
    compared = is_sampled & ~sampler_logps.isnan()
    k3 = kl.k3(sampler_logps.where(compared, 0), logps.where(compared, 0)).clamp(max=_MOST)  # else as `mismatch/kl`
    return torch.stack([k3.sum(), compared.sum(), is_sampled.sum()])
