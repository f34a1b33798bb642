"""How transfers share links: against tables worked out by hand, against another way to fill pipes,
and against what has to hold for every set of transfers."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.config import Link
from pdjax.links import PRESETS, Network, ends_of, exclusive, max_min, resolve

BYTE_PER_NS = Link(bytes_per_s=1e9)


def capacities(pairs, bytes_per_s: float = 12.0) -> dict:
    return {end: bytes_per_s for pair in pairs for end in ends_of(pair)}


def run(transfers, link: Link = BYTE_PER_NS, **options) -> dict[int, tuple[int, int]]:
    """(began, arrived) of each (start_ns, source, target, bytes), by its place in the list."""
    network, arrived = Network(link, **options), {}

    def until(now: float) -> None:
        while (at := network.next_finish()) is not None and at <= now:
            arrived.update({c.id: (c.began_ns, at) for c in network.finish(at)})

    for id, (at, source, target, nbytes) in sorted(enumerate(transfers), key=lambda it: it[1][0]):
        until(at)
        network.start(at, id, source, target, nbytes)
    until(math.inf)
    return arrived


# --- Rates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "rates"),
    [
        (["ax"], [12]),
        (["ax", "ay"], [6, 6]),  # they share the way out of a
        (["ax", "bx"], [6, 6]),  # they share the way into x
        (["ax", "by"], [12, 12]),
        (["ax", "xa"], [12, 12]),  # the two directions of a link are two
        (["ax", "bx", "cx"], [4, 4, 4]),
        # x takes three, so b has 8 left of its way out for y.
        (["ax", "bx", "cx", "by"], [4, 4, 4, 8]),
        # ... of which d takes as much: y is the tighter end.
        (["ax", "bx", "cx", "by", "dy"], [4, 4, 4, 6, 6]),
        (["ax", "ay", "az", "bz", "cz"], [4, 4, 4, 4, 4]),
        (["ax", "ay", "by"], [6, 6, 6]),
    ],
)
def test_rates_are_the_max_min_fair_ones(pairs, rates):
    assert max_min([tuple(pair) for pair in pairs], capacities(pairs)) == pytest.approx(rates)


def test_exclusive_rates_do_not_depend_on_others():
    pairs = [("a", "x"), ("a", "y"), ("b", "x")]
    assert exclusive(pairs, capacities(pairs)) == [12, 12, 12]


PAIRS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from("vwxyz")),
    min_size=1,
    max_size=12,
    unique=True,
)
CAPACITIES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=10, max_size=10)


def poured(pairs, capacity) -> list[Fraction]:
    """Water-filling by brute force: a drop for every pair that has room, until none has."""
    drop = Fraction(1, 27720)  # divides evenly by up to 12 pairs
    level, rates = dict.fromkeys(capacity, Fraction(0)), [Fraction(0)] * len(pairs)
    flowing = list(range(len(pairs)))
    while flowing:
        step = {end: sum(end in ends_of(pairs[i]) for i in flowing) * drop for end in capacity}
        # As many whole rounds at once as fit everywhere, which is at least one.
        rounds = min((capacity[e] - level[e]) // d for e, d in step.items() if d)
        if rounds == 0:
            full = {e for e, d in step.items() if d and capacity[e] - level[e] < d}
            flowing = [i for i in flowing if not full & set(ends_of(pairs[i]))]
            continue
        for end, d in step.items():
            level[end] += rounds * d
        for i in flowing:
            rates[i] += rounds * drop
    return rates


@given(PAIRS, CAPACITIES)
def test_rates_are_those_of_filling_drop_by_drop(pairs, sizes):
    ends = sorted({end for pair in pairs for end in ends_of(pair)})
    capacity = dict(zip(ends, sizes, strict=False))
    assert max_min(pairs, capacity) == pytest.approx(
        [float(rate) for rate in poured(pairs, capacity)], abs=1e-3
    )


@given(PAIRS, CAPACITIES)
def test_every_pair_has_a_full_end_where_nobody_has_more(pairs, sizes):
    """Which is what max-min fairness means; no end carries more than it can."""
    ends = sorted({end for pair in pairs for end in ends_of(pair)})
    capacity = dict(zip(ends, sizes, strict=False))
    rates = max_min(pairs, capacity)
    at = {end: [r for p, r in zip(pairs, rates, strict=True) if end in ends_of(p)] for end in ends}
    assert all(sum(at[end]) <= capacity[end] + 1e-9 for end in ends)
    for pair, rate in zip(pairs, rates, strict=True):
        assert any(
            sum(at[end]) >= capacity[end] - 1e-9 and rate >= max(at[end]) - 1e-9
            for end in ends_of(pair)
        )


# --- Times -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16])
def test_n_equal_transfers_into_one_instance_take_n_times_as_long(n):
    transfers = [(0, f"p{i}", "d", 1000) for i in range(n)]
    assert run(transfers) == {i: (0, 1000 * n) for i in range(n)}


def test_n_unequal_transfers_arrive_when_the_analytic_solution_says():
    """Of sizes s_1 <= ... <= s_n at one end, the k-th ends at sum_j min(s_j, s_k)."""
    sizes = [500, 100, 300, 300, 800]
    arrived = run([(0, f"p{i}", "d", size) for i, size in enumerate(sizes)])
    assert arrived == {
        k: (0, sum(min(other, size) for other in sizes)) for k, size in enumerate(sizes)
    }


def test_a_late_transfer_takes_its_half_from_when_it_starts():
    # 600 bytes alone, then 400 + 400 at half rate, then the last 200.
    assert run([(0, "a", "x", 1000), (600, "a", "y", 600)]) == {0: (0, 1400), 1: (600, 1600)}


def test_transfers_of_one_pair_cross_one_after_the_other():
    transfers = [(0, "a", "x", 100), (10, "a", "x", 50), (10, "a", "y", 60)]
    # a->x runs alone for 10, then shares: its 90 bytes need 180, but a->y is over at 130.
    arrived = run(transfers)
    assert arrived == {0: (0, 160), 1: (160, 210), 2: (10, 130)}


def test_latency_is_added_once_and_takes_no_bandwidth():
    link = Link(bytes_per_s=1e9, latency_s=1e-6)
    assert run([(0, "a", "x", 100)] * 3, link) == {0: (0, 1100), 1: (100, 1200), 2: (200, 1300)}


def test_a_link_of_latency_alone_and_no_link_at_all():
    assert run([(5, "a", "x", 100)] * 2, Link(latency_s=7e-9)) == {0: (5, 12), 1: (5, 12)}
    assert run([(5, "a", "x", 100)] * 2, Link()) == {0: (5, 5), 1: (5, 5)}


def test_a_transfer_of_nothing_arrives():
    assert run([(0, "a", "x", 0), (0, "a", "x", 10), (0, "a", "x", 0)]) == {
        0: (0, 0), 1: (0, 10), 2: (10, 10),
    }  # fmt: skip


def test_sharing_does_not_slow_what_is_exclusive():
    transfers = [(0, "a", "x", 100), (0, "a", "y", 100), (0, "b", "x", 100)]
    assert run(transfers, share=exclusive) == {i: (0, 100) for i in range(3)}


def test_what_is_cancelled_leaves_its_bandwidth_to_others():
    network = Network(BYTE_PER_NS)
    network.start(0, 0, "a", "x", 100)
    network.start(0, 1, "a", "y", 100)
    network.start(0, 2, "a", "x", 100)  # behind 0
    network.cancel(50, 0)
    assert network.next_finish() == 50 + 75 * 2
    assert [c.id for c in network.finish(200)] == [1]
    assert network.next_finish() == 225  # 75 at half, then 25 alone
    network.cancel(225, 2)
    assert network.next_finish() is None and not network.finish(10**9)


def test_what_is_cancelled_in_its_latency_does_not_arrive():
    network = Network(Link(bytes_per_s=1e9, latency_s=1e-6))
    network.start(0, 0, "a", "x", 100)
    network.cancel(500, 0)
    assert network.next_finish() is None


def test_a_stall_stops_the_way_in_until_it_ends():
    network = Network(BYTE_PER_NS)
    network.start(0, 0, "a", "x", 100)
    network.stall(40, "x", 1000)
    network.start(50, 1, "a", "y", 100)
    network.start(50, 2, "x", "y", 100)  # the way out of x is open
    arrived = {}
    while (at := network.next_finish()) is not None:
        arrived.update({c.id: at for c in network.finish(at)})
    assert arrived == {0: 1060, 1: 250, 2: 250}


def test_a_stall_without_an_end_holds_for_ever():
    network = Network(Link())
    network.stall(0, "x")
    network.start(0, 0, "a", "x", 1)
    assert network.next_finish() is None


TRANSFERS = st.lists(
    st.tuples(
        st.integers(0, 3000), st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 2000)
    ),
    min_size=1,
    max_size=14,
)


def exactly(transfers) -> dict[int, Fraction]:
    """Arrival times by stepping from change to change in exact fractions, at 1 byte/ns."""
    todo = sorted(range(len(transfers)), key=lambda i: transfers[i][0])
    left = {i: Fraction(transfers[i][3]) for i in todo}
    queues: dict[tuple, list[int]] = {}
    now, arrived = Fraction(0), {}
    while todo or queues:
        while todo and transfers[todo[0]][0] <= now:
            i = todo.pop(0)
            queues.setdefault(transfers[i][1:3], []).append(i)
        over = [pair for pair, queue in queues.items() if left[queue[0]] == 0]
        for pair in over:
            arrived[queues[pair].pop(0)] = now
            if not queues[pair]:
                del queues[pair]
        if over:
            continue
        pairs = list(queues)
        shares = max_min(pairs, capacities(pairs, 1.0))  # which other tests check
        rates = [Fraction(share).limit_denominator(1000) for share in shares]
        times = [left[queues[p][0]] / r for p, r in zip(pairs, rates, strict=True)]
        if todo:
            times.append(transfers[todo[0]][0] - now)
        if not times:
            break
        for pair, rate in zip(pairs, rates, strict=True):
            left[queues[pair][0]] -= rate * min(times)
        now += min(times)
    return arrived


@settings(deadline=None)
@given(TRANSFERS)
def test_arrivals_are_those_of_exact_arithmetic(transfers):
    arrived = run(transfers)
    # Each change is rounded to a nanosecond, and a later one inherits the error.
    expected = {i: float(at) for i, at in exactly(transfers).items()}
    assert {i: at for i, (_, at) in arrived.items()} == pytest.approx(
        expected, abs=2 * len(transfers)
    )


@settings(deadline=None)
@given(TRANSFERS)
def test_an_end_carries_no_more_than_its_bandwidth_and_never_rests_with_work_waiting(transfers):
    arrived = run(transfers)
    for side in (1, 2):
        for name in {transfer[side] for transfer in transfers}:
            mine = [i for i, transfer in enumerate(transfers) if transfer[side] == name]
            first = min(transfers[i][0] for i in mine)
            last = max(arrived[i][1] for i in mine)
            assert sum(transfers[i][3] for i in mine) <= last - first + len(transfers)
    # Work conservation: somebody sends at full rate as long as anything is under way, so nothing
    # takes longer than everything would, one after the other.
    last = max(at for _, at in arrived.values())
    assert last <= max(t[0] for t in transfers) + sum(t[3] for t in transfers) + len(transfers)


# --- Speeds ----------------------------------------------------------------------------------


def test_a_config_overrides_a_preset():
    assert resolve(Link("rdma-400g")) == PRESETS["rdma-400g"] == (50e9, 2e-6)
    assert resolve(Link("rdma-400g", bytes_per_s=40e9)) == (40e9, 2e-6)
    assert resolve(Link("rdma-400g", latency_s=1e-3)) == (50e9, 1e-3)
    assert resolve(Link(bytes_per_s=3.0)) == (3.0, 0.0)
    assert resolve(Link()) == (math.inf, 0.0)


def test_every_preset_of_the_config_has_a_speed():
    for name in PRESETS:
        assert resolve(Link(name)) == PRESETS[name]


@pytest.mark.parametrize(
    ("preset", "ms"), [("nvlink4", 0.60), ("rdma-400g", 5.37), ("rdma-200g", 10.7)]
)
def test_256_mib_take_as_long_as_is_known(preset, ms):
    (_, arrived) = run([(0, "p", "d", 256 << 20)], Link(preset))[0]
    assert arrived / 1e6 == pytest.approx(ms, rel=0.02)
