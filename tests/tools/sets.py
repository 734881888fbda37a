"""Candidates from lists of token ids, and back."""

import itertools
from collections.abc import Collection, Iterable

import torch

from trl_steady.features.sampling_mask.candidates import CandidateSets


def candidate_sets(sets: Iterable[Collection[int]]) -> CandidateSets:
    sets = list(sets)
    ids = torch.tensor([*itertools.chain(*sets)], dtype=torch.int32)
    return CandidateSets.from_counts(ids, torch.tensor([len(each) for each in sets], dtype=torch.int64))


def lists(sets: CandidateSets) -> list[list[int]]:
    return [sets.ids[start:end].tolist() for start, end in itertools.pairwise(sets.offsets.tolist())]
