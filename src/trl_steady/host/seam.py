"""The way of a micro-batch, from generation to loss: one class that overrides each method of TRL once.

`Steady` stands before a trainer class of TRL in the order of inheritance. It does what TRL does, and asks the parts of
the trainer, in the order of one tuple, what they add. Methods with a leading underscore are TRL's. A subclass may
override the public ones.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PreTrainedModel

from trl_steady.host import loss
from trl_steady.host.checkpoints import UNFINISHED, Checkpoints
from trl_steady.host.engine import steady_engine
from trl_steady.host.metrics import Metrics
from trl_steady.host.mistakes import checked_rollout, refuse_small
from trl_steady.host.models import Scorer, parameters_kept, role_of
from trl_steady.host.names import completions_of, overridden
from trl_steady.host.part import Part, Rollout, ScoringPass, Steps, Trainer, Turn, entered
from trl_steady.host.resume import refuse_lost
from trl_steady.host.rollouts import reading
from trl_steady.host.scoring import scored

if TYPE_CHECKING:
    import trl

    _Trls = trl.GRPOTrainer
else:
    _Trls = object

_P = TypeVar("_P", bound=Part)


class Steady(_Trls):
    """A trainer of TRL with parts. Its subclasses also inherit from the trainer class of TRL, after this class."""

    PARTS: ClassVar[tuple[type[Part], ...]] = ()
    """The features of the trainer, in the order in which they are asked."""
    args: Any  # a config of `trl_steady.config`
    model: torch.nn.Module  # set by TRL's constructor, whose annotation allows for None
    # TRL has these three for GRPO only
    rollout_func: Callable[..., Any] | None = None
    environment_factories: Mapping[str | None, object] | None = None
    tools: Sequence[object] | None = None
    loss_reduction: str | property = "sequence_mean"  # a name that `loss.token_weights` knows
    # What is in progress. TRL's methods stand between the seam's, and would not hand these on as arguments.
    _rollout: Rollout | None = None
    _samples: Mapping[str, Any] = MappingProxyType({})  # the micro-batch whose loss is computed
    _until_backward: ExitStack | None = None

    def __init__(
        self, model: str | PreTrainedModel | PeftModel, reward_funcs: Any, args: Any, *positional: Any, **keywords: Any
    ) -> None:
        self.reached = set[str]()  # our methods that training has run
        self.metrics, self.checkpoints = Metrics(self), Checkpoints(self)
        self.parts = tuple(part(self._as_trainer) for part in self.PARTS)
        captures = [capture for part in self.parts for capture in part.captures(args)]
        sync = next((sync for part in self.parts if (sync := part.adapter_sync(args))), None)
        with entered(part.building(model, args) for part in self.parts), steady_engine(captures, sync):
            super().__init__(model, reward_funcs, args, *positional, **keywords)
        for part in self.parts:
            part.built()
        self.add_callback(Steps(self.parts, self.metrics.clock))

    @property
    def _as_trainer(self) -> Trainer:
        return cast(Trainer, self)  # TRL annotates few attributes, so that a type checker cannot compare the two

    def part(self, kind: type[_P]) -> _P:
        """Return the part of a class."""
        return {type(part): part for part in self.parts}[kind]  # pyright: ignore[reportReturnType]

    def note_reached(self, method: str) -> None:
        """Record that a method of ours runs in training. Only a run shows it: a script may call `super()` or not."""
        if self.model.training:
            self.reached.add(method)

    # 1. Generate.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        function, phase = self.rollout_func, self.metrics.clock.phase("generation")
        with overridden(self, {} if function is None else {"rollout_func": phase(checked_rollout(function))}):
            return self.rollout(inputs)

    def rollout(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Make completions of a batch of prompts as TRL does, with rewards, log-probs and the columns of the parts."""
        self.note_reached("rollout")
        rollout = Rollout()
        with self.metrics.clock.phase("rollout"):
            with entered(part.rolling(rollout) for part in self.parts), overridden(self, {"_rollout": rollout}):
                make: Callable[[list[Any]], dict[str, Any]] = super()._generate_and_score_completions
                for part in self.parts:  # each part calls the one before it, and the first calls TRL
                    make = functools.partial(part.making, rollout, make)
                rollout.samples = make(inputs)
            for part in self.parts:
                rollout.samples.update(part.columns(rollout))
            for part in self.parts:
                if (advantages := part.advantages(rollout)) is not None:
                    rollout.samples["advantages"] = advantages
        return rollout.samples

    def _generate_single_turn(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> Any:
        return self.generate(prompt_ids, *arguments, **keywords)

    def generate(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> Any:
        """Generate tokens for each prompt, and return what TRL returns.

        Each turn of an agent is one call, whose prompt contains all earlier turns.
        """
        self.note_reached("generate")
        turn, phase = Turn(prompt_ids, self._rollout), self.metrics.clock.phase
        engine = cast(Any, self.vllm_generation if self.use_vllm else self)
        timed = {"sync_weights": phase("sync")(engine.sync_weights)} if self.use_vllm else {}
        contexts = (part.generating(turn) for part in self.parts)
        with phase("generation"), overridden(engine, timed), entered(contexts):
            generated = super()._generate_single_turn(prompt_ids, *arguments, **keywords)
            turn.completion_ids = completions_of(generated)
        return generated

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        self.note_reached("calculate_rewards")
        reads = [part.read_rewards for part in self.parts]
        with (
            self.metrics.clock.phase("rewards"),
            overridden(self, {"reward_funcs": reading(self.reward_funcs, reads)}),
        ):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        for part in self.parts:
            part.keep_rewards(rewards, completions, completion_ids_list)
        return rewards

    # 2. Score the old policy and the reference in a rollout, and the policy in a micro-batch.

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return self.log_probs(model, *arguments, **keywords)

    def log_probs(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **of_samples: object,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs (B, T) and, on request, entropies (B, T) and the load-balancing loss, as TRL computes them.

        The arguments are TRL's; `ScoringPass` explains them.
        """
        if torch.is_grad_enabled():  # the training pass, not the pass of the old policy or the reference
            self.note_reached("log_probs")
        role = role_of(self._as_trainer, model, in_rollout=self._rollout is not None)
        asked = logits_to_keep, batch_size, compute_entropy, compute_aux_loss, of_samples
        in_progress = self._rollout, self._samples, self._until_backward
        scoring = ScoringPass(role, model, input_ids, attention_mask, *asked, *in_progress)
        with self.metrics.clock.phase(None if self._rollout is None else "scoring"):
            return scored(scoring, self.parts, super()._get_per_token_logps_and_entropies)

    def values(
        self, critic: Scorer, samples: Mapping[str, Any], rollout: Rollout | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Return the values (B, T) of a critic for samples with TRL's columns, in the passes of the parts."""
        columns = {} if rollout is not None else samples
        asked = batch_size, False, False, loss.forwarded(samples), rollout, columns, self._until_backward
        scoring = ScoringPass("value", critic, *loss.scored(samples), *asked)
        with self.metrics.clock.phase(None if rollout is None else "scoring"):
            return scored(scoring, self.parts, super()._get_per_token_logps_and_entropies)[0]

    # 3. Compute the loss.

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run TRL's training step, and keep the contexts of its forward active until backward ends."""
        with self.metrics.clock.phase("update"), self.until_backward_ends():
            loss = super().training_step(model, inputs, num_items_in_batch)
        for part in self.parts if self.accelerator.sync_gradients else ():
            part.after_last_backward()
        return loss

    @contextmanager
    def until_backward_ends(self) -> Iterator[None]:
        """Keep the contexts of forwards active until this context ends. Backward must end inside it."""
        with ExitStack() as stack, overridden(self, {"_until_backward": stack}):
            yield

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *arguments: object, **keywords: object
    ) -> Tensor:
        """Compute the loss of one micro-batch as TRL does. A part may regroup the micro-batches of a step."""
        self.note_reached("compute_loss")

        def compute(inputs: Mapping[str, Any]) -> Tensor:
            with overridden(self, {"_samples": inputs}):
                return super(Steady, self).compute_loss(model, inputs, *arguments, **keywords)

        for part in self.parts:  # each part calls the one before it, and the first calls TRL
            compute = functools.partial(part.computing, model, compute)
        return compute(inputs)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        return self.micro_batch_loss(model, inputs)

    def micro_batch_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Compute the loss of a micro-batch: score it, rewrite the scores, run TRL's loss, and add what TRL lacks.

        This is TRL's own loss if no option needs a rewrite and there are no log-probs of a sampler to compare.
        """
        self.note_reached("micro_batch_loss")
        part = next((part for part in self.parts if part.rewrites(inputs)), None)
        if part is None:
            return super()._compute_loss(model, inputs)
        batch = self.score(model, inputs)
        terms = part.rewrite(batch)
        with overridden(self, loss.attributes(self._as_trainer, terms)):
            total = super()._compute_loss(model, loss.rewritten(inputs, terms.batch))
        for factor, values in terms.added:
            weights = loss.token_weights(self._as_trainer, batch.mask, inputs, terms.reduction, values.dtype)
            total = total + factor * (weights * values).sum()
        return total

    def score(self, model: torch.nn.Module, inputs: dict[str, Any]) -> loss.MicroBatch:
        """Run one forward of the policy on a micro-batch with TRL's own method."""
        of_model, asked = loss.forwarded(inputs), {"compute_entropy": True, "compute_aux_loss": self.aux_loss_enabled}
        scores = self._get_per_token_logps_and_entropies(model, *loss.scored(inputs), **asked, **of_model)
        return loss.MicroBatch.of(inputs, scores)

    # 4. Log, save and resume.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's metrics and ours."""
        self.metrics.log(logs)
        super().log(logs, start_time)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return the micro-batches of an optimizer step, or none if the run was resumed after its last step.

        transformers would take one more step.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        for part in self.parts:
            epoch_iterator = part.drawing(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int] | None:
        refuse_small(self.train_dataset, self.args)
        self.checkpoints.sampler = super()._get_train_sampler(dataset)
        return self.checkpoints.sampler

    def _get_output_dir(self, trial: object) -> str:
        run = super()._get_output_dir(trial)
        return os.path.join(run, UNFINISHED) if self.checkpoints.is_writing else run

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        write = functools.partial(super()._save_checkpoint, model, trial)
        self.checkpoints.write(super()._get_output_dir(trial), write, super()._push_from_checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.checkpoints.is_writing:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = None if self.checkpoints.is_writing else Path(output_dir or self.args.output_dir or "")
        with entered(part.saving(folder) for part in self.parts):
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        with parameters_kept(self.model):  # PEFT would load a bf16 adapter as float32
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: SimpleNamespace) -> None:
        super()._issue_warnings_after_load(load_result)
        refuse_lost(self.model, load_result.missing_keys)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.checkpoints.take_from(Path(checkpoint))
