"""Routes of a vLLM that is played by a few lines: colocated, through TRL's own calls, or a server, over HTTP.

It returns routes that no router has chosen, so that nothing but what it returned can be what is replayed. The real one
is in tests/vllm.
"""

import base64
import io
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import Qwen3MoeConfig
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient

from tests import agent, routed_oracle, tiny
from tests.routed import CLOSE, Row, build, oracles, rows
from tests.routed_oracle import NONE
from trl_steady.host import engine as host_engine
from trl_steady.host.engine import ROUTES, CapturingGeneration

LAYERS, SPARSE, EXPERTS, CHOSEN = 4, [1, 3], 8, 2
Array = Any


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixture"))


def save_model(folder: Path, **options: Any) -> Path:
    """Every second layer is dense, the first one too."""
    sizes = {"num_hidden_layers": LAYERS, "mlp_only_layers": [0, 2], "head_dim": 8, "moe_intermediate_size": 16}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**tiny.SIZES, **sizes, **experts, **options})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def chosen(ids: list[int], syncs: int) -> Array:
    """(T, L, K) of a sequence, other ones after each sync; a dense layer has zeros."""
    shape = (len(ids), LAYERS, EXPERTS)
    experts = np.random.default_rng([zlib.crc32(str(ids).encode()), syncs]).random(shape).argsort(-1)[..., :CHOSEN]
    experts[:, [layer for layer in range(LAYERS) if layer not in SPARSE]] = 0
    return experts.astype(np.uint8)


class Engine:
    """Answers with tokens from nowhere, 1 to 8 of them."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.loaded: set[str] = set()
        self.syncs = 0
        self.answered: Callable[[Array], Array | None] = lambda experts: experts[:-1]
        """What becomes of the routes of all tokens."""
        self.spoken: Callable[[list[int]], list[int]] = lambda _: self.random.integers(
            40, 250, self.random.integers(1, 9)
        ).tolist()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded |= {name for name, _ in weights}

    def reset_prefix_cache(self) -> None:
        self.syncs += 1

    def sample(self, prompt: list[int]) -> tuple[list[int], list[float], Array | None]:
        ids = self.spoken(prompt)
        return ids, [-5.0] * len(ids), self.answered(chosen([*prompt, *ids], self.syncs))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL sets them, and leaves them
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for module in (vllm_generation, vllm_client):
        monkeypatch.setattr(module, "is_vllm_available", lambda **_: True)
    return Engine()


class LLM:
    """vLLM's class of that name, as far as TRL uses it."""

    def __init__(self, engine: Engine, asked: dict[str, Any]) -> None:
        self.engine, self.asked = engine, asked
        runner = SimpleNamespace(model=engine)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=SimpleNamespace(max_model_len=512))
        self.reset_prefix_cache = engine.reset_prefix_cache

    def generate(self, prompts: list[dict[str, list[int]]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert sampling_params.n == 1
        return [self._answer(prompt["prompt_token_ids"]) for prompt in prompts]

    def _answer(self, prompt: list[int]) -> Any:
        ids, scores, routes = self.engine.sample(prompt)
        pairs = zip(ids, scores, strict=True)
        logprobs = [{token: SimpleNamespace(logprob=score, rank=1)} for token, score in pairs]
        completion = SimpleNamespace(token_ids=ids, logprobs=logprobs, routed_experts=routes)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])


@pytest.fixture
def colocated(mixture: Path, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds a trainer whose process has the engine."""
    monkeypatch.setattr(vllm_generation, "LLM", lambda **asked: LLM(engine, asked), raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)

    def trainer(folder: Path = mixture, **options: Any) -> Any:
        options = {"use_vllm": True, "vllm_mode": "colocate", "router_replay": "R3", "max_steps": 5, **options}
        return build(folder, tmp_path, **options)

    return trainer


class Server:
    """Answers over HTTP as vLLM's does."""

    url: str

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config: dict[str, Any] = {"model_config": {"enable_return_routed_experts": True}}
        self.is_silent = False
        """Whether answers have no word of routes, as those of a version that knows of none."""
        self.requests: list[dict[str, Any]] = []

    def get(self, path: str) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": "mixture"}]}
        if path.startswith("/server_info"):
            model = {"logprobs_mode": "processed_logprobs", **self.config["model_config"]}
            return {"vllm_config": {**self.config, "model_config": model}}
        assert path == "/health"
        return {}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/reset_prefix_cache":
            self.engine.reset_prefix_cache()
            return {"success": True}
        assert path == "/v1/completions"
        self.requests.append(body)
        return {"choices": [self._choice(prompt) for prompt in body["prompt"] for _ in range(body["n"])]}

    def _choice(self, prompt: list[int]) -> dict[str, Any]:
        ids, scores, routes = self.engine.sample(prompt)
        names = [f"token_id:{token}" for token in ids]
        logprobs = {"tokens": names, "token_logprobs": scores, "top_logprobs": [None] * len(ids)}
        choice = {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}
        return choice if self.is_silent else {**choice, "routed_experts": None if routes is None else encoded(routes)}


def encoded(routes: Array) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    answering = Server(engine)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(answering.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(answering.post(self.path, json.loads(body or "{}")))

        def _send(self, answer: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda _, __, weights: engine.load_weights(weights))
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    answering.url = f"http://127.0.0.1:{http.server_port}"
    yield answering
    http.shutdown()
    http.server_close()


@pytest.fixture
def served(mixture: Path, tmp_path: Path, server: Server) -> Callable[..., Any]:
    """Builds a trainer whose engine is the server."""
    address = {"vllm_mode": "server", "vllm_server_base_url": server.url}

    def trainer(**options: Any) -> Any:
        options = {"use_vllm": True, **address, "router_replay": "R3", "max_steps": 5, **options}
        return build(mixture, tmp_path, **options)

    return trainer


def check(trainer: Any, mixture: Path) -> None:
    """Two rollouts, the second after a sync: the routes that were returned, in every pass."""
    assert len(trainer.rollouts) == 2
    for number, (_, output) in enumerate(trainer.rollouts):
        found = list(rows(output))
        assert len({row.prompt for row in found}) > 1 and len({len(row.ids) - row.prompt for row in found}) > 2
        for row in found:
            check_row(row, number)
    policy = oracles(mixture, trainer)
    for update in trainer.updates:
        before, now = policy(trainer.rollouts[update.rollout][0]), policy(update.weights)
        for row in update.rows:
            check_row(row, update.rollout)
            with torch.no_grad():
                for name, model in {"logps": now, "old_per_token_logps": before}.items():
                    forced = routed_oracle.log_probs(model, row.ids, row.prompt, row.routes)
                    torch.testing.assert_close(row.values[name], forced, **CLOSE)
    fallback = [row["routing/fallback"] for row in tiny.history(trainer) if "routing/fallback" in row]
    assert fallback == [0, 0]


def check_row(row: Row, rollout: int) -> None:
    expected = torch.from_numpy(chosen(row.ids, rollout + 1)[:, SPARSE])
    assert row.routes is not None and row.of_padding is not None
    assert row.routes.dtype == torch.uint8 and torch.equal(row.routes[:-1], expected[:-1])
    assert (row.routes[-1] == NONE).all() or torch.equal(row.routes[-1], expected[-1])
    assert (row.of_padding == NONE).all()


ANSWERS: dict[str, Callable[[Array], Array]] = {
    "all but the last token": lambda experts: experts[:-1],
    "all tokens": lambda experts: experts,
    "int16": lambda experts: experts[:-1].astype(np.int16),
    "uint16": lambda experts: experts[:-1].astype(np.uint16),
    "layers with routers": lambda experts: experts[:-1, SPARSE],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_an_engine_in_the_process_returns_is_replayed(
    mixture: Path, engine: Engine, colocated: Callable[..., Any], answer: str
) -> None:
    engine.answered = ANSWERS[answer]
    unflagged = vllm_generation.LLM
    trainer = colocated()
    assert vllm_generation.LLM is unflagged
    llm = trainer.vllm_generation.llm
    assert llm.asked["enable_return_routed_experts"] is True and llm.asked["model"] == str(mixture)
    check(tiny.train(trainer), mixture)
    assert "generate" not in vars(llm) and engine.loaded == tiny.parameters(trainer).keys()


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_a_server_returns_is_replayed(
    mixture: Path, engine: Engine, server: Server, served: Callable[..., Any], answer: str
) -> None:
    """It has each prompt once, and answers with the choices of one after those of another."""
    engine.answered = ANSWERS[answer]
    trainer = served()
    check(tiny.train(trainer), mixture)
    assert "_post" not in vars(trainer.vllm_generation.vllm_client)
    assert [(len(body["prompt"]), body["n"]) for body in server.requests] == [(4, 4), (4, 4)]


def test_the_flag_of_vllm_0_31_is_found(server: Server, served: Callable[..., Any]) -> None:
    server.config = {"model_config": {}, "aux_output_config": {"enable_return_routed_experts": True}}
    tiny.train(served(max_steps=1))


@pytest.mark.parametrize(
    "config",
    [
        {"model_config": {"enable_return_routed_experts": False}},
        {"model_config": {}, "aux_output_config": {"enable_return_routed_experts": False}},
        {"model_config": {}, "aux_output_config": None},
        {"model_config": {}},
    ],
    ids=str,
)
def test_a_server_that_captures_nothing_is_refused(
    server: Server, served: Callable[..., Any], config: dict[str, Any]
) -> None:
    server.config = config
    with pytest.raises(ValueError, match=r"started without capturing them\. Start it with --enable-return-routed-"):
        served()


@pytest.mark.parametrize("is_silent", [False, True])
def test_answers_without_routes_are_refused(
    engine: Engine, server: Server, served: Callable[..., Any], is_silent: bool
) -> None:
    engine.answered, server.is_silent = lambda _: None, is_silent
    with pytest.raises(ValueError, match=r"vLLM returned no routes for 16 of 16 sequences\. Start a server with "):
        served().train()


def test_a_few_sequences_without_routes_are_refused(engine: Engine, colocated: Callable[..., Any]) -> None:
    count = iter(range(16))
    engine.answered = lambda experts: None if next(count) in (3, 5) else experts[:-1]
    with pytest.raises(ValueError, match=r"vLLM returned no routes for 2 of 16 sequences.*router_replay='R2'"):
        colocated().train()


WRONG: dict[str, tuple[Callable[[Array], Array], str]] = {
    "nothing filled in": (
        lambda experts: np.zeros_like(experts[:-1]),
        r"routes of token 0 in layer 0 are \[0, 0\].*has not captured them",
    ),
    "another model": (
        lambda experts: experts[:-1, :3],
        r"returned routes of 3 layers, and the model has routers in its decoder layers 1, 3.*serves another model",
    ),
    "a token too few": (
        lambda experts: experts[:-2],
        r"returned values of \d+ tokens of a sequence of \d+; the last alone may have none",
    ),
    "experts that there are not": (
        lambda experts: np.where(experts == 0, 77, experts)[:-1],
        r"a route leads to expert 77, and the router model\.layers\.1\.mlp\.gate has 8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_routes_are_refused(engine: Engine, colocated: Callable[..., Any], case: str) -> None:
    engine.answered, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        colocated().train()


def test_a_vllm_without_capture_says_what_to_do(
    colocated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(enable_prefix_caching: bool = True, **asked: Any) -> Any:
        if "enable_return_routed_experts" in asked:
            raise TypeError("EngineArgs.__init__() got an unexpected keyword argument 'enable_return_routed_experts'")
        raise NotImplementedError

    monkeypatch.setattr(vllm_generation, "LLM", old)
    with pytest.raises(ValueError, match=r"needs a vLLM with enable_return_routed_experts.*newer.*or set router_rep"):
        colocated()
    assert vllm_generation.LLM is old


def test_an_engines_own_errors_are_not_taken_for_it(
    colocated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: Any) -> Any:
        raise TypeError("unsupported operand")

    monkeypatch.setattr(vllm_generation, "LLM", broken)
    with pytest.raises(TypeError, match="unsupported operand"):
        colocated()
    assert vllm_generation.LLM is broken


def test_without_vllm_trl_says_so(colocated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vllm_generation, "LLM")
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda **_: False)
    with pytest.raises(ImportError, match="vLLM is not available"):
        colocated()
    assert not hasattr(vllm_generation, "LLM")


def test_an_engine_over_several_gpus_is_refused(colocated: Callable[..., Any]) -> None:
    with pytest.raises(
        ValueError, match=r"vllm_tensor_parallel_size=2: one process alone.*Set vllm_mode='server', or"
    ):
        colocated(vllm_tensor_parallel_size=2)


def test_a_dense_model_is_refused(models: dict[str, Path], colocated: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"router_replay='R3': Qwen2ForCausalLM has no routers"):
        colocated(models["dense"])


def test_a_token_has_the_routes_of_the_turn_in_which_it_first_had_some(
    tmp_path: Path, engine: Engine, colocated: Callable[..., Any]
) -> None:
    """What it was sampled under, though the engine returns others with the next turn."""
    reader = agent.tokenizer()
    names = {name: reader.convert_tokens_to_ids(f"<{name}>") for name in ("tool_call", "tool_response")}
    call = '<tool_call>\n{"name": "double", "arguments": {"x": 2}}\n</tool_call><|im_end|>'
    texts = iter(["No.<|im_end|>", call] * 8)
    engine.spoken = lambda prompt: (
        reader("4.<|im_end|>" if names["tool_response"] in prompt else next(texts)).input_ids
    )
    agents = {"tools": agent.tools([]), "train_dataset": agent.dataset(agent.one_by_one), "processing_class": reader}
    ends = {"eos_token_id": reader.eos_token_id, "pad_token_id": reader.pad_token_id, "vocab_size": len(reader)}
    folder = save_model(tmp_path / "model", **ends)
    trainer = tiny.train(colocated(folder, max_completion_length=160, max_steps=1, build=agents))
    turns = []
    for row in rows(trainer.rollouts[0][1]):
        spans = agent.turns(row.ids[row.prompt :])
        first = row.prompt + spans[0][1]
        expected = chosen(row.ids, 1)
        expected[: first - 1] = chosen(row.ids[:first], 1)[:-1]
        assert row.routes is not None and np.array_equal(row.routes[:-1].numpy(), expected[:-1, SPARSE])
        turns.append(len(spans))
    assert turns == [1, 2] * 8


@pytest.mark.parametrize("replay", ["R2", None])
def test_without_r3_the_engine_is_trls(colocated: Callable[..., Any], replay: str | None) -> None:
    generation = colocated(router_replay=replay).vllm_generation
    assert type(generation) is vllm_generation.VLLMGeneration
    assert "enable_return_routed_experts" not in generation.llm.asked


def test_a_generation_that_fails_leaves_the_engine_as_it_was(
    server: Server, served: Callable[..., Any], colocated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("of the test")

    generation = served().vllm_generation
    generation.generate([[1, 2]], None, 1)
    generation.take_routes(SPARSE)
    monkeypatch.setattr(VLLMClient, "generate", fails)
    with pytest.raises(RuntimeError, match="of the test"):
        generation.generate([[1, 2]], None, 1)
    assert "_post" not in vars(generation.vllm_client)

    generation = colocated().vllm_generation
    monkeypatch.setattr(LLM, "generate", fails)
    with pytest.raises(RuntimeError, match="of the test"):
        generation.generate([[1, 2]], None, 1)
    assert "generate" not in vars(generation.llm)


class Process:
    """What an accelerator says of itself."""

    def __init__(self, index: int) -> None:
        self.process_index = self.local_process_index = index
        self.is_main_process = index == 0
        self.num_processes, self.device = 2, torch.device("cpu")
        self.state = SimpleNamespace(deepspeed_plugin=None)

    def wait_for_everyone(self) -> None: ...


@pytest.mark.parametrize("generations", [1, 3])
def test_each_of_two_processes_has_the_routes_of_its_own_sequences(
    server: Server, monkeypatch: pytest.MonkeyPatch, models: dict[str, Path], generations: int
) -> None:
    mixture = transformers.AutoModelForCausalLM.from_pretrained(models["moe"])
    prompts = [[prompt] * generations for prompt in ([1, 2, 3], [4, 5], [6, 7, 8, 9], [9])]
    of_processes = [[*prompts[0], *prompts[1]], [*prompts[2], *prompts[3]]]
    sent: list[Any] = []

    def gathered(given: list[Any]) -> list[Any]:
        return of_processes[0] + of_processes[1] if given[0] is not None else [None] * 2 * len(given)

    def from_main(objects: list[Any], from_process: int) -> None:
        assert from_process == 0
        if main:
            sent.append(list(objects))
        else:
            objects[:] = sent.pop(0)

    monkeypatch.setattr(vllm_generation, "gather_object", gathered)
    for module in (vllm_generation, host_engine):
        monkeypatch.setattr(module, "broadcast_object_list", from_main)
    seen = []
    for index, own in enumerate(of_processes):
        main = index == 0
        options = {"mode": "server", "server_base_url": server.url, "max_completion_length": 8}
        generation = CapturingGeneration(mixture, Process(index), None, captures=[ROUTES], **options)
        _, completions, _, _ = generation.generate(own, None, generations)
        for prompt, ids, routes in zip(own, completions, generation.take_routes(SPARSE), strict=True):
            expected = chosen([*prompt, *ids], 0)[:-1, SPARSE]
            assert np.array_equal(routes.numpy(), expected)
            seen.append((*prompt, *ids))
    assert sent == [] and len(server.requests) == 1 and len(seen) == 4 * generations
