"""A teacher behind an address: it says what the model in the process says, or names itself."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.features.padding_free.rollouts import UNEQUAL
from tests.oracles import teacher as oracle
from tests.tools import tiny


class Scores:
    """Scores prompts as `/v1/completions` with `echo` does. `says_ids`: tokens are named as vLLM's flag asks."""

    url: str

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = tiny.tokenizer()
        self.says_ids = True
        self.requests: list[dict[str, Any]] = []
        self.fails_after: int | None = None
        self.answer: dict[str, Any] | None = None
        """In place of the answer."""

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        assert body["echo"] and body["logprobs"] == 1 and body["max_tokens"] == 1 and body["model"] == "big"
        if self.answer is not None:
            return self.answer
        choices = [{"index": index, "logprobs": self.scored(prompt)} for index, prompt in enumerate(body["prompt"])]
        return {"choices": choices[::-1]}

    def scored(self, prompt: str | list[int]) -> dict[str, Any]:
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        with torch.no_grad():
            known = [min(token, self.model.config.vocab_size - 1) for token in ids]  # a new token is the last one
            logps = oracle.sequence_logps(self.model, [known[:1]], [known[1:]])[0].tolist()
        names = [f"token_id:{token}" if self.says_ids else chr(token) for token in [*ids, 7]]
        return {"tokens": names, "token_logprobs": [None, *logps, -0.5], "top_logprobs": None}


@pytest.fixture
def server(models: dict[str, Path]) -> Iterator[Scores]:
    scores = Scores(models["moe"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self._send(200, {"data": [{"id": "big"}]})

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if scores.fails_after is not None and len(scores.requests) >= scores.fails_after:
                return self._send(503, {"error": {"message": "out of memory"}})
            self._send(200, scores.post(body))

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    scores.url = f"http://127.0.0.1:{http.server_port}"
    yield scores
    http.shutdown()
    http.server_close()


def train(model: Path, output: Path, teacher: str, **options: Any) -> Any:
    torch.manual_seed(0)
    build = {"rollout_func": UNEQUAL, "train_dataset": tiny.dataset()}
    settings = {"teacher_mode": "add", "optim": "sgd", "max_steps": 3, "num_iterations": 1, "steps_per_generation": 2}
    return tiny.trainer(model, output, teacher=teacher, **{**settings, **options}, build=build)


@pytest.mark.parametrize("suffix", ["", pytest.param("/v1/", marks=pytest.mark.slow)])
def test_it_says_what_the_model_in_the_process_says(
    models: dict[str, Path], tmp_path: Path, server: Scores, suffix: str
) -> None:
    """Within the rounding of float32 passes with and without padding."""
    here = tiny.train(train(models["dense"], tmp_path, str(models["moe"])))
    there = tiny.train(train(models["dense"], tmp_path, server.url + suffix))
    found = tiny.parameters(there)
    for name, value in tiny.parameters(here).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    kls = [[row["teacher/kl"] for row in tiny.history(each) if "teacher/kl" in row] for each in (here, there)]
    assert kls[1] == pytest.approx(kls[0], rel=1e-4) and len(kls[0]) == 2
    asked = [len(body["prompt"]) for body in server.requests[1:]]
    assert asked == [4] * 4  # 2 rollouts of 8, in batches


def test_one_that_fails_names_itself_and_the_run_resumes(
    models: dict[str, Path], tmp_path: Path, server: Scores
) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    whole = tiny.train(train(models["dense"], tmp_path / "whole", server.url, **options))
    server.fails_after = len(server.requests) + 3  # the probe, and the first rollout
    failing = train(models["dense"], tmp_path / "out", server.url, **options)
    with pytest.raises(RuntimeError) as failed:
        failing.train()
    said = str(failed.value)
    assert f"teacher={server.url!r} (big) has not scored a rollout: HTTP Error 503" in said
    assert "out of memory" in said and "resume_from_checkpoint=True" in said and "checkpoint-2" in said
    server.fails_after = None
    resumed = train(models["dense"], tmp_path / "out", server.url, **options)
    resumed.train(resume_from_checkpoint=True)
    found = tiny.parameters(resumed)
    assert all(torch.equal(value, found[name]) for name, value in tiny.parameters(whole).items())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"choices": []}, "it answered 0 of 4 prompts"),
        ({"choices": [{"index": i, "logprobs": None} for i in range(4)]}, "not subscriptable"),
        (
            {"choices": [{"index": i, "logprobs": {"token_logprobs": [None, -1.0, None]}} for i in range(4)]},
            "it has not scored each token of a sequence of",
        ),
    ],
    ids=["nothing", "no log-probs", "too few"],
)
def test_an_answer_without_scores_is_refused(
    models: dict[str, Path], tmp_path: Path, server: Scores, answer: dict[str, Any], said: str
) -> None:
    trainer = train(models["dense"], tmp_path, server.url)
    server.answer = answer
    with pytest.raises(RuntimeError, match=said):
        trainer.train()


@pytest.mark.parametrize("says_ids", [True, False])
def test_another_tokenizer_is_refused_with_both_names(
    models: dict[str, Path], tmp_path: Path, server: Scores, says_ids: bool
) -> None:
    """By the ids of a text, or by their number if the server does not say them."""
    server.says_ids = says_ids
    train(models["dense"], tmp_path, server.url)
    server.tokenizer.add_tokens(["return"])
    with pytest.raises(ValueError, match=r"has the tokenizer of 'big', .*that of the policy, ''"):
        train(models["dense"], tmp_path, server.url)


def test_an_address_without_a_server_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"teacher='http://127\.0\.0\.1:9' is no server that scores prompts: "):
        train(models["dense"], tmp_path, "http://127.0.0.1:9")
