"""What a transfer crosses: an instance's own line, a node's fabric, NICs, the spine."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdjax.core.config import role_of
from pdjax.core.link import Link, Nodes, node_of
from pdjax.core.placement import Placement
from pdjax.links.sharing import End, Path
from pdjax.links.speeds import Speed, resolve

HOST = ".host"
"""Ends the name of the swap space of an instance, which is in the instance's node."""
NANOSECONDS = 1e9

Named = tuple[str, float]
"""Of an end: its name and its bytes/s."""


class Route(NamedTuple):
    """What transfers from one instance to another cross, and how long that takes at least."""

    path: Path
    latency_ns: int


class _Seat(NamedTuple):
    """Where an instance is: its node, its devices (named after whose they are), how many."""

    node: int
    devices: str
    count: int


class Topology:
    """Routes between the instances of a placement, which may be empty where there are no nodes."""

    def __init__(self, link: Link, placement: Placement):
        self._nodes, self._exclusive = link.nodes, link.sharing == "exclusive"
        self._link, self._fabric = resolve(link), resolve(link.nodes.fabric)
        self._seats = _seats(placement, link.nodes) if link.nodes.devices else None
        self._ends: dict[str, End] = {}
        self.latencies_ns = {_ns(self._link.latency_s)}
        if self._seats is not None:
            self.latencies_ns.add(_ns(self._fabric.latency_s))

    def route(self, source: str, target: str) -> Route:
        """By ends that others have, too, but where links are exclusive."""
        speed, ends = self._crossed(source, target)
        path = tuple(self._end(*end) for end in ends if end[1] < math.inf)
        return Route(path, _ns(speed.latency_s))

    def _end(self, name: str, bytes_per_s: float) -> End:
        end = None if self._exclusive else self._ends.get(name)
        if end is None:
            end = self._ends[name] = End(name, bytes_per_s)
        return end

    def _crossed(self, source: str, target: str) -> tuple[Speed, Iterator[Named]]:
        if self._seats is None:
            return self._link, _two(source, target, self._link.bytes_per_s)
        a, b = self._seat(source), self._seat(target)
        if a.node == b.node:
            return self._fabric, self._own_lines(a, b, "fabric", self._fabric)
        return self._link, self._between(a, b)

    def _between(self, a: _Seat, b: _Seat) -> Iterator[Named]:
        nics = self._nodes.nics
        if nics:
            bytes_per_s = nics * self._link.bytes_per_s
            yield from _two(f"node {a.node}", f"node {b.node}", bytes_per_s)
        else:
            yield from self._own_lines(a, b, "NICs", self._link)
        yield "spine", self._nodes.spine_bytes_per_s or math.inf

    def _own_lines(self, a: _Seat, b: _Seat, what: str, speed: Speed) -> Iterator[Named]:
        """Every device has a line of its own, each way."""
        yield f"{what} out of {a.devices}", a.count * speed.bytes_per_s
        yield f"{what} into {b.devices}", b.count * speed.bytes_per_s

    def _seat(self, instance: str) -> _Seat:
        assert self._seats is not None
        seat = self._seats[instance.removesuffix(HOST)]
        return seat._replace(devices=instance) if instance.endswith(HOST) else seat


def _two(source: str, target: str, bytes_per_s: float) -> Iterator[Named]:
    yield f"out of {source}", bytes_per_s
    yield f"into {target}", bytes_per_s


def _seats(placement: Placement, nodes: Nodes) -> Mapping[str, _Seat]:
    seats = {}
    for instance, node in node_of(placement, nodes).items():
        role = placement[role_of(instance)]
        number = instance.rpartition("/")[2]
        devices = f"{role.beside}/{number}" if role.beside else instance
        seats[instance] = _Seat(node, devices, role.tp)
    return seats


def _ns(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
