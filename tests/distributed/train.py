"""Train tiny models on one process or on two. `models` has the folder of each model, and the url of a vLLM server."""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
import trl
from accelerate import PartialState
from transformers import LogitsProcessor
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient

from tests.distributed import processes
from tests.distributed.runs import (
    CONFORMANCE,
    FIXED,
    GLOBAL_BATCH,
    OLD_PASS,
    PPO,
    RLOO,
    ROUTED,
    SERVED,
)
from tests.tools import resumable, tiny, wide
from tests.tools.sets import candidate_sets
from trl_steady.features.reference.feature import Reference
from trl_steady.features.sampling_mask import feature as sampling_part
from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.features.sampling_mask.recording import CandidateRecorder
from trl_steady.features.scalar_head import optimizer as learner
from trl_steady.trl_bridge import models as host_models


class Witness(transformers.TrainerCallback):
    """The reference of each step, as this process has it, and the steps that began without the optimizer's state."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps: list[dict[str, torch.Tensor]] = []
        self.cleared: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.trainer.optimizer.state:
            self.cleared.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pairs = self.trainer.feature(Reference).callback.pairs()
        self.steps.append({pair.name: pair.reference.detach().clone() for pair in pairs})


class Invented(CandidateRecorder):
    """Candidates that the sampled token decides: up to 4 tokens, or all."""

    def candidates(self, completions: list[list[int]]) -> CandidateSets:
        tokens = (token for completion in completions for token in completion)
        return candidate_sets({token, *range(token - token % 5, token)} if token % 5 else [] for token in tokens)


def answers_of(count: int, trainer: Any) -> list[list[int]]:
    """Answers that depend on the place in the global batch only."""
    first = trainer.accelerator.process_index * count
    return [[(13 * (first + i) + 5 * t) % 200 + 45 for t in range(1 + (first + i) % 6)] for i in range(count)]


class Saying(LogitsProcessor):
    """These answers, whatever the scores are."""

    def __init__(self, answers: list[list[int]], width: int, pad: int) -> None:
        self.answers, self.width, self.pad = answers, width, pad

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.size(1) - self.width
        said = [answer[place] if place < len(answer) else self.pad for answer in self.answers]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.tensor(said)[:, None], 0.0)


@contextlib.contextmanager
def other_routers(model: Any) -> Iterator[None]:
    """Meanwhile each expert has the score of another, as if what generates routed otherwise."""
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    for gate in gates:
        gate.data = gate.roll(1, dims=0)
    yield
    for gate in gates:
        gate.data = gate.roll(-1, dims=0)


def generate(trainer: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
    """The answers; for R3 transformers' own `generate` is made to say them, and the trainer watches its routers."""
    answers = answers_of(len(prompt_ids), trainer)
    if trainer.args.router_replay == "R3":
        model, tokenizer = host_models.bare(trainer, trainer.model), trainer.processing_class
        prompts = tokenizer.pad({"input_ids": prompt_ids}, return_tensors="pt")
        saying = Saying(answers, prompts.input_ids.size(1), tokenizer.pad_token_id)
        with other_routers(model):
            said = model.generate(**prompts, logits_processor=[saying], max_new_tokens=max(map(len, answers)))
        of_prompts = saying.width
        assert [row[of_prompts:][: len(own)] for row, own in zip(said.tolist(), answers, strict=True)] == answers
    return answers, None


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """These answers, and log-probs of an engine."""
    first, answers = trainer.accelerator.process_index * len(prompts), answers_of(len(prompts), trainer)
    # an engine that disagrees by up to 1.5 nats a token, in the one run that looks at it
    logprobs = [[-5.5 + 1.5 * math.sin(first + i + t) for t in range(len(a))] for i, a in enumerate(answers)]
    return {
        "prompt_ids": [trainer.processing_class(p)["input_ids"] for p in prompts],
        "completion_ids": answers,
        "logprobs": logprobs if trainer.args.sampler_options else None,
    }


@contextlib.contextmanager
def stand_ins(options: dict[str, Any], url: str) -> Iterator[None]:
    """For what draws tokens; with vLLM, for what a process without it lacks, and the server takes no weights."""
    with contextlib.ExitStack() as stack:
        if options.get("use_vllm"):
            options["vllm_server_base_url"] = url
            for module in (vllm_generation, vllm_client):
                stack.enter_context(patch.object(module, "is_vllm_available", lambda **_: True))
            stack.enter_context(patch.object(VLLMClient, "init_communicator", lambda *_, **__: None))
            stack.enter_context(patch.object(VLLMClient, "update_named_params", lambda _, __, sent: list(sent)))
        else:
            stack.enter_context(patch.object(trl.GRPOTrainer, "_generate_single_turn", generate))
            completions = lambda *arguments: generate(*arguments)[0]
            stack.enter_context(patch.object(trl.RLOOTrainer, "_generate_single_turn", completions))
            stack.enter_context(patch.object(sampling_part, "CandidateRecorder", Invented))
        yield


def fixed(run: str, models: dict[str, Any], output: Path) -> dict[str, Any]:
    """Groups of the whole global batch, so that with two processes each group lies on both."""
    state = PartialState()
    options: dict[str, Any] = {
        "epsilon": 5e-3,
        "epsilon_high": 8e-3,
        "per_device_train_batch_size": GLOBAL_BATCH // state.num_processes,
        "num_generations": GLOBAL_BATCH,
        "steps_per_generation": 1,
        "num_iterations": 2,
        "beta": 0.1,
        "optim": "sgd",  # Adam would blow rounding up to the size of an update where the gradient is zero on paper
        "learning_rate": 0.1,
        "gradient_checkpointing": False,
        **(FIXED | CONFORMANCE | ROUTED | SERVED | OLD_PASS | RLOO | PPO)[run],
    }
    if options.get("method") != "RLOO":
        options["build"] = {"rollout_func": rollout, **options.get("build", {})}
    if options.get("teacher") in models:
        options["teacher"] = str(models[options["teacher"]])
    del options["shows"]
    base, momentum = options.pop("base", None), options.pop("momentum", None)
    then = options.pop("then", None)
    torch.manual_seed(0)  # the adapter of one process and of two
    model: Any = Path(models[options.pop("model", "dense")])
    if options.pop("value_head", False):
        options["build"]["value_model"] = with_head(model, state.process_index)
    if base:
        model = wide.load(model, base)
    # the critic's optimizer, for the same reason
    descent = patch.object(learner, "AdamW", lambda groups, **_: torch.optim.SGD(groups))
    with stand_ins(options, models.get("url", "")), descent:
        trainer: Any = tiny.trainer(model, output, **options)
        if then:
            then(trainer)
        rollouts = recorded(trainer)
        if momentum:
            trained = (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
            trainer.optimizer = torch.optim.SGD(trained, lr=trainer.args.learning_rate, momentum=momentum)
        witness, rows = Witness(trainer), set[int]()
        if trainer.feature(Reference).callback:
            trainer.add_callback(witness)
        trainer.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: rows.add(len(inputs[0])))
        stored = frozen(trainer)
        trainer.train()
    return {
        "processes": state.num_processes,
        "backend": state.backend,
        "parameters": {name: p for name, p in tiny.parameters(trainer).items() if p.dtype.is_floating_point},
        "base": resumable.differences(stored, frozen(trainer)),
        "history": tiny.history(trainer),
        "critic": trainer.critic.state() if "critic" in dir(trainer) else {},
        "rollouts": rollouts,
        "step advantages": getattr(trainer, "last_step_advantages", []),
        "references": witness.steps,
        "cleared": witness.cleared,
        "refreshes": [tuple(refresh) for refresh in trainer.reference_refreshes],
        "rows": rows,
    }


def with_head(model: Path, process: int) -> Any:
    """A model for sequence classification with the policy's body, and with a head that differs by process."""
    made: Any = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    generator = torch.Generator().manual_seed(process)
    made.score.weight.data = torch.randn(made.score.weight.shape, generator=generator) / 4
    return made


def recorded(trainer: Any) -> list[dict[str, list[list[float]]]]:
    """The critic's columns of each rollout that the trainer will make, without padding."""
    rollouts: list[dict[str, list[list[float]]]] = []
    own = trainer._generate_and_score_completions

    def rollout(inputs: Any) -> dict[str, Any]:
        samples = own(inputs)
        mask = samples["completion_mask"].bool()
        columns = {name: samples[name] for name in ("values", "returns", "advantages") if name in samples}
        rows = {name: zip(values, mask, strict=True) for name, values in columns.items() if values.dim() == 2}
        rollouts.append({name: [row[is_own].tolist() for row, is_own in pairs] for name, pairs in rows.items()})
        return samples

    trainer._generate_and_score_completions = rollout
    return rollouts


def frozen(trainer: Any) -> dict[str, torch.Tensor]:
    """What bitsandbytes has stored of a base."""
    return {name: p for name, p in tiny.parameters(trainer).items() if not p.dtype.is_floating_point}


def alone(runs: Iterable[str], models: dict[str, Any], output: Path) -> dict[str, dict[str, Any]]:
    """Return what each run leaves on this process alone."""
    return {run: fixed(run, models, output / run) for run in runs}


def together(runs: Iterable[str], models: dict[str, Any], output: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each run leaves on each of two processes."""
    output.mkdir()
    processes.run(functools.partial(_work, runs=list(runs), models=models, output=output), output, seconds=600)
    return {run: [torch.load(output / run / f"rank_{rank}.pt") for rank in range(processes.WORLD)] for run in runs}


def _work(rank: int, runs: list[str], models: dict[str, Any], output: Path) -> None:
    PartialState(cpu=True)
    for run in runs:
        torch.save(fixed(run, models, output / run), output / run / f"rank_{rank}.pt")


def features(runs: Iterable[dict[str, Any]]) -> set[str]:
    """Return the features that these runs show."""
    return {feature for run in runs for feature in run["shows"]}
