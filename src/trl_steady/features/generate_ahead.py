"""Generate ahead: a server generates the next rollout while the trainer trains on this one."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trl_steady.config.grpo import GRPOConfig
from trl_steady.core.engine import GenerationResult, SendRequest
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.processes import any_process, first_reason
from trl_steady.core.types import MicroBatches, Rollout, Turn
from trl_steady.features.request_seeds import RequestSeeds
from trl_steady.trl_bridge.generate_ahead import BatchesAhead, PendingRequest, build_request, respond_with
from trl_steady.trl_bridge.vllm_seeds import FIRST_SEED

_FILE = "ahead.pt"
_OPTION = "async_generate=True"


class _Wait(NamedTuple):
    """How a rollout got its completions."""

    behind: int
    """Versions of the policy between the one that generated and the newest."""
    waited: float
    """Seconds in which the trainer waited."""
    hidden: float
    """Seconds of the generation in which the trainer trained."""
    seconds: float
    """Seconds of the generation."""


class GenerateAhead(Feature):
    """Sends the request for a rollout to the server one rollout ahead, with `async_generate`.

    TRL's trainer generates as usual, and gets the result of the request that was sent earlier. A version of the policy
    stays on the server until the result is there.
    """

    args: GRPOConfig

    def __init__(self, trainer: Trainer, args: GRPOConfig) -> None:
        super().__init__(trainer, args)
        self._batches = BatchesAhead(trainer)
        self._rows: list[Any] | None = None  # of the rollout in progress, until its first generation
        self._pending: PendingRequest | None = None  # on the main process
        self._loaded: PendingRequest | None = None
        self._is_resumed = False  # until the first rollout after a resume with a result
        self._version = 0  # of the policy on the server
        self._synced = -1  # step in which it was sent there
        self._wait_in_rollout: _Wait | None = None

    def on_init_end(self) -> None:
        """Refuse what uses the server in another way. Warn if nothing corrects for the lag."""
        trainer, args = self.trainer, self.args
        self._is_on = args.async_generate  # read once: switched off in mid-run, it would lose the batches read ahead
        if not self._is_on:
            return
        if trainer.rollout_func is not None:
            self.refuse(_OPTION, "a rollout_func asks the server itself")
        if trainer.environment_factories:
            self.refuse(_OPTION, "environments would begin the next episode before this one ends")
        if trainer.tools:
            self.refuse(_OPTION, "a newer policy would sample an agent's later turns than its first")
        has_ratio = args.vllm_importance_sampling_correction or args.sampler_options or args.loss.to_sampler
        if not has_ratio and args.off_policy_mask_threshold is None:
            self.warn(
                f"{_OPTION}: completions are of the policy one rollout before, and nothing corrects for that. Leave "
                "vllm_importance_sampling_correction=True, or set off_policy_mask_threshold."
            )
        trainer.vllm_generation.before_sync = self._before_sync

    def on_train_begin(self) -> None:
        """Count versions from 0: a loaded request is older. Warn if no rollout can be asked ahead."""
        self._version = 0
        self._synced = -1
        if self._loaded is not None:
            self._synced = self._loaded.step
        if self._is_on and not self._batches.can_read_ahead:
            self.warn(
                f"{_OPTION}: each epoch has one rollout only, and nothing is asked before its epoch begins, so the "
                "option has no effect. Repeat the rows of train_dataset, or take smaller rollouts."
            )

    def on_epoch_begin(self) -> None:
        """Forget the rows and the request that the last epoch has left: it may have stopped early."""
        self._drop()
        self._pending = self._loaded
        self._loaded = None

    def on_train_end(self, best: Path | None) -> None:
        """Wait for a result that nobody needs: a training may stop early."""
        self._drop()

    def _drop(self) -> None:
        self._wait()
        self._pending = None
        self._batches = BatchesAhead(self.trainer)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def _before_sync(self) -> None:
        """Keep the version of a request on the server. The same policy may be sent twice, as after a resume."""
        self._wait()
        step = self.trainer.state.global_step
        if step != self._synced:
            self._version += 1
        self._synced = step

    def around_batches(self, batches: MicroBatches, call_next: Callable[[MicroBatches], Any]) -> Any:
        """Let batches be read ahead."""
        if self._is_on:
            batches = self._batches.begin_step(batches)
        return call_next(batches)

    def around_rollout(self, rollout: Rollout, call_next: Callable[[Rollout], dict[str, Any]]) -> dict[str, Any]:
        """Note the rows of a rollout in training. Further rounds of dynamic sampling generate as usual."""
        self._rows = None
        if self._is_on and self.trainer.awaits_backward:  # not for a reward model's first training
            self._rows = rollout.inputs
        return call_next(rollout)

    def around_generate(self, turn: Turn, call_next: Callable[[Turn], Any]) -> Any:
        """Let a rollout's first generation get its result from ahead, and then send the next rollout's request."""
        if turn.rollout is None or self._rows is None:
            return call_next(turn)
        rows = self._rows
        self._rows = None
        self._wait()
        self._raise_error()
        turn.rollout.from_checkpoint = self._is_resumed
        self._is_resumed = False
        self._wait_in_rollout = None  # other processes than the main one have none
        with respond_with(self.trainer, self._respond):
            generated = call_next(turn)
        self.trainer.metrics.pooled(sums=_sums(self._wait_in_rollout))
        self._send_next(rows)
        return generated

    def _send_next(self, rows: list[Any]) -> None:
        """Send the request for the rollout after that of `rows`."""
        position = self._batches.position(rows)
        is_unknown = any_process(position is None)
        if is_unknown or position is None:
            self.warn(
                f"{_OPTION}: the rows of a rollout are not those that transformers drew, so the next one is not asked "
                "ahead. Let a subclass hand on the list that it gets."
            )
            return
        following = self._batches.next_rollout(position)
        if following is None:
            return
        request = build_request(self.trainer, following.rows)
        if request:  # on the main process
            first_seed = self.trainer.feature(RequestSeeds).first_seed_ahead(following.steps)
            if first_seed is not None:
                request[FIRST_SEED] = first_seed
            self._pending = PendingRequest(self.trainer.vllm_generation, request, self._version)
            self._pending.start()

    def _raise_error(self) -> None:
        """Raise the error of a request on all processes, which would wait for the main one."""
        error: BaseException | None = None
        message: str | None = None
        if self._pending is not None:
            error = self._pending.error
        if error is not None:
            message = f"{type(error).__name__}: {error}"
        message = first_reason(message)
        if message:
            self._pending = None
            raise RuntimeError(
                f"{_OPTION}: the server has failed at step {self.trainer.state.global_step}, asked for the next "
                f"rollout: {message}. Resume from the last checkpoint when it answers again."
            ) from error

    def _respond(self, send: SendRequest, request: Mapping[str, Any]) -> GenerationResult:
        """Return the result from ahead if the request is the same."""
        pending = self._pending
        self._pending = None
        if pending is not None and pending.result is not None and pending.matches(request):
            behind = self._version - pending.version
            hidden = max(pending.seconds - pending.waited, 0.0)
            self._wait_in_rollout = _Wait(behind, pending.waited, hidden, pending.seconds)
            return pending.result
        if pending is not None:
            self.warn(
                f"{_OPTION}: the request of a rollout is another one than was sent ahead, so its completions are "
                "thrown away. Prompts of a subclass and options of sampling that change during the run cannot be sent "
                "ahead."
            )
        start = time.perf_counter()
        result = send(request)
        seconds = time.perf_counter() - start
        self._wait_in_rollout = _Wait(behind=0, waited=seconds, hidden=0.0, seconds=seconds)
        return result

    def save_state(self, checkpoint: Path) -> None:
        """Save the result that is ahead. An error is raised by the next rollout."""
        self._wait()
        if self._pending is not None and self._pending.error is None:
            self._pending.save(checkpoint / _FILE, self._version, self._synced)

    def load_state(self, checkpoint: Path) -> None:
        """Go on with the result that was ahead."""
        if not self._is_on:
            return
        file = checkpoint / _FILE
        if file.is_file() and self.trainer.accelerator.is_main_process:
            self._loaded = PendingRequest.load(self.trainer.vllm_generation, file)
        self._is_resumed = any_process(self._loaded is not None)


def _sums(wait: _Wait | None) -> dict[str, torch.Tensor]:
    """Return metric -> numerator and denominator of its mean over rollouts."""
    if wait is None:
        wait = _Wait(0, 0.0, 0.0, 0.0)
        rollouts = 0
    else:
        rollouts = 1
    return {
        "async/versions_behind": torch.tensor([wait.behind, rollouts]),
        "async/waited": torch.tensor([wait.waited, rollouts]),
        "async/overlap": torch.tensor([wait.hidden, wait.seconds]),
    }
