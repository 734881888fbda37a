"""What packed passes are held to, in loops over rows, columns and tokens: written from the description, not the code.

A token is named by its row and its column in the padded batch; a token of a shared prompt by the first row it is of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Name = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """A padded batch."""

    ids: Tensor
    mask: Tensor
    prompt_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.ids.shape[0], self.ids.shape[1]

    @property
    def labels(self) -> Tensor:
        """The tokens of the completions, as TRL asks for them."""
        labels = self.ids.masked_fill(self.mask == 0, -100)
        labels[:, : self.prompt_columns] = -100
        return labels

    def with_ids(self, ids: Tensor) -> "Batch":
        return Batch(ids, self.mask, self.prompt_columns)


def padded(rows: Sequence[tuple[Sequence[int], Sequence[int]]], left: int = 0, right: int = 0, pad: int = 0) -> Batch:
    """Prompts on the left of one border and completions on the right of it, with columns to spare at both ends."""
    prompt_columns = left + max(len(prompt) for prompt, _ in rows)
    completion_columns = right + max(len(completion) for _, completion in rows)
    ids, mask = [], []
    for prompt, completion in rows:
        before, after = prompt_columns - len(prompt), completion_columns - len(completion)
        ids.append([*[pad] * before, *prompt, *completion, *[pad] * after])
        mask.append([*[0] * before, *[1] * (len(prompt) + len(completion)), *[0] * after])
    return Batch(torch.tensor(ids), torch.tensor(mask), prompt_columns)


@dataclass
class Segment:
    """Tokens laid side by side: each sees those before it here, and all of `prefix`."""

    names: list[Name]
    prefix: list[Name] = field(default_factory=list)


def real_columns(mask: Tensor, row: int) -> list[int]:
    return [column for column in range(mask.shape[1]) if mask[row, column]]


def segments(batch: Batch, shared: bool) -> list[Segment]:
    """The segments of a padded batch; a shared prompt's before the first that it is the prefix of."""
    ids, mask, prompt_columns = batch.ids, batch.mask, batch.prompt_columns
    prompts = [
        tuple(int(ids[row, column]) for column in real_columns(mask, row) if column < prompt_columns)
        for row in range(len(ids))
    ]
    result: list[Segment] = []
    leaders: dict[tuple[int, ...], Segment] = {}
    for row, prompt in enumerate(prompts):
        columns = real_columns(mask, row)
        if not columns:
            continue
        if shared and len(prompt) > 1 and prompts.count(prompt) > 1:
            kept = len(prompt) - 1
            if prompt not in leaders:
                leaders[prompt] = Segment([(row, column) for column in columns[:kept]])
                result.append(leaders[prompt])
            prefix = list(leaders[prompt].names)
            result.append(Segment([(row, column) for column in columns[kept:]], prefix))
        else:
            result.append(Segment([(row, column) for column in columns]))
    return result


def seen(parts: Sequence[Segment], window: int | None = None) -> dict[Name, set[Name]]:
    """For each token the tokens it attends to, itself among them; under a window those at a distance below it."""
    result: dict[Name, set[Name]] = {}
    for part in parts:
        sequence = [*part.prefix, *part.names]
        for last, name in enumerate(part.names, len(part.prefix)):
            first = 0 if window is None else max(0, last - window + 1)
            result[name] = set(sequence[first : last + 1])
    return result


def visible(order: Sequence[Name], parts: Sequence[Segment], window: int | None = None) -> Tensor:
    """(N, N): whether the token in a row attends to the token in a column, both in `order`."""
    sees = seen(parts, window)
    return torch.tensor([[key in sees[query] for key in order] for query in order])


@dataclass(frozen=True)
class Taken:
    """A sequence of a step: its prompt's and its completion's length, and which prompt it answers."""

    prompt: int
    completion: int
    question: int | None = None


def tokens(group: Sequence[Taken], padded: bool) -> int:
    """How many tokens a pass over `group` computes."""
    if not group:
        return 0
    if padded:
        return len(group) * (max(s.prompt for s in group) + max(s.completion for s in group))
    total, met = 0, set()
    for sequence in group:
        alike = sum(other.question == sequence.question for other in group)
        if sequence.question is None or alike == 1 or sequence.prompt < 2:
            total += sequence.prompt + sequence.completion
        else:
            total += 1 + sequence.completion
            if sequence.question not in met:
                total += sequence.prompt - 1
                met.add(sequence.question)
    return total


def fault(counts: Sequence[int], processes: Sequence[Sequence[Taken]], budget: int, padded: bool) -> str | None:
    """Why `counts` is not the greedy cut of every process's sequences under `budget`; None where it is."""
    length = len(processes[0])
    if sum(counts) != length or any(count < 1 for count in counts):
        return f"the counts {counts} do not cut {length} sequences"
    start = 0
    for count in counts:
        costs = [tokens(sequences[start : start + count], padded) for sequences in processes]
        if count > 1 and max(costs) > budget:
            return f"{count} sequences from {start} are {costs} tokens"
        if start + count < length:
            more = [tokens(sequences[start : start + count + 1], padded) for sequences in processes]
            if max(more) <= budget:
                return f"{count} sequences from {start}, one more would be {more} tokens"
        start += count
    return None
