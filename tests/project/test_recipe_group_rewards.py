"""recipes/group_rewards: a judge behind a server that answers, fails, ranks too few or hangs; and lengths."""

import asyncio
import importlib
import json
import re
import shlex
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.cli.tools import Launched
from tests.project import recipe
from tests.tools import tiny
from trl_steady.cli import main as cli

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes/group_rewards"
ANSWERS = ["three", "a", "fourteen", "of"]


class Server:
    """A server with OpenAI's chat API, which ranks as `behaviour` says and keeps the requests."""

    def __init__(self) -> None:
        self.behaviour = "by length"
        self.requests: list[dict[str, Any]] = []
        self.is_over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({**request, "path": self.path, "key": self.headers["Authorization"]})
                status, content = outer.answer(request["messages"][0]["content"])
                body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def answer(self, content: str) -> tuple[int, str | None]:
        answers = re.findall(r"^Answer \d+:\n(.*?)(?=\n\nAnswer |\n\nEnd with)", content, re.M | re.S)
        ranking = sorted(range(1, len(answers) + 1), key=lambda number: (len(answers[number - 1]), number))
        match self.behaviour:
            case "fails":
                return 500, ""
            case "fails once" if len(self.requests) == 1:
                return 503, ""
            case "hangs":
                self.is_over.wait(30)
            case "ranks too few":
                ranking = ranking[:-1]
            case "ranks one twice":
                ranking = ranking[:-1] + ranking[:1]
            case "by position":
                ranking = [*range(1, len(answers) + 1)]
            case "says nothing":
                return 200, None
            case _:
                pass
        return 200, f"I see [1] in the text, but: {ranking}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    yield server
    server.is_over.set()
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("recipes.group_rewards.judge")


def ask(module: Any, server: Server, **options: Any) -> tuple[list[float | None], dict[str, float]]:
    """The rewards of four answers, and what is logged."""
    judge = module.Judge(server.url, "a-model", **{"wait": 0.0, "timeout": 0.3, **options})
    logged: dict[str, float] = {}
    completions = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
    prompts = [[{"role": "user", "content": "How many?"}]] * 4
    rewards = asyncio.run(
        judge(prompts=prompts, completions=completions, log_metric=logged.__setitem__, number=[1] * 4)
    )
    return rewards, logged


def test_the_judge_sees_both_orders_and_the_best_gets_one(module: Any, server: Server) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    rewards, logged = ask(module, server, timeout=30.0, key="secret", fields=fields)
    assert rewards == [pytest.approx(1 / 3), 1.0, 0.0, pytest.approx(2 / 3)]
    assert logged == {"judge/unusable": 0.0, "judge/consistent": 1.0}
    assert len(server.requests) == 2
    contents = sorted(request["messages"][0]["content"] for request in server.requests)
    shown = [[re.search(rf"^{answer}$", content, re.M).start() for answer in ANSWERS] for content in contents]  # type: ignore[union-attr]
    assert sorted(order == sorted(order) for order in shown) == [False, True]
    assert all(order in (sorted(order), sorted(order, reverse=True)) for order in shown)
    assert all("How many?" in content for content in contents)
    for request in server.requests:
        assert request["path"] == "/v1/chat/completions" and request["model"] == "a-model"
        assert request["key"] == "Bearer secret" and request["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_judge_that_follows_positions_prefers_no_answer(module: Any, server: Server) -> None:
    server.behaviour = "by position"
    rewards, logged = ask(module, server, timeout=30.0)
    assert rewards == [0.5] * 4 and logged["judge/consistent"] == 0.0


def test_a_server_that_fails_once_is_asked_again(module: Any, server: Server) -> None:
    server.behaviour = "fails once"
    rewards, _ = ask(module, server, timeout=30.0)
    assert rewards[1] == 1.0 and len(server.requests) == 3


@pytest.mark.parametrize("behaviour", ["ranks too few", "ranks one twice", "says nothing"])
def test_a_group_that_is_not_ranked_has_no_reward(module: Any, server: Server, behaviour: str) -> None:
    server.behaviour = behaviour
    rewards, logged = ask(module, server, timeout=30.0, attempts=2)
    assert rewards == [None] * 4 and logged == {"judge/unusable": 1.0} and len(server.requests) == 4


@pytest.mark.parametrize(("behaviour", "why"), [("fails", "HTTP Error 500"), ("hangs", "TimeoutError: timed out")])
def test_a_server_that_fails_ends_the_run_with_the_prompt(
    module: Any, server: Server, behaviour: str, why: str, models: dict[str, Path], tmp_path: Path
) -> None:
    server.behaviour = behaviour
    reward = module.GroupReward(module.Judge(server.url, "a-model", timeout=0.3, attempts=2, wait=0.0))
    trainer = tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": reward})
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"'Judge' failed for the group of the prompt '.*\d=': .*{why}"):
        trainer.train()
    assert len(server.requests) == 16  # 4 groups, 2 orders, 2 attempts
    assert time.monotonic() - start < 25  # a hanging server answers after 30 seconds


def test_right_answers_are_measured_against_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    function = importlib.import_module("recipes.group_rewards.length").shortest_right.function
    texts = ["Paris", "It is paris.", "Rome", "Paris, of course"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    ids = [[0] * length for length in (4, 8, 1, 16)]
    assert function(completions=completions, completion_ids=ids, answer=["Paris"] * 4) == [1.0, 0.5, 0.0, 0.25]
    assert function(completions=completions, completion_ids=ids, answer=["Oslo"] * 4) == [0.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("line", ["judge", "length"])
def test_a_command_of_the_readme_trains_a_tiny_model(
    module: Any,
    server: Server,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
) -> None:
    monkeypatch.setattr(module.judge.function, "url", server.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    recipe.chatty(models["dense"], tmp_path / "model")
    commands = [text for text in (FOLDER / "README.md").read_text().splitlines() if text.startswith("trl-steady ")]
    (command,) = [shlex.split(text)[1:] for text in commands if ("shortest_right" in text) == (line == "length")]
    command += ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "out")]
    launched = Launched(monkeypatch)
    assert cli.main([*command, "--use_cpu", "true"]) == 0
    assert cli.main(launched.args.training_script_args) == 0
    printed = capsys.readouterr().out
    assert "on: completions of a prompt judged together" in printed
    assert len(server.requests) == (2 * 4 * 2 if line == "judge" else 0)  # 2 rollouts, 4 groups, 2 orders
    assert ("rewards/Judge/mean': '0.5'" in printed) == (line == "judge")
