"""Measure the seconds from Enter to the message for twelve mistakes, each in a process of its own.

Run it with PYTHONPATH=src, or the src of another version. With --runs 3, it prints medians.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
from pathlib import Path
from datasets import Dataset
import trl_steady
from trl_steady import GRPOTrainer
from tests.tools import tiny
def config(name="GRPO", **options):
    return tiny.arguments(getattr(trl_steady, f"{name}Config"), Path("out"), use_cpu=True, **options)
def asks(completions, answer, **_):
    return [float(len(each)) for each in completions]
def train(args, reward=tiny.reward, column="prompt"):
    data = Dataset.from_dict({column: ["1+1="] * 16})
    GRPOTrainer("model", reward, args, data, processing_class=tiny.tokenizer()).train()
"""
# mistake -> arguments, or the last line of a script; what ends the process; what its last line names
MISTAKES = {
    "a missing YAML file": "-m trl_steady grpo --config missing.yaml",
    "a misspelt key in it": "-m trl_steady grpo --config badkey.yaml",
    "a misspelt option": "-m trl_steady grpo --los_type gspo",
    "a missing script": "-m trl_steady run missing.py",
    "one of several processes": "-m trl_steady run --num_processes 2 missing.py",
    "a misspelt --set": "-m trl_steady run --set los_type=gspo script.py",
    "GRPOConfig(los_type=...)": "config(los_type='gspo')",
    "a threshold in quotes": "train(config(off_policy_mask_threshold='0.1'))",
    "a column for the reward": "train(config(), asks)",
    "no column prompt": "train(config(), column='question')",
    "PPOConfig for GRPOTrainer": "train(config('PPO'))",
    "a budget of 2 tokens": "train(config(token_budget=2))",
}


def measure(what: str, folder: Path) -> tuple[float, int, str]:
    """Return seconds, the number of lines of the error, and the last of them."""
    (folder / "script.py").write_text(SCRIPT + ("" if what.startswith("-m") else what))
    arguments = what.split() if what.startswith("-m") else ["script.py"]
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
    lines, seconds = list[str](), 0.0
    for line in process.stderr or ():
        if line.strip() and "it/s]" not in line:
            seconds = time.perf_counter() - start
            lines.append(line.rstrip())
            if "token_budget=2" in line and "Warning" in line:
                process.send_signal(signal.SIGKILL)
    process.wait()
    return seconds, len(lines), lines[-1] if lines else ""


def main() -> None:
    """Print one line for each mistake."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    runs = parser.parse_args().runs
    sys.path.insert(0, str(ROOT))
    from tests.tools import tiny

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny.save_model("dense", folder / "model")
        (folder / "badkey.yaml").write_text("los_type: gspo\n")
        for name, what in MISTAKES.items():
            found = [measure(what, folder) for _ in range(runs)]
            seconds, count, last = statistics.median(each[0] for each in found), *found[-1][1:]
            print(f"{seconds:6.1f} s  {count:3} lines  {name}: {last[:160]}", flush=True)


if __name__ == "__main__":
    main()
