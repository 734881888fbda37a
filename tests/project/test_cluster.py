"""recipes/cluster: the Slurm script starts what it says on each node, and the SkyPilot file names files that exist.

Programs of Slurm, vLLM and the trainer are stand-ins that write down how they were called.
"""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project import recipe

FOLDER = Path(__file__).parents[2] / "recipes/cluster"
SCRIPT = FOLDER / "server_and_trainers.sbatch"
PROGRAMS = {
    "scontrol": 'if [ "$1" = show ]; then printf "a\\nb\\nc\\n"; else echo "$@" >>"$LOG/scontrol"; fi',
    # runs a step's tasks on this machine; Slurm's kills them at SIGTERM
    "srun": """
tasks=1 nodes= step=$LOG/step-$(ls "$LOG" | grep -c step-)
touch "$step"
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) tasks=${1#*=} ;; --nodelist=*) nodes=${1#*=} ;; esac
    shift
done
pids=()
trap 'kill -KILL "${pids[@]}"' TERM
for ((rank = 0; rank < tasks; rank++)); do
    ON=$nodes SLURM_PROCID=$rank "$@" & pids+=($!)
done
echo "${pids[@]}" >"$step"
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
done
""",
    "scancel": 'kill -"${1#--signal=}" $(cat "$LOG/step-${2#7.}")',
    "getent": 'echo "10.0.0.2 STREAM b"',
    "vllm": 'echo "$ON $@" >"$LOG/vllm"; $VLLM; exec sleep 60',
    "curl": '[ -e "$LOG/vllm" ]',
    "trl-steady": """
echo "$ON ${VLLM_HOST_IP:-none} $@" >"$LOG/rank-$SLURM_PROCID"
trap 'echo saved >"$LOG/saved-$SLURM_PROCID"; exit 0' TERM
if [ -n "${FINISH:-}" ]; then touch "$OUTPUT_DIR/adapter_model.safetensors"; exit 0; fi
while :; do sleep 0.05; done
""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the stand-ins before all other programs, and an output folder with two checkpoints."""
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    for name in ("out/checkpoint-20", "out/checkpoint-3", "log"):
        (tmp_path / name).mkdir(parents=True)
    return {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "OUTPUT_DIR": str(tmp_path / "out"),
        "CONFIG": "run.yaml",
        "MODEL": "some/model",
        "GPUS": "4",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "[a-c]",
        "VLLM": "true",
    }


def read(environment: dict[str, str], name: str) -> str:
    path = Path(environment["LOG"], name)
    return path.read_text() if path.exists() else ""


def test_one_node_serves_and_the_others_train(environment: dict[str, str]) -> None:
    ended = subprocess.run(["bash", str(SCRIPT)], env={**environment, "FINISH": "1"}, timeout=60)
    assert ended.returncode == 0
    served = read(environment, "vllm")
    assert served.startswith("a serve some/model --host 0.0.0.0 --port 8000 --tensor-parallel-size 4 ")
    for rank in (0, 1):
        words = read(environment, f"rank-{rank}").split()
        address = ["10.0.0.2", "none"][rank]  # the server connects to rank 0
        assert words[:3] == ["b,c", address, "grpo"]
        given = dict(zip(words[3::2], words[4::2], strict=True))
        assert given == {
            "--config": "run.yaml",
            "--output_dir": environment["OUTPUT_DIR"],
            "--machine_rank": str(rank),
            "--accelerate_config": "recipes/accelerate/ddp.yaml",
            "--num_machines": "2",
            "--num_processes": "8",
            "--main_process_ip": "b",
            "--main_process_port": "29500",
            "--vllm_server_base_url": "http://a:8000",
            "--resume_from_checkpoint": f"{environment['OUTPUT_DIR']}/checkpoint-20",
        }
    assert read(environment, "scontrol") == ""  # the final model is there


def test_a_signal_reaches_the_trainers_and_the_job_is_queued_again(environment: dict[str, str]) -> None:
    running = subprocess.Popen(["bash", str(SCRIPT)], env=environment)
    for _ in range(600):
        if read(environment, "rank-1"):
            break
        time.sleep(0.05)
    time.sleep(0.5)  # for the trap in the stand-in
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0
    assert read(environment, "saved-0") == read(environment, "saved-1") == "saved\n"
    assert read(environment, "scontrol") == "requeue 7\n"


def test_a_folder_that_does_not_exist_is_made(environment: dict[str, str]) -> None:
    environment["OUTPUT_DIR"] += "/new"
    ended = subprocess.run(["bash", str(SCRIPT)], env={**environment, "FINISH": "1"}, timeout=60)
    assert ended.returncode == 0 and "--resume_from_checkpoint" not in read(environment, "rank-0")


def test_a_server_that_ends_ends_the_job(environment: dict[str, str]) -> None:
    environment["VLLM"] = "exit 1"
    Path(environment["PATH"].split(":")[0], "curl").write_text("#!/bin/bash\nexit 1\n")
    ended = subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 1 and "the server has ended; see server-7.log" in ended.stdout
    assert read(environment, "rank-0") == ""


def test_the_page_has_the_table_and_no_recipe_loses_more_than_20_minutes(recipes: Any) -> None:
    assert len(recipes.hours.recipes()) == 11
    page = (FOLDER / "README.md").read_text()
    assert recipes.hours.filled(page) == page, "run `python recipes/cluster/hours.py`"
    assert all(0 < recipes.hours.night(path).lost <= 20 for path in recipes.hours.recipes())


def test_the_times_are_those_of_a_calculation_by_hand(recipes: Any) -> None:
    """recipes/gspo: 32 answers of 1,300 tokens by 4.02 billion parameters, 10 FLOPs each; 1,200 tokens are written."""
    found = recipes.hours.night(FOLDER.parent / "gspo/qwen3-4b-deepmath-80gb.yaml")
    step = 32 * 1300 * 4.02e9 * 10 / 400e12 + 32 * 1200 / 8000
    assert found.step == pytest.approx(step)
    assert found.hours == pytest.approx(400 * step / 3600) and found.lost == pytest.approx(10 * step / 60)
    names = ("gspo/qwen3-4b-deepmath-80gb", "async/qwen3-4b-deepmath-2x80gb", "moe/qwen3-30b-a3b-fsdp2")
    assert [recipes.hours.gpus(FOLDER.parent / f"{name}.yaml") for name in names] == ["1x80", "2x80", "8x141"]


def test_the_commands_of_the_page_parse(recipes: Any) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", (FOLDER / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    commands = [line for line in blocks[0].replace("\\\n", " ").splitlines() if "--config" in line]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command.split("--config ")[1])
        name = words[0].removeprefix("recipes/").removesuffix(".yaml")
        given = {flag.removeprefix("--"): value for flag, value in zip(words[1::2], words[2::2], strict=True)}
        recipe.parse(recipes, name, **given)


def test_the_spot_file_names_what_exists() -> None:
    task = yaml.safe_load((FOLDER / "spot.yml").read_text())
    for name in ("CONFIG", "TRAIN"):
        assert (FOLDER.parents[1] / task["envs"][name]).is_file()
    options = yaml.safe_load((FOLDER.parents[1] / task["envs"]["CONFIG"]).read_text())
    assert options["enable_jit_checkpoint"] and "task" in options  # the script reads the file
