"""Images travel with their samples: a tiny vision-language model through TRL's own multimodal path."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import tiny
from tests.trainers import images
from tests.trainers.images import pictures
from trl_steady import StepRewards

llava = images.llava


def test_a_vision_language_model_trains_as_trls_sequence_level_does(llava: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = llava
    options = {"epsilon": 5e-3, "epsilon_high": 8e-3, "optim": "sgd", "gradient_checkpointing": False}
    options["build"] = {"train_dataset": pictures(), "processing_class": processor, "reward_funcs": tiny.reward}
    before = tiny.parameters(tiny.trainer(folder, tmp_path, loss_type="gspo", **options))
    theirs = tiny.train(
        tiny.trainer(folder, tmp_path, ours=False, loss_type="grpo", importance_sampling_level="sequence", **options)
    )
    ours = tiny.train(tiny.trainer(folder, tmp_path, padded=True, loss_type="gspo", **options))
    expected, after = tiny.parameters(theirs), tiny.parameters(ours)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert any(not torch.equal(after[name], before[name]) for name in after if "vision_tower" in name)


@pytest.mark.slow
def test_a_run_with_images_resumes_exactly(llava: tuple[Path, Any], tmp_path: Path) -> None:
    """Inside a window, images and all."""
    folder, processor = llava
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "beta": 0.04, "lora": True}
    options |= {"gradient_checkpointing": False, "sync_ref_model": True}
    options["build"] = {"train_dataset": pictures(), "processing_class": processor, "reward_funcs": tiny.reward}
    whole = tiny.train(tiny.trainer(folder, tmp_path, **options))
    resumed = tiny.trainer(folder, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    after = tiny.parameters(resumed)
    assert all(torch.equal(value, after[name]) for name, value in tiny.parameters(whole).items())


def test_steps_of_a_completion_about_an_image(llava: tuple[Path, Any], tmp_path: Path) -> None:
    """By the processor's tokenizer; what a reward function sees is a conversation with one message."""
    folder, processor = llava
    contents: list[str] = []

    def halves(completions: list[list[dict[str, Any]]], **_: Any) -> list[Any]:
        texts = [message["content"] for (message,) in completions]
        contents[:] = texts
        half = [len(text) // 2 for text in texts]
        return [
            StepRewards([float(i), 1.0], [cut, len(text)]) if cut else None
            for i, (cut, text) in enumerate(zip(half, texts, strict=True))
        ]

    options: dict[str, Any] = {"loss_type": "gspo_token", "step_advantage": "process", "max_steps": 1}
    options["build"] = {"train_dataset": pictures(), "processing_class": processor, "reward_funcs": halves}
    trainer = tiny.train(tiny.trainer(folder, tmp_path, gradient_checkpointing=False, **options))
    shown = trainer.last_step_advantages
    assert ["".join(text for text, _ in completion) for completion in shown] == contents
    assert any(len({value for _, value in completion}) == 2 for completion in shown)


@pytest.mark.slow
def test_images_follow_their_samples_through_cut_columns(llava: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = llava
    options: dict[str, Any] = {"loss_type": "grpo", "optim": "sgd", "gradient_checkpointing": False, "beta": 0.1}
    options |= {"per_device_train_batch_size": 2, "num_generations": 2, "steps_per_generation": 8}
    data = pictures(lengths=(1, 3, 2))
    options["build"] = {"train_dataset": data, "processing_class": processor, "reward_funcs": tiny.reward}
    theirs = tiny.train(tiny.trainer(folder, tmp_path, ours=False, **options))
    with pytest.warns(UserWarning, match="LlavaForConditionalGeneration takes other inputs than text"):
        ours = tiny.trainer(folder, tmp_path, **options)
    widths: list[int] = []
    ours.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].size(1)))
    tiny.train(ours)
    expected = tiny.parameters(theirs)
    for name, value in tiny.parameters(ours).items():
        assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), name
    assert len(set(widths)) > 2
    for given in ({"token_budget": 100}, {"skip_zero_weight": True, "beta": 0.0}):
        with pytest.raises(ValueError, match=rf"{next(iter(given))}=.*takes other inputs than text"):
            tiny.trainer(folder, tmp_path, **{**options, **given})


def test_images_travel_with_the_rows_of_dynamic_sampling(llava: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = llava
    data = pictures(4)
    data = data.add_column("number", list(range(4)))
    seen: list[list[tuple[int, tuple[int, ...]]]] = []

    def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        """Only prompt 0 of a first round has a signal; later only those with a number above 0."""
        keeps = [(n == 0) == (not seen) for n in number]
        seen.append(list(zip(number, map(tuple, completion_ids), strict=True)))
        return [float(i) if keep else 0.0 for i, keep in enumerate(keeps)]

    options: dict[str, Any] = {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 9, "max_completion_length": 4}
    build = {"train_dataset": data, "processing_class": processor, "reward_funcs": reward}
    trainer = tiny.trainer(folder, tmp_path, build=build, **options)
    trainer.model.train()
    rows = [dict(data[i]) for i in (0, 0, 1, 2) for _ in range(4)]
    samples = trainer._generate_and_score_completions(rows)
    pairs = zip(samples["completion_ids"], samples["completion_mask"], strict=True)
    found = [tuple(ids[mask.bool()].tolist()) for ids, mask in pairs]
    later = [answer for answers in seen[1:] for answer in answers if answer[0]]
    assert found == [ids for _, ids in (*seen[0][:8], *later[:8])] and len(seen) > 1
    numbers = [number for number, _ in (*seen[0][:8], *later[:8])]
    expected = processor.image_processor([data[i]["images"][0] for i in numbers], return_tensors="pt")
    assert torch.equal(samples["pixel_values"], expected["pixel_values"]) and len(samples["num_images"]) == 16
