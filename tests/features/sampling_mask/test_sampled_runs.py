"""Whole runs with a kept sampling mask: resumed, evaluated, cut off, of agents and about images."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.features.sampling_mask import tools as sampled
from tests.features.sampling_mask.tools import CLOSE, build
from tests.oracles import sampling as oracle
from tests.tools import resumable, tiny
from tests.trainers import images

llava = images.llava


def test_evaluation_scores_among_its_own_sets_and_leaves_training_alone(
    models: dict[str, Path], tmp_path: Path
) -> None:
    options = {"top_p": 0.6, "max_steps": 5, "per_device_eval_batch_size": 8, "token_budget": 30}
    without = tiny.train(build(models["dense"], tmp_path, **options))
    evaluations = {"eval_strategy": "steps", "eval_steps": 3, "build": {"eval_dataset": tiny.dataset(4)}}
    trainer = tiny.train(build(models["dense"], tmp_path, **options, **evaluations))
    evaluated = [row for row in tiny.history(trainer) if "eval_loss" in row]
    assert len(evaluated) == 2 and len(trainer.evaluations) == 4
    names = {name.removeprefix("sampling_mask/") for name in tiny.history(without)[0] if "sampling_mask" in name}
    assert len(names) == 5
    for row in evaluated:
        assert {name for name in row if "sampling_mask" in name} == {f"eval_sampling_mask/{name}" for name in names}
    trained = [row for row in tiny.history(trainer) if "eval_loss" not in row]
    assert trained[:-1] == tiny.history(without)[:-1]
    assert resumable.differences(tiny.parameters(without), tiny.parameters(trainer)) == []
    policy = sampled.models(models["dense"], trainer)
    for update in trainer.evaluations:
        model = policy(update.weights)
        for row in sampled.rows(update):
            assert row.sets in trainer.sets_by_tokens(update.rollout)[tuple(row.ids)]
            expected = sampled.log_probs(sampled.scores(model, row), row)
            torch.testing.assert_close(row.values["logps"].double(), expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:trim_padding=True only cuts columns")
def test_a_model_that_reads_images_scores_among_the_sets(llava: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = llava
    build_ = {"train_dataset": images.pictures(lengths=(1, 3, 2)), "processing_class": processor}
    trainer = build(folder, tmp_path, top_p=0.6, max_steps=2, gradient_checkpointing=False, build=build_)
    tiny.train(trainer)
    for update in trainer.updates:
        model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        model.load_state_dict(update.weights)
        rows = sampled.rows(update)
        for row, picture in zip(rows, update.inputs["pixel_values"], strict=True):
            assert row.sets in trainer.sets_by_tokens(0)[tuple(row.ids)] and all(row.sets)
            z = sampled.scores(model, row, pixel_values=picture.unsqueeze(0))
            torch.testing.assert_close(row.values["logps"].double(), sampled.log_probs(z, row), **CLOSE)
            assert oracle.kept_mass(z, row.sets).mean() < 0.95
