"""Goodput: the highest rate at which enough requests meet both SLOs and the queue does not grow.

Found by bisection over rates. Every rate is served with the same seeds, so that only the rate
differs between two points (common random numbers; Law, Simulation Modeling and Analysis, 11.2):
the same requests, their arrivals scaled. All that is served counts together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from pdjax.core.config import SLO, Config, ConfigError
from pdjax.cost import Cost
from pdjax.metrics import GROWTH, Attainment, Outcomes, attainment_of, growth_of, outcomes
from pdjax.sim import simulate
from pdjax.workload import make_source

Serve = Callable[[float, int], Outcomes]
"""(requests per second, seed) -> what became of each request."""

SPAN = 2.0**8
"""How far from its start a search goes, up or down."""


STEP = 0.9
"""From one rate to the next below, in search of one at which every seed reaches the target; and the
other way round."""


class GoodputError(ValueError):
    """A search that cannot say anything; one line."""


class Seed(NamedTuple):
    """A rate under one seed: share of requests within both SLOs, and requests per second by which
    the number in the system grew."""

    share: float
    growth_per_s: float


@dataclass(frozen=True)
class Point:
    """A rate that was served under all seeds. The interval is Wilson's over all requests."""

    rate: float
    attainment: Attainment
    seeds: tuple[Seed, ...]
    target: float

    @property
    def growth_per_s(self) -> float:
        return float(np.mean([seed.growth_per_s for seed in self.seeds]))

    @property
    def growth(self) -> float:
        """As a share of the requests that arrive."""
        return self.growth_per_s / self.rate

    @property
    def growing(self) -> bool:
        return self.growth > GROWTH

    @property
    def reached(self) -> bool:
        return self.attainment.share >= self.target

    @property
    def counts(self) -> bool:
        """Whether the goodput is at least this rate."""
        return self.reached and not self.growing

    @property
    def why(self) -> str:
        """What keeps the goodput below this rate, in a few words; nothing where it counts."""
        late = "" if self.reached else f"{self.attainment.share:.1%} in time"
        grows = f"queue grows by {self.growth:.0%}" if self.growing else ""
        return ", ".join(filter(None, (late, grows)))

    @property
    def refusal(self) -> str:
        """Why a rate at which enough requests were in time does not count all the same."""
        if not (self.reached and self.growing):
            return ""
        a = self.attainment
        return (
            f"{self.rate:.4g} requests/s is not a goodput: {a.share:.1%} of {a.requests} requests "
            f"are in time, but the queue grows by {self.growth:.0%} of what arrives; serve more "
            "requests to see whether it goes on"
        )


@dataclass(frozen=True)
class Goodput:
    """rate: the highest that was served and counts, in requests per second; 0: none does. low,
    high: 95 % interval of the crossing, from how the seeds differ (Student's t; NaN for one seed,
    and where no rate counts). points: all rates served, ascending."""

    rate: float
    low: float
    high: float
    points: tuple[Point, ...]

    @property
    def requests(self) -> int:
        """How many were served at each rate, over all seeds."""
        return self.points[0].attainment.requests

    @property
    def at(self) -> Point | None:
        """The point at `rate`; None where no rate counts."""
        return next((p for p in self.points if p.rate == self.rate), None)

    @property
    def beyond(self) -> Point:
        """The lowest rate served above `rate`."""
        return next(p for p in self.points if p.rate > self.rate)

    @property
    def fails_at(self) -> float:
        return self.beyond.rate

    @property
    def refusal(self) -> str:
        """One line where the rate above would be the goodput if its queue did not grow."""
        return self.beyond.refusal

    def table(self) -> pd.DataFrame:
        """The points visited, a row each."""
        rows = [
            {
                "rate": p.rate,
                "requests": p.attainment.requests,
                "attainment": p.attainment.share,
                "low95": p.attainment.low,
                "high95": p.attainment.high,
                "growth_per_s": p.growth_per_s,
                "growing": p.growing,
                "counts": p.counts,
            }
            for p in self.points
        ]
        return pd.DataFrame(rows)


def goodput(
    serve: Serve,
    slo: SLO,
    *,
    start: float = 1.0,
    seeds: Sequence[int] = range(5),
    tolerance: float = 0.02,
    visit: Callable[[Point], None] = lambda point: None,
) -> Goodput:
    """Doubles or halves the rate from `start` until one counts and one does not, then bisects
    until they are within `tolerance` of each other (a share of the rate). Going down it ends where
    half the rate changes nothing (who is late is so alone, too), or at start / SPAN.

    visit: told of every point once it has been served. Raises GoodputError where requests are too
    few to tell whether the queue grows, and where every rate up to start * SPAN counts.
    """
    points: list[Point] = []

    def counts(rate: float) -> bool:
        points.append(serve_at(serve, slo, rate, seeds))
        visit(points[-1])
        return points[-1].counts

    low = high = start
    if counts(start):
        while counts(high := 2 * low):
            low = high
            if low >= start * SPAN:
                raise GoodputError(
                    f"every rate up to {low:.4g} requests/s meets the SLO: serve more requests, or "
                    "begin at a higher rate"
                )
    else:
        while not counts(low := high / 2):
            high = low
            if low <= start / SPAN or _same(points[-2], points[-1]):
                return _result(0.0, points)
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if counts(middle) else (low, middle)
    if len(seeds) > 1:  # one seed has no interval
        _bracket_seeds(points, counts)
    return _result(low, points)


def _bracket_seeds(points: list[Point], counts: Callable[[float], bool]) -> None:
    """Serves rates further down and up, by no more than a factor of 2, until every seed has one at
    which it reaches the target and one at which it does not: its crossing, for the interval."""
    low = min(points, key=lambda point: point.rate)
    high = max(points, key=lambda point: point.rate)
    least, most = low.rate / 2, 2 * high.rate
    while low.rate > least and any(seed.share < low.target for seed in low.seeds):
        counts(STEP * low.rate)
        low = points[-1]
    while high.rate < most and any(seed.share >= high.target for seed in high.seeds):
        if high.growing:
            break  # which is what ends it
        counts(high.rate / STEP)
        high = points[-1]


def _same(point: Point, other: Point) -> bool:
    """Whether load makes no difference between the two."""
    steady = not (point.growing or other.growing)
    return steady and point.attainment == other.attainment and point.attainment.attained > 0


def serve_at(serve: Serve, slo: SLO, rate: float, seeds: Sequence[int]) -> Point:
    """One rate, under all seeds. Raises GoodputError where requests are too few."""
    attained, requests, each = 0, 0, []
    for seed in seeds:
        ends = serve(rate, seed)
        growth = growth_of(ends.arrival_s, ends.ended_s)
        if growth.growing is None:
            raise GoodputError(
                f"{len(ends.arrival_s)} requests are too few to tell whether the queue grows: "
                "serve at least 30 per seed, and not all at once"
            )
        in_time = ends.attained(slo)
        each.append(Seed(float(in_time.mean()), growth.per_s))
        attained, requests = attained + int(in_time.sum()), requests + len(in_time)
    return Point(rate, attainment_of(attained, requests), tuple(each), slo.target)


# --- the interval ------------------------------------------------------------------------------


def _result(rate: float, points: Sequence[Point]) -> Goodput:
    points = sorted(points, key=lambda point: point.rate)
    crossings = [crossing(points, i) for i in range(len(points[0].seeds))]
    low = high = float("nan")
    if rate and len(crossings) > 1:
        mean, error = float(np.mean(crossings)), float(stats.sem(crossings))
        half = float(stats.t.ppf(0.975, len(crossings) - 1)) * error
        low, high = max(0.0, mean - half), mean + half
    return Goodput(rate, low, high, tuple(points))


def crossing(points: Sequence[Point], seed: int) -> float:
    """The rate at which one seed would cross the target: between the highest rate below which it
    always counts and the next one, linear in attainment; the former where the queue, which is
    judged over all seeds, is what ends it. points: ascending."""
    before: Point | None = None
    for point in points:
        share = point.seeds[seed].share
        if share < point.target or point.growing:
            if before is None:
                return 0.0
            above, below = before.seeds[seed].share, share
            if below >= point.target:
                return before.rate
            way = (above - point.target) / (above - below)
            return before.rate + way * (point.rate - before.rate)
        before = point
    return points[-1].rate


# --- what is served ----------------------------------------------------------------------------


def simulated(config: Config, placement: str, cost: Cost) -> Serve:
    """The requests of `config.workload` at any rate, under one placement, in virtual time.

    Raises ConfigError for arrivals that have no rate: `burst`, `closed`, and a trace's own times.
    """
    arrivals = config.workload.arrivals
    if arrivals.process not in ("poisson", "gamma", "uniform"):
        raise ConfigError(
            f"arrivals by `{arrivals.process}` have no rate to search: set "
            "`workload.arrivals.process` to `poisson`, `gamma` or `uniform`"
        )

    def serve(rate: float, seed: int) -> Outcomes:
        at_rate = replace(config.workload, arrivals=replace(arrivals, rate=rate))
        source = make_source(
            at_rate, seed, encode=None, vocab=1, context=config.model.context, eos=()
        )
        return outcomes(simulate(config, placement, source, cost))

    return serve
