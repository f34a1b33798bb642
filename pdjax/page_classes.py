"""Which sizes of blocks suit a histogram of lengths, for `Pool.classes`."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class NoLengths(ValueError):
    """There is nothing to choose classes for."""


class Candidate(NamedTuple):
    """Classes (block sizes in tokens) and what they cost a request on average.

    waste: tokens of its last page that stay empty. entries: blocks it consists of, which is how
    many entries of a table lead to them. cost: the objective of `score_classes`, in tokens.
    """

    classes: tuple[int, ...]
    waste: float
    waste_share: float  # of all tokens held
    entries: float
    cost: float


def score_classes(
    lengths: Iterable[int], page_size: int = 8, *, count: int = 3, entry_tokens: float = 1.0
) -> list[Candidate]:
    """All choices of `count` classes for requests of these lengths, cheapest first.

    Minimised is the mean over requests of `waste + entry_tokens * entries`: small blocks waste
    little but need many table entries, each of which a kernel reads and follows. `entry_tokens`,
    how many empty tokens are worth one entry less, is yours to choose. A request's blocks are
    those of core.blocks.ClassAllocator in an empty pool: the largest that fit, then smaller ones.

    The sizes tried are `page_size` times powers of two, up to the longest request; fewer classes
    come back where there are not so many. Lengths of 0 hold nothing and are left out. Raises
    NoLengths when none is left.
    """
    lengths_R = np.asarray([length for length in lengths if length > 0])
    if not len(lengths_R):
        raise NoLengths("no length is above 0, so there is nothing to choose page classes for")
    values, counts = np.unique(lengths_R, return_counts=True)
    weights = counts / counts.sum()
    sizes = [page_size]
    while 2 * sizes[-1] <= values[-1]:
        sizes.append(2 * sizes[-1])
    candidates = []
    for classes in itertools.combinations(sizes, min(count, len(sizes))):
        held = -(-values // classes[0]) * classes[0]
        entries, left = np.zeros_like(held), held
        for size in reversed(classes):
            entries, left = entries + left // size, left % size
        waste, mean_entries = float(weights @ (held - values)), float(weights @ entries)
        share = waste / float(weights @ held)
        cost = waste + entry_tokens * mean_entries
        candidates.append(Candidate(classes, waste, share, mean_entries, cost))
    return sorted(candidates, key=lambda candidate: candidate.cost)


def good_classes(
    lengths: Iterable[int], page_size: int = 8, *, count: int = 3, entry_tokens: float = 1.0
) -> tuple[int, ...]:
    """The cheapest classes by `score_classes`. A pool's `page_size` has to be the first of them."""
    best = score_classes(lengths, page_size, count=count, entry_tokens=entry_tokens)[0]
    return best.classes
