"""A vLLM that is played by a few lines: colocated, through TRL's own calls, or a server, over HTTP.

It returns routes that no router has chosen and sets that no sampling has left, so that nothing but what it returned
can be what is trained on. The real one is in tests/vllm.
"""

import base64
import io
import itertools
import json
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import Qwen3MoeConfig
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from tests.features.router_replay.tools import build
from tests.tools import tiny

LAYERS, SPARSE, EXPERTS, CHOSEN = 4, [1, 3], 8, 2
ROUTED, MASKED = "enable_return_routed_experts", "return_sampling_mask"
COMPLETIONS, TOKENS, RENDER = "/v1/completions", "/inference/v1/generate", "/v1/chat/completions/render"
# no policy has sampled its tokens
UNCHECKED = {"use_vllm": True, "engine_check": None}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
UNBOUNDED = "sampling distribution replay requires top_k > 0 to bound sampling mask size"
Array = Any
Sets = list[list[int]]
Build = Callable[..., Any]


def refuse_unbounded(temperature: float, top_k: int) -> None:
    """As vLLM does with `return_sampling_mask`."""
    if temperature <= 0:
        raise ValueError("sampling distribution replay requires temperature > 0")
    if top_k <= 0:
        raise ValueError(UNBOUNDED)


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


def _random(seed: Any, *more: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(str(seed).encode()), *more])


def chosen(ids: list[int], syncs: int) -> Array:
    """(T, L, K) of a sequence, other ones after each sync; a dense layer has zeros."""
    experts = _random(ids, syncs).random((len(ids), LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN]
    experts[:, [layer for layer in range(LAYERS) if layer not in SPARSE]] = 0
    return experts.astype(np.uint8)


def kept(prompt: list[int], completion: list[int], syncs: int) -> Sets:
    """A set for each token of a completion, with up to 11 others beside it, in any order; other ones after a sync."""
    random, sets = _random([prompt, completion], syncs), []
    for token in completion:
        others = random.choice(tiny.SIZES["vocab_size"], random.integers(12), replace=False).tolist()
        sets.append(random.permutation([token, *(other for other in others if other != token)]).tolist())
    return sets


class Sample(NamedTuple):
    ids: list[int]
    scores: list[float]
    routes: Array | None
    sets: Sets | None


class Engine:
    """Answers with tokens from nowhere, 1 to 8 of them."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        """As they were sent last."""
        self.syncs = 0
        self.answered: Callable[[Array], Array | None] = lambda experts: experts[:-1]
        """What becomes of the routes of all tokens."""
        self.left: Callable[[Sets], Sets | None] = lambda sets: sets
        """What becomes of the sets of all tokens of a completion."""
        self.spoken: Callable[[list[int], int], list[int]] = lambda prompt, number: self.anything(prompt, number)
        """The completion of a prompt, which has been asked for so many times before since a sync."""
        self.scored: Callable[[list[int], list[int]], list[float]] = lambda _, ids: [-5.0] * len(ids)
        """Log-probs of a completion behind a prompt."""
        self.is_silent = False
        """True if it has no word of routes and sets, as a version that knows of none."""
        self.obeys_seeds = False
        """True if its seed decides a completion, in place of the number of those before it."""
        self.seeds: list[list[int | None]] = []
        """The seeds of the completions of each call, in order."""
        self.adapters: list[Any] | None = None
        """Requests for adapters; None if a colocated engine takes none."""
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()

    def anything(self, prompt: list[int], number: int) -> list[int]:
        random = _random(prompt, self.syncs, number)
        return random.integers(40, 250, random.integers(1, 9)).tolist()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights |= {name: weight.detach().clone() for name, weight in weights}

    def reset_prefix_cache(self) -> None:
        self.syncs += 1

    def sample(self, prompt: list[int], seed: int | None) -> Sample:
        with self._lock:
            key = (self.syncs, *prompt)
            number = self._asked[key]
            self._asked[key] += 1
            if self.obeys_seeds and seed is not None:
                number = seed
            ids = self.spoken(prompt, number)
            routes = self.answered(chosen([*prompt, *ids], self.syncs))
            return Sample(ids, self.scored(prompt, ids), routes, self.left(kept(prompt, ids, self.syncs)))


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what TRL says of this process for a colocated engine, and leaves behind."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    alone(monkeypatch)
    for module in (vllm_generation, vllm_client):
        monkeypatch.setattr(module, "is_vllm_available", lambda **_: True)
    return Engine()


def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's client asks a server that fails again at once."""
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)


class LLM:
    """vLLM's class of that name, as far as TRL uses it."""

    def __init__(self, engine: Engine, asked: dict[str, Any]) -> None:
        self.engine, self.asked = engine, asked
        runner = SimpleNamespace(model=engine)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=SimpleNamespace(max_model_len=512))
        self.reset_prefix_cache = engine.reset_prefix_cache
        if engine.adapters is not None:
            self.llm_engine.add_lora = engine.adapters.append

    def generate(
        self,
        prompts: list[dict[str, list[int]]],
        sampling_params: Any,
        use_tqdm: bool,
        lora_request: Any = None,
    ) -> list[Any]:
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        assert len(params) == len(prompts) and {each.n for each in params} == {1}
        assert lora_request == (self.engine.adapters[-1] if self.engine.adapters else None)
        if self.asked.get(MASKED):
            refuse_unbounded(params[0].temperature, params[0].top_k)
        self.engine.seeds.append([getattr(each, "seed", None) for each in params])
        asked = zip(prompts, self.engine.seeds[-1], strict=True)
        return [self._answer(prompt["prompt_token_ids"], seed) for prompt, seed in asked]

    def _answer(self, prompt: list[int], seed: int | None) -> Any:
        ids, scores, routes, sets = self.engine.sample(prompt, seed)
        pairs = zip(ids, scores, strict=True)
        logprobs = [{token: SimpleNamespace(logprob=score, rank=1)} for token, score in pairs]
        completion = SimpleNamespace(token_ids=ids, logprobs=logprobs)
        if not self.engine.is_silent:
            completion.routed_experts = routes if self.asked.get(ROUTED) else None
            has_sets = self.asked.get(MASKED) and sets is not None
            completion.sampling_mask = SimpleNamespace(token_ids=sets) if has_sets else None
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])


def colocate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the engine where TRL looks for vLLM."""
    monkeypatch.setattr(vllm_generation, "LLM", lambda **asked: LLM(engine, asked), raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)


@pytest.fixture
def in_process(mixture: Path, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds a trainer whose process has the engine."""
    colocate(engine, monkeypatch)

    def trainer(folder: Path = mixture, **options: Any) -> Any:
        alone(monkeypatch)
        return build(folder, tmp_path, **{**UNCHECKED, "vllm_mode": "colocate", "max_steps": 5, **options})

    return trainer


class Server:
    """Answers over HTTP as vLLM's does."""

    url: str

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config: dict[str, Any] = {"model_config": {ROUTED: True, MASKED: False}}
        """What it was started with."""
        self.missing: set[str] = {LOAD, UNLOAD}
        """Paths that it does not serve."""
        self.refused: dict[str, tuple[int, str]] = {}
        """Paths that it serves with an error: status and message."""
        self.waits = itertools.cycle([0.1, 0.05, 0.0, 0.02])
        """Seconds from a request for one prompt to its answer: not the first to come is the first to be answered."""
        self.requests: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        """By their paths, as they came."""
        self.answers: list[list[int]] = []
        """Prompts that came alone, as they were answered."""

    def flag(self, name: str) -> bool:
        return any((part or {}).get(name, False) for part in self.config.values())

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
        self.requests[path].append(body)
        if path in (LOAD, UNLOAD):
            return {}
        if path == RENDER:
            return {"features": features(body["messages"])}
        sampling = body if path == COMPLETIONS else body["sampling_params"]
        if self.flag(MASKED):
            refuse_unbounded(sampling["temperature"], sampling["top_k"])
        of_choices = [None] * sampling["n"]
        if sampling.get("seed") is not None:
            of_choices = list(range(sampling["seed"], sampling["seed"] + sampling["n"]))  # for each prompt the same
        if path == COMPLETIONS:
            choices = [self._choice(prompt, seed) for prompt in body["prompt"] for seed in of_choices]
            return {"choices": [choice for choice, _ in choices]}
        assert path == TOKENS and sampling["output_kind"] == 2, path
        assert body.keys() == {"request_id", "model", "token_ids", "features", "sampling_params"}
        choices = [self._choice_of_tokens(body["token_ids"], *each) for each in enumerate(of_choices)]
        time.sleep(next(self.waits))
        self.answers.append(body["token_ids"])
        return {"choices": choices}

    def _choice(self, prompt: list[int], seed: int | None) -> tuple[dict[str, Any], Sample]:
        sample = self.engine.sample(prompt, seed)
        names = [f"token_id:{token}" for token in sample.ids]
        logprobs = {"tokens": names, "token_logprobs": sample.scores, "top_logprobs": [None] * len(names)}
        choice = {"prompt_token_ids": prompt, "token_ids": sample.ids, "logprobs": logprobs}
        if not self.engine.is_silent:
            has_routes = sample.routes is not None and self.flag(ROUTED)
            choice["routed_experts"] = encoded(sample.routes) if has_routes else None
        return choice, sample

    def _choice_of_tokens(self, prompt: list[int], index: int, seed: int | None) -> dict[str, Any]:
        choice, sample = self._choice(prompt, seed)
        tokens = choice.pop("logprobs")
        pairs = zip(tokens["tokens"], tokens["token_logprobs"], strict=True)
        own = [{"token": token, "logprob": score} for token, score in pairs]
        choice |= {"index": index, "logprobs": {"content": [{**each, "top_logprobs": [each]} for each in own]}}
        del choice["prompt_token_ids"]
        if not self.engine.is_silent:
            choice["sampling_mask"] = sample.sets if self.flag(MASKED) else None
        return choice


def encoded(routes: Array) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def features(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the images of a conversation; where they lie in it is for the client to say."""
    urls = [part["image_url"]["url"] for message in messages for part in message["content"]]
    hashes = [f"{zlib.crc32(url.encode()):x}" for url in urls]
    return {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": [{"offset": 77, "length": 1} for _ in urls]}}


@pytest.fixture
def server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    answering = Server(engine)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, answering.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if self.path in answering.missing:
                return self._send(404, {"detail": "Not Found"})
            if self.path in answering.refused:
                status, message = answering.refused[self.path]
                return self._send(status, {"error": {"message": message}})
            try:
                self._send(200, answering.post(self.path, body))
            except Exception as error:  # without an answer the client would ask again and again
                self._send(400, {"error": {"message": f"{type(error).__name__}: {error}"}})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda _, __, weights: engine.load_weights(weights))
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    answering.url = f"http://127.0.0.1:{http.server_port}"
    yield answering
    http.shutdown()
    http.server_close()


@pytest.fixture
def over_http(mixture: Path, tmp_path: Path, server: Server) -> Build:
    """Builds a trainer whose engine is the server."""
    address = {"vllm_mode": "server", "vllm_server_base_url": server.url}

    def trainer(folder: Path = mixture, **options: Any) -> Any:
        return build(folder, tmp_path, **{**UNCHECKED, **address, "max_steps": 5, **options})

    return trainer


@pytest.fixture
def flagged(server: Server, over_http: Build) -> Build:
    """The same, of a server that was started with the flags that the trainer's options ask for."""

    def trainer(*arguments: Any, **options: Any) -> Any:
        flags = {MASKED: "keep_sampling_mask", ROUTED: "router_replay"}
        server.config = {"model_config": {flag: bool(options.get(option)) for flag, option in flags.items()}}
        return over_http(*arguments, **options)

    return trainer


@pytest.fixture(params=["in_process", "flagged"], ids=["colocated", "server"])
def built(request: pytest.FixtureRequest) -> Build:
    """Builds a trainer with either."""
    return request.getfixturevalue(request.param)
