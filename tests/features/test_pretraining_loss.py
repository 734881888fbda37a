"""The language-model loss of `ptx_coef`: its gradient, the order of its examples, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from tests.features.critic.tools import Twin, build, policy_parameters
from tests.tools import tiny
from tests.tools.cases import cases
from tests.tools.headroom import within

TEXTS = ["a", "some words", "", "the longest of all these texts, by far", "1 + 1 = 2"]
TEXT = Dataset.from_dict({"text": TEXTS})
MESSAGES = Dataset.from_dict(
    {"messages": [[{"role": "user", "content": f"{text}?"}, {"role": "assistant", "content": text}] for text in TEXTS]}
)


def examples_of(trainer: Any) -> list[list[list[int]]]:
    """A list that gets the token ids of each forward of examples."""
    seen: list[list[list[int]]] = []

    def see(_: Any, __: Any, keywords: dict[str, Any]) -> None:
        if "num_items_in_batch" in keywords:
            batch = zip(keywords["input_ids"], keywords["attention_mask"], strict=True)
            seen.append([ids[mask.bool()].tolist() for ids, mask in batch])

    trainer.model.register_forward_pre_hook(see, with_kwargs=True)
    return seen


# three micro-batches an epoch, in steps of two and one
SHORT = {"lora": True, "steps_per_generation": 3, "max_steps": 2, "learning_rate": 0.0}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("case", "own"),
    cases(
        {
            "lora, budget": {"lora": True, "token_budget": 20, "share_prompts": True},
            "full": {},
            "last window of an epoch, budget": {**SHORT, "token_budget": 20},
            "lora, not recomputed": {"lora": True, "gradient_checkpointing": False, "loss_type": "grpo"},
            "messages": {"lora": True},
        }.items(),
        fast=3,
    ),
)
def test_its_gradient_is_added_to_the_policys(
    models: dict[str, Path], tmp_path: Path, case: str, own: dict[str, Any]
) -> None:
    """Two micro-batches of four examples. Each of their tokens counts the same, in whatever batch it is.

    The last window of an epoch has one micro-batch.
    """
    options = {"gradient_accumulation_steps": 2, "max_steps": 1, "max_grad_norm": 0.0, **own}
    runs: list[dict[str, Tensor]] = []
    for coef in (0.0, 0.7):
        reader = tiny.tokenizer()
        reader.chat_template = "{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}"
        texts = {"ptx_dataset": MESSAGES if case == "messages" else TEXT} if coef else {}
        built = {
            "processing_class": reader,
            "train_dataset": tiny.dataset(4 * options.get("steps_per_generation", 4)),
            **texts,
        }
        trainer = build(models["dense"], tmp_path, exact=True, known=True, ptx_coef=coef, build=built, **options)
        twin, seen = Twin(trainer), examples_of(trainer)
        gradients = tiny.Gradients()
        trainer.add_callback(gradients)
        trainer.train()
        runs.append({name: each for name, each in gradients.steps[-1].items() if name in policy_parameters(trainer)})
    last = options["max_steps"] - 1
    examples = [ids for batch in seen for ids in batch][8 * last :]
    assert len(examples) == (4 if last else 8) and len({sum(map(len, batch)) for batch in seen}) > 1
    losses = []
    for ids in map(torch.tensor, examples):
        logits = twin.logits(ids)
        losses.append(-logits.log_softmax(-1)[:-1].gather(1, ids[1:].unsqueeze(1)).flatten())
    loss = torch.cat(losses).mean()
    own = {n: p for n, p in twin.whole.named_parameters() if n in runs[0]}
    expected = dict(zip(own, torch.autograd.grad(loss, [*own.values()]), strict=True))
    size = torch.stack([each.norm() for each in expected.values()]).norm()
    for name, gradient in expected.items():
        error = (runs[1][name] - runs[0][name] - 0.7 * gradient).norm() / size
        assert within(error.item(), 2e-5), name  # of norms in float32
    assert tiny.history(trainer)[last]["ptx_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_examples_are_whole_texts_and_a_pass_over_them_is_a_permutation(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass has an order of its own, drawn once. A text has an end, and is cut where the model's positions end."""
    drawn: list[int] = []
    randperm = torch.randperm

    def draw(length: int, **keywords: Any) -> Tensor:
        if keywords.keys() == {"generator"} and length == len(TEXTS):
            drawn.append(length)
        return randperm(length, **keywords)

    monkeypatch.setattr("trl_steady.features.pretraining_loss.torch.randperm", draw)
    trainer = build(
        models["dense"], tmp_path, known=True, ptx_coef=1.0, max_steps=10, build={"ptx_dataset": TEXT}, lora=True
    )
    trainer.critic.bare.config.max_position_embeddings = 30
    seen = examples_of(trainer)
    trainer.train()
    order = [tuple(ids) for batch in seen for ids in batch]
    reader = tiny.tokenizer()
    whole = [(*reader(text)["input_ids"], reader.eos_token_id)[:30] for text in TEXTS]
    passes = [order[start : start + len(TEXTS)] for start in range(0, len(order), len(TEXTS))]
    assert len(passes) == 8 and max(map(len, order)) == 30
    for epoch, own in enumerate(passes):
        indices = randperm(len(TEXTS), generator=torch.Generator().manual_seed(trainer.args.seed + epoch))
        assert own == [whole[index] for index in indices]
    assert len({*map(tuple, passes)}) > 4 and len(drawn) == 8


def test_an_evaluation_reads_no_example(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"ptx_coef": 0.5, "lora": True, "known": True, "build": {"ptx_dataset": TEXT}}
    trainer = build(models["dense"], tmp_path, **options)
    seen = examples_of(trainer)
    logs = trainer.evaluate(tiny.dataset(8))
    assert not seen and "eval_ptx_loss" not in logs and logs["eval_loss"] != 0


def test_a_coefficient_and_a_dataset_need_each_other(models: dict[str, Path], tmp_path: Path) -> None:
    for coef, dataset in ((0.5, None), (0.0, TEXT)):
        with pytest.raises(ValueError, match=f"ptx_coef={coef} and ptx_dataset need each other"):
            build(models["dense"], tmp_path, lora=True, ptx_coef=coef, build={"ptx_dataset": dataset})
