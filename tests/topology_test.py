"""Instances in nodes: where they are, what transfers cross and share, and how fast that is."""

import math
from dataclasses import replace

import pytest

from pdjax.core.config import (
    Config,
    ConfigError,
    Line,
    Link,
    Model,
    Nodes,
    Placement,
    Pool,
    Role,
    Routing,
    Transfer,
    node_of,
)
from pdjax.core.events import Finish, Landed, Send, Step
from pdjax.core.link import Preset
from pdjax.core.request import Request, SamplingParams
from pdjax.cost import Cost
from pdjax.links import PRESETS, Network, resolve
from pdjax.sim import simulate
from pdjax.workload import Source

PD: Placement = {"p": Role("prefill", instances=4), "d": Role("decode", instances=4)}


def run(placement: Placement, link: Link, transfers) -> dict[int, int]:
    """Nanoseconds at which each (source, target, bytes) arrives if all start at 0."""
    network, arrived = Network(link, placement), {}
    for id, transfer in enumerate(transfers):
        network.start(0, id, *transfer)
    while (at := network.next_finish()) is not None:
        arrived |= {crossed.id: at for crossed in network.finish(at)}
    return arrived


# --- where instances are -------------------------------------------------------------------


def names(placement: Placement, nodes: Nodes) -> str:
    """Instances by node, for example `p0 p1 | d0`."""
    where = node_of(placement, nodes)
    groups = [[n.replace("/", "") for n in where if where[n] == k] for k in range(8)]
    return " | ".join(" ".join(sorted(group)) for group in groups if group)


@pytest.mark.parametrize(
    ("counts", "tp", "devices", "by_role", "interleaved"),
    [
        ((4, 4), (1, 1), 4, "p0 p1 p2 p3 | d0 d1 d2 d3", "d0 d1 p0 p1 | d2 d3 p2 p3"),
        ((4, 4), (1, 1), 2, "p0 p1 | p2 p3 | d0 d1 | d2 d3", "d0 p0 | d1 p1 | d2 p2 | d3 p3"),
        ((2, 4), (2, 1), 4, "p0 p1 | d0 d1 d2 d3", "d0 d1 p0 | d2 d3 p1"),
        ((3, 1), (1, 1), 4, "d0 p0 p1 p2", "d0 p0 p1 p2"),
        # what does not fit into the rest of a node begins the next
        ((3, 1), (2, 3), 4, "p0 p1 | p2 | d0", "p0 p1 | d0 | p2"),
        ((1, 1), (1, 1), 1, "p0 | d0", "p0 | d0"),
    ],
)
def test_nodes_are_filled_in_order(counts, tp, devices, by_role, interleaved):
    placement = {
        "p": Role("prefill", instances=counts[0], tp=tp[0]),
        "d": Role("decode", instances=counts[1], tp=tp[1]),
    }
    assert names(placement, Nodes(devices)) == by_role
    assert names(placement, Nodes(devices, fill="interleaved")) == interleaved


def test_a_role_beside_another_is_with_it():
    placement = {
        "p": Role("prefill", instances=2, beside="d"),
        "d": Role("decode", instances=2),
        "e": Role("decode"),
    }
    assert names(placement, Nodes(2)) == "d0 d1 p0 p1 | e0"


# --- what is in a config ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Nodes(devices=-1), "`nodes.devices` is -1; it must be at least 0"),
        (lambda: Nodes(8, nics=-1), "`nodes.nics` is -1"),
        (lambda: Nodes(8, spine_bytes_per_s=math.nan), "`nodes.spine_bytes_per_s` is nan"),
        (lambda: Nodes(nics=0), "`nodes.nics` without nodes: say how many `nodes.devices`"),
        (lambda: Nodes(fabric=Line("nvlink4")), "`nodes.fabric` without nodes"),
        (lambda: Line(bytes_per_s=-1), "`bytes_per_s` -1 and .* must be at least 0"),
        (
            lambda: Config(
                {"it": {"server": Role(tp=16)}}, transfer=Transfer(link=Link(nodes=Nodes(8)))
            ),
            "role `server` has tp 16, but a node has `nodes.devices` 8: instances do not span",
        ),
    ],
)
def test_what_makes_no_sense_is_named(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_config_overrides_a_preset():
    assert resolve(Link("rdma-400g")) == PRESETS["rdma-400g"] == (50e9, 2e-6)
    assert resolve(Link("rdma-400g", bytes_per_s=40e9)) == (40e9, 2e-6)
    assert resolve(Link("rdma-400g", latency_s=1e-3)) == (50e9, 1e-3)
    assert resolve(Link(bytes_per_s=3.0)) == (3.0, 0.0)
    assert resolve(Link()) == (math.inf, 0.0)


def test_every_preset_of_the_config_has_a_speed():
    assert ["", *PRESETS] == list(Preset.__args__)
    for name in PRESETS:
        assert resolve(Link(name)) == PRESETS[name]


@pytest.mark.parametrize(
    ("preset", "ms"), [("nvlink4", 0.60), ("rdma-400g", 5.37), ("rdma-200g", 10.7)]
)
def test_256_mib_take_as_long_as_is_known(preset, ms):
    assert run({}, Link(preset), [("p", "d", 256 << 20)])[0] / 1e6 == pytest.approx(ms, rel=0.02)


# --- what transfers cross ----------------------------------------------------------------------

FABRIC = Line(bytes_per_s=10e9, latency_s=50e-9)  # 10 bytes/ns
NICS = Link(
    bytes_per_s=1e9, latency_s=200e-9, nodes=Nodes(2, fill="interleaved", fabric=FABRIC)
)  # 1 byte/ns; nodes p0 d0 | p1 d1 | p2 d2 | p3 d3


def of_nodes(**changes) -> Link:
    nodes = {"devices": 2, "fill": "interleaved", "fabric": FABRIC, **changes}
    return Link(bytes_per_s=1e9, latency_s=200e-9, nodes=Nodes(**nodes))


def test_within_a_node_a_transfer_has_the_fabric_between_nodes_the_nics():
    arrived = run(PD, NICS, [("p/0", "d/0", 1000), ("p/1", "d/2", 1000)])
    assert arrived == {0: 100 + 50, 1: 1000 + 200}


def test_what_is_within_a_node_does_not_slow_what_is_between_nodes():
    arrived = run(PD, NICS, [("p/0", "d/1", 1000), ("p/0", "d/0", 10_000)])
    assert arrived == {0: 1000 + 200, 1: 1000 + 50}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_instances_of_a_node_share_its_nics_each_way(n):
    """n transfers out of (into) a node end after n times as long, whoever sends them."""
    out = [("p/0", f"d/{i}", 1000) for i in range(1, n + 1)]
    back = [(f"p/{i}", "d/0", 1000) for i in range(1, n + 1)]
    assert set(run(PD, NICS, out).values()) == {1000 * n + 200}
    assert set(run(PD, NICS, back).values()) == {1000 * n + 200}
    assert set(run(PD, NICS, out + back).values()) == {1000 * n + 200}  # two ways
    mixed = [("p/0", "p/1", 1000), ("d/0", "d/2", 1000)]
    assert set(run(PD, NICS, mixed).values()) == {2200}


def test_several_nics_are_as_many_times_as_fast():
    transfers = [("p/0", "d/1", 1000), ("p/0", "d/2", 1000)]
    assert set(run(PD, of_nodes(nics=4), transfers).values()) == {500 + 200}


def test_with_a_nic_per_device_an_instance_has_as_many_as_devices():
    placement = {"p": Role("prefill", instances=2, tp=2), "d": Role("decode", instances=4)}
    link = of_nodes(devices=4, fill="by_role", nics=0)  # p0 p1 | d0 d1 d2 d3
    # p/0 has 2 bytes/ns, which its two targets can take; p/1 has one target, whose NIC is the end.
    transfers = [("p/0", "d/0", 1000), ("p/0", "d/1", 1000), ("p/1", "d/2", 1000)]
    assert set(run(placement, link, transfers).values()) == {1200}
    transfers = [(f"p/{i}", "d/0", 1000) for i in (0, 1)]
    assert set(run(placement, link, transfers).values()) == {2200}


def test_the_fabric_belongs_to_devices():
    """Two prefill devices into a decode device, and one of two devices into two decode devices."""
    placement = {"p": Role("prefill", instances=2, tp=2), "d": Role("decode", instances=4)}
    link = of_nodes(devices=8)
    assert run(placement, link, [(f"p/{i}", "d/0", 1000) for i in (0, 1)]) == {0: 250, 1: 250}
    assert run(placement, link, [("p/0", f"d/{i}", 1000) for i in (0, 1)]) == {0: 150, 1: 150}


def test_roles_on_the_same_devices_share_their_lines():
    placement = {
        "p": Role("prefill", instances=3),
        "d": Role("decode", instances=3, beside="p"),
    }
    link = of_nodes(devices=1, nics=0)
    transfers = [("p/0", "d/1", 1000), ("d/0", "p/2", 1000)]
    assert set(run(placement, link, transfers).values()) == {2200}


def test_swap_space_is_in_the_node_of_its_instance_and_no_other_transfer_meets_it():
    transfers = [("d/0", "d/0.host", 1000), ("p/0", "d/0", 1000), ("p/1", "d/0", 1000)]
    assert run(PD, NICS, transfers) == {0: 150, 1: 150, 2: 1200}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_spine_is_shared_by_all_that_is_between_nodes(n):
    """Of n transfers that share nothing else each has 1/n of it, but no more than a NIC."""
    link = of_nodes(spine_bytes_per_s=1.5e9)
    transfers = [(f"p/{i}", f"d/{(i + 1) % 4}", 3000) for i in range(n)]
    took = round(3000 / min(1.0, 1.5 / n))
    assert run(PD, link, transfers) == dict.fromkeys(range(n), took + 200)
    within = [(f"p/{i}", f"d/{i}", 3000) for i in range(4)]
    alone = run(PD, link, within)
    assert set(alone.values()) == {350}
    assert list(run(PD, link, [*within, *transfers]).items())[:4] == list(alone.items())


def test_one_at_a_time_holds_for_the_spine_too():
    link = Link(bytes_per_s=1e9, sharing="one_at_a_time", nodes=Nodes(1, spine_bytes_per_s=2e9))
    transfers = [(f"p/{i}", f"d/{i}", 1000) for i in range(4)]
    assert run(PD, link, transfers) == {i: 1000 * (i + 1) for i in range(4)}


def test_exclusive_means_nics_and_spine_too():
    nodes = Nodes(2, fabric=FABRIC, spine_bytes_per_s=0.5e9)
    link = Link(bytes_per_s=1e9, sharing="exclusive", nodes=nodes)
    assert set(run(PD, link, [("p/0", f"d/{i}", 1000) for i in range(4)]).values()) == {2000}


def test_a_stall_of_an_instance_leaves_its_node_to_others():
    network = Network(NICS, PD)
    network.stall(0, "d/1", 10_000)
    network.start(0, 0, "p/0", "d/1", 1000)
    network.start(0, 1, "p/0", "p/1", 1000)  # the same NICs
    arrived = {}
    while (at := network.next_finish()) is not None:
        arrived |= {crossed.id: at for crossed in network.finish(at)}
    assert arrived == {0: 11_200, 1: 1200}


# --- served over them ----------------------------------------------------------------------------


def exposed_ms(link: Link) -> list[float]:
    """What each of two requests at once, on a prefill instance of its own, waits for its KV of 1000
    bytes; instance i of one role hands over to instance i of the other."""
    pool = Pool(tokens=4000, page_size=1000)
    placement = {
        "p": Role("prefill", instances=2, pool=pool, chunk=1000),
        "d": Role("decode", instances=2, pool=pool, chunk=1000),
    }
    config = Config(
        {"it": placement},
        model=Model("none", context=2000),
        transfer=Transfer(schedule="whole", link=link),
        routing=Routing("round_robin", "round_robin"),
    )
    cost = Cost(lambda step: 1_000_000, lambda send: send.length, link)
    requests = [Request(i, 0, 1000, SamplingParams(max_tokens=2)) for i in range(2)]
    log = simulate(config, "it", Source(tuple(requests)), cost)
    return sorted(record.t_ns / 1e6 - 1 for record in log if isinstance(record.body, Landed))


def test_what_requests_wait_for_depends_on_where_their_instances_are():
    nodes = {"fabric": Line(bytes_per_s=1e6), "devices": 2}
    near = Nodes(fill="interleaved", **nodes)  # p0 d0 | p1 d1
    far = Nodes(**nodes)  # p0 p1 | d0 d1
    assert exposed_ms(Link(bytes_per_s=1e5)) == [10, 10]
    assert exposed_ms(Link(bytes_per_s=1e5, nodes=near)) == [1, 1]
    assert exposed_ms(Link(bytes_per_s=1e5, nodes=far)) == [20, 20]
    assert exposed_ms(Link(bytes_per_s=1e5, nodes=replace(far, nics=0))) == [10, 10]
    assert exposed_ms(Link(bytes_per_s=1e5, nodes=replace(far, nics=4))) == [5, 5]
    assert exposed_ms(Link(bytes_per_s=1e5, nodes=far, sharing="one_at_a_time")) == [10, 20]


def handed_over(near: bool, schedule, decode_tokens: int = 4000) -> list[bool]:
    """Of each hand-off of 12 requests in 4P4D, whether it stayed in its node; all have ended."""
    pool = Pool(tokens=4000, page_size=1000)
    placement = {
        "p": Role("prefill", instances=4, pool=pool, chunk=1000),
        "d": Role("decode", instances=4, pool=replace(pool, tokens=decode_tokens), chunk=1000),
    }
    link = of_nodes(devices=4)  # p0 d0 p1 d1 | p2 d2 p3 d3
    config = Config(
        {"it": placement},
        model=Model("none", context=3000),
        transfer=Transfer(schedule=schedule, link=link),
        routing=Routing("round_robin", "round_robin", near=near),
    )
    cost = Cost(lambda step: 1_000_000, lambda send: send.length, link)
    lengths = [1000 if i % 4 < 2 else 2000 for i in range(12)]
    requests = [Request(i, 0, n, SamplingParams(max_tokens=20)) for i, n in enumerate(lengths)]
    log = [record.body for record in simulate(config, "it", Source(tuple(requests)), cost)]
    assert sum(isinstance(body, Finish) for body in log) == len(requests)
    where = node_of(placement, link.nodes)
    sends = [body for body in log if isinstance(body, Send)]
    sends += [send for body in log if isinstance(body, Step) for send in body.sends]
    return [where[send.source] == where[send.target] for send in sends]


@pytest.mark.parametrize("schedule", ["whole", "layerwise"])
def test_kv_stays_in_its_node_where_that_is_asked_for_and_there_is_room(schedule):
    assert not all(handed_over(False, schedule))
    assert all(handed_over(True, schedule, decode_tokens=20_000))
    elsewhere = handed_over(True, schedule, decode_tokens=5000)
    assert any(elsewhere) and not all(elsewhere)


def test_to_decode_near_needs_nodes():
    with pytest.raises(ConfigError, match=r"`routing\.near` without nodes: say how many"):
        Config({"it": PD}, routing=Routing(near=True))
