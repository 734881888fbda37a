"""Trainers that keep what they score under routing replay, for tests of it."""

import functools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from torch import Tensor

import trl_steady
from tests.oracles import routes as routed_oracle
from tests.oracles.routes import NONE
from tests.tools import tiny
from trl_steady.core.token_record import Traced

LAYERS, EXPERTS, CHOSEN = 2, 4, 2

# packed or padded, a sum is taken in another order than of a sequence alone; log-probs are around 5 nats
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
LORA: dict[str, LoraConfig] = {
    "attention": LoraConfig(**tiny.LORA),
    "experts": LoraConfig(
        **{**tiny.LORA, "target_modules": []},
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        lora_dropout=0.0,
    ),
    "router": LoraConfig(**{**tiny.LORA, "target_modules": []}, target_parameters=["mlp.gate.weight"]),
    "saved router": LoraConfig(**tiny.LORA, modules_to_save=["mlp.gate"]),
}


class Row(NamedTuple):
    """A sequence of a padded batch."""

    ids: list[int]
    prompt: int
    routes: Tensor | None
    """(T, L, K), those of its tokens."""
    of_padding: Tensor | None
    values: dict[str, Tensor]
    """What the batch says of its completion's tokens."""


class Update(NamedTuple):
    rollout: int
    weights: dict[str, Tensor]
    rows: list[Row]
    inputs: dict[str, Any]


class Recorded(trl_steady.GRPOTrainer):
    """Ours, which keeps what left its rollouts, what came to its loss, and the weights of each."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.rollouts: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
        self.turns: list[list[list[Traced]]] = []
        self.updates: list[Update] = []
        self.evaluations: list[Update] = []
        super().__init__(*arguments, **keywords)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.turns.append([])
        weights = routed_oracle.weights(self.model)
        output = super()._generate_and_score_completions(inputs)
        self.rollouts.append((weights, {k: v.clone() for k, v in output.items() if isinstance(v, Tensor)}))
        return output

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **keywords: Any) -> Any:
        answer = super()._generate_single_turn(prompt_ids, *arguments, **keywords)
        if self.args.router_replay == "R3":
            record = self.rollout_in_progress.records["routes"]
            record.sequences = [self.tampered(routed) for routed in record.sequences]
            self.turns[-1].append(record.sequences)
        return answer

    def tampered(self, routed: Traced) -> Traced:
        return routed

    def _policy_loss(self, model: torch.nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Tensor:
        weights = routed_oracle.weights(self.model)
        loss = super()._policy_loss(model, inputs, *arguments, **keywords)
        of_tokens = {"logps": self.scored.detach()}
        update = Update(len(self.rollouts) - 1, weights, list(rows({**inputs, **of_tokens})), inputs)
        (self.updates if self.model.training else self.evaluations).append(update)
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        self.scored = scores[0]
        return scores

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        with torch.random.fork_rng():  # what is sampled to train on is the same with and without evaluation
            return super().evaluate(*arguments, **keywords)


class Random(Recorded):
    """As if the rollout had gone through any experts."""

    def tampered(self, routed: Traced) -> Traced:
        generator = torch.Generator().manual_seed(zlib.crc32(str(routed.ids).encode()))
        shape = (len(routed.ids) - 1, LAYERS, EXPERTS)
        return Traced(routed.ids, torch.rand(shape, generator=generator).argsort(-1)[..., :CHOSEN].to(torch.uint8))


def rows(batch: dict[str, Any]) -> Iterator[Row]:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
    routes, completions = batch.get("routes"), batch["completion_mask"].bool()
    names = ("logps", "old_per_token_logps", "ref_per_token_logps")
    for i, own in enumerate(mask):
        yield Row(
            ids[i][own].tolist(),
            int(batch["prompt_mask"][i].sum()),
            None if routes is None else routes[i][own],
            None if routes is None else routes[i][~own],
            {name: batch[name][i][completions[i]] for name in names if name in batch},
        )


def build(
    folder: Path,
    output: Path,
    kind: type[Recorded] = Recorded,
    *,
    lora: str | None = None,
    build: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    arguments = tiny.arguments(trl_steady.GRPOConfig, output, **options)
    keywords: dict[str, Any] = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    if lora is not None:
        keywords["peft_config"] = LORA[lora]
    keywords |= build or {}
    return kind(keywords.pop("model", str(folder)), keywords.pop("reward_funcs", tiny.reward), arguments, **keywords)


def of_rollout(routes: Tensor) -> Tensor:
    """(T, L, K) as R3 has them: the last token was never fed."""
    return torch.cat([routes, torch.full_like(routes[:1], NONE)])


def ascending(routes: Tensor | None) -> Tensor:
    assert routes is not None
    return routes.long().sort(-1).values


def oracles(folder: Path, trainer: Any) -> Callable[[dict[str, Tensor]], torch.nn.Module]:
    """The model by itself with given weights."""
    return functools.partial(routed_oracle.plain, folder, trainer.model)


FREE = {"router_aux_loss_coef": 0.0}  # a load-balancing loss goes with TRL's own micro-batches only
