"""How transfers share what they cross: pure functions from paths to rates."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False, slots=True)
class End:
    """One direction of a port, or whatever else carries no more than `bytes_per_s` at a time. Two
    are the same only if they are one object."""

    name: str
    bytes_per_s: float


Path = tuple[End, ...]
"""All that a transfer crosses."""
Share = Callable[[Sequence[Path]], list[float]]
"""Paths of transfers, first come first -> bytes/s of each."""


def max_min(paths: Sequence[Path]) -> list[float]:
    """Max-min fair rates: no transfer can get more without one that has no more getting less.

    By progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2): the end with
    the least for each of its transfers fixes theirs, and so on with what is left.
    """
    if len(paths) == 1:
        return [rate_alone(paths[0])]
    users: dict[End, list[int]] = {}
    for i, path in enumerate(paths):
        for end in path:
            users.setdefault(end, []).append(i)
    left = {end: end.bytes_per_s for end in users}
    waiting = {end: len(those) for end, those in users.items()}
    rates = [math.inf] * len(paths)
    open_ = set(range(len(paths)))
    # Equal shares in the order in which transfers name their ends, as of a search from the first.
    heap = [(left[end] / waiting[end], order, end) for order, end in enumerate(users)]
    order_of = {end: order for _, order, end in heap}
    heapq.heapify(heap)
    while heap:
        share, _, tightest = heapq.heappop(heap)
        if not waiting[tightest] or share != left[tightest] / waiting[tightest]:
            continue  # others have taken from it since
        fixed: dict[End, int] = {}
        for i in users[tightest]:
            if i in open_:
                open_.remove(i)
                rates[i] = share
                for end in paths[i]:
                    fixed[end] = fixed.get(end, 0) + 1
        for end, count in fixed.items():
            waiting[end] -= count
            if share < math.inf:
                left[end] = max(0.0, left[end] - share * count)
            if waiting[end]:
                heapq.heappush(heap, (left[end] / waiting[end], order_of[end], end))
    return rates


def one_at_a_time(paths: Sequence[Path]) -> list[float]:
    """Whoever is first at all of its ends has them whole; the others wait, first come first served.
    What waits keeps its place at all of its ends."""
    taken: set[End] = set()
    rates = []
    for path in paths:
        rates.append(0.0 if taken.intersection(path) else rate_alone(path))
        taken.update(path)
    return rates


def rate_alone(path: Path) -> float:
    """What nobody else slows down."""
    return min((end.bytes_per_s for end in path), default=math.inf)


SHARES: Mapping[str, Share] = {
    "max_min": max_min,
    "one_at_a_time": one_at_a_time,
    "exclusive": lambda paths: [rate_alone(path) for path in paths],
}
"""By the names that configs give them. Where links are `exclusive` no two paths have an end in
common (topology.Topology)."""
