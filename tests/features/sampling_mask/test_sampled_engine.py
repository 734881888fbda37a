"""Kept tokens of a vLLM, colocated or a server, as tests/tools/engines.py plays it: sets that no sampling has left."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl.generation import vllm_generation

from tests.features.router_replay.tools import oracles
from tests.features.sampling_mask import tools as sampled
from tests.features.sampling_mask.tools import CLOSE, SAMPLING, SETS, TEMPERATURE, Row
from tests.oracles import routes as routed_oracle
from tests.oracles import sampling as oracle
from tests.tools import agent, engines, tiny
from tests.tools.engines import MASKED, ROUTED, SPARSE, TOKENS, Build, Engine, Server, Sets, chosen, kept
from tests.tools.headroom import within
from tests.tools.sets import lists
from trl_steady.core.metrics import Clock
from trl_steady.features.router_replay.feature import ROUTES
from trl_steady.features.router_replay.routes import from_engine
from trl_steady.features.sampling_mask.feature import SAMPLING_MASK, take_candidates
from trl_steady.trl_bridge import vllm as host_engine
from trl_steady.trl_bridge.vllm import SteadyGeneration

mixture, engine, in_process = engines.mixture, engines.engine, engines.in_process
server, over_http, flagged, built = engines.server, engines.over_http, engines.flagged, engines.built


def routes_of(ids: list[int], syncs: int) -> Tensor:
    return torch.from_numpy(chosen(ids, syncs)[:, SPARSE])


def returned(row: Row, syncs: int) -> Sets:
    return [sorted(each) for each in kept(row.ids[: row.prompt], row.ids[row.prompt :], syncs)]


def check(trainer: Any, folder: Path, expected: Callable[[Row, int], Sets] = returned) -> None:
    """What was returned, and after a sync what was returned then, is in each update and in the log-probs of each pass.

    The old policy's, the reference's and the one with a gradient.
    """
    policy, apart = oracles(folder, trainer), []
    for update in trainer.updates:
        weights = [update.weights, trainer.rollouts[update.rollout][0], trainer.rollouts[0][0]]
        of_passes = zip(("logps", "old_per_token_logps", "ref_per_token_logps"), map(policy, weights), strict=True)
        passes = {name: model for name, model in of_passes if name in update.rows[0].values}
        for row in sampled.rows(update):
            assert row.sets == expected(row, update.rollout + 1) and not any(row.of_padding)
            for name, model in passes.items():
                z = sampled.scores(model, row, TEMPERATURE, row.routes)
                on_sets = sampled.log_probs(z, row)
                torch.testing.assert_close(row.values[name].double(), on_sets, **CLOSE)
                of_all = oracle.log_probs(z, row.targets, [[]] * len(row.sets))
                apart.append((on_sets - of_all).abs().mean().item())
    assert {"logps", "old_per_token_logps"} <= trainer.updates[0].rows[0].values.keys() and np.mean(apart) > 0.3


@pytest.mark.fast_rows(1)
@pytest.mark.supports("keep_sampling_mask", on=("vLLM colocate", "vLLM server"), only="stand-in")
def test_sets_are_in_every_update_and_in_every_pass(models: dict[str, Path], engine: Engine, built: Build) -> None:
    """Two rollouts, the second after a sync."""
    folder = models["dense"]

    def scored(prompt: list[int], completion: list[int]) -> list[float]:
        """Score as the weights that the engine was sent, on its sets."""
        row: Any = SimpleNamespace(ids=[*prompt, *completion], prompt=len(prompt))
        z = sampled.scores(routed_oracle.initial(folder, engine.weights), row, TEMPERATURE)
        return oracle.log_probs(z, torch.tensor(completion), kept(prompt, completion, engine.syncs)).tolist()

    engine.scored = scored
    corrected = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1e9}
    trainer = tiny.train(built(folder, beta=0.1, **SETS, **corrected))
    assert len(trainer.rollouts) == 2 and "ref_per_token_logps" in trainer.updates[0].rows[0].values
    check(trainer, folder)
    for update in trainer.updates:  # the engine is the policy itself, token by token
        ratio = update.inputs["importance_sampling_ratio"][update.inputs["completion_mask"].bool()]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), **CLOSE)
    history = tiny.history(trainer)
    assert [row["sampling_mask/fallback"] for row in history if "sampling_mask/fallback" in row] == [0, 0]
    assert all(within(row["mismatch/kl"], 1e-9) for row in history if "mismatch/kl" in row)


def test_a_server_has_each_prompt_once_and_answers_in_any_order(
    models: dict[str, Path], server: Server, flagged: Build
) -> None:
    trainer = tiny.train(flagged(models["dense"], **SETS))
    check(trainer, models["dense"])
    came = [body["token_ids"] for body in server.requests[TOKENS]]
    assert sorted(came) == sorted(server.answers) and came != server.answers


@pytest.mark.fast_rows(1)
def test_a_token_without_a_choice_of_tokens_is_scored_among_all(
    models: dict[str, Path], engine: Engine, built: Build
) -> None:
    """One of three has an empty set, and one the vocabulary. The row of a token that was left out is cut."""
    everything = list(range(tiny.SIZES["vocab_size"]))
    engine.left = lambda sets: [*([[], each, everything][i % 3] for i, each in enumerate(sets)), [1, 2, 3]]
    expected = lambda row, syncs: [each if i % 3 == 1 else [] for i, each in enumerate(returned(row, syncs))]
    with pytest.warns(UserWarning, match="tokens were sampled among more than"):
        trainer = tiny.train(built(models["dense"], max_steps=4, **SETS))
    check(trainer, models["dense"], expected)
    sets = [each for update in trainer.updates for row in sampled.rows(update) for each in row.sets]
    share = sum(not each for each in sets) / len(sets)
    assert 0.5 < share < 0.9 and tiny.history(trainer)[0]["sampling_mask/fallback"] == pytest.approx(share)


@pytest.mark.fast_rows(1)
def test_sets_of_an_agents_turns_are_put_together(tmp_path: Path, engine: Engine, built: Build) -> None:
    """A turn's are of that turn; a tool's result has none. Every second completion is a call."""
    reader = agent.tokenizer()
    result = reader.convert_tokens_to_ids("<tool_response>")
    call = '<tool_call>\n{"name": "double", "arguments": {"x": 2}}\n</tool_call><|im_end|>'
    engine.spoken = lambda prompt, number: (
        reader("4.<|im_end|>" if result in prompt else ["No.<|im_end|>", call][number % 2]).input_ids
    )
    ends = {"eos_token_id": reader.eos_token_id, "pad_token_id": reader.pad_token_id, "vocab_size": len(reader)}
    folder = engines.save_model(tmp_path / "model", **ends)
    agents = {"tools": agent.tools([]), "train_dataset": agent.dataset(agent.one_by_one), "processing_class": reader}
    trainer = tiny.train(built(folder, max_steps=4, max_completion_length=160, build=agents, **SETS))
    turns: list[int] = []

    def expected(row: Row, syncs: int) -> Sets:
        sets: Sets = [[] for _ in row.ids]
        spans = agent.turns(row.ids[row.prompt :])
        for start, end in ((row.prompt + start, row.prompt + end) for start, end in spans):
            sets[start:end] = map(sorted, kept(row.ids[:start], row.ids[start:end], syncs))
        turns.append(len(spans))
        return sets[row.prompt :]

    check(trainer, folder, expected)
    assert sorted(turns) == [1] * 8 + [2] * 8
    assert tiny.history(trainer)[0]["sampling_mask/fallback"] == 0


def test_each_of_two_processes_has_the_sets_of_its_own_sequences(
    mixture: Path, engine: Engine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts have the same answer, so that it alone does not tell whose sets are whose.

    The processes run one after the other, the main one first, and the second gets what the first has sent.
    """
    engine.spoken = lambda _, number: [50 + number, 60, 70]
    server.config = {"model_config": {MASKED: True, ROUTED: True}}
    model, generations = routed_oracle.initial(mixture), 3
    prompts = [[prompt] * generations for prompt in ([1, 2, 3], [4, 5], [6, 7, 8, 9], [9])]
    everything, sent = [*itertools.chain(*prompts)], list[Any]()

    def gathered(given: list[Any]) -> list[Any]:
        return everything if given[0] is not None else [None] * len(everything)

    def from_main(objects: list[Any], from_process: int) -> None:
        assert from_process == 0
        if process.is_main_process:
            sent.append(list(objects))
        else:
            objects[:] = sent.pop(0)

    monkeypatch.setattr(vllm_generation, "gather_object", gathered)
    for module in (vllm_generation, host_engine):
        monkeypatch.setattr(module, "broadcast_object_list", from_main)
    options = {"mode": "server", "server_base_url": server.url, "max_completion_length": 8, "top_k": 20}
    seen = 0
    for index, own in enumerate((prompts[0] + prompts[1], prompts[2] + prompts[3])):
        process: Any = SimpleNamespace(
            process_index=index, local_process_index=index, is_main_process=index == 0, num_processes=2
        )
        process.device, process.state = torch.device("cpu"), SimpleNamespace(deepspeed_plugin=None)
        process.wait_for_everyone = lambda: None
        generation = SteadyGeneration(model, process, None, extras=[SAMPLING_MASK, ROUTES], clock=Clock(), **options)
        _, completions, _, _ = generation.generate(own, None, generations)
        sets = lists(take_candidates(generation, completions))
        assert sets == [each for pair in zip(own, completions, strict=True) for each in kept(*pair, 0)]
        found = [from_engine(each, SPARSE) for each in generation.take(ROUTES)]
        for prompt, ids, routes in zip(own, completions, found, strict=True):
            assert torch.equal(routes, routes_of([*prompt, *ids], 0)[:-1])
        seen += len(completions)
    assert sent == [] and len(server.requests[TOKENS]) == 4 and seen == 4 * generations


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("left", "message"),
    [
        (lambda sets: sets[:-1], "sets and tokens do not match"),
        (lambda sets: [[*each, 255][-1:] for each in sets], "not in the set that it was sampled from"),
        (lambda sets: [each * 2 for each in sets], "with a token twice"),
        (lambda sets: [[*each, -1] for each in sets], "a negative token id"),
        (lambda sets: sets if len(sets) % 2 else None, r"no kept tokens for ([1-9]|1[0-5]) of 16 sequences"),
        (lambda _: None, r"no kept tokens for 16 of 16 sequences\. Start a server with --return-sampling-mask"),
    ],
    ids=["a row too few", "without its token", "twice the same", "negative", "some", "none"],
)
def test_wrong_sets_are_refused(
    models: dict[str, Path], engine: Engine, built: Build, left: Any, message: str
) -> None:
    engine.left = left
    with pytest.raises(ValueError, match=message):
        built(models["dense"], **SETS).train()


@pytest.mark.parametrize(
    ("options", "flags"),
    [({"router_replay": "R3", **SETS}, {MASKED, ROUTED}), ({"router_replay": "R2", **SAMPLING}, set[str]())],
    ids=["both", "other routes"],
)
def test_the_engine_is_started_with_what_is_asked_for(
    in_process: Build, options: dict[str, Any], flags: set[str]
) -> None:
    generation, plain = in_process(**options).vllm_generation, in_process().vllm_generation
    assert generation.llm.asked == {**plain.llm.asked, **dict.fromkeys(flags, True)}


@pytest.mark.refuses("keep_sampling_mask", on="vLLM colocate", where="with `vllm_tensor_parallel_size` above 1")
def test_an_engine_over_several_gpus_is_refused(in_process: Build) -> None:
    with pytest.raises(ValueError, match=r"_parallel_size=2: a colocated engine returns the \w.*'server'"):
        in_process(vllm_tensor_parallel_size=2, **SETS)


@pytest.mark.parametrize("sampling", [{"greedy": True}, {"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.5}])
def test_an_engine_that_returns_sets_also_serves_evaluations(
    in_process: Build, engine: Engine, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    """vLLM with `return_sampling_mask` refuses a temperature of 0, also of evaluations, and needs top_k."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_generation": sampling, "max_steps": 2}
    wider = {"generation_kwargs": {"top_k": 30}}  # would take the place of an engine's own option
    trainer = in_process(**SETS, **evaluated, **wider, build={"eval_dataset": tiny.dataset(4)})
    asked: list[tuple[float, int, float]] = []
    generate = trainer.vllm_generation.llm.generate

    def note(prompts: Any, sampling_params: Any, **keywords: Any) -> Any:
        first = sampling_params[0] if isinstance(sampling_params, list) else sampling_params
        asked.append((first.temperature, first.top_k, first.top_p))
        return generate(prompts, sampling_params=sampling_params, **keywords)

    monkeypatch.setattr(trainer.vllm_generation.llm, "generate", note)
    trainer.train()
    of_training, of_evaluation = asked[0], asked[-1]
    assert len({*asked}) == 2 and of_training[1] == 30
    if sampling.get("temperature") != 0.5:
        assert of_evaluation == (1.0, 1, 1.0)  # the likeliest token
    assert any("eval_reward" in row for row in trainer.state.log_history)
