"""Two processes (gloo, CPU) and one process with the same global batch."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from tests.distributed import processes, train
from tests.distributed.checks import check_close, check_histories, check_references, marked
from tests.tools import engines, resumable
from tests.tools.engines import MASKED, TOKENS, Engine, Server

mixture, engine, server = engines.mixture, engines.engine, engines.server


@pytest.mark.supports("gspo", "gspo_token", "gmpo", "KL corrections", "masks", "step rewards", on="DDP")
@pytest.mark.supports("dppo", "sampler_penalty", on="DDP")
@pytest.mark.supports("moving reference, full", "moving reference, LoRA", on="DDP")
@pytest.mark.supports("ref_model_sync_kl", "ref_model_sync_reset_optimizer", on="DDP")
@pytest.mark.supports("quantised base", "adapter_dtype", "moving reference, quantised base", on="DDP")
@pytest.mark.supports("keep_sampling_mask", "trim_padding", "token_budget", "share_prompts", on="DDP")
@pytest.mark.supports("skip_zero_weight", "teacher", on="DDP")
def test_two_processes_train_as_one_does(
    models: dict[str, Path], wide: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert marked(request) == train.features(train.FIXED.values())
    folders = {**models, "wide": wide}
    alone = train.alone(train.FIXED, folders, tmp_path / "one")
    together = train.together(train.FIXED, folders, tmp_path / "two")
    for run in train.FIXED:
        one, two = alone[run], together[run]
        assert [(process["processes"], process["backend"]) for process in (one, *two)] == [
            (1, None),
            *2 * [(2, "gloo")],
        ]
        check_close(run, one["parameters"], two[0]["parameters"])
        # metrics are means over the micro-batches of each process, or of what each process computes
        if not {"token_budget", "skip_zero_weight"} & train.FIXED[run].keys():
            check_histories(one["history"], two[0]["history"])
        assert [process["base"] for process in (one, *two)] == [[], [], []]
    for run in ("gspo", "gspo_token"):
        assert any(row.get("ratio/sequence_max", 1) > 1.001 for row in alone[run]["history"])
    of_tokens = alone["tokens, prompts"], together["tokens, prompts"][0]
    for one, two in zip(*(each["history"][:-1] for each in of_tokens), strict=True):
        for name in ("ratio/sequence_min", "ratio/sequence_mean", "ratio/sequence_max"):
            assert two[name] == pytest.approx(one[name], rel=1e-4), name
    assert all(0 < row["sampling_mask/kept_mass"] < 1 for row in alone["kept"]["history"][:-1])
    engine = alone["engine"]
    for mask in ("off_policy", "geometric", "veto"):
        assert any(0 < row[f"dropped/{mask}"] < 1 for row in engine["history"][:-1]), mask
    for run, of_two in (("weights", 0.0), ("weights, tokens", 0.5)):
        # in the first, one process has all that has no gradient, and computes as many sequences as the other
        each = alone[run], together[run][0]
        shares = [{row["skipped/sequences"] for row in process["history"][:-1]} for process in each]
        assert shares == [{0.5}, {of_two}]
    assert alone["taught"]["history"][0]["teacher/agreement"] > 0
    steps, halves = alone["steps"], together["steps"]
    assert [len(process["step advantages"]) for process in (steps, *halves)] == [8, 4, 4]
    both = [completion for process in halves for completion in process["step advantages"]]
    for one, two in zip(steps["step advantages"], both, strict=True):
        assert [value for _, value in two] == pytest.approx([value for _, value in one], rel=1e-4, abs=1e-6)
    assert any(len({value for _, value in completion}) > 1 for completion in both)
    moving = [run for run, options in train.FIXED.items() if options.get("sync_ref_model")]
    moves = {run: [(step, rule) for step, _, rule in alone[run]["refreshes"]] for run in moving}
    assert moves["full"] == moves["lora"] == moves["nf4"] == [(3, "steps"), (6, "steps"), (9, "steps")]
    assert [process["cleared"] for process in (alone["lora"], *together["lora"])] == [[0, 3, 6, 9]] * 3
    assert {rule for _, rule in moves["kl"]} == {"steps", "kl"}
    for run in moves:
        check_references(run, alone[run], together[run])

    (page,) = (tmp_path / "two").rglob("report.html")  # of the main process
    assert "Time of a step" in page.read_text()
    assert [process["rows"] for process in (alone["gspo"], *together["gspo"])] == [{1}] * 3  # laid end to end


def test_two_processes_pass_the_rows_of_the_conformance_suite(models: dict[str, Path], tmp_path: Path) -> None:
    alone = train.alone(train.CONFORMANCE, models, tmp_path / "one")
    together = train.together(train.CONFORMANCE, models, tmp_path / "two")
    for run in train.CONFORMANCE:
        check_close(run, alone[run]["parameters"], together[run][0]["parameters"])
        if run.startswith("teacher"):
            check_histories(alone[run]["history"], together[run][0]["history"])


@pytest.mark.supports("RLOO", on="DDP")
def test_two_processes_train_rloo_as_one_does(models: dict[str, Path], tmp_path: Path) -> None:
    alone = train.alone(train.RLOO, models, tmp_path / "one")
    together = train.together(train.RLOO, models, tmp_path / "two")
    for run in train.RLOO:
        one, two = alone[run], together[run]
        assert [process["processes"] for process in (one, *two)] == [1, 2, 2]
        check_close(run, one["parameters"], two[0]["parameters"])
        if run != "rloo tokens":  # whose metrics are means over the micro-batches of each process
            check_histories(one["history"], two[0]["history"])
    assert [step for step, _, _ in alone["rloo"]["refreshes"]] == [3, 6, 9]
    check_references("rloo", alone["rloo"], together["rloo"])


@pytest.mark.supports("router_replay R2", "router_replay R3", on="DDP")
def test_two_processes_replay_routes_as_one_does(
    models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert marked(request) == train.features(train.ROUTED.values())
    alone = train.alone(train.ROUTED, models, tmp_path / "one")
    together = train.together(train.ROUTED, models, tmp_path / "two")
    for run in train.ROUTED:
        check_close(run, alone[run]["parameters"], together[run][0]["parameters"])
    one, two = alone["R2"], together["R2"]
    check_histories(one["history"], two[0]["history"])
    check_histories(alone["R3"]["history"], together["R3"][0]["history"])
    ends = {run: together[run][0]["parameters"] for run in ("R2", "R3")}
    assert any(not torch.allclose(ends["R3"][name], value, rtol=0.01) for name, value in ends["R2"].items())
    rollouts = 0
    for row, row_of_two in zip(one["history"], two[0]["history"], strict=True):
        for metric in ("routing/changed", "routing/fallback"):
            assert row.get(metric) == pytest.approx(row_of_two.get(metric), abs=1e-12), metric
        if "routing/bytes" in row:
            rollouts += 1
            assert 0 < row_of_two["routing/bytes"] * 2 <= row["routing/bytes"]  # each pads to its own longest
    assert rollouts == 2
    assert any(row.get("routing/changed", 0) > 0.01 for row in one["history"])


@pytest.mark.supports("router_replay R3", "keep_sampling_mask", "KL corrections", on="vLLM server", only="stand-in")
def test_two_processes_train_on_what_one_server_says_as_one_does(
    mixture: Path, server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It is asked by the first process alone, which hands on to each what is said of its sequences."""
    assert marked(request, "vLLM server") == train.features(train.SERVED.values())
    server.config["model_config"][MASKED] = True
    models, ends, asked = {"mixture": mixture, "url": server.url}, [], []
    for trained in (train.alone, train.together):
        server.engine = Engine()
        ends.append(trained(train.SERVED, models, tmp_path / trained.__name__)["served routes"])
        asked.append({path: len(bodies) for path, bodies in server.requests.items()})
        server.requests.clear()
    assert asked[0] == asked[1] and asked[0].keys() == {TOKENS}
    one, two = ends
    check_close("served routes", one["parameters"], two[0]["parameters"])
    check_histories(one["history"], two[0]["history"])
    of_routes = one["history"][:-1]
    assert all(0 < row["sampling_mask/kept_mass"] < 1 and row["routing/changed"] > 0 for row in of_routes)


def test_two_processes_need_no_pass_of_the_old_policy(mixture: Path, server: Server, tmp_path: Path) -> None:
    """The metrics of the engine are those of TRL, whose means are over the processes' own."""
    server.config["model_config"][MASKED] = True
    ends = []
    for run in train.OLD_PASS:
        server.engine = Engine()  # which answers as before
        models = {"mixture": mixture, "url": server.url}
        ends.append(train.together([run], models, tmp_path / run)[run][0])
    skipped, scored = ends
    check_close("skipped", scored["parameters"], skipped["parameters"])
    check_histories(scored["history"], skipped["history"])
    for without, expected in zip(skipped["history"][:-1], scored["history"][:-1], strict=True):
        of_engine = {metric: value for metric, value in expected.items() if metric.startswith("sampling/")}
        assert len(of_engine) == 5
        assert {metric: without[metric] for metric in of_engine} == pytest.approx(of_engine, rel=1e-4)


def build_sampled(kind: str, model: Path, output: Path) -> Any:
    """A window is 4 steps, the reference moves after 4 and 8, and what it was goes into what it becomes."""
    options = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 3, "max_steps": 10, "save_steps": 7}
    return resumable.build(kind, model, output, **options, build=None)


def resume(rank: int, kind: str, model: Path, output: Path) -> None:
    PartialState(cpu=True)
    checkpoint, ends = output / "whole/checkpoint-7", {}
    for name in ("whole", "resumed"):
        torch.manual_seed(rank)  # a new adapter differs between processes until DDP evens it
        trainer = build_sampled(kind, model, output / name)
        trainer.train(resume_from_checkpoint=str(checkpoint) if name == "resumed" else None)
        ends[name] = resumable.state(trainer)
    assert [step for step, _, _ in ends["whole"]["refreshes"]] == [4, 8]
    assert resumable.differences(ends["whole"], ends["resumed"]) == []
    one, two = gather_object([{key: ends["whole"][key] for key in ("policy", "reference", "refreshes")}])
    assert resumable.differences(one, two) == []
    rollouts = [torch.load(checkpoint / f"rollouts_{i}.pt")["rollouts"] for i in range(2)]
    assert resumable.differences(*rollouts) != []


@pytest.mark.supports("exact resume", on="DDP")
@pytest.mark.refuses("exact resume", on="DDP", where="on another number of processes")
@pytest.mark.parametrize("kind", resumable.KINDS)
def test_two_processes_resume_inside_a_window_and_one_process_refuses_to(
    models: dict[str, Path], wide: Path, tmp_path: Path, kind: str
) -> None:
    """Each process has rollouts of its own, and there is no resuming without them."""
    model = wide if kind == "nf4" else models["dense"]
    processes.run(functools.partial(resume, kind=kind, model=model, output=tmp_path), tmp_path)
    one = build_sampled(kind, model, tmp_path / "one")
    with pytest.raises(ValueError, match=r"window that began with\s+processes=2; this run has processes=1\s"):
        one.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-7"))
