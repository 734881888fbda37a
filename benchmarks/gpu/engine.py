"""Take steps for which a colocated vLLM samples: `python -m benchmarks.gpu.engine --json PATH [--small]`.

SmolLM2-135M-Instruct in bf16 with LoRA. `mismatch/kl` tells whether engine and trainer agree, at the first rollout and
at the last, after the adapter was sent several times.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from peft import LoraConfig
from tests.tools import tiny
from tests.vllm import cpu

import trl_steady
from benchmarks import measuring
from benchmarks.gpu import models
from benchmarks.gpu.block import Figure
from benchmarks.measuring import CUDA

OF_CPU = {
    **{"dtype": "float32", "enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 18},
    **{"max_num_batched_tokens": 64, "max_num_seqs": 16},
}
"""vLLM on a CPU needs a small cache, and blocks that its kernel takes."""


def steps(folder: Path, *, small: bool) -> list[Figure]:
    """Train, and return figures."""
    clock = models.Clock()
    options: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": 64 if small else 256,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_engine_kwargs": {"enforce_eager": True, "dtype": "bfloat16"},
        "per_device_train_batch_size": 2 if small else 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 2 if small else 8,
        "max_completion_length": 8 if small else 64,
        "max_steps": 3 if small else 8,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **models.options("bf16"),
    }
    if not CUDA:
        cpu.take_weights()
        options["vllm_engine_kwargs"] = OF_CPU
        options["bf16"] = False
    build = {"peft_config": LoraConfig(**models.LORA), "callbacks": [clock], "train_dataset": tiny.dataset(64)}
    build["reward_funcs"] = models.reward
    trainer = measuring.build(trl_steady, str(folder), folder / "out", build, **options)
    trainer.train()
    mismatch = [row["mismatch/kl"] for row in trainer.state.log_history if "mismatch/kl" in row]
    return [
        Figure("a step with its rollout", statistics.median(clock.seconds[1:]), "s"),
        Figure("mismatch/kl of the first rollout", mismatch[0], "nats"),
        Figure("mismatch/kl of the last rollout", mismatch[-1], "nats"),
    ]


def main() -> int:
    """Take the steps, and return the exit status."""
    options = models.parser(__doc__).parse_args()
    measuring.heading(options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.save(folder, small=options.small)
        measuring.record(options.json, steps(folder, small=options.small))
    return 0


if __name__ == "__main__":
    sys.exit(main())
