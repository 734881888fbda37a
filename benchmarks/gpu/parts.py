"""The parts of `make gpu`: commands of Python, in the order in which they run."""

from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """A part: a Python command that writes figures to the file after `--json`."""

    name: str
    what: str
    limit: int
    """Seconds. It may take twice as many if others leave them."""
    command: Sequence[str]
    small: Sequence[str] = ("--small",)
    """Arguments that a rehearsal adds."""
    needs_bf16: bool = True
    needs: str = ""
    """A package."""


PARTS = (
    Work("tests", "tests/gpu against CPUs, float64 and TRL", 330, ("-m", "benchmarks.gpu.tests"), needs_bf16=False),
    Work("steps in bf16", "steps of GRPO, RLOO and PPO, all weights", 80, ("-m", "benchmarks.gpu.steps", "bf16")),
    Work("steps in fp16", "the same", 80, ("-m", "benchmarks.gpu.steps", "fp16"), needs_bf16=False),
    Work(
        "steps in NF4 with LoRA",
        "the same on a 4-bit base",
        100,
        ("-m", "benchmarks.gpu.steps", "nf4"),
        needs_bf16=False,
    ),
    Work(
        "padding",
        "steps without padding beside TRL's",
        90,
        ("benchmarks/padding.py", "--rounds", "3"),
        ("--random", "--window", "1", "--scale", "0.1"),
    ),
    Work(
        "replay",
        "steps of a mixture of experts that replay its routes, beside those that do not",
        60,
        ("benchmarks/replay.py", "--rounds", "5"),
        ("--rounds", "2", "--batch", "2", "--window", "1", "--prompt", "4", "--completion", "8"),
    ),
    Work(
        "kept mask",
        "steps with the kept sampling mask beside those without",
        60,
        ("benchmarks/sampling_mask.py", "--rounds", "5"),
        ("--small", "--rounds", "2", "--batch", "2", "--completion", "8", "--layers", "1"),
    ),
    Work("memory", "peaks beside the formula of --dry-run", 60, ("-m", "benchmarks.gpu.memory")),
    Work(
        "vLLM",
        "steps for which vLLM samples in the same process",
        150,
        ("-m", "benchmarks.gpu.engine"),
        needs="vllm",
    ),
)
