"""With a vLLM server: what a quantised policy sends, and what the log-probs that come back decide and show."""

import json
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

import trl_steady
from tests.features.reference.tools import base_tensors
from tests.tools import engines, tiny
from tests.tools import wide as wide_model
from tests.tools.cases import cases
from trl_steady.features.router_replay.feature import ROUTES
from trl_steady.features.sampling_mask.feature import SAMPLING_MASK

engine = engines.engine


class Server:
    """Stands in for TRL's client of a vLLM server: an unquantised model that takes what it is sent and samples."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.syncs: list[dict[str, Tensor]] = []

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], weights: Iterator[tuple[str, Tensor]]):
        sent = {name: weight.detach().clone() for name, weight in weights}
        assert [(n, str(w.dtype).removeprefix("torch."), list(w.shape)) for n, w in sent.items()] == metadata
        missing, unexpected = self.model.load_state_dict(sent, strict=False)
        assert not unexpected and not missing
        self.syncs.append(sent)

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}


@pytest.fixture
def server(wide: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """TRL's own `sync_weights` runs; the engine behind it is a `Server`."""
    engine = Server(wide)

    def connect(generation: Any) -> None:
        generation.vllm_client = engine

    def generate(_: Any, prompts: list[list[int]], num_generations: int, **__: Any) -> tuple[Any, ...]:
        completions, logprobs = [], []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = engine.model.generate(
                ids, do_sample=True, max_new_tokens=8, output_logits=True, return_dict_in_generate=True, top_k=0
            )
            tokens = out.sequences[0, len(prompt) :]
            logits = torch.cat(out.logits).log_softmax(-1)
            completions.append(tokens.tolist())
            logprobs.append([[value] for value in logits[range(len(tokens)), tokens].tolist()])
        return prompts, completions, logprobs, None

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", connect)
    monkeypatch.setattr(VLLMGeneration, "generate", generate)
    return engine


VLLM: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "beta": 0.04, "max_steps": 18}
MOVING = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 4}


@pytest.mark.supports("quantised base", "adapter_dtype", on="vLLM server", only="stand-in")
@pytest.mark.supports("moving reference, quantised base", on="vLLM server", only="stand-in")
def test_the_engine_gets_base_plus_delta_and_the_base_stays(wide: Path, tmp_path: Path, server: Server) -> None:
    """18 steps with 5 syncs and 4 refreshes; each sync against an independent computation."""
    trainer = tiny.trainer(
        wide_model.load(wide, "nf4"), tmp_path, lora=True, adapter_dtype="float32", **VLLM, **MOVING
    )
    before = [value.clone() for value in base_tensors(trainer.model)]
    layer = trainer.model.base_model.model.model.layers[1].self_attn.v_proj
    quantised = layer.base_layer.weight
    expected: list[Tensor] = []

    class Witness(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 4 == 0:  # a rollout comes
                delta = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight  # lora_alpha / r = 8 / 4
                expected.append((dequantize_4bit(quantised, quantised.quant_state) + delta).detach())

    trainer.add_callback(Witness())
    trainer.train()
    assert len(server.syncs) == len(expected) == 5
    assert [step for step, _, _ in trainer.reference_refreshes] == list(range(4, 18, 4))
    for sent, weight in zip(server.syncs, expected, strict=True):
        torch.testing.assert_close(sent["model.layers.1.self_attn.v_proj.weight"], weight, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected[0], expected[-1])
    after = base_tensors(trainer.model)
    assert len(after) == len(before) and all(torch.equal(*pair) for pair in zip(after, before, strict=True))
    # what the engine samples from is the policy, to the rounding of the sampler's weights
    name = "sampling/sampling_logp_difference/mean"
    drift = [row[name] for row in tiny.history(trainer) if name in row]
    assert len(drift) == 5 and max(drift) < 0.02


@pytest.mark.supports("moving reference, LoRA", on="vLLM server", only="stand-in")
def test_the_references_modules_are_not_sent(wide: Path, tmp_path: Path, server: Server) -> None:
    """On an unquantised base TRL merges itself; it would send the reference's copy under a name no engine knows."""
    config = LoraConfig(**{**tiny.LORA, "modules_to_save": ["input_layernorm"]})
    options = {**VLLM, **MOVING, "max_steps": 5}
    trainer = tiny.trainer(wide, tmp_path, build={"peft_config": config}, **options)
    trainer.train()
    assert len(server.syncs) == 2
    norm = trainer.model.base_model.model.model.layers[0].input_layernorm.modules_to_save["ref"].weight
    assert torch.equal(server.syncs[1]["model.layers.0.input_layernorm.weight"], norm)


@pytest.mark.refuses("quantised base", on="vLLM colocate", where="with `vllm_adapter_sync=False`")
def test_colocate_on_a_quantised_base_gets_no_merged_weights(wide: Path, tmp_path: Path, server: Server) -> None:
    options = {**VLLM, "vllm_mode": "colocate", "vllm_adapter_sync": False}
    with pytest.raises(ValueError, match=r"vllm_mode='colocate' quantises the engine.*set vllm_mode='server'"):
        tiny.trainer(wide_model.load(wide, "nf4"), tmp_path, lora=True, **options)


def test_with_an_engine_trls_losses_are_trls_and_the_mismatch_is_logged(
    wide: Path, tmp_path: Path, server: Server
) -> None:
    """An engine in bf16, TRL's correction on: the same parameters and metrics, and more of the latter."""
    server.model.to(torch.bfloat16)
    options = {**VLLM, "max_steps": 6, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}
    theirs, ours = (
        tiny.train(tiny.trainer(wide, tmp_path, ours=ours, padded=True, **options)) for ours in (False, True)
    )
    for expected_row, row in zip(tiny.history(theirs), tiny.history(ours), strict=True):
        assert expected_row.items() <= row.items()
    expected, after = tiny.parameters(theirs), tiny.parameters(ours)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    for row in tiny.history(ours)[:-1]:
        assert 0 < row["mismatch/kl"] < 0.05 and row["mismatch/effective_sample_size"] > 0.9
        assert row["mismatch/log_ratio_q01"] < 0 < row["mismatch/log_ratio_q99"]


@pytest.mark.slow
@pytest.mark.supports("gspo", "gspo_token", "KL corrections", "masks", on="vLLM server", only="stand-in")
@pytest.mark.parametrize("loss_type", cases(("gspo", "grpo", "gspo_token"), fast=1))
def test_an_engines_log_probs_decide_masks_and_correct_the_kl(
    wide: Path, tmp_path: Path, server: Server, loss_type: str
) -> None:
    """Every update is on-policy, so that nothing but the engine's rounding is left to see."""
    server.model.to(torch.bfloat16)
    options = {**VLLM, "max_steps": 3, "loss_type": loss_type, "steps_per_generation": 1, "optim": "sgd"}
    options |= {"vllm_importance_sampling_correction": False, "per_device_train_batch_size": 16}
    plain = tiny.train(tiny.trainer(wide, tmp_path, **options))
    sampler = tiny.train(tiny.trainer(wide, tmp_path, kl_ratio_denominator="sampler", **options))
    masks = {"geometric_mask_range": (0.999, 1.001), "off_policy_mask_threshold": 0.0, "token_veto_threshold": 0.99}
    masked = tiny.train(tiny.trainer(wide, tmp_path, **masks, **options))
    ends = [tiny.parameters(trained) for trained in (plain, sampler, masked)]
    for other in ends[1:]:
        assert any(not torch.equal(other[name], ends[0][name]) for name in other)
    for mask in ("off_policy", "geometric", "veto"):
        assert any(0 < row[f"dropped/{mask}"] < 1 for row in tiny.history(masked)[:-1]), mask


FREE = {"max_num_batched_tokens", "max_num_seqs", "quantization", "seed"}
"""Arguments that TRL gives to a colocated engine, and that a user may give in their place."""


@pytest.fixture
def colocated(models: dict[str, Path], tmp_path: Path, engine: engines.Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a trainer with an engine in this process."""
    engines.colocate(engine, monkeypatch)

    def built(**options: Any) -> Any:
        engines.alone(monkeypatch)
        options = {**engines.UNCHECKED, "vllm_mode": "colocate", **options}
        return tiny.trainer(models["moe"], tmp_path, **options)

    return built


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("method", ["GRPO", "PPO", "RLOO"])
def test_a_users_arguments_of_an_engine_win_over_trls(colocated: Any, method: str) -> None:
    llm, replay = vllm_generation.LLM, {"method": method, "router_replay": "R3"}
    trls = colocated(**replay).vllm_generation.llm.asked
    assert trls["max_num_batched_tokens"] == 4096
    given = {"max_num_batched_tokens": 8192, "enforce_eager": True}
    for written in (given, json.dumps(given)):
        assert colocated(**replay, vllm_engine_kwargs=written).vllm_generation.llm.asked == {**trls, **given}
    assert vllm_generation.LLM is llm


def test_arguments_that_a_trainer_decides_are_refused(colocated: Any, tmp_path: Path) -> None:
    trls = colocated().vllm_generation.llm.asked
    assert trls.keys() > FREE
    flags = {ROUTES.flag, SAMPLING_MASK.flag, "enable_lora", "max_lora_rank", "max_loras"}
    several = {"pipeline_parallel_size", "data_parallel_size"}
    for name in {*trls, *flags, *several} - FREE:
        with pytest.raises(ValueError, match=rf"vllm_engine_kwargs has {name}=1, .* Leave it out") as refused:
            colocated(vllm_engine_kwargs={name: 1})
        instead = str(refused.value).partition(", and set ")[2].rstrip(".")
        assert not instead or hasattr(trl_steady.RLOOConfig, instead)


def test_an_argument_that_vllm_does_not_know_is_refused(colocated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, known = vllm_generation.LLM, make_dataclass("EngineArgs", colocated().vllm_generation.llm.asked)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **asked: known(**asked) and llm(**asked))
    colocated(vllm_engine_kwargs={"max_num_seqs": 8})
    said = r"^vllm_engine_kwargs={'max_num_seq': 8}: vLLM cannot be built\. Change what it names, .*'max_num_seq'$"
    with pytest.raises(ValueError, match=said):
        colocated(vllm_engine_kwargs={"max_num_seq": 8})


def test_an_engine_that_cannot_return_routes_names_the_option(colocated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From vLLM 0.31 on, an engine refuses the flag under Model Runner V1 and without prefix caching."""
    llm = vllm_generation.LLM

    def build(**asked: Any) -> Any:
        if asked.get(ROUTES.flag) and not asked.get("enable_prefix_caching", True):
            raise ValueError("AuxOutput Connector requires prefix caching.")
        return llm(**asked)

    monkeypatch.setattr(vllm_generation, "LLM", build)
    without = {"enable_prefix_caching": False}
    colocated(router_replay="R2", vllm_engine_kwargs=without)
    said = r"^router_replay='R3', vllm_engine_kwargs={.*}: vLLM cannot be built\. .*: AuxOutput .* prefix caching"
    with pytest.raises(ValueError, match=said):
        colocated(router_replay="R3", vllm_engine_kwargs=without)
    assert colocated(router_replay="R3").vllm_generation.llm.asked[ROUTES.flag]
