"""The search finds rates that are known, says how sure it is, and refuses queues that grow."""

import math

import numpy as np
import pytest
from decision_helpers import COST, PLACEMENTS
from scipy.stats import binomtest

from pdjax.core.config import SLO, Arrivals, Config, ConfigError, Lengths, Model, Workload
from pdjax.goodput import GoodputError, Outcomes, Point, Seed, crossing, goodput, simulated
from pdjax.metrics import attainment_of

SLOS = SLO(ttft_s=1.0, tpot_s=1.0, target=0.9)
REQUESTS = 1000


def ends(rate: float, ttft_s: np.ndarray, delays_s: np.ndarray | float) -> Outcomes:
    """Requests that come evenly and stay for so long."""
    arrival_s = np.arange(len(ttft_s)) / rate
    nothing = np.full(len(ttft_s), np.nan)
    return Outcomes(arrival_s, ttft_s, nothing, arrival_s + delays_s, np.full(len(ttft_s), True))


def linear(rate: float, seed: int) -> Outcomes:
    """A share of 1 - rate / (100 + seed) is in time: 90 % at a rate of 10 + seed / 10."""
    late = math.ceil(REQUESTS * min(1.0, rate / (100 + seed)))
    return ends(rate, np.where(np.arange(REQUESTS) < late, 2.0, 0.5), 0.5)


@pytest.mark.parametrize("start", [0.3, 9.9, 80.0])
def test_the_search_finds_a_known_crossing_from_either_side(start):
    found = goodput(linear, SLOS, start=start, seeds=[0], tolerance=0.01)
    assert 9.9 <= found.rate <= 10 < found.fails_at <= found.rate * 1.0102
    assert not found.refusal


def test_every_rate_is_served_under_the_same_seeds():
    asked = []
    goodput(lambda rate, seed: asked.append((rate, seed)) or linear(rate, seed), SLOS, seeds=[3, 8])
    rates = [rate for rate, _ in asked]
    assert [seed for _, seed in asked] == [3, 8] * (len(asked) // 2)
    assert rates[::2] == rates[1::2] and len(set(rates)) == len(rates) // 2


def test_the_interval_of_the_crossing_comes_from_how_seeds_differ():
    found = goodput(linear, SLOS, seeds=range(-20, 21, 10), tolerance=0.001)
    # The seeds cross at 8, 9, 10, 11 and 12: a mean of 10, and t(0.975, 4) sd / sqrt(5) = 1.963.
    assert found.low == pytest.approx(10 - 1.963, abs=0.03)
    assert found.high == pytest.approx(10 + 1.963, abs=0.03)
    assert math.isnan(goodput(linear, SLOS, seeds=[0]).low)  # one seed does not differ


def test_attainment_has_wilsons_interval_over_the_requests_of_all_seeds():
    found = goodput(linear, SLOS, seeds=[0, 1])
    for point in found.points:
        a = point.attainment
        assert a.requests == found.requests == 2 * REQUESTS
        wilson = binomtest(a.attained, a.requests).proportion_ci(method="wilson")
        assert (a.low, a.high) == pytest.approx((wilson.low, wilson.high))


def growing(rate: float, seed: int) -> Outcomes:
    """All are in time, but above 5 requests/s the last of n leave only after n / 5 seconds: what a
    server of 5 requests/s does whose clients do not mind to wait for their last token."""
    stay_s = 0.5 + np.arange(REQUESTS) * max(0.0, 1 / 5 - 1 / rate)
    return ends(rate, np.full(REQUESTS, 0.5), stay_s)


def test_a_growing_queue_is_no_goodput_however_many_are_in_time():
    found = goodput(growing, SLOS, start=1.0, seeds=[0], tolerance=0.01)
    # A tenth of what arrives may stay: 5 / 0.9 requests/s.
    assert found.rate == pytest.approx(5 / 0.9, rel=0.01)
    assert all(point.attainment.share == 1 for point in found.points)
    assert found.refusal.count("\n") == 0 and "is not a goodput: 100.0%" in found.refusal
    assert f"{found.fails_at:.4g} requests/s" in found.refusal


def test_too_few_requests_to_see_a_queue_grow_are_refused():
    few = lambda rate, seed: ends(rate, np.full(8, 0.5), 0.5)  # noqa: E731
    with pytest.raises(GoodputError, match="8 requests are too few"):
        goodput(few, SLOS)


def test_a_server_that_no_rate_overwhelms_is_told():
    idle = lambda rate, seed: ends(rate, np.full(REQUESTS, 0.5), 0.5 / rate)  # noqa: E731
    with pytest.raises(GoodputError, match="every rate up to"):
        goodput(idle, SLOS)


def test_requests_that_are_late_alone_end_the_search_at_once():
    late = lambda rate, seed: ends(  # noqa: E731
        rate, np.where(np.arange(REQUESTS) < 200, 2.0, 0.5), 0.5 / rate
    )
    found = goodput(late, SLOS, seeds=[0, 1])
    assert (found.rate, len(found.points)) == (0.0, 2)
    assert math.isnan(found.low)


def test_the_table_has_every_point_ascending():
    found = goodput(linear, SLOS, seeds=[0])
    table = found.table()
    assert table["rate"].is_monotonic_increasing and len(table) == len(found.points)
    assert table.loc[table["counts"], "rate"].max() == found.rate


def test_a_crossing_lies_between_two_points_in_proportion():
    def point(rate: float, share: float, growth_per_s: float = 0.0) -> Point:
        return Point(rate, attainment_of(1, 1), (Seed(share, growth_per_s),), 0.9)

    assert crossing([point(1, 1.0), point(2, 0.8)], 0) == 1.5
    assert crossing([point(1, 0.92), point(2, 0.82)], 0) == pytest.approx(1.2)
    assert crossing([point(1, 1.0), point(2, 0.95, growth_per_s=1)], 0) == 1
    assert crossing([point(1, 0.5), point(2, 1.0)], 0) == 0  # it must count from the start on
    assert crossing([point(1, 1.0)], 0) == 1


def test_the_queue_is_judged_over_all_seeds_and_not_by_one_that_had_bad_luck():
    seeds = Seed(0.95, 0.3), Seed(0.95, -0.3)
    steady, late = (
        Point(rate, attainment_of(1, 1), tuple(s._replace(share=share) for s in seeds), 0.9)
        for rate, share in ((1.0, 0.95), (2.0, 0.85))
    )
    assert [crossing([steady, late], seed) for seed in (0, 1)] == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize("start", [9.9, 10.1])
def test_the_search_goes_on_until_every_seed_has_a_crossing(start):
    """The five seeds cross at 8 to 12: from 9.9 the search ends at once with all rates above 8, and
    from 10.1 with all below 12."""
    found = goodput(linear, SLOS, start=start, seeds=range(-20, 21, 10), tolerance=0.001)
    rates = [point.rate for point in found.points]
    assert min(rates) < 8 and max(rates) > 12
    assert found.low == pytest.approx(10 - 1.963, abs=0.1)
    assert found.high == pytest.approx(10 + 1.963, abs=0.1)


# --- over the simulator ----------------------------------------------------------------------


def config(process: str = "poisson") -> Config:
    """Prompts of 4 tokens: 14 ms alone; two more tokens at 11 ms each (see decision_helpers)."""
    arrivals = Arrivals(process, rate=3.0)
    lengths = {"prompt": Lengths(mean=4), "output": Lengths(mean=1)}
    return Config(
        {name: PLACEMENTS[name] for name in ("1P1D", "2P1D")},
        model=Model("none", context=40),
        workload=Workload(requests=300, arrivals=arrivals, **lengths),
        slo=SLO(ttft_s=0.05, tpot_s=0.02, target=0.9),
    )


def test_a_server_with_even_arrivals_reaches_its_capacity_and_no_more():
    """One prompt of 4 tokens per step of 14 ms, for ever: above 1 / 14 ms the wait grows."""
    found = goodput(simulated(config("uniform"), "1P1D", COST), config().slo, start=30, seeds=[0])
    assert found.rate <= 1 / 0.014 * 1.05 and found.fails_at > 1 / 0.014
    two = goodput(simulated(config("uniform"), "2P1D", COST), config().slo, start=30, seeds=[0])
    assert two.rate == pytest.approx(2 * found.rate, rel=0.1)


def test_the_same_search_finds_the_same():
    serve = simulated(config(), "1P1D", COST)
    once, again = (goodput(serve, config().slo, start=30, seeds=[0, 1]) for _ in range(2))
    assert once == again and 20 < once.rate < 1 / 0.014


def test_arrivals_without_a_rate_are_refused():
    with pytest.raises(ConfigError, match="arrivals by `closed` have no rate"):
        simulated(config("closed"), "1P1D", COST)
