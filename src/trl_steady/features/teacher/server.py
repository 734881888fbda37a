"""A teacher behind the address of a server. This file knows its requests and answers, and no trainer."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from transformers import PreTrainedTokenizerBase

FAILURES = (OSError, ValueError, LookupError, TypeError)
"""What the methods raise if a server fails, or answers something else than log-probs."""
_SECONDS = 600  # that a request may take
_REQUESTS = 4  # at once
_PROBE = "def f(x):\n    return 12345.678 * x  # Größe, 你好, привет"


class TeacherServer:
    """Scores sequences by `/v1/completions` with `echo` and `logprobs`, as vLLM and others serve it.

    All methods raise one of `FAILURES` if it fails.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model: str = self._ask("/v1/models")["data"][0]["id"]
        """Name of the model that the server serves."""

    def has_tokens_of(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return True if the server reads a text as the same tokens, or as many, if it does not say their ids."""
        (tokens,) = self._completed([_PROBE], "tokens")
        expected = [f"token_id:{token}" for token in tokenizer(_PROBE)["input_ids"]]
        if len(tokens) - len(expected) not in (0, 1):  # the last one is generated
            return False
        names_ids = str(tokens[0]).startswith("token_id:")
        return tokens[: len(expected)] == expected or not names_ids

    def log_probs(self, sequences: Sequence[list[int]], batch_size: int) -> list[list[float]]:
        """Return the log-prob of each token of sequences, without the first of each, which nothing predicts."""
        batches = [sequences[start : start + batch_size] for start in range(0, len(sequences), batch_size)]
        with ThreadPoolExecutor(_REQUESTS) as threads:
            answers = threads.map(lambda batch: self._completed(batch, "token_logprobs"), batches)
        log_probs: list[list[Any]] = []
        for answer in answers:
            log_probs += answer
        for sequence, values in zip(sequences, log_probs, strict=True):
            del values[len(sequence) :]  # what is generated
            del values[:1]
            if len(values) != len(sequence) - 1 or None in values:
                raise ValueError(f"it has not scored each token of a sequence of {len(sequence)}")
        return log_probs

    def _completed(self, prompts: Sequence[str | list[int]], field: str) -> list[list[Any]]:
        """Return a field of the log-probs of prompts, each with one generated token behind it."""
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompts), "max_tokens": 1, "temperature": 1.0}
        answer = self._ask(
            "/v1/completions", {**body, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != len(prompts):
            raise ValueError(f"it answered {len(choices)} of {len(prompts)} prompts")
        return [choice["logprobs"][field] for choice in choices]

    def _ask(self, path: str, body: object = None) -> dict[str, Any]:
        data = None
        if body is not None:
            data = json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=_SECONDS) as response:
                return json.load(response)
        except HTTPError as error:
            raise OSError(f"{error}: {error.read().decode(errors='replace')[:500]}") from error
        except HTTPException as error:  # it ends amid an answer
            raise OSError(repr(error)) from error
