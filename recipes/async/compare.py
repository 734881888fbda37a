"""Compare seconds per step without and with `async_generate`: a vLLM server on one core, the trainer on another.

python recipes/async/compare.py outputs/smollm2-135m
"""

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl.generation.vllm_client import VLLMClient

from trl_steady import GRPOConfig, GRPOTrainer

SERVER_CORE, TRAINER_CORE = 0, 1
STEPS, WARM_UP = 8, 2
OUTPUT = Path("outputs/async")
SETTINGS: dict[str, Any] = {
    **{"use_vllm": True, "vllm_mode": "server", "vllm_adapter_sync": True, "use_cpu": True, "bf16": False},
    **{"per_device_train_batch_size": 4, "steps_per_generation": 1, "num_generations": 4, "learning_rate": 1e-4},
    **{"max_completion_length": 32, "generation_kwargs": {"ignore_eos": True}},  # as long as each other
    **{"logging_steps": 1, "log_line": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
}


@contextlib.contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """Start a vLLM server of a model, which takes adapters, on one core. Yield its URL, and end it in every case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"Starting a vLLM server on core {SERVER_CORE}, in about a minute. Log: {log}", flush=True)
    command = ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    command += ["--enable-lora", "--max-lora-rank", "8", "--logprobs-mode", "processed_logprobs"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(SERVER_CORE), "VLLM_CPU_KVCACHE_SPACE": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the block is left
    with log.open("w") as out:
        options: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT, "env": {**os.environ, **environment}}
        server = subprocess.Popen(command, process_group=0, **options)  # a group, which ends with all its processes
    try:
        while True:
            with contextlib.suppress(OSError):  # it is not up yet
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            if server.poll() is not None:
                sys.exit(f"The server has ended. Its log ends with:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


class Clock(TrainerCallback):
    """Note when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def letters(completions: Sequence[str], **_: Any) -> list[float]:
    """Return how many letters "e" each answer has: any reward will do."""
    return [float(each.count("e")) for each in completions]


def build(model: Path, url: str, *, ahead: bool, **options: Any) -> GRPOTrainer:
    """Return a trainer with a LoRA adapter and these options, on a core that the server does not use."""
    os.sched_setaffinity(0, {TRAINER_CORE})
    torch.set_num_threads(1)
    # TRL would connect to the server by NCCL, to send weights; on CPU, there is none
    VLLMClient.init_communicator = lambda *_, **__: None
    args = GRPOConfig(str(OUTPUT), **{**SETTINGS, "vllm_server_base_url": url, "async_generate": ahead, **options})
    rows = Dataset.from_dict({"prompt": [f"Question {i}: what is the sea like?" for i in range(64)]})
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return GRPOTrainer(model=str(model), reward_funcs=letters, args=args, train_dataset=rows, peft_config=lora)


def seconds(trainer: GRPOTrainer) -> float:
    """Train, and return the seconds per step after the first steps."""
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    return (clock.ends[-1] - clock.ends[WARM_UP - 1]) / (len(clock.ends) - WARM_UP)


def main() -> None:
    """Train without and with the option."""
    model, found = Path(sys.argv[1]), dict[bool, float]()
    with served(model, OUTPUT / "server.log") as url:
        for ahead in (False, True):
            trainer = build(model, url, ahead=ahead, max_steps=STEPS)
            found[ahead] = seconds(trainer)
    print(f"\nasync_generate=False: {found[False]:.2f} s per step")
    print(f"async_generate=True:  {found[True]:.2f} s per step, {found[False] / found[True]:.2f} times as fast")
    history = [row for row in trainer.state.log_history if "loss" in row][WARM_UP:]
    for name in ("async/waited", "async/overlap", "async/versions_behind"):
        print(f"  {name}: {statistics.mean(row[name] for row in history):.2f}")


if __name__ == "__main__":
    main()
