"""A `RewardAdapter` scores as its saved model does when transformers and PEFT run it alone."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

from tests.features.critic import tools as critics
from tests.features.reward_model import tools as rewarding
from tests.features.reward_model.tools import ANSWERS, ENDS, PROMPTS, scores_of
from tests.tools import tiny, wide
from trl_steady import RewardAdapter, StepRewards
from trl_steady.features.reward_model.feature import RewardModel
from trl_steady.rewards import by_blank_line, by_regex, by_turn


def saved(kind: str, base: Path, folder: Path) -> Any:
    """The reward model of a folder, by transformers and PEFT alone."""
    if kind == "full":
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    how = {"quantization_config": BitsAndBytesConfig(**wide.NF4)} if kind == "nf4" else {}
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32, **how)
    return PeftModel.from_pretrained(model, folder)


@pytest.mark.fast_rows(1)
@torch.no_grad()
@pytest.mark.parametrize(("kind", "trim_padding"), [("lora", True), ("lora", False), ("nf4", True), ("full", True)])
def test_scores_are_those_of_the_saved_model_which_comes_back(
    kind: str, trim_padding: bool, model_of: Any, tmp_path: Path
) -> None:
    trainer = rewarding.build(kind, model_of(kind), tmp_path, trim_padding=trim_padding)
    rewarding.stir(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    twin = saved(kind, model_of(kind), tmp_path / "saved" / "reward")
    twin.train(kind == "nf4")  # in eval mode, bitsandbytes rounds an NF4 base once more; there is no dropout
    scorer = trainer.feature(RewardModel).scorer
    with torch.no_grad():
        found = scorer.scores(PROMPTS, ANSWERS, ENDS, batch_size=2)
    expected = scores_of(twin)
    assert found.shape == (4, 3) and len(found[found != 0].unique()) == 7
    # float32, in which a score of some layers of sums differs by its last digits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    files = {file.name for file in (tmp_path / "saved").iterdir() if file.is_dir()}
    assert files == {"reward"}  # and the policy alone beside it
    again = rewarding.build(kind, model_of(kind), tmp_path / "b", adapter=RewardAdapter(tmp_path / "saved" / "reward"))
    assert critics.same(trainer.reward_model.state(), again.reward_model.state())


def test_a_new_one_scores_0_and_its_adapter_is_the_policys(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = rewarding.build("lora", models["dense"], tmp_path)
    parameters = dict(trainer.model.named_parameters())
    adapter = {name: p for name, p in parameters.items() if ".reward." in name}
    assert adapter and not any(p.requires_grad for p in adapter.values())
    assert all(torch.equal(p, parameters[name.replace(".reward.", ".default.")]) for name, p in adapter.items())
    with torch.no_grad():
        assert not trainer.feature(RewardModel).scorer.scores(PROMPTS, ANSWERS, ENDS).any()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_reward_of_a_rollout_is_the_score_after_the_last_token(
    kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Prompts of unequal lengths, and answers of unequal lengths, as the policy has read and written them."""
    trainer = rewarding.build(kind, models["dense"], tmp_path)
    rewarding.stir(trainer)
    trainer.model.train()
    samples = trainer._generate_and_score_completions(
        [{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"] for _ in range(4)]
    )
    trainer.save_model(str(tmp_path / "saved"))
    twin = saved(kind, models["dense"], tmp_path / "saved" / "reward").eval()
    columns = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    scores = list(trainer._logs["rewards"]["reward_model"])
    for score, prompt, is_read, answer, is_written in zip(scores, *(samples[name] for name in columns), strict=True):
        text = torch.cat([prompt[is_read.bool()], answer[is_written.bool()]])
        with torch.no_grad():
            expected = twin(input_ids=text.unsqueeze(0)).logits.item()
        assert score == pytest.approx(expected, rel=1e-4, abs=1e-5)  # float32, sums of 16 terms
    assert len({round(score, 6) for score in scores}) > 8


def test_an_end_that_is_also_padding_is_not_scored(models: dict[str, Path], tmp_path: Path) -> None:
    """transformers scores the last token that is no padding, and `RewardTrainer` trains that score."""
    reader = tiny.tokenizer()
    reader.pad_token = reader.eos_token
    end = reader.eos_token_id
    trainer = rewarding.build("lora", models["dense"], tmp_path, build={"processing_class": reader})
    rewarding.stir(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    twin = saved("lora", models["dense"], tmp_path / "saved" / "reward").eval()
    twin.config.pad_token_id = end
    ended = [[*answer, end] for answer in ANSWERS[:3]] + [ANSWERS[3], [end]]  # one is cut off, one is empty
    prompts = [*PROMPTS, [20, 21]]
    feature = trainer.feature(RewardModel)
    feature._prompt_ids = prompts
    found = feature.adapter([""] * 5, [""] * 5, ended)
    texts = [prompt + answer for prompt, answer in zip(prompts, ended, strict=True)]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [end] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        expected = twin(input_ids=ids, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-5)


def test_steps_are_scored_at_their_ends(models: dict[str, Path], tmp_path: Path) -> None:
    """One token a byte: a step that ends after n characters is scored after n tokens."""
    adapter = RewardAdapter(head="steps", splitter=by_regex(";"))
    trainer = rewarding.build("lora", models["dense"], tmp_path, adapter=adapter, loss_type="gspo_token")
    rewarding.stir(trainer)
    tokenizer = tiny.tokenizer()
    texts = ["ab;c;", "xyz", ";", ""]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    feature = trainer.feature(RewardModel)
    feature._prompt_ids = PROMPTS
    found = feature.compute_rewards(texts, texts, ids, {})
    with torch.no_grad():
        expected = feature.scorer.scores(PROMPTS, ids, [[3, 5], [3], [1], []])
    assert found[0] == StepRewards(expected[0].tolist(), [3, 5], closed=True)
    assert found[1] == StepRewards(expected[1, :1].tolist(), [3])
    assert found[3] == StepRewards([], [])
    adapter.splitter = by_turn()
    turns = [[{"role": "assistant", "content": letter} for letter in "ab"]] * 4
    with pytest.raises(ValueError, match=r"2 values, but completion 0 of RewardAdapter has 1 assistant turns"):
        feature.compute_rewards(texts, turns, ids, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "process"}, r"head='process' .*'outcome' or 'steps'"),
        ({"splitter": by_blank_line()}, r"splitter has no effect with head='outcome'"),
        ({"source": "x", "peft_config": LoraConfig()}, r"source='x' has a peft_config .*Give one of"),
    ],
)
def test_arguments_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardAdapter(**options)


def test_setups_in_which_it_would_not_act_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    def unbuilt(message: str, kind: str = "lora", **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            rewarding.build(kind, models["dense"], tmp_path, **options)

    unbuilt(r"reward_funcs has 2 RewardAdapters", adapter=[RewardAdapter(), RewardAdapter()])
    unbuilt("RewardAdapter has a peft_config, and the policy", "full", adapter=RewardAdapter(peft_config=LoraConfig()))
    unbuilt(r"'reward' .*object.* must .*LoRA", adapter=RewardAdapter(peft_config=cast(Any, object())))
    rounding = {"use_transformers_continuous_batching": True, "bf16": True}
    unbuilt("continuous_batching=True and bf16=True, with which TRL rounds all adapters", **rounding)
    adapter = RewardAdapter()
    with pytest.raises(ValueError, match=r"a trainer of trl-steady\. Import"):
        adapter(prompts=["a"], completions=["b"], completion_ids=[[1]])
    trainer = rewarding.build("lora", models["dense"], tmp_path, adapter=adapter)
    unbuilt(r"of another trainer\. Make exactly one for each", adapter=adapter)
    with pytest.raises(ValueError, match=r"is new, its scores are all 0, and nothing trains it"):
        trainer.train()
    with pytest.raises(ValueError, match=r"reads text only, and the dataset has images"):
        adapter(["a"], ["b"], [[1]], image=[object()])
    trainer.save_model(str(tmp_path / "saved"))
    unbuilt(r"has no score\.weight", "full", adapter=RewardAdapter(models["dense"]))
    unbuilt(r"value_init='reward'", method="PPO", num_generations=1, value_init="reward")
    unbuilt("or is an adapter", "full", adapter=RewardAdapter(tmp_path / "saved" / "reward"))
