"""An engine in the trainer's process that is sent adapters: PEFT reads the files, on a base of its own."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import BitsAndBytesConfig
from trl.generation import vllm_generation

from tests.tools import engines, tiny
from tests.tools import wide as wide_model

NF4 = {**wide_model.NF4, "bnb_4bit_use_double_quant": True}
# of the same weights in float32, one sequence at a time instead of a packed batch
ROUNDING = 1e-4
ENGINE: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "beta": 0.04, "learning_rate": 1e-2}


class Request(NamedTuple):
    """vLLM's `LoRARequest`."""

    name: str
    number: int
    path: str


class LLM:
    """vLLM's class of that name, as far as TRL and adapters use it."""

    def __init__(self, asked: dict[str, Any], refuses: str | None) -> None:
        self.asked, self.refuses = asked, refuses
        self.base = load(asked["model"], asked["quantization"])
        self.adapters: list[Request] = []
        self.answered: list[Request | None] = []
        self.weights: dict[str, Tensor] = {}
        self.slept: list[int] = []
        self.is_awake = True
        self.manager = SimpleNamespace(modules=dict.fromkeys(["qkv_proj"]), get_adapter=self.get_adapter)
        runner = SimpleNamespace(model=self, lora_manager=SimpleNamespace(_adapter_manager=self.manager))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        config = SimpleNamespace(max_model_len=64)
        self.llm_engine = SimpleNamespace(model_executor=executor, add_lora=self.add_lora, model_config=config)

    def add_lora(self, request: Request) -> None:
        assert self.is_awake
        if self.refuses == "add_lora":
            raise ValueError("expected target modules in {'q_proj'}")
        adapter = LoraConfig.from_pretrained(request.path)
        assert adapter.r <= self.asked["max_lora_rank"]
        base = load(self.asked["model"], self.asked["quantization"])
        self.served = PeftModel.from_pretrained(base, request.path).train()  # bitsandbytes repacks a base in eval mode
        for module in self.served.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()
        self.adapters.append(request)

    def get_adapter(self, number: int) -> Any:
        """Keep of an adapter what vLLM keeps: joined projections, and not the modules that it only logs."""
        names = ["qkv_proj"] if self.refuses is None else ["qkv_proj", self.refuses]
        return SimpleNamespace(loras=dict.fromkeys(names))

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.weights |= {name: value.detach().clone() for name, value in weights}
        self.base.load_state_dict(self.weights, strict=False)

    def reset_prefix_cache(self) -> None: ...

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.slept.append(level)
        self.is_awake = False

    def wake_up(self, tags: list[str]) -> None:
        self.is_awake = True

    def generate(
        self, prompts: list[Any], sampling_params: Any, use_tqdm: bool, lora_request: Request | None = None
    ) -> list[Any]:
        self.answered.append(lora_request)
        assert lora_request is None or lora_request == self.adapters[-1]
        model = self.base if lora_request is None else self.served
        is_scored = getattr(sampling_params, "logprobs", None) is not None
        return [self._answer(model, prompt["prompt_token_ids"], is_scored) for prompt in prompts]

    @torch.no_grad()
    def _answer(self, model: Any, prompt: list[int], is_scored: bool) -> Any:
        ids = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=6, do_sample=True, top_k=0)[0]
        scores = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        tokens = ids[len(prompt) :].tolist()
        scored = zip(tokens, scores[range(len(tokens)), tokens].tolist(), strict=True)
        logprobs = [{token: SimpleNamespace(logprob=score, rank=1)} for token, score in scored]
        completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs if is_scored else None)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])


def requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put vLLM's class of requests where it is imported from."""
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(LoRARequest=Request))


def load(folder: Any, quantization: str | None, **asked: Any) -> Any:
    options: dict[str, Any] = {}
    if quantization:
        options = {"quantization_config": BitsAndBytesConfig(**{**NF4, **asked}), "device_map": "cpu"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).train()


@pytest.fixture
def built(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, LLM]]:
    """Builds a trainer, and the engine beside it."""
    made: list[LLM] = []
    requests(monkeypatch)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda **_: True)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)

    def trainer(
        model: Any = wide,
        refuses: str | None = None,
        lora: dict[str, Any] | None = None,
        build: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[Any, LLM]:
        def llm(**asked: Any) -> LLM:
            made.append(LLM(asked, refuses if "enable_lora" in asked else None))
            return made[-1]

        engines.alone(monkeypatch)  # a trainer that was refused has left its rank in the environment
        monkeypatch.setattr(vllm_generation, "LLM", llm, raising=False)
        config = LoraConfig(**{**tiny.LORA, **(lora or {})})
        ours = tiny.trainer(model, tmp_path, build={"peft_config": config, **(build or {})}, **{**ENGINE, **options})
        return ours, made[-1]

    return trainer


def differences(trainer: Any) -> list[float]:
    """Train, and compare log-probs of each rollout: the engine's and the policy's. The largest differences."""
    found: list[float] = []

    class Compared(type(trainer)):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            samples = super()._generate_and_score_completions(inputs)
            ids = torch.cat([samples["prompt_ids"], samples["completion_ids"]], dim=1)
            mask = torch.cat([samples["prompt_mask"], samples["completion_mask"]], dim=1)
            with torch.no_grad():
                logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            scores = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            scores = scores[:, samples["prompt_ids"].size(1) - 1 :]
            kept = samples["completion_mask"].bool()
            found.append((scores - samples["sampling_per_token_logps"])[kept].abs().max().item())
            return samples

    trainer.__class__ = Compared
    trainer.train()
    return found
