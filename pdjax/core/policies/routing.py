"""Which instance gets a request. A router is a pure function; write yours beside these."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdjax.core.request import Request


class Load(NamedTuple):
    """What an instance has before it: requests and tokens that it has not finished."""

    requests: int
    tokens: int


Router = Callable[[int, Request, Sequence[Load]], int]
"""(how many requests were routed before, request, load of each candidate) -> index."""


def round_robin(ticket: int, request: Request, loads: Sequence[Load]) -> int:
    return ticket % len(loads)


def shortest_queue(ticket: int, request: Request, loads: Sequence[Load]) -> int:
    """Fewest unfinished requests, then fewest tokens, then the first."""
    return min(range(len(loads)), key=lambda i: loads[i])


ROUTERS: dict[str, Router] = {"round_robin": round_robin, "shortest_queue": shortest_queue}
