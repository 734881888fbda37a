"""A vLLM engine that gets the adapter alone, on CPU: after each sync its log-probs are the policy's.

vLLM makes its groups of processes once, and a mixture of experts needs one more: those tests come before these.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from tests.features.adapters.tools import differences
from tests.features.reference.tools import base_tensors
from tests.tools import engines, tiny
from tests.vllm import cpu
from tests.vllm.tools import LORA, needs_vllm, serving

pytestmark = needs_vllm
# float32 on both sides; the engine adds the adapter's product where the policy does, in another order
ROUNDING = 1e-4
ENGINE: dict[str, Any] = {"use_vllm": True, "learning_rate": 1e-2, "max_completion_length": 12, "beta": 0.04}
COLOCATED = {"vllm_mode": "colocate", "vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.1}


@pytest.fixture
def built(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Builds a trainer with a colocated engine, and says what TRL has asked of it."""
    cpu.take_weights()
    engines.alone(monkeypatch)
    asked: dict[str, Any] = {}

    def llm(**options: Any) -> Any:
        import vllm

        asked.clear()
        asked.update(options)
        small = {"enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 18}
        return vllm.LLM(**{"dtype": "float32", **options, **small, "max_num_batched_tokens": 64, "max_num_seqs": 16})

    def trainer(engine: dict[str, Any] | None = None, **options: Any) -> tuple[Any, dict[str, Any]]:
        monkeypatch.setattr(vllm_generation, "LLM", lambda **keywords: llm(**{**keywords, **(engine or {})}))
        settings = {**ENGINE, **COLOCATED, **options}
        return tiny.trainer(folder, tmp_path, build={"peft_config": LoraConfig(**LORA)}, **settings), asked

    return trainer


@pytest.mark.supports("vllm_adapter_sync", "moving reference, LoRA", on="vLLM colocate")
def test_log_probs_are_the_policys_after_each_sync(built: Callable[..., tuple[Any, dict[str, Any]]]) -> None:
    moving = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 4}
    trainer, asked = built(vllm_adapter_sync=True, max_steps=12, **moving)
    assert asked["enable_lora"] and asked["max_lora_rank"] == 8
    before = [value.clone() for value in base_tensors(trainer.model)]
    found = differences(trainer)
    assert len(found) == 3 and max(found) < ROUNDING
    assert all(torch.equal(*pair) for pair in zip(base_tensors(trainer.model), before, strict=True))
    engine = trainer.vllm_generation.llm.llm_engine
    assert len(engine.list_loras()) == 1


def test_an_adapter_of_which_the_engine_skips_modules_is_merged(
    built: Callable[..., tuple[Any, dict[str, Any]]],
) -> None:
    """vLLM only logs what it skips, also in the towers of a multimodal model."""
    partly = {"lora_target_modules": ["qkv_proj", "o_proj"]}
    skips = r"refuses the adapter: it leaves out 6 of the adapter's modules, such as model.layers.0.mlp.down_proj"
    with pytest.raises(ValueError, match=f"has to serve the adapter alone .*: .*{skips}"):
        built(engine=partly, vllm_adapter_sync=True)
    with pytest.warns(UserWarning, match=skips):
        trainer, _ = built(engine=partly, max_steps=8)
    assert trainer.vllm_generation.active_sync is None
    assert max(differences(trainer)) < ROUNDING


def test_an_engine_in_fp8_serves_the_adapter_and_the_mismatch_is_seen(
    built: Callable[..., tuple[Any, dict[str, Any]]],
) -> None:
    given = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}  # the kind for which vLLM has a kernel for CPU
    trainer, asked = built(vllm_adapter_sync=True, max_steps=12, vllm_engine_kwargs=given)
    assert asked["enable_lora"] and asked["logprobs_mode"] == "processed_logprobs"
    assert len(found := differences(trainer)) == 3 and min(found) > 100 * ROUNDING
    model = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    weights = {name: weight.dtype for name, weight in model.named_parameters() if name.endswith("_layer.weight")}
    assert {dtype for name, dtype in weights.items() if "proj" in name} == {torch.float8_e4m3fn}
    rollouts = [row for row in trainer.state.log_history if "sampling/importance_sampling_ratio/min" in row]
    assert len(rollouts) == 3  # of which `engine_check` has passed the first
    for row in rollouts:
        assert row["sampling/importance_sampling_ratio/min"] < 1 < row["sampling/importance_sampling_ratio/max"]
        assert row["mismatch/kl"] > 1e-4  # below 1e-10 in float32


def test_an_argument_that_vllm_does_not_know_is_refused(built: Callable[..., tuple[Any, dict[str, Any]]]) -> None:
    with pytest.raises(ValueError, match=r"^vllm_engine_kwargs={'max_num_seq': 8}: vLLM cannot .*'max_num_seq'"):
        built(vllm_engine_kwargs={"max_num_seq": 8})


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of the same shape, surer of its tokens."""
    path = tmp_path_factory.mktemp("other")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    model.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "PPO"])
def test_an_engine_with_the_policys_base_passes_the_check_and_one_with_another_does_not(
    built: Callable[..., tuple[Any, dict[str, Any]]], other: str, method: str
) -> None:
    """On-policy and without TRL's correction, where TRL scores no old policy."""
    options = {"method": method, "beta": 0.0, "steps_per_generation": 1, "per_device_train_batch_size": 16}
    if method != "RLOO":
        options["vllm_importance_sampling_correction"] = False
    trainer, _ = built(max_steps=2, engine_check=1e-6, **options)
    trainer.train()
    assert trainer.state.global_step == 2
    trainer, asked = built(engine={"model": other}, max_steps=2, **options)
    assert asked["model"] == other and asked["enable_lora"]
    with pytest.raises(
        ValueError, match=r"engine_check=1.0: engine and policy differ by a mean k3 of \S+ nats per token"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--enable-lora", "--max-lora-rank", "8", "--logprobs-mode", "processed_logprobs"]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    yield from serving(folder, tmp_path_factory.mktemp("server"), flags, environment)


@pytest.mark.supports("vllm_adapter_sync", on="vLLM server")
def test_a_servers_log_probs_are_the_policys_after_each_sync(
    folder: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)  # nccl, for weights
    address = {"vllm_mode": "server", "vllm_server_base_url": url}
    build = {"peft_config": LoraConfig(**LORA)}
    options = {**ENGINE, **address, "vllm_adapter_sync": True, "max_steps": 12}
    trainer = tiny.trainer(folder, tmp_path, build=build, **options)
    client = trainer.vllm_generation.vllm_client
    found = differences(trainer)
    assert len(found) == 3 and max(found) < ROUNDING
    served = [each["id"] for each in client._get(f"{url}/v1/models")["data"]]
    assert served == [str(folder), client.model]
    assert client.model.startswith("trl-steady-") and client.model.endswith("-4")
    assert len(list(tmp_path.glob("_vllm-adapter-*"))) == 1
