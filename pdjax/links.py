"""Links between instances: how fast they are, and how transfers share them. It has no clock.

The model is a fluid one: a transfer that begins takes bandwidth at once, and every rate is solved
again whenever one begins or its last byte leaves. Bandwidth belongs to the ends of a transfer: what
an instance sends shares its way out, what it receives its way in. Latency is on top, and takes
no bandwidth: pieces follow each other without waiting for it.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdjax.core.config import Link

NANOSECONDS = 1e9
NEVER = math.inf  # a time


class Speed(NamedTuple):
    """One way, per instance and direction: bytes (not bits) a second, and seconds."""

    bytes_per_s: float
    latency_s: float


PRESETS: Mapping[str, Speed] = {
    "nvlink4": Speed(450e9, 10e-6),
    "ici-v5e": Speed(45e9, 1e-6),
    "pcie5": Speed(63e9, 4e-6),
    "rdma-400g": Speed(50e9, 2e-6),
    "rdma-200g": Speed(25e9, 2e-6),
    "tcp-10g": Speed(1.25e9, 30e-6),
}
"""Line rates, one way; transports reach 0.65 (NVLink) to 0.9 (InfiniBand) of them (calculon's A100
settings), so set `bytes_per_s` to what yours does. Latencies are small-message orders of magnitude.

nvlink4: H100's 18 links at 25 GB/s one way (NVIDIA's 900 GB/s counts both); 10 us is
    AIConfigurator's point-to-point latency.
ici-v5e: one of a chip's four links, 45 GB/s one way, about 1 us a hop (Google's scaling book).
pcie5: 32 GT/s times 16 lanes times 128/130; 4 us is the best pair that p2pmark's author measured.
rdma-400g, rdma-200g: the line rate of NDR and HDR InfiniBand; 2 us for verbs over two switches.
tcp-10g: the line rate; 30 us is half of a round trip of 60 us through two kernels.
"""


def resolve(link: Link) -> Speed:
    """What a config's link comes to: a preset with what the config overrides; without either,
    infinitely fast."""
    bytes_per_s, latency_s = PRESETS.get(link.preset, Speed(math.inf, 0.0))
    return Speed(link.bytes_per_s or bytes_per_s, link.latency_s or latency_s)


# --- Sharing -----------------------------------------------------------------------------

Pair = tuple[str, str]
"""(source, target) of a transfer."""
End = tuple[Literal["out", "in"], str]
"""One direction of one instance: what transfers share."""
Sharing = Callable[[Sequence[Pair], Mapping[End, float]], list[float]]
"""(pairs that have something to send, bytes/s of each end) -> bytes/s of each pair."""


def ends_of(pair: Pair) -> tuple[End, End]:
    return ("out", pair[0]), ("in", pair[1])


def max_min(pairs: Sequence[Pair], capacity: Mapping[End, float]) -> list[float]:
    """Max-min fair rates: no pair can get more without one that has no more getting less.

    By progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2): the end with
    the least for each of its pairs fixes theirs, and so on with what is left.
    """
    users: dict[End, list[int]] = {}
    for i, pair in enumerate(pairs):
        for end in ends_of(pair):
            users.setdefault(end, []).append(i)
    left = {end: capacity[end] for end in users}
    rates = [math.nan] * len(pairs)
    while users:
        tightest = min(users, key=lambda end: left[end] / len(users[end]))
        share = left[tightest] / len(users[tightest])
        for i in users[tightest]:
            rates[i] = share
        for end in {end for i in users[tightest] for end in ends_of(pairs[i])}:
            waiting = [i for i in users[end] if math.isnan(rates[i])]
            if share < math.inf:
                left[end] = max(0.0, left[end] - share * (len(users[end]) - len(waiting)))
            users[end] = waiting
        users = {end: waiting for end, waiting in users.items() if waiting}
    return rates


def exclusive(pairs: Sequence[Pair], capacity: Mapping[End, float]) -> list[float]:
    """Every pair has a link of its own: what other pairs send does not slow it down."""
    return [min(capacity[end] for end in ends_of(pair)) for pair in pairs]


# --- The network -------------------------------------------------------------------------


class Crossed(NamedTuple):
    """Transfer `id` has arrived; its first byte left at `began_ns`."""

    id: int
    began_ns: int


@dataclass(slots=True)
class _Flow:
    """A transfer: from `since_ns` on it has `left` bytes to send at `rate` bytes/s."""

    id: int
    left: float
    rate: float = 0.0
    since_ns: int = 0
    began_ns: int | None = None

    @property
    def over_ns(self) -> float:
        if not self.left:
            return self.since_ns
        if not self.rate:
            return NEVER
        return self.since_ns + round(self.left / self.rate * NANOSECONDS)

    def change_rate(self, now_ns: int, rate: float) -> None:
        if rate == self.rate:  # what is computed once stays exact
            return
        if now_ns > self.since_ns:
            sent = self.rate * (now_ns - self.since_ns) / NANOSECONDS
            self.left = max(0.0, self.left - sent)
        self.rate, self.since_ns = rate, now_ns


class Network:
    """Transfers between named instances. Times are integer nanoseconds that never go back.

    Between two instances transfers cross one after the other, in the order in which they were
    started; those of different pairs share the ends that they have in common, as `share` says.
    """

    def __init__(self, link: Link, share: Sharing = max_min):
        self._bytes_per_s, latency_s = resolve(link)
        self._latency_ns = round(latency_s * NANOSECONDS)
        self._share = share
        self._queues: dict[Pair, deque[_Flow]] = {}  # the first of each is crossing
        self._sent: deque[tuple[int, _Flow]] = deque()  # (when it arrives, all bytes have left)
        self._stalled: dict[End, float] = {}  # until when

    def start(self, now_ns: int, id: int, source: str, target: str, nbytes: int) -> None:
        self._advance(now_ns)
        queue = self._queues.setdefault((source, target), deque())
        queue.append(_Flow(id, nbytes))
        if len(queue) == 1:
            self._solve(now_ns)

    def next_finish(self) -> int | None:
        """When something arrives next if nothing is started before; None: then nothing will."""
        if self._sent:
            return self._sent[0][0]
        at = self._next_change() if self._queues else NEVER
        return None if at == NEVER else int(at) + self._latency_ns

    def finish(self, now_ns: int) -> list[Crossed]:
        """What has arrived by now and has not been told, first arrived first."""
        self._advance(now_ns)
        crossed = []
        while self._sent and self._sent[0][0] <= now_ns:
            _, flow = self._sent.popleft()
            assert flow.began_ns is not None
            crossed.append(Crossed(flow.id, flow.began_ns))
        return crossed

    def cancel(self, now_ns: int, id: int) -> None:
        """Transfer `id`, if it is under way, never arrives; others have its bandwidth."""
        self._advance(now_ns)
        self._sent = deque(item for item in self._sent if item[1].id != id)
        for pair, queue in self._queues.items():
            if any(flow.id == id for flow in queue):
                self._queues[pair] = deque(flow for flow in queue if flow.id != id)
        self._solve(now_ns)

    def stall(self, now_ns: int, target: str, until_ns: float = NEVER) -> None:
        """Nothing moves on the way into `target` before `until_ns`."""
        self._advance(now_ns)
        self._stalled["in", target] = until_ns
        self._solve(now_ns)

    def _next_change(self) -> float:
        """When the rates change next: bytes of a transfer are over, or a stall is."""
        over = (queue[0].over_ns for queue in self._queues.values())
        return min((*over, *self._stalled.values()), default=NEVER)

    def _advance(self, now_ns: int) -> None:
        while (at := self._next_change()) <= now_ns:
            at = int(at)
            for queue in self._queues.values():
                if queue[0].over_ns <= at:
                    self._sent.append((at + self._latency_ns, queue.popleft()))
            self._stalled = {end: until for end, until in self._stalled.items() if until > at}
            self._solve(at)

    def _solve(self, now_ns: int) -> None:
        self._queues = {pair: queue for pair, queue in self._queues.items() if queue}
        pairs = list(self._queues)
        ends = (end for pair in pairs for end in ends_of(pair))
        capacity = {end: 0.0 if end in self._stalled else self._bytes_per_s for end in ends}
        for pair, rate in zip(pairs, self._share(pairs, capacity), strict=True):
            flow = self._queues[pair][0]
            if flow.began_ns is None:
                flow.began_ns = flow.since_ns = now_ns
            flow.change_rate(now_ns, rate)
