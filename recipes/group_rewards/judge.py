"""A judge that ranks the answers of a group: any model behind a server with OpenAI's chat API.

Judges prefer some positions. This one sees each group twice, the second time in reverse order, and averages the two
places of an answer. It needs the standard library only.
"""

import asyncio
import itertools
import json
import os
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_steady import GroupReward

ASK = """\
Rank the answers to the question from best to worst.

Question:
{question}

{answers}

End with the numbers of all {count} answers, best first, as a JSON list. Example: [2, 1, 3]"""


@dataclass
class Judge:
    """Ranks the answers of a group. Each gets the share of the others that it beats, from 0 to 1."""

    url: str
    """Address up to and including `/v1`."""
    model: str
    key: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More fields of each request. Not every server takes all."""
    timeout: float = 600.0
    """Seconds without a byte from the server, after which a request is given up. The first comes with the answer."""
    attempts: int = 3
    """Requests for a ranking, before an error of the server ends the run, or a group goes without a reward."""
    wait: float = 2.0
    """Seconds between two of them."""

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Callable[[str, float], None], **_: Any
    ) -> list[float | None]:
        """Return a reward for each answer, or None for all if the judge does not rank them.

        Raises:
            OSError: The server cannot be reached, answers with an error, or takes too long.
        """
        question = _text(prompts[0])
        answers = [_text(completion) for completion in completions]
        both_orders = self._places(question, answers), self._places(question, answers[::-1])
        forward, backward = await asyncio.gather(*both_orders, return_exceptions=True)  # no request outlives the call
        for ranking in (forward, backward):
            if isinstance(ranking, BaseException):
                raise ranking
        log_metric("judge/unusable", float(forward is None or backward is None))
        if forward is None or backward is None:
            return [None] * len(answers)
        places = list(zip(forward, backward[::-1], strict=True))
        log_metric("judge/consistent", _consistency(places))
        others = max(len(answers) - 1, 1)
        return [1.0 - (first + second) / (2 * others) for first, second in places]

    async def _places(self, question: str, answers: Sequence[str]) -> list[int] | None:
        """Return the place of each answer, 0 = best; None if no attempt gave a ranking of all."""
        numbered = [f"Answer {number}:\n{answer}" for number, answer in enumerate(answers, start=1)]
        content = ASK.format(question=question, answers="\n\n".join(numbered), count=len(answers))
        for attempt in range(1, self.attempts + 1):
            try:
                reply = await asyncio.to_thread(self._reply, content)
            except OSError:
                if attempt == self.attempts:
                    raise
                await asyncio.sleep(self.wait)
                continue
            ranking = _last_list(reply)
            if sorted(ranking) == list(range(1, len(answers) + 1)):
                return [ranking.index(number) for number in range(1, len(answers) + 1)]
        return None

    def _reply(self, content: str) -> str:
        request = {
            "model": self.model,
            "temperature": 0.0,
            "messages": [{"role": "user", "content": content}],
            **self.fields,
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        address = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(request).encode(), headers)
        with urllib.request.urlopen(address, timeout=self.timeout) as response:
            return json.load(response)["choices"][0]["message"]["content"] or ""  # None if it has only thought


def _text(messages: Any) -> str:
    """Return a prompt or a completion, a text or messages, as text."""
    if isinstance(messages, str):
        return messages
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def _last_list(reply: str) -> list[int]:
    """Return the last list of numbers in a reply, which may begin with reasons."""
    found = re.findall(r"\[[\d,\s]*\]", reply)
    if not found:
        return []
    return [int(number) for number in re.findall(r"\d+", found[-1])]


def _consistency(places: Sequence[tuple[int, int]]) -> float:
    """Return the share of pairs of answers that have the same order in both rankings; 1 for no pair."""
    same = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in itertools.combinations(places, 2)]
    return sum(same) / len(same) if same else 1.0


judge = GroupReward(
    Judge(
        os.environ.get("JUDGE_URL", "http://localhost:8000/v1"),
        os.environ.get("JUDGE_MODEL", "judge"),
        os.environ.get("OPENAI_API_KEY", ""),
        json.loads(os.environ.get("JUDGE_FIELDS", "{}")),
    )
)
"""The reward that smollm2-135m-judge.yaml names. Its settings come from the environment."""
