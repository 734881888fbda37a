"""Describe the device and the versions, in a JSON file: `python -m benchmarks.gpu.machine --json PATH`."""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import block

MORE = ("trl", "transformers", "peft", "bitsandbytes", "accelerate", "triton", "vllm", "flash_attn", "trl-steady")


def described() -> dict[str, Any]:
    """Return the device, and the versions of what runs on it; None for what is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in MORE:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    device: dict[str, Any] = {"name": f"{platform.machine()}, {torch.get_num_threads()} threads", "cuda": None}
    device["built_for"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "free_bytes": torch.cuda.mem_get_info(0)[0],
            "capability": list(torch.cuda.get_device_capability(0)),
            "cuda": torch.version.cuda,
        }
    return {"device": device, "versions": versions}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    block.save(parser.parse_args().json, described())
