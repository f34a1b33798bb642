"""Which waiting prompt is next. An order is a pure function; write yours beside these."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """A prompt that waits: for how long by now, and how many tokens it has to have computed."""

    waited_ns: int
    tokens: int


Order = Callable[[Sequence[Waiting]], int]
"""Those who wait, oldest first -> the index of the next."""


def fcfs(waiting: Sequence[Waiting]) -> int:
    return 0


def sjf(waiting: Sequence[Waiting]) -> int:
    """Shortest job first."""
    return min(range(len(waiting)), key=lambda i: waiting[i].tokens)


def hrrn(waiting: Sequence[Waiting]) -> int:
    """Highest response ratio next, (waited + service) / service (Brinch Hansen 1971): with service
    in proportion to tokens that is the highest waited / tokens."""
    return max(range(len(waiting)), key=lambda i: waiting[i].waited_ns / waiting[i].tokens)


ORDERS: dict[str, Order] = {"fcfs": fcfs, "sjf": sjf, "hrrn": hrrn}


def next_of(order: Order, waiting: Sequence[Waiting], bound_ns: int) -> int:
    """The order's choice, unless the oldest has waited for `bound_ns` (0: no bound): then it is
    its turn, so that nobody starves."""
    if bound_ns and waiting[0].waited_ns >= bound_ns:
        return 0
    return order(waiting)
