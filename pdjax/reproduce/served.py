"""Requests of given lengths at a given rate, and the rate at which too few are in time."""

from collections.abc import Callable, Sequence

import numpy as np

from pdjax.core.config import Arrivals
from pdjax.core.request import Request, SamplingParams
from pdjax.workload import Source, arrival_times

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, n) -> n rows of prompt and output tokens."""


def poisson(draw: Draw, n: int, rate: float, seed: int) -> Source:
    """`n` requests at `rate` per second. Another rate keeps the lengths and scales the arrivals."""
    arrivals, lengths = (np.random.default_rng((seed, concern)) for concern in range(2))
    times = arrival_times(Arrivals(rate=rate), n, arrivals)
    return Source(
        tuple(
            Request(rid, round(t * 1e9), prompt, SamplingParams(max_tokens=output))
            for rid, (t, (prompt, output)) in enumerate(
                zip(times.tolist(), draw(lengths, n).tolist(), strict=True)
            )
        )
    )


def resampled(pairs: Sequence[tuple[int, int]]) -> Draw:
    """Rows of `pairs`, each as likely as the others; prompt and output stay together."""
    rows = np.array(pairs)
    return lambda rng, n: rows[rng.integers(len(rows), size=n)]


def crossing(rates: Sequence[float], shares: Sequence[float], target: float) -> float:
    """The rate at which the share first falls below `target`, linear between the rates; 0 where
    it is below from the first one on, the last rate where it never is. rates: ascending."""
    below = next((i for i, share in enumerate(shares) if share < target), None)
    if below is None:
        return rates[-1]
    if below == 0:
        return 0.0
    (r0, r1), (s0, s1) = rates[below - 1 : below + 1], shares[below - 1 : below + 1]
    return r0 + (r1 - r0) * (s0 - target) / (s0 - s1)
