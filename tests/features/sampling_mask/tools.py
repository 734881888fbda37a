"""Trainers that keep what they sampled among and what they score under a kept sampling mask, for tests of it."""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.features.router_replay import tools as routed
from tests.oracles import routes as routed_oracle
from tests.oracles import sampling as oracle
from tests.tools.sets import lists
from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.trl_bridge import models as host_models
from trl_steady.trl_bridge.patching import patched

# each run begins with a collection of garbage by accelerate, which need not go through all that has been imported
gc.freeze()

Sets = list[list[int]]

# Scores of up to 20 nats in float32 have steps of 2e-6, and tens of sums that lead to them have been rounded.
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-4}
TEMPERATURE = 0.7
SAMPLING: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "temperature": TEMPERATURE}
SETS: dict[str, Any] = {"keep_sampling_mask": True, **SAMPLING}


class Drawn(NamedTuple):
    """A completion of one call of `generate`, as transformers' own output tells of it."""

    ids: list[int]
    """With what it was generated for."""
    sets: Sets
    """Of each token of the completion, the tokens that had a score in the end, in ascending order."""


class Row(NamedTuple):
    """A sequence of a micro-batch, without its padding."""

    ids: list[int]
    prompt: int
    sets: Sets
    """Of the tokens of the completion, as they came to the loss, in ascending order."""
    of_padding: Sets
    routes: Tensor | None
    values: dict[str, Tensor]
    """What has been computed of the tokens of the completion."""
    is_sampled: Tensor
    """Of each token of the completion, whether the model has sampled it; else it is a tool's."""

    @property
    def targets(self) -> Tensor:
        return torch.tensor(self.ids[self.prompt :])


class Sampled(routed.Recorded):
    """As `routed.Recorded`, which also keeps what it sampled among, and entropies."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.draws: list[list[list[Drawn]]] = []  # of each rollout its turns
        super().__init__(*arguments, **keywords)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.draws.append([])
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **keywords: Any) -> Any:
        bare: Any = host_models.bare(self, self.model)
        answers: list[Any] = []

        def telling(*inputs: Any, **options: Any) -> Tensor:
            config = copy.deepcopy(options.pop("generation_config"))
            config.update(return_dict_in_generate=True, output_scores=True)
            answers.append(type(bare).generate(bare, *inputs, generation_config=config, **options))
            return answers[0].sequences

        with patched(bare, {"generate": telling}):
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *arguments, **keywords)
        (answer,) = answers
        self.draws[-1].append([])
        for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            scores = [step[row] for step in answer.scores[: len(completion)]]
            sets = [(of_token > -torch.inf).nonzero().flatten().tolist() for of_token in scores]
            self.draws[-1][-1].append(Drawn([*prompt, *completion], sets))
        return completion_ids, logprobs

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        self.entropies = scores[1]
        return scores

    def _policy_loss(self, model: torch.nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Tensor:
        loss = super()._policy_loss(model, inputs, *arguments, **keywords)
        updates = self.updates if self.model.training else self.evaluations
        updates[-1] = updates[-1]._replace(inputs={**inputs, "entropies": self.entropies.detach()})
        return loss

    def sets_by_tokens(self, rollout: int) -> dict[tuple[int, ...], list[Sets]]:
        """Of each sequence of a rollout of one turn; more than one where it has been sampled more than once."""
        (turn,) = self.draws[rollout]
        found: dict[tuple[int, ...], list[Sets]] = {}
        for drawn in turn:
            found.setdefault(tuple(drawn.ids), []).append(drawn.sets)
        return found


def rows(update: routed.Update) -> Iterator[Row]:
    """Of a micro-batch."""
    inputs = update.inputs
    sampled = inputs["tool_mask"] if "tool_mask" in inputs else torch.ones_like(inputs["completion_mask"])
    for i, own in enumerate(update.rows):
        is_token = inputs["completion_mask"][i].bool()
        sets = of_sample(*inputs["kept_tokens"][i])
        assert len(sets) == len(is_token)
        yield Row(
            own.ids,
            own.prompt,
            [each for each, is_own in zip(sets, is_token, strict=True) if is_own],
            [each for each, is_own in zip(sets, is_token, strict=True) if not is_own],
            own.routes,
            {**own.values, **({"entropies": inputs["entropies"][i][is_token]} if "entropies" in inputs else {})},
            sampled[i][is_token].bool(),
        )


def of_sample(ids: Tensor, offsets: Tensor) -> Sets:
    """What a sample of a rollout carries, column by column."""
    assert offsets[0] == 0 and offsets[-1] == len(ids)
    return [sorted(each) for each in lists(CandidateSets(ids, offsets))]


@torch.no_grad()
def scores(
    model: Any, row: Row, temperature: float = 1.0, routes: Tensor | None = None, **of_sample: Tensor
) -> Tensor:
    """(T, V) of the completion's tokens: logits of the sequence alone, over the temperature; routes may be forced."""
    with contextlib.nullcontext() if routes is None else routed_oracle._forced(routes):
        logits = model(input_ids=torch.tensor([row.ids]), use_cache=False, **of_sample).logits
    return logits[0, row.prompt - 1 : -1].double() / temperature


def log_probs(z: Tensor, row: Row) -> Tensor:
    """Among the sets of the row."""
    return oracle.log_probs(z, row.targets, row.sets)


def models(folder: Path, trainer: Any) -> Callable[[dict[str, Tensor]], Any]:
    """The model by itself with given weights."""
    return routed.oracles(folder, trainer)


def build(folder: Path, output: Path, kind: type[Sampled] = Sampled, **options: Any) -> Any:
    """A trainer with the option and with a KL, unless something else is said."""
    return routed.build(folder, output, kind, **{"keep_sampling_mask": True, "beta": 0.1, **options})


def without_ours(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """What is logged with and without the option."""
    return [{name: v for name, v in row.items() if not name.startswith("sampling_mask/")} for row in history]
