"""What must hold for any transfers over any links: capacities, arrivals, and no economy seen."""

import math
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.config import (
    Line,
    Link,
    Nodes,
    Placement,
    Role,
    node_of,
)
from pdjax.links import Network, resolve

PD: Placement = {"p": Role("prefill", instances=4), "d": Role("decode", instances=4)}


INSTANCES = [f"{role}/{i}" for role in "pd" for i in range(4)]
LINKS = st.builds(
    Link,
    bytes_per_s=st.sampled_from([0.0, 1e9, 3e9, 7e8 / 3]),
    latency_s=st.sampled_from([0.0, 1e-7]),
    sharing=st.sampled_from(["max_min", "one_at_a_time"]),
    nodes=st.builds(
        Nodes,
        devices=st.sampled_from([1, 2, 3, 8]),
        fill=st.sampled_from(["by_role", "interleaved"]),
        fabric=st.sampled_from([Line(), Line(bytes_per_s=5e9, latency_s=3e-8)]),
        nics=st.integers(0, 2),
        spine_bytes_per_s=st.sampled_from([0.0, 1e9, 2.5e9, 1e9 / 7, 3e10]),
    ),
)
TRANSFERS = st.lists(
    st.tuples(
        st.integers(0, 3000),
        st.sampled_from(list(permutations(INSTANCES, 2))),
        st.integers(0, 5000),
    ),
    min_size=1,
    max_size=25,
)


def carried(link: Link, pairs: dict[int, tuple[str, str]], rates: dict[int, float]):
    """(bytes/s, at most) of everything that is shared, told from the config alone."""
    where, nodes = node_of(PD, link.nodes), link.nodes
    loads: dict[tuple, float] = {}
    limits: dict[tuple, float] = {}
    fabric = nodes.fabric.bytes_per_s or math.inf
    for id, (a, b) in pairs.items():
        between = where[a] != where[b]
        shared = [("out", a), ("in", b)]
        limit = (link.bytes_per_s or math.inf) if between else fabric
        if between and nodes.nics:
            shared = [("out", where[a]), ("in", where[b])]
            limit *= nodes.nics
        shared = [(between, *one) for one in shared]
        limits |= dict.fromkeys(shared, limit)
        if between and nodes.spine_bytes_per_s:
            shared.append(("spine",))
            limits["spine",] = nodes.spine_bytes_per_s
        for one in shared:
            loads[one] = loads.get(one, 0.0) + rates[id]
    return [(load, limits[one]) for one, load in loads.items()]


@settings(deadline=None, max_examples=300)
@given(LINKS, TRANSFERS)
def test_nothing_ever_carries_more_than_it_can_and_everything_arrives(link, transfers):
    network, pairs, arrived = Network(link, PD), {}, {}

    def until(now: float) -> None:
        while (at := network.next_finish()) is not None and at <= now:
            arrived.update({crossed.id: at for crossed in network.finish(at)})
            check()

    def check() -> None:
        crossing = {queue[0].id: queue[0].rate for queue in network._lanes.values()}
        now = {id: pairs[id] for id in crossing}
        for load, limit in carried(link, now, crossing):
            assert load <= limit * (1 + 1e-9)
        if crossing:
            assert any(crossing.values())  # somebody moves

    for id, (at, pair, nbytes) in sorted(enumerate(transfers), key=lambda it: it[1][0]):
        until(at)
        pairs[id] = pair
        network.start(at, id, *pair, nbytes)
        check()
    until(math.inf)
    assert sorted(arrived) == list(range(len(transfers)))
    for id, (at, (a, b), nbytes) in enumerate(transfers):
        within = node_of(PD, link.nodes)[a] == node_of(PD, link.nodes)[b]
        speed = resolve(link.nodes.fabric if within else link)
        fastest = speed.bytes_per_s * (1 if within else max(1, link.nodes.nics))
        assert arrived[id] >= at + math.floor(nbytes / fastest * 1e9 + speed.latency_s * 1e9)


class Everything(Network):
    """Works out all rates again at every change."""

    def _coupled(self, flows, ends):
        crossing = {queue[0] for queue in self._lanes.values()}
        return sorted(crossing, key=lambda flow: flow.number)


def played(network: Network, transfers, cancelled, stalls) -> list:
    """What arrives, when, and since when it crossed."""
    starts = [(at, 0, i, (*pair, nbytes)) for i, (at, pair, nbytes) in enumerate(transfers)]
    ends = [(at, 1, i, ()) for i, at in cancelled.items() if i < len(transfers)]
    holds = [(at, 2, 0, (target, at + length)) for at, target, length in stalls]
    arrived = []

    def until(now: float) -> None:
        while (at := network.next_finish()) is not None and at <= now:
            arrived.extend((at, *crossed) for crossed in network.finish(at))

    for at, kind, id, what in sorted(starts + ends + holds):
        until(at)
        if kind == 0:
            network.start(at, id, *what)
        elif kind == 1:
            network.cancel(at, id)
        else:
            network.stall(at, *what)
    until(math.inf)
    return arrived


@settings(deadline=None, max_examples=400)
@given(
    LINKS,
    TRANSFERS,
    st.dictionaries(st.integers(0, 24), st.integers(0, 4000), max_size=3),
    st.lists(
        st.tuples(st.integers(0, 4000), st.sampled_from(INSTANCES), st.integers(1, 2000)),
        max_size=3,
    ),
)
def test_looking_only_at_what_a_change_concerns_changes_nothing(link, transfers, cancelled, stalls):
    """Slack spines and fabrics, waiting lines and stalls included."""
    events = transfers, cancelled, stalls
    assert played(Network(link, PD), *events) == played(Everything(link, PD), *events)


def test_what_meets_only_where_there_is_room_is_not_looked_at_together():
    """d0 receives for ever, so that the spine is never idle; it has room for two more."""
    link = Link(bytes_per_s=1e9, nodes=Nodes(devices=1, spine_bytes_per_s=3.5e9))
    network = Network(link, PD)
    solved, share = [], network._share

    def counted(paths):
        solved.append(len(paths))
        return share(paths)

    network._share = counted
    network.start(0, 0, "p/0", "d/0", 10**9)
    for i in range(1, 50):
        network.start(10_000 * i, 2 * i, "p/1", "d/1", 1000)
        network.start(10_000 * i, 2 * i + 1, "p/2", "d/2", 1000)
        assert len(network.finish(10_000 * i + 5000)) == 2
    assert max(solved) == 1
    network.start(10**6, 1000, "p/3", "d/3", 1000)
    network.start(10**6, 1001, "p/2", "d/2", 1000)
    network.start(10**6, 1002, "p/1", "d/1", 1000)
    assert solved[-1] == 4  # now it is too narrow
