"""Transfers on their way: arrivals against closed forms, against exact arithmetic, against a plain
network that looks at everything after every change, and against what has to hold for any set."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.config import Link
from pdjax.links import End, Network, max_min

BYTE_PER_NS = Link(bytes_per_s=1e9)
ONE_AT_A_TIME = Link(bytes_per_s=1e9, sharing="one_at_a_time")
EXCLUSIVE = Link(bytes_per_s=1e9, sharing="exclusive")


def run(transfers, link: Link = BYTE_PER_NS) -> dict[int, tuple[int, int]]:
    """(began, arrived) of each (start_ns, source, target, bytes), by its place in the list."""
    network, arrived = Network(link), {}

    def until(now: float) -> None:
        while (at := network.next_finish()) is not None and at <= now:
            arrived.update({c.id: (c.began_ns, at) for c in network.finish(at)})

    for id, (at, source, target, nbytes) in sorted(enumerate(transfers), key=lambda it: it[1][0]):
        until(at)
        network.start(at, id, source, target, nbytes)
    until(math.inf)
    return arrived


def arrivals(network: Network) -> dict[int, int]:
    """When what is under way arrives."""
    arrived = {}
    while (at := network.next_finish()) is not None:
        arrived.update({c.id: at for c in network.finish(at)})
    return arrived


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


@pytest.mark.parametrize("pairs", [["ax", "ay", "bx"], ["ax", "ax", "ax"]])
def test_nothing_slows_what_is_exclusive(pairs):
    assert run([(0, a, b, 100) for a, b in pairs], EXCLUSIVE) == {i: (0, 100) for i in range(3)}


def test_one_at_a_time_transfers_into_one_instance_end_after_all_that_were_there_before():
    """Of sizes s_1 ... s_n in order of start the k-th ends at s_1 + ... + s_k."""
    sizes = [500, 100, 300, 300, 800]
    arrived = run([(0, f"p{i}", "d", size) for i, size in enumerate(sizes)], ONE_AT_A_TIME)
    ends = [sum(sizes[: k + 1]) for k in range(5)]
    assert arrived == {k: (ends[k] - sizes[k], ends[k]) for k in range(5)}


def test_one_at_a_time_who_waits_at_one_end_keeps_its_place_at_the_other():
    transfers = [(0, "a", "x", 100), (10, "b", "x", 50), (20, "b", "y", 50), (30, "a", "x", 10)]
    # b->y could cross at 20, but b->x is before it and waits for x; a->x comes after b->x.
    expected = {0: (0, 100), 1: (100, 150), 2: (150, 200), 3: (150, 160)}
    assert run(transfers, ONE_AT_A_TIME) == expected


def test_one_at_a_time_a_stalled_transfer_holds_up_those_behind_it():
    network = Network(ONE_AT_A_TIME)
    network.start(0, 0, "a", "x", 100)
    network.stall(40, "x", 1000)
    network.start(50, 1, "a", "y", 100)
    assert arrivals(network) == {0: 1060, 1: 1160}


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
    assert arrivals(network) == {0: 1060, 1: 250, 2: 250}


@pytest.mark.parametrize("nbytes", [0, 1])
def test_a_stall_without_an_end_holds_for_ever(nbytes):
    network = Network(Link())
    network.stall(0, "x")
    network.start(0, 0, "a", "x", nbytes)
    assert network.next_finish() is None


def test_a_stall_can_be_made_longer_while_it_lasts():
    network = Network(BYTE_PER_NS)
    network.start(0, 0, "a", "x", 100)
    network.stall(40, "x", 1000)
    network.stall(500, "x", 2000)
    assert arrivals(network) == {0: 2060}


TRANSFERS = st.lists(
    st.tuples(
        st.integers(0, 3000), st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 2000)
    ),
    min_size=1,
    max_size=14,
)


def shares_of(pairs, bytes_per_s: float = 1.0) -> list[float]:
    """Max-min fair rates, which other tests check."""
    outs = {pair[0]: End("out", bytes_per_s) for pair in pairs}
    ins = {pair[1]: End("in", bytes_per_s) for pair in pairs}
    return max_min([(outs[a], ins[b]) for a, b in pairs])


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
        shares = shares_of(pairs)
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


class Plain:
    """The same rules without any economy: every rate is worked out again at every change, and every
    transfer is looked at to see what is next. No latency, no stalls."""

    def __init__(self, bytes_per_s: float):
        self.bytes_per_s, self.now = bytes_per_s, 0
        self.flows: list[list] = []  # [id, pair, bytes left, rate, since, over], oldest first

    def crossing(self) -> list[list]:
        first: dict[tuple, list] = {}
        for flow in self.flows:
            first.setdefault(flow[1], flow)
        return list(first.values())

    def solve(self) -> None:
        flows = sorted(self.crossing(), key=self.flows.index)
        for flow, rate in zip(
            flows, shares_of([f[1] for f in flows], self.bytes_per_s), strict=True
        ):
            _, _, left, old, since, _ = flow
            if rate != old:
                left = max(0.0, left - old * (self.now - since) / 1e9)
                flow[2:] = [left, rate, self.now, self.now + round(left / rate * 1e9)]

    def until(self, now: float) -> dict[int, int]:
        arrived = {}
        while self.flows and (at := min(flow[5] for flow in self.crossing())) <= now:
            self.now = at
            over = [flow for flow in self.crossing() if flow[5] == at]
            arrived |= {flow[0]: at for flow in over}
            self.flows = [flow for flow in self.flows if flow[0] not in arrived]
            self.solve()
        return arrived

    def run(self, transfers, cancelled) -> dict[int, int]:
        arrived: dict[int, int] = {}
        for at, id in in_order(transfers, cancelled):
            arrived |= self.until(at)
            self.now = at
            if id < 0:
                self.flows = [flow for flow in self.flows if flow[0] != ~id]
            else:
                _, source, target, nbytes = transfers[id]
                self.flows.append([id, (source, target), nbytes, 0.0, at, math.inf])
            self.solve()
        return arrived | self.until(math.inf)


def in_order(transfers, cancelled) -> list[tuple[int, int]]:
    """(when, id) of starts, and (when, ~id) of cancellations."""
    starts = [(transfer[0], id) for id, transfer in enumerate(transfers)]
    ends = [(at, ~id) for id, at in cancelled.items() if id < len(transfers)]
    return sorted(starts + ends, key=lambda it: it[0])


MANY = st.lists(
    st.tuples(
        st.integers(0, 5000), st.sampled_from("abcde"), st.sampled_from("vwxyz"),
        st.integers(0, 3000),
    ),
    min_size=1,
    max_size=40,
)  # fmt: skip
CANCELLED = st.dictionaries(st.integers(0, 39), st.integers(0, 6000), max_size=5)


@settings(deadline=None, max_examples=300)
@given(MANY, CANCELLED, st.sampled_from([1e9, 7e8 / 3, 1.1e9, 3e10]))
def test_looking_only_at_what_a_change_concerns_changes_no_nanosecond(
    transfers, cancelled, bytes_per_s
):
    network, arrived = Network(Link(bytes_per_s=bytes_per_s)), {}

    def until(now: float) -> None:
        while (at := network.next_finish()) is not None and at <= now:
            arrived.update({c.id: at for c in network.finish(at)})

    for at, id in in_order(transfers, cancelled):
        until(at)
        if id < 0:
            network.cancel(at, ~id)
        else:
            network.start(at, id, *transfers[id][1:])
    until(math.inf)
    assert arrived == Plain(bytes_per_s).run(transfers, cancelled)


def test_what_is_remembered_of_former_rates_does_not_grow_with_time():
    """A transfer whose rate changes very often while it crosses leaves no trail."""
    network = Network(BYTE_PER_NS)
    network.start(0, 0, "a", "x", 10**9)
    for i in range(1, 2000):
        network.start(1000 * i, i, "a", "y", 100)
        assert [c.id for c in network.finish(1000 * i + 900)] == [i]
    assert len(network._over) < 200 and len(network._flows) == 1
