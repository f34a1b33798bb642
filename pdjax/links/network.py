"""Transfers on their way. The model is a fluid one: a transfer that begins takes bandwidth at once,
and rates change whenever one begins or its last byte leaves: its own, and those of transfers
that share an end with it, or with one that does, and so on. Latency is on top, and takes no
bandwidth: pieces follow each other without waiting for it.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdjax.core.link import Link
from pdjax.core.placement import Placement
from pdjax.links.sharing import SHARES, End, Path, rate_alone
from pdjax.links.topology import NANOSECONDS, Route, Topology

NEVER = math.inf  # a time
ROOM = 64
"""Entries of the heap that are not worth tidying up."""
NEARLY = 1 - 1e-9
"""More than sums of floats are off."""


class Crossed(NamedTuple):
    """Transfer `id` has arrived; its first byte left at `began_ns`."""

    id: int
    began_ns: int


Lane = tuple[str, str, int]
"""(source, target, number) of transfers that cross one after the other; the number is 0 but where
links are exclusive, and each transfer has a lane."""


@dataclass(slots=True, eq=False)
class _Flow:
    """A transfer, the `number`-th that was started. It waits in its lane, then crosses `path`: from
    `since_ns` on it has `left` bytes to send at `rate` bytes/s and is `over_ns`; then all its bytes
    have left."""

    id: int
    number: int
    lane: Lane
    route: Route
    left: float
    path: Path = ()
    rate: float = 0.0
    since_ns: int = 0
    over_ns: float = NEVER
    began_ns: int | None = None

    def change_rate(self, now_ns: int, rate: float) -> bool:
        """Whether it is another one."""
        if rate == self.rate:  # what is computed once stays exact
            return False
        if now_ns > self.since_ns:
            sent = self.rate * (now_ns - self.since_ns) / NANOSECONDS
            self.left = max(0.0, self.left - sent)
        self.rate, self.since_ns, self.over_ns = rate, now_ns, NEVER
        if rate:
            self.over_ns = now_ns + round(self.left / rate * NANOSECONDS)
            self.began_ns = now_ns if self.began_ns is None else self.began_ns
        return True


@dataclass(slots=True)
class _Crossing:
    """What crosses an end, and how much of it that could use if nobody shared anything."""

    flows: dict[_Flow, None] = field(default_factory=dict)
    demand: float = 0.0


class Network:
    """Transfers between named instances. Times are integer nanoseconds that never go back.

    Between two instances transfers cross one after the other, in the order in which they were
    started; those of different pairs share the ends that they have in common. Where links are
    exclusive every transfer crosses at once and by itself.
    """

    def __init__(self, link: Link, placement: Placement | None = None):
        """placement: where instances are, which counts where the link has nodes."""
        self._topology = Topology(link, placement or {})
        self._share = SHARES[link.sharing]
        self._started = self._left = 0  # transfers
        self._flows: dict[int, _Flow] = {}  # by id
        self._lanes: dict[Lane, deque[_Flow]] = {}  # the first of each is crossing
        self._fair, self._exclusive = link.sharing == "max_min", link.sharing == "exclusive"
        self._crossing: dict[End, _Crossing] = {}
        self._over: list[tuple[float, int, _Flow]] = []  # a heap: (an over_ns, number, flow)
        self._sent: list[tuple[int, int, _Flow]] = []  # a heap: (arrives, n-th that left, flow)
        self._stalled: dict[str, float] = {}  # target -> until when
        self._stops: dict[str, End] = {}  # target -> what lets nothing through

    def start(self, now_ns: int, id: int, source: str, target: str, nbytes: int) -> None:
        self._advance(now_ns)
        self._started += 1
        lane = source, target, self._started if self._exclusive else 0
        flow = _Flow(id, self._started, lane, self._topology.route(source, target), nbytes)
        self._flows[id] = flow
        queue = self._lanes.setdefault(lane, deque())
        queue.append(flow)
        if len(queue) == 1:
            self._put_on(now_ns, [flow])

    def next_finish(self) -> int | None:
        """When to look at the network next if nothing is started before: nothing arrives earlier.
        None: nothing will arrive."""
        arrives_ns = self._sent[0][0] if self._sent else NEVER
        change_ns = self._next_change() if self._lanes else NEVER
        at_ns = min(arrives_ns, change_ns + min(self._topology.latencies_ns))
        return None if at_ns == NEVER else int(at_ns)

    def finish(self, now_ns: int) -> list[Crossed]:
        """What has arrived by now and has not been told, first arrived first."""
        self._advance(now_ns)
        crossed = []
        while self._sent and self._sent[0][0] <= now_ns:
            _, _, flow = heapq.heappop(self._sent)
            assert flow.began_ns is not None
            del self._flows[flow.id]
            crossed.append(Crossed(flow.id, flow.began_ns))
        return crossed

    def cancel(self, now_ns: int, id: int) -> None:
        """Transfer `id`, if it is under way, never arrives; others have its bandwidth."""
        self._advance(now_ns)
        flow = self._flows.pop(id, None)
        if flow is None:
            return
        queue = self._lanes.get(flow.lane, deque())
        if queue and queue[0] is flow:
            flow.over_ns = NEVER
            self._end(now_ns, [flow])
        elif flow in queue:
            queue.remove(flow)
        else:
            self._sent = [item for item in self._sent if item[2] is not flow]
            heapq.heapify(self._sent)

    def stall(self, now_ns: int, target: str, until_ns: float = NEVER) -> None:
        """Nothing moves on the way into `target` before `until_ns`."""
        self._advance(now_ns)
        self._stops.setdefault(target, End(f"stall of {target}", 0.0))
        self._stalled[target] = until_ns
        self._turn(now_ns, target)

    # --- one change after the other ----------------------------------------------------------

    def _advance(self, now_ns: int) -> None:
        while (at := self._next_change()) <= now_ns:
            at_ns, over = int(at), []
            while self._next_over() <= at:
                flow = heapq.heappop(self._over)[2]
                flow.over_ns = NEVER
                over.append(flow)
                arrives_ns = at_ns + flow.route.latency_ns
                heapq.heappush(self._sent, (arrives_ns, self._left + len(over), flow))
            self._left += len(over)
            self._end(at_ns, over)
            for target in [t for t, until in self._stalled.items() if until <= at]:
                del self._stalled[target]
                self._turn(at_ns, target)

    def _next_change(self) -> float:
        """When the rates change next: bytes of a transfer are over, or a stall is."""
        over_ns = self._next_over()
        return min(over_ns, *self._stalled.values()) if self._stalled else over_ns

    def _next_over(self) -> float:
        over = self._over
        while over and over[0][0] != over[0][2].over_ns:  # it has another rate since, or has ended
            heapq.heappop(over)
        return over[0][0] if over else NEVER

    def _end(self, now_ns: int, flows: Sequence[_Flow]) -> None:
        """These cross no longer; who is next does."""
        freed, following = self._take_off(flows), []
        for flow in flows:
            queue = self._lanes[flow.lane]
            queue.popleft()
            if queue:
                following.append(queue[0])
            else:
                del self._lanes[flow.lane]
        self._put_on(now_ns, following, freed)

    def _turn(self, now_ns: int, target: str) -> None:
        """A stall of `target` begins or ends for what is crossing."""
        flows = [queue[0] for lane, queue in self._lanes.items() if lane[1] == target]
        self._put_on(now_ns, flows, self._take_off(flows))

    def _take_off(self, flows: Sequence[_Flow]) -> set[End]:
        """These cross nothing; returns where others may have more for it."""
        freed = {end for flow in flows for end in flow.path if self._is_tight(end)}
        for flow in flows:
            alone = rate_alone(flow.path)
            for end in flow.path:
                crossing = self._crossing[end]
                del crossing.flows[flow]
                crossing.demand -= alone
                if not crossing.flows:
                    del self._crossing[end]
        return freed

    def _put_on(self, now_ns: int, flows: Sequence[_Flow], freed: Iterable[End] = ()) -> None:
        """These cross from now on, and at `freed` is more room than there was."""
        for flow in flows:
            target = flow.lane[1]
            stop = (self._stops[target],) if target in self._stalled else ()
            flow.path = (*flow.route.path, *stop)
            alone = rate_alone(flow.path)
            for end in flow.path:
                crossing = self._crossing.setdefault(end, _Crossing())
                crossing.flows[flow] = None
                crossing.demand += alone
        self._solve(now_ns, self._coupled(flows, freed))

    def _coupled(self, flows: Sequence[_Flow], ends: Iterable[End]) -> list[_Flow]:
        """These, those that cross any of `ends`, and whoever shares a tight end with one of them,
        and so on, in the order in which they were started: all whose rates may change."""
        found = dict.fromkeys(flows)
        seen = {*ends}
        for flow in flows:
            seen.update(filter(self._is_tight, flow.path))
        todo = [end for end in seen if end in self._crossing]
        while todo:
            for flow in self._crossing[todo.pop()].flows:
                if flow not in found:
                    found[flow] = None
                    new = [end for end in flow.path if end not in seen and self._is_tight(end)]
                    seen.update(new)
                    todo += new
        return sorted(found, key=lambda flow: flow.number)

    def _is_tight(self, end: End) -> bool:
        """Whether it may hold up what crosses it; not if all that could use is less than it has."""
        return not self._fair or self._crossing[end].demand > NEARLY * end.bytes_per_s

    def _solve(self, now_ns: int, flows: Sequence[_Flow]) -> None:
        if not flows:
            return
        rates = self._share([flow.path for flow in flows])
        for flow, rate in zip(flows, rates, strict=True):
            if flow.change_rate(now_ns, rate) and rate:
                heapq.heappush(self._over, (flow.over_ns, flow.number, flow))
        if len(self._over) > 2 * len(self._lanes) + ROOM:  # most of it is of former rates
            crossing = (queue[0] for queue in self._lanes.values())
            self._over = [(f.over_ns, f.number, f) for f in crossing if f.over_ns < NEVER]
            heapq.heapify(self._over)
