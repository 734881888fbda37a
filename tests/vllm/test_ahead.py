"""A vLLM server on CPU that generates a rollout ahead: its answers are of the policy before, and it may be killed."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from tests.tools import engines, tiny
from tests.vllm.tools import LORA, needs_vllm, serving
from trl_steady.trl_bridge.vllm import SteadyGeneration

pytestmark = needs_vllm
FLAGS = ["--enable-lora", "--max-lora-rank", "8", "--logprobs-mode", "processed_logprobs"]
TAKES_ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
# float32 on both sides; the engine adds the adapter's product where the policy does, in another order
ROUNDING = 1e-4
OPTIONS: dict[str, Any] = {
    **{"use_vllm": True, "vllm_mode": "server", "vllm_adapter_sync": True, "async_generate": True},
    **{"per_device_train_batch_size": 16, "steps_per_generation": 1, "max_steps": 6, "engine_check": None},
}
# so long that a generation takes longer than an update of the tiny policy, and is not over when the server is killed
LONG: dict[str, Any] = {"max_completion_length": 64, "generation_kwargs": {"ignore_eos": True}}


@pytest.fixture
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Starts a server, and gives its URL. All servers end with the test."""
    begun: list[Iterator[str]] = []

    def start() -> str:
        begun.append(serving(folder, tmp_path_factory.mktemp("server"), FLAGS, TAKES_ADAPTERS))
        return next(begun[-1])

    yield start
    for each in begun:
        each.close()  # type: ignore[attr-defined]


@pytest.fixture
def built(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds a trainer that asks a server."""
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)  # nccl, for weights

    def trainer(url: str, **options: Any) -> Any:
        build = {"peft_config": LoraConfig(**LORA), "train_dataset": tiny.dataset(32)}  # one epoch
        return tiny.trainer(folder, tmp_path, build=build, **{**OPTIONS, "vllm_server_base_url": url, **options})

    return trainer


@pytest.mark.filterwarnings("ignore:sampling leaves tokens out:UserWarning")
def test_greedy_answers_are_those_of_the_policy_one_rollout_before(
    server: Callable[[], str], built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is slower than the trainer. The entropy bonus moves the policy: rewards of equal answers do not."""
    url, asked = server(), list[tuple[str, bool]]()
    send = SteadyGeneration.send_request

    def noted(self: SteadyGeneration, client: VLLMClient, request: Any) -> Any:
        result = send(self, client, request)
        loaded = [each["id"] for each in client._get(f"{url}/v1/models")["data"]]
        asked.append((client.model, client.model in loaded))
        return result

    monkeypatch.setattr(SteadyGeneration, "send_request", noted)
    trainer = built(url, top_k=1, entropy_coef=1.0, learning_rate=3e-2, **LONG)
    # for each rollout the adapter as it began, and the rollout
    found: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    class Kept(type(trainer)):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            adapter = {name: value.clone() for name, value in get_peft_model_state_dict(self.model).items()}
            found.append((adapter, super()._generate_and_score_completions(inputs)))
            return found[-1][1]

    trainer.__class__ = Kept
    trainer.train()

    def below_best(adapter: dict[str, Tensor], samples: dict[str, Tensor]) -> Tensor:
        """How far the logit of each token of the answers lies below the largest one: 0 if the choice is greedy."""
        set_peft_model_state_dict(trainer.model, adapter)
        ids = torch.cat([samples["prompt_ids"], samples["completion_ids"]], dim=1)
        mask = torch.cat([samples["prompt_mask"], samples["completion_mask"]], dim=1)
        with torch.no_grad():
            logits = trainer.model.eval()(input_ids=ids, attention_mask=mask).logits.float()
        logits = logits[:, samples["prompt_ids"].size(1) - 1 : -1]
        chosen = logits.gather(-1, samples["completion_ids"][..., None]).squeeze(-1)
        return (logits.amax(-1) - chosen)[samples["completion_mask"].bool()]

    adapters, rollouts = zip(*found, strict=True)
    assert len(found) == 6
    of_versions = zip([adapters[0], *adapters[:-1]], rollouts, strict=True)
    assert max(below_best(*each).max() for each in of_versions) < ROUNDING
    newer = [below_best(*each) for each in found[1:]]
    assert sum(gaps.max() > 100 * ROUNDING for gaps in newer) >= 4  # so that one rollout's lag is seen
    behind = [row["async/versions_behind"] for row in tiny.history(trainer) if "loss" in row]
    assert behind == [0, 1, 1, 1, 1, 1]
    names, loaded = zip(*asked, strict=True)
    assert all(loaded) and len(names) == 6
    assert names[0] == names[1] and len(set(names)) == 5  # the first version answers twice


def test_a_server_that_is_killed_ends_the_training_which_resumes_with_another_server(
    server: Callable[[], str], built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.without_pauses(monkeypatch)  # TRL's client would try for a minute
    url, asked, killed = server(), list[int](), list[float]()
    (process,) = (each for each in psutil.Process().children() if url.rsplit(":", 1)[1] in each.cmdline())
    send = SteadyGeneration.send_request

    def kill() -> None:
        killed.append(time.monotonic())
        os.killpg(process.pid, signal.SIGKILL)

    def noted(self: SteadyGeneration, client: VLLMClient, request: Any) -> Any:
        asked.append(len(killed))
        if len(asked) == 4:
            os.killpg(process.pid, signal.SIGSTOP)  # so that it does not answer before
            threading.Timer(0.5, kill).start()
        return send(self, client, request)

    monkeypatch.setattr(SteadyGeneration, "send_request", noted)
    saves = {"save_strategy": "steps", "save_steps": 2}
    trainer = built(url, **LONG, **saves)
    with pytest.raises(RuntimeError, match=r"^async_generate=True: the server has failed at step 3, asked"):
        trainer.train()
    assert asked == [0, 0, 0, 0] and trainer.state.global_step == 3
    assert time.monotonic() - killed[0] < 120
    again = built(server(), **LONG, **saves)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    behind = [row["async/versions_behind"] for row in tiny.history(again) if "loss" in row]
    assert behind[2:] == [1, 1, 1, 1] and len(asked) == 4 + 3  # the third rollout's answers come from the checkpoint
