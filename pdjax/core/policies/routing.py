"""Which instance gets a request. A router is a pure function; write yours beside these."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdjax.core.config import Estimate, Routing
from pdjax.core.request import Request


class Load(NamedTuple):
    """What an instance has before it: requests and tokens that it has not finished; `cached`:
    leading tokens of the request's text that its pool has; `held`: tokens of KV that requests
    hold in its pool, or will when they come out of its queue; `prompts`: those of `tokens` that
    are of prompts, and not computed yet."""

    requests: int
    tokens: int
    cached: int = 0
    held: int = 0
    prompts: int = 0


Router = Callable[[int, Request, Sequence[Load]], int]
"""(how many requests were routed before, request, load of each candidate) -> index."""


Rank = Callable[[Load], tuple[int, int]]
"""What a router compares that looks at nothing but loads, each by itself: the lowest wins."""


def by_requests(load: Load) -> tuple[int, int]:
    return load.requests, load.tokens


def by_tokens(load: Load) -> tuple[int, int]:
    return load.tokens, load.requests


def round_robin(ticket: int, request: Request, loads: Sequence[Load]) -> int:
    return ticket % len(loads)


def random(ticket: int, request: Request, loads: Sequence[Load]) -> int:
    """As good as drawn: a hash of the request's id, the same in every run."""
    return _scatter(request.id) % len(loads)


def shortest_queue(ticket: int, request: Request, loads: Sequence[Load]) -> int:
    """Fewest unfinished requests, then fewest tokens, then the first."""
    return min(range(len(loads)), key=lambda i: by_requests(loads[i]))


def fewest_tokens(ticket: int, request: Request, loads: Sequence[Load]) -> int:
    """Fewest unfinished tokens: of prompts on the prefill side (Splitwise's join-shortest-queue,
    ISCA 2024), of outputs, as far as `max_tokens` predicts them, on the decode side."""
    return min(range(len(loads)), key=lambda i: by_tokens(loads[i]))


def power_of_two(ticket: int, request: Request, loads: Sequence[Load]) -> int:
    """The less loaded of two candidates that a hash of the request draws, loads compared by the
    power of two of their tokens, which is all that a length predictor knows (TetriInfer,
    arXiv 2401.11181: power of two choices over predicted length buckets)."""
    first = _scatter(request.id) % len(loads)
    other = (first + 1 + _scatter(~request.id) % max(1, len(loads) - 1)) % len(loads)
    return min((first, other), key=lambda i: (loads[i].tokens.bit_length(), loads[i].requests))


def cache_aware(weight: float, ticket: int, request: Request, loads: Sequence[Load]) -> int:
    """Lowest `cache_aware_costs`."""
    costs = cache_aware_costs(weight, request.prompt_len, loads)
    return min(range(len(loads)), key=costs.__getitem__)


def cache_aware_costs(weight: float, prompt_len: int, loads: Sequence[Load]) -> list[float]:
    """What Dynamo's KV router weighs (its documentation, routing concepts): prompt tokens that
    would have to be computed, those sent there earlier included, times `weight`, plus tokens of
    KV of all requests there, from their routing to their end. (What the request itself would add
    to the latter is the same everywhere.)"""
    return [weight * (load.prompts + prompt_len - load.cached) + load.held for load in loads]


def shortest_ttft(
    estimate: Estimate, remote: bool, ticket: int, request: Request, loads: Sequence[Load]
) -> int:
    """Lowest `expected_ttfts` (Mooncake, FAST 2025, Algorithm 1)."""
    expected = expected_ttfts(estimate, remote, request.prompt_len, loads)
    return min(range(len(loads)), key=expected.__getitem__)


def expected_ttfts(
    estimate: Estimate, remote: bool, prompt_len: int, loads: Sequence[Load]
) -> list[float]:
    """Seconds to the first token at each candidate: queue, loading what a pool elsewhere has more
    of (`remote`; where that is more than `balance` times what is here), prefill of the rest."""
    best = max(load.cached for load in loads)
    expected = []
    for load in loads:
        cached, transfer_s = load.cached, 0.0
        if remote and best > estimate.balance * cached:
            transfer_s = (best - cached) * estimate.load_token_s
            cached = best
        queue_s = load.prompts * estimate.prefill_token_s
        expected.append(transfer_s + queue_s + prefill_s(estimate, prompt_len, cached))
    return expected


def prefill_s(estimate: Estimate, length: int, cached: int) -> float:
    """Seconds to compute the last `length - cached` tokens of a prompt."""
    pairs = (length**2 - cached**2) / 2
    return estimate.step_s + (length - cached) * estimate.prefill_token_s + pairs * estimate.pair_s


def _scatter(number: int) -> int:
    """Steele, Lea and Flood's 64-bit finaliser (SplitMix, OOPSLA 2014)."""
    z = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


ROUTERS: dict[str, Callable[..., int]] = {
    router.__name__: router
    for router in (
        round_robin,
        random,
        shortest_queue,
        fewest_tokens,
        power_of_two,
        cache_aware,
        shortest_ttft,
    )
}


RANKS: dict[str, Rank] = {"shortest_queue": by_requests, "fewest_tokens": by_tokens}
"""Routers that take the first of the lowest rank. (The scheduler keeps instances in that order, so
that their number costs nothing. A router that is not named here sees every candidate's load.)"""


def router_of(name: str, routing: Routing, remote: bool) -> Router:
    """The router that a config names, with the constants that the config gives it."""
    router = ROUTERS[name]
    if router is cache_aware:
        return functools.partial(router, routing.cache_weight)
    if router is shortest_ttft:
        return functools.partial(router, routing.estimate, remote)
    return router


def looks_at_caches(name: str) -> bool:
    return ROUTERS[name] in (cache_aware, shortest_ttft)
