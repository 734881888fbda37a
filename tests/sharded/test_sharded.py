"""Whole runs of FSDP2, ZeRO-2 and ZeRO-3 on two CPU processes, beside the same runs of DDP.

Each run is also resumed from a checkpoint inside a generation window, and its model is saved and loaded again. One
pair of processes does all runs of an engine, one after another, because starting torch takes longer than a run.
"""

import functools
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.distributed import processes, sharded
from tests.distributed.checks import marked
from tests.sharded import runs, work
from tests.sharded.runs import RUNS
from tests.tools import agent
from tests.tools import wide as wide_model

Result = dict[str, Any]

PAIRS = [
    pytest.param(engine, name, marks=[sharded.needs_deepspeed] if engine != "FSDP2" else [])
    for engine in ("FSDP2", "ZeRO-2", "ZeRO-3")
    for name in runs.runs_of(engine)
]
KIND = {"DDP": "MULTI_CPU", "FSDP2": "FSDP", "ZeRO-2": "DEEPSPEED", "ZeRO-3": "DEEPSPEED"}

# Both run the same kernels, but take sums over processes and tensors in another order. This changes the last digits of
# a gradient, and ten updates carry them on. The largest difference of a tensor was 1e-5, that of a metric 5e-5.
TENSORS: dict[str, Any] = {"rtol": 1e-4, "atol": 5e-5}
METRICS: dict[str, Any] = {"rel": 1e-3, "abs": 1e-4}
QUANTILES: dict[str, Any] = {"rel": 0.05, "abs": 1e-4}
"""Metrics that are the middle of a bin, which is 4.7 % wide."""

# TRL trains adapters of a quantised base in bfloat16. Each engine then rounds its sums at other places, and DeepSpeed
# also keeps a float32 copy. Updates differ in the last of the 8 bits.
TENSORS_BF16: dict[str, Any] = {"rtol": 2**-5, "atol": 2**-5}
METRICS_BF16: dict[str, Any] = {"rel": 0.05, "abs": 0.05}


class Engines:
    """The results of each engine, which the first test that asks for them computes."""

    def __init__(self, models: dict[str, Path], folder: Path) -> None:
        self.models, self.folder = models, folder
        self.ended: dict[str, Exception | None] = {}

    def of(self, engine: str, name: str) -> list[Result]:
        """Return what each process has left of a run."""
        self._start(engine)
        files = [self.folder / engine / name / f"rank_{rank}.pt" for rank in range(processes.WORLD)]
        if not all(file.exists() for file in files):
            raise RuntimeError(f"{name} was not reached") from self.ended[engine]
        return [torch.load(file, weights_only=False) for file in files]

    def _start(self, engine: str) -> None:
        if engine in self.ended:
            return
        folder = self.folder / f"store of {engine}"
        folder.mkdir()
        check = functools.partial(work.work, engine=engine, models=self.models, output=self.folder)
        self.ended[engine] = None
        try:
            processes.run(check, folder, seconds=1200)
        except Exception as error:  # the results of the runs before it are there
            self.ended[engine] = error


@pytest.fixture(scope="module")
def engines(models: dict[str, Path], wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("engines")
    caller = agent.save_model(tmp_path_factory.mktemp("agent"))
    return Engines({**models, "wide": wide, "agent": caller}, folder)


@pytest.mark.supports(
    "gspo", "gspo_token", "gmpo", "KL corrections", "masks", on=("FSDP2", "ZeRO-2", "ZeRO-3"), only="CPU"
)
@pytest.mark.supports("step rewards", "RLOO", "moving reference, full", on=("FSDP2", "ZeRO-2", "ZeRO-3"), only="CPU")
@pytest.mark.supports(
    "moving reference, LoRA", "moving reference, quantised base", on=("FSDP2", "ZeRO-2", "ZeRO-3"), only="CPU"
)
@pytest.mark.supports(
    "ref_model_sync_kl", "quantised base", "router_replay R2", on=("FSDP2", "ZeRO-2", "ZeRO-3"), only="CPU"
)
@pytest.mark.supports(
    "router_replay R3", "keep_sampling_mask", "trim_padding", on=("FSDP2", "ZeRO-2", "ZeRO-3"), only="CPU"
)
@pytest.mark.supports(
    "share_prompts", "skip_zero_weight", "teacher", "exact resume", on=("FSDP2", "ZeRO-2", "ZeRO-3"), only="CPU"
)
@pytest.mark.supports("ref_model_sync_reset_optimizer", "token_budget", on="FSDP2", only="CPU")
@pytest.mark.supports("adapter_dtype", "PPO, LoRA", "PPO, quantised base", on=("FSDP2", "ZeRO-2"), only="CPU")
@pytest.mark.supports("ptx_coef", on=("FSDP2", "ZeRO-2"), only="CPU")
@pytest.mark.supports("PPO, full", on="ZeRO-2", only="CPU")
@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_an_engine_trains_as_ddp(engines: Engines, request: pytest.FixtureRequest, engine: str, name: str) -> None:
    """The model is saved, and each process ends a resumed run as the uninterrupted one."""
    assert marked(request, engine) == runs.features(runs.runs_of(engine))
    run, (expected, _), found = RUNS[name], engines.of("DDP", name), engines.of(engine, name)
    assert [result["distributed"] for result in (expected, *found)] == [KIND["DDP"], KIND[engine], KIND[engine]]
    is_bf16 = torch.bfloat16 in {tensor.dtype for tensor in found[0]["trained"].values()}
    for result in found:
        assert result["differences of the resumed run"] == []
        moves = [[(step, rule) for step, _, rule in each["refreshes"]] for each in (result, expected)]
        assert moves[0] == moves[1]
        assert result["base"].keys() == expected["base"].keys()
        assert all(torch.equal(result["base"][key], value) for key, value in expected["base"].items())
        for kind in ("trained", "reference", "critic"):
            assert expected[kind].keys() == result[kind].keys()
            for key, value in expected[kind].items():
                close = TENSORS_BF16 if value.dtype == torch.bfloat16 else TENSORS
                torch.testing.assert_close(
                    result[kind][key], value, **close, msg=lambda text, key=key: f"{key}: {text}"
                )

    assert len(expected["history"]) == len(found[0]["history"]) == runs.STEPS
    for row, own in zip(expected["history"], found[0]["history"], strict=True):
        assert row.keys() == own.keys()
        for metric, value in row.items():
            close = QUANTILES if metric.startswith(("off_policy", "mismatch")) else METRICS
            assert own[metric] == pytest.approx(value, **(METRICS_BF16 if is_bf16 else close)), metric

    # what each process has: a critic's learner is not DeepSpeed's, and the first process has the whole head of one row
    whole, critic = (sum(tensor.numel() for tensor in found[0][kind].values()) for kind in ("trained", "critic"))
    parts, of_critic = ([result[kind] for result in found] for kind in ("here", "here of critic"))
    if engine == "ZeRO-2":
        assert parts == [whole, whole] and of_critic == [critic, critic]
    else:
        assert max(parts) < 0.6 * whole and sum(parts) >= whole
        assert max(of_critic) <= 0.6 * critic + 64 and sum(of_critic) == critic

    folder, saved = engines.models[run.get("model", "dense")], engines.folder / engine / name / "saved"
    check_saved_critic(run, folder, saved / "value", found[0]["critic"])
    if engine == "FSDP2" and run.get("saves_shards"):
        assert not list(saved.glob("*.safetensors"))  # transformers saves models under FULL_STATE_DICT only
        return
    if run.get("lora"):
        base = wide_model.load(folder, "nf4") if "base" in run else load(folder)
        model = peft.PeftModel.from_pretrained(base, saved)
        loaded = {key: tensor for key, tensor in model.named_parameters() if "lora_" in key}
    else:
        loaded = dict(load(saved).named_parameters())
    assert loaded.keys() == found[0]["trained"].keys()
    for key, tensor in found[0]["trained"].items():
        assert torch.equal(loaded[key].to(tensor.dtype), tensor), key


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check_saved_critic(run: runs.Run, folder: Path, value: Path, critic: dict[str, torch.Tensor]) -> None:
    """transformers and PEFT load it from the folder `value`."""
    assert value.exists() == bool(critic and not run.get("saves_shards"))
    if not value.exists():
        return
    options = {}
    if "base" in run:
        options = {"quantization_config": transformers.BitsAndBytesConfig(**wide_model.NF4), "device_map": "cpu"}
    of_classes = transformers.AutoModelForSequenceClassification
    if not run.get("lora"):
        model = of_classes.from_pretrained(value, dtype=torch.float32)
        loaded = {**dict(model.base_model.named_parameters()), "score.weight": model.score.weight}
        assert loaded.keys() == critic.keys() and all(torch.equal(loaded[key], own) for key, own in critic.items())
        return
    base = of_classes.from_pretrained(folder, num_labels=1, dtype=torch.float32, **options)
    model = dict(peft.PeftModel.from_pretrained(base, value).named_parameters())
    loaded = {key: tensor for key, tensor in model.items() if "default" in key.split(".")}
    assert len(loaded) == len(critic) and max(tensor.abs().max() for tensor in critic.values()) > 0.1
    for key, tensor in critic.items():
        head = "score.modules_to_save.default.weight"
        place = f"model.{key.replace('.value.', '.default.')}" if key != "score.weight" else head
        assert torch.equal(loaded[f"base_model.model.{place}"], tensor), key


@sharded.needs_deepspeed
@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for name, run in RUNS.items() for engine in sorted(runs.refusing(run))]
)
def test_engines_refuse_the_others_before_training(engines: Engines, engine: str, name: str) -> None:
    message = {
        "reset": "ref_model_sync_reset_optimizer=True .*DeepSpeed.*Set it to False",
        "nf4 float32": "adapter_dtype='float32'.*ZeRO-3.*ZeRO-2 or FSDP2",
        "budget": "token_budget=24 .*DeepSpeed, ",
        # before its warm-up, which tests/distributed/test_refused.py has
        "ppo warm-up": "token_budget=24 .*DeepSpeed, ",
    }.get(name, "PPOTrainer .*FSDP2 with adapters .*or ZeRO-2")
    for result in engines.of(engine, name):
        assert re.search(message, result["refused"])
    assert not list((engines.folder / engine / name).glob("checkpoint-*"))


def test_each_run_has_what_it_shows(engines: Engines) -> None:
    """Under DDP: masks drop, the reference moves, routes and kept tokens act, and tools are called."""
    rows = {name: engines.of("DDP", name)[0]["history"] for name in RUNS}

    def values(name: str, metric: str) -> list[float]:
        found = [row[metric] for row in rows[name] if metric in row]
        assert found, (name, metric)
        return found

    for name, run in RUNS.items():
        moves = engines.of("DDP", name)[0]["refreshes"]
        assert [step for step, _, _ in moves] == ([4, 8] if run.get("sync_ref_model") else []), name
        assert {rule for _, _, rule in moves} <= {"kl" if "ref_model_sync_kl" in run else "steps"}
        assert run.get("beta") == 0 or max(values(name, "kl")) > 1e-3
        # the samples differ between machines: the weakest run reached 0.07 on one of them
        assert max(values(name, "grad_norm")) > 0.01
        if run.get("router_replay"):
            assert max(values(name, "routing/changed")) > 0.01
            assert values(name, "routing/fallback") == [0.0] * len(values(name, "routing/fallback"))
        if run.get("keep_sampling_mask"):
            assert all(0.5 < mass < 0.999 for mass in values(name, "sampling_mask/kept_mass"))
        if run.get("method") == "PPO":
            assert max(values(name, "value/grad_norm")) > run.get("max_grad_norm", runs.COMMON["max_grad_norm"])
            assert len(set(values(name, "value/mean"))) > 2
            assert [norm == 0 for norm in values(name, "grad_norm")].count(True) == run.get("value_warmup_steps", 0)
    for mask in ("off_policy", "geometric", "veto"):
        assert any(0 < value < 1 for value in values("engine", f"dropped/{mask}")), mask
    assert 0 < max(values("weights", "skipped/sequences")) < 1
    assert min(values("tools", "tools/call_frequency")) > 0 and min(values("steps", "steps/mean_count")) > 1
