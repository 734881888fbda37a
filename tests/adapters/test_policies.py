"""Kinds of PEFT policies, and what shares or copies their base: each works, or is refused with a reason.

The table is at the end of docs/compatibility.md. Usage: python -m tests.adapters.test_policies --write
"""

import copy
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import use_adapter

from tests.adapters import test_served
from tests.adapters.test_base import PLAIN, PPO, TOKENS, qwen
from tests.adapters.test_served import ROUNDING, differences, quantised
from tests.tools import critics, tiny
from tests.tools import wide as wide_model
from tests.tools.headroom import within
from trl_steady import RewardAdapter

PAGE = Path(__file__).parents[2] / "docs/compatibility.md"
BEGIN, END = "<!-- made by `python -m tests.adapters.test_policies --write` -->\n", "\n<!-- end of what is made -->"
IDS = torch.tensor([tiny.tokenizer()("ab1+2=").input_ids])
Folders = dict[str, Path]

built = test_served.built


# kinds


class Policy(NamedTuple):
    """A model and a configuration, as a trainer gets them."""

    model: Any
    config: Any = None
    options: Mapping[str, Any] = MappingProxyType({})


def new(config: Any = LoraConfig, base: str = "dense", **options: Any) -> Callable[[Folders], Policy]:
    """An adapter that the trainer makes."""
    rank = {} if config is peft.IA3Config else {"r": 4}
    settings = {**rank, "target_modules": PLAIN["target_modules"], **options}
    return lambda folders: Policy(folders[base], config(**settings))


def plain(folder: Path) -> Any:
    kind = transformers.AutoModelForImageTextToText if folder.name == "towers" else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


def trained(folders: Folders, name: str = "default") -> Any:
    """An adapter that is not new."""
    config = LoraConfig(**PLAIN, init_lora_weights=False)
    return get_peft_model(plain(folders["dense"]), config, adapter_name=name)


def corda(folders: Folders) -> Policy:
    """As LoftQ does, it puts a part of each weight into the adapter. PEFT computes LoftQ on a GPU only."""
    model, config = plain(folders["dense"]), LoraConfig(**PLAIN, init_lora_weights="corda", corda_config=CordaConfig())
    with torch.no_grad():
        texts = torch.arange(240).view(-1, 1, 8)
        preprocess_corda(model, config, run_model=lambda: [model(input_ids=text) for text in texts])
    return Policy(model, config)


def norms(folders: Folders) -> Policy:
    model = trained(folders)
    for path, parameter in model.named_parameters():
        if "layernorm" in path or "model.norm" in path:
            parameter.requires_grad_(True)
    return Policy(model)


def two(folders: Folders) -> Policy:
    model = trained(folders)
    model.add_adapter("other", LoraConfig(**PLAIN, init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return Policy(model)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, Callable[[Folders], Policy]] = {
    "LoRA": new(),
    "rsLoRA": new(use_rslora=True),
    "DoRA": new(use_dora=True),
    "PiSSA": new(init_lora_weights="pissa"),
    "OLoRA": new(init_lora_weights="olora"),
    "CorDA": corda,
    "trained tokens": new(trainable_token_indices={"embed_tokens": TOKENS}),
    "trained norms": norms,
    "bias": new(bias="all"),
    "modules_to_save": new(modules_to_save=["lm_head", "input_layernorm"]),
    "target parameters": new(base="moe", target_modules=["q_proj"], target_parameters=EXPERTS),
    "towers": new(base="towers", target_modules=r".*language_model.*q_proj|.*visual.*qkv"),
    "IA3": new(peft.IA3Config, feedforward_modules=[]),
    "LoHa": new(peft.LoHaConfig),
    "VeRA": new(peft.VeraConfig),
    "named adapter": lambda folders: Policy(trained(folders, "mine")),
    "two adapters": two,
    "merged base": lambda folders: Policy(trained(folders).merge_and_unload(), LoraConfig(**PLAIN)),
    "NF4": lambda folders: Policy(quantised(folders["wide"]), LoraConfig(**PLAIN), {"adapter_dtype": "float32"}),
    "int8": lambda folders: Policy(wide_model.load(folders["wide"], "int8"), LoraConfig(**PLAIN)),
}
QUICK = ("PiSSA", "trained tokens", "trained norms", "bias")


class Setup:
    """Builds trainers of one kind.

    Args:
        kind: Its name.
        folders: The models.
        output: Folder for outputs.
        engine: The fixture `built`.
    """

    def __init__(self, kind: str, folders: Folders, output: Path, engine: Callable[..., Any]) -> None:
        self.kind, self._folders, self.output, self._engine = kind, folders, output, engine

    def given(self, *, loaded: bool = False) -> Policy:
        """The same at each call. `loaded`: the adapter is one that has been trained before."""
        torch.manual_seed(1)
        policy = KINDS[self.kind](self._folders)
        if loaded:
            model = get_peft_model(whole(policy.model), policy.config)
            with torch.no_grad():
                for parameter in (tensor for tensor in model.parameters() if tensor.requires_grad):
                    parameter.add_(0.1 * torch.randn(parameter.shape))
            return Policy(model, None, policy.options)
        return policy

    def trainer(self, *, loaded: bool = False, seed: int = 2, build: dict[str, Any] | None = None, **more: Any) -> Any:
        """A trainer, whose new adapter begins with what `seed` draws."""
        model, config, options = self.given(loaded=loaded)
        build = {"peft_config": config, **(build or {})}
        torch.manual_seed(seed)
        return tiny.trainer(model, self.output / str(seed), build=build, **{**options, **more})

    def with_engine(self, **more: Any) -> Any:
        model, config, options = self.given()
        torch.manual_seed(2)
        return self._engine(model, build={"peft_config": config}, **{**options, **more})

    def logits_given(self, *, loaded: bool) -> Tensor:
        return logits(whole(self.given(loaded=loaded).model))


def whole(model: Any) -> Any:
    return plain(model) if isinstance(model, Path) else model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """In training mode, where bitsandbytes leaves the weights alone. The models have no dropout."""
    return model.train()(input_ids=IDS).logits.clone()


def of_policy(trainer: Any) -> dict[str, Any]:
    """Return the trained tensors outside a vision tower, to which text passes no gradient."""
    others = {"ref", "value", "reward", "visual"}
    every = trainer.model.named_parameters()
    return {name: tensor for name, tensor in every if tensor.requires_grad and others.isdisjoint(name.split("."))}


def train(trainer: Any) -> None:
    """Train, and check that all of the policy learns."""
    before = critics.snapshot(of_policy(trainer))
    trainer.train()
    after = of_policy(trainer)
    assert before and before.keys() == after.keys()
    assert [name for name, tensor in before.items() if torch.equal(tensor, after[name])] == []


# columns


def of_reference(model: Any) -> Tensor:
    """Logits of what TRL takes as the reference. A warning that a cell counts must come from the trainer itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with use_adapter(model, "ref" if "ref" in model.peft_config else None):
            return logits(model)


def kl_of(trainer: Any) -> list[float]:
    found = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert all(map(math.isfinite, found))
    return found


def reference(setup: Setup) -> str:
    """The reference is the model that was given, and stays so while the policy learns."""
    found = set()
    for loaded in (False,) if setup.given().config is None else (False, True):
        if loaded and setup.kind == "bias":
            with pytest.raises(ValueError, match="supports only 1 adapter with bias"):  # PEFT, of TRL's reference
                setup.trainer(loaded=True, beta=0.04)
            continue
        trainer = setup.trainer(loaded=loaded, beta=0.04, max_steps=4)
        before = of_reference(trainer.model)
        torch.testing.assert_close(before, setup.logits_given(loaded=loaded), rtol=1e-4, atol=1e-4)
        train(trainer)
        assert (logits(trainer.model) - before).abs().max() > 0.01
        found.add(torch.equal(of_reference(trainer.model), before))
    return "✓" if found == {True} else "moves, warned"


def moving_reference(setup: Setup) -> str:
    """Right after a refresh, policy and reference are one."""
    options = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 4}
    trainer = setup.trainer(beta=0.04, max_steps=6, **options)
    train(trainer)
    kl = kl_of(trainer)
    assert [refresh.step for refresh in trainer.reference_refreshes] == [4] and len(kl) == 6
    assert kl[4] == pytest.approx(0, abs=1e-6) and min(kl[3], kl[5]) > 1e-5
    return "✓"


def kl_in_the_reward(setup: Setup) -> str:
    """It begins at 0 and grows, from a reference that stays."""
    trainer = setup.trainer(kl_coef=0.05, max_steps=9, **PPO)
    before = of_reference(trainer.model)
    train(trainer)
    kl = kl_of(trainer)  # one a rollout
    assert len(kl) == 3 and kl[0] == pytest.approx(0, abs=1e-6) and min(kl[1:]) > 1e-3
    return "✓" if torch.equal(of_reference(trainer.model), before) else "moves, warned"


def apart(trainer: Any, scorer: Any) -> str:
    """A scorer's gradient reaches nothing else, and its scores do not change with the policy."""
    samples = trainer.rollout([{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"]])
    trainer.model.train()
    parameters = {name: each for name, each in scorer.named_parameters() if "visual" not in name}
    for parameter in parameters.values():
        parameter.requires_grad_(True).data.add_(0.1)
    with trainer.until_backward_ends():
        before = trainer.values(scorer, samples)
        before.square().sum().backward()
    graded = {id(each) for each in trainer.model.parameters() if each.grad is not None}
    assert graded <= {id(each) for each in parameters.values()} and before.isfinite().all()
    assert [name for name, each in parameters.items() if each.grad is None or not each.grad.any()] == []
    with torch.no_grad():
        for parameter in of_policy(trainer).values():
            parameter.add_(0.1)
        return "✓" if torch.equal(trainer.values(scorer, samples), before) else "moves, warned"


def critic(setup: Setup) -> str:
    """All of it learns, and its values leave 0 for the rewards, which are positive."""
    trainer = setup.trainer(kl_coef=0.0, max_steps=5, **PPO)
    before = critics.snapshot(dict(trainer.critic.named_parameters()))
    train(trainer)
    after = dict(trainer.critic.named_parameters())
    assert [name for name in before if torch.equal(before[name], after[name]) and "visual" not in name] == []
    samples = trainer.rollout([{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"]])
    assert samples["values"][samples["completion_mask"].bool()].mean() > 0
    return apart(trainer, trainer.critic)


def reward_model(setup: Setup) -> str:
    trainer = setup.trainer(build={"reward_funcs": [RewardAdapter(), tiny.reward]}, max_steps=5)
    trainer.reward_model.head.weight.data.fill_(0.1)
    train(trainer)
    scores = [row["rewards/reward_model/mean"] for row in trainer.state.log_history if "reward" in row]
    assert len(scores) == 2 and all(map(math.isfinite, scores)) and all(scores)
    return apart(trainer, trainer.reward_model)


def resume(setup: Setup) -> str:
    """To the bit, in a trainer whose new adapter began with other numbers."""
    beta = 0.0 if setup.kind in NOT_DEFAULT else 0.04
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "beta": beta}
    first = setup.trainer(**options)
    train(first)
    again = setup.trainer(seed=3, **options)
    again.train(resume_from_checkpoint=str(setup.output / "2" / "checkpoint-4"))
    states = (trainer.model.state_dict().items() for trainer in (again, first))
    found, expected = ({name: tensor for name, tensor in state if isinstance(tensor, Tensor)} for state in states)
    assert critics.same(found, expected)
    return "✓"


def vllm(setup: Setup) -> str:
    """The engine has the policy's log-probs at each rollout and, if weights are merged, those that PEFT merges."""
    trainer, llm = setup.with_engine(max_steps=8, beta=0.0)
    model = trainer.model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name and parameter.requires_grad:  # text alone would leave it at 0
                parameter.add_(0.1)
    frozen = critics.snapshot({name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad})
    before = critics.snapshot(of_policy(trainer))
    found = differences(trainer)
    assert len(found) == 2 and within(max(found), ROUNDING)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in of_policy(trainer).items())
    is_worn = any(not torch.equal(tensor, model.get_parameter(name)) for name, tensor in frozen.items())
    if llm.adapters:
        assert not llm.weights and not is_worn
        return "adapter"
    trainer.vllm_generation.sync_weights()
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    torch.testing.assert_close(dict(llm.base.state_dict()), dict(expected), rtol=1e-4, atol=1e-4)
    return "merged in place" if is_worn else "merged"


COLUMNS: dict[str, Callable[[Setup], str]] = {
    "reference": reference,
    "moving reference": moving_reference,
    "KL in the reward": kl_in_the_reward,
    "critic": critic,
    "reward model": reward_model,
    "resume": resume,
    "vLLM": vllm,
}


# reasons

NOT_LORA, NOT_DEFAULT, OF_BASE = ("IA3", "LoHa", "VeRA"), ("named adapter", "two adapters"), ("trained norms", "bias")
NOT_PLAIN = ("DoRA", "trained tokens", "bias", "modules_to_save", "target parameters")
# a part of the message -> column -> kinds
REASONS: dict[str, dict[str, tuple[str, ...]]] = {
    "parameters of the base train beside the adapter": {
        **dict.fromkeys(("reference", "KL in the reward", "moving reference"), OF_BASE),
    },
    "parameters of the base train with the policy": dict.fromkeys(("critic", "reward model"), OF_BASE),
    "must both be LoRA": dict.fromkeys(("KL in the reward", "critic", "reward model"), NOT_LORA),
    "peft_type='VERA' cannot follow the policy as a reference": {"moving reference": ("VeRA",)},
    "the reference is made from one named 'default'": dict.fromkeys(
        ("reference", "moving reference", "KL in the reward"), NOT_DEFAULT
    ),
    "transformers loads the first only": {"resume": ("two adapters",)},
    "vLLM does not serve LoRA with": {"vLLM": NOT_PLAIN},
    "PEFT has changed the base": {"vLLM": ("PiSSA", "OLoRA", "CorDA")},
    "of the base trains beside the adapter": {"vLLM": ("trained norms",)},
    "vLLM serves LoRA in the language model only": {"vLLM": ("towers",)},
    "each push to vLLM changes the policy's base by rounding": {"vLLM": NOT_LORA},
    "2 adapters are active": {"vLLM": ("two adapters",)},
    "is not that of the checkpoint": {"vLLM": ("merged base",)},
    "vLLM does not quantise its base to 8 bits": {"vLLM": ("int8",)},
}


def cell(setup: Setup, column: str) -> str:
    """Return the text of a cell, with the number of the reason if it is not what a user asked for."""
    reasons = [text for text, places in REASONS.items() if setup.kind in places.get(column, ())]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        try:
            found = COLUMNS[column](setup)
        except ValueError as error:
            found, told = "✗", str(error)
        else:
            told = " ".join(str(each.message) for each in said if issubclass(each.category, UserWarning))
    if found in ("✓", "adapter"):
        assert not reasons
        return found
    assert len(reasons) == 1 and reasons[0] in told, f"{column}: {found}: {told}"
    return f"{found} ({1 + [*REASONS].index(reasons[0])})"


# the page

FOUND: dict[str, list[str]] = {}


def rows(page: str) -> dict[str, list[str]]:
    """The cells of the table by the first of their row."""
    made = page.split(BEGIN)[1].split(END)[0].splitlines()
    cells = ([text.strip() for text in each.split("|")[1:-1]] for each in made if each.startswith("|"))
    return {first: others for first, *others in cells}


def notes() -> str:
    return "\n".join(f"{number}. `{text}`" for number, text in enumerate(REASONS, 1))


def written(page: str) -> str:
    """The page with what has been found."""
    cells = [["policy", *COLUMNS], *([kind, *FOUND[kind]] for kind in KINDS)]
    header, *lines = (f"| {' | '.join(row)} |" for row in cells)
    table = "\n".join([header, "|---" * len(cells[0]) + "|", *lines])
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table}\n\n{notes()}{END}{rest.split(END)[1]}"


@pytest.fixture(scope="session")
def folders(models: Folders, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    towers = tmp_path_factory.mktemp("models") / "towers"
    torch.manual_seed(0)
    model = qwen()
    model.generation_config.eos_token_id = tiny.SIZES["eos_token_id"]
    model.save_pretrained(towers)
    return {**models, "wide": wide, "towers": towers}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_a_kind_of_policy_does_what_the_page_says(
    kind: str, folders: Folders, tmp_path: Path, built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not: python -m tests.adapters.test_policies --write."""
    if kind == "towers":
        monkeypatch.setattr(test_served, "load", lambda folder, _: plain(Path(folder)).train())
    FOUND[kind] = [cell(Setup(kind, folders, tmp_path / column, built), column) for column in COLUMNS]
    assert rows(PAGE.read_text()).get(kind) == FOUND[kind]


def test_the_page_has_each_kind_and_each_reason() -> None:
    page = PAGE.read_text()
    found = rows(page)
    assert [*found] == ["policy", "---", *KINDS] and found["policy"] == [*COLUMNS]
    assert f"\n\n{notes()}{END}" in page
    for n, column in enumerate(COLUMNS):
        reasoned = {kind for kind in KINDS if "(" in found[kind][n]}
        assert reasoned == {kind for places in REASONS.values() for kind in places.get(column, ())}, column


if __name__ == "__main__":
    pytest.main([__file__, "-q", "-m", "slow or not slow", "-k", "does_what_the_page_says"])
    run = sys.modules["tests.adapters.test_policies"]  # not this one
    if run.FOUND.keys() != KINDS.keys():
        sys.exit(f"There is no row for {', '.join(KINDS.keys() - run.FOUND.keys())}: see the failures.")
    now = run.written(PAGE.read_text())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(now)
    else:
        sys.stdout.write(now.split(BEGIN)[1].split(END)[0])
