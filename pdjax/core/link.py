"""What a config says of links: how fast, how shared, and which instances are in one node."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pdjax.core.placement import Placement, require

Preset = Literal[
    "",
    "nvlink3",
    "nvlink4",
    "nvlink5",
    "ici-v5e",
    "ici-v5p",
    "pcie4",
    "pcie5",
    "rdma-200g",
    "rdma-400g",
    "rdma-800g",
    "tcp-10g",
]
Sharing = Literal["max_min", "one_at_a_time", "exclusive"]


@dataclass(frozen=True)
class Line:
    """How fast bytes go one way.

    preset: a name in `pdjax.links.PRESETS`, or empty. bytes_per_s, latency_s: override the
    preset's; 0 bytes/s with no preset is no line at all: as fast as the devices copy (on a modelled
    clock, at once).
    """

    preset: Preset = ""
    bytes_per_s: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self):
        require(
            self.bytes_per_s >= 0 and self.latency_s >= 0,
            f"`bytes_per_s` {self.bytes_per_s} and `latency_s` {self.latency_s} of a link must be "
            "at least 0",
        )


@dataclass(frozen=True)
class Nodes:
    """Machines with several devices, filled in the order of the placement: an instance that does
    not fit into what is left of one begins the next; roles that are `beside` another are with it.

    devices: of a node; 0: there are no nodes, and each instance has a link of its own.
    fill: `by_role` (all instances of a role, then those of the next, as DistServe places under
        high affinity), or `interleaved` (every node has its share of every role, so that KV can
        stay in it, as under low affinity).
    fabric: between the devices of a node; each has so much, each way.
    nics: of a node, each as fast as the link; all its instances share them. 0: one for each device,
        which nobody else uses.
    spine_bytes_per_s: of all transfers between nodes together; 0: no limit.
    """

    devices: int = 0
    fill: Literal["by_role", "interleaved"] = "by_role"
    fabric: Line = field(default_factory=Line)
    nics: int = 1
    spine_bytes_per_s: float = 0.0

    def __post_init__(self):
        for name in ("devices", "nics", "spine_bytes_per_s"):
            value = getattr(self, name)
            require(value >= 0, f"`nodes.{name}` is {value}; it must be at least 0")
        lost = [
            name
            for name, default in (("fabric", Line()), ("nics", 1), ("spine_bytes_per_s", 0))
            if getattr(self, name) != default
        ]
        require(
            self.devices > 0 or not lost,
            f"`nodes.{', '.join(lost)}` without nodes: say how many `nodes.devices` one has",
        )


@dataclass(frozen=True)
class Link(Line):
    """What connects two instances. One way, in bytes, per instance and direction; with `nodes`, per
    NIC and direction.

    sharing: what transfers that need the same line do: have it together, in equal shares as far as
        they can use them (`max_min`); have it one after the other, first come first served
        (`one_at_a_time`); or nothing, as if each had a line of its own (`exclusive`).
    """

    sharing: Sharing = "max_min"
    nodes: Nodes = field(default_factory=Nodes)


def node_of(placement: Placement, nodes: Nodes) -> dict[str, int]:
    """The node, from 0, of every instance. Raises ConfigError where one fits into no node."""
    where: dict[str, int] = {}
    node, free = -1, 0
    for role, i in _in_order(placement, nodes):
        tp = placement[role].tp
        require(
            tp <= nodes.devices,
            f"role `{role}` has tp {tp}, but a node has `nodes.devices` {nodes.devices}: instances "
            "do not span nodes",
        )
        if tp > free:
            node, free = node + 1, nodes.devices
        where[f"{role}/{i}"] = node
        free -= tp
    for name, role in placement.items():
        if role.beside:
            where |= {f"{name}/{i}": where[f"{role.beside}/{i}"] for i in range(role.instances)}
    return where


def _in_order(placement: Placement, nodes: Nodes) -> Iterator[tuple[str, int]]:
    """(role, number) of each instance that has devices of its own, first come first placed."""
    own = {name: role.instances for name, role in placement.items() if not role.beside}
    order = [(name, i) for name, count in own.items() for i in range(count)]
    if nodes.fill == "interleaved":  # instance i of n is due when (i + 1/2) / n of all are placed
        order.sort(key=lambda it: (2 * it[1] + 1) / own[it[0]])
    yield from order
