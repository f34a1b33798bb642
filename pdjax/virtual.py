"""A clock made of a heap: actions take the time a cost model says, and nothing waits.

Behind it stands either nothing (a simulator) or an engine that computes each action when it
starts: then tokens are real and times are deterministic.
"""

import heapq
from collections.abc import Callable

from pdjax.core.events import Action, Emitted, Event, Landed, Send, Step, StepDone
from pdjax.cost import Cost

Compute = Callable[[Action], tuple[Emitted, ...]]
"""Runs an action's arithmetic, if any, and returns the tokens it emits."""


class VirtualBackend:
    """A core.loop.Backend in virtual time.

    An instance runs one step at a time. Layer group g of a step with G groups is computed after
    (g + 1)/G of the step's time; its pieces leave then. One piece at a time crosses the link
    between two instances, first ready first. Simultaneous events keep the order in which they
    were caused.
    """

    def __init__(self, cost: Cost, compute: Compute, note: Callable[[Event], None]):
        """note: told of every event when it is submitted."""
        self._cost, self._compute, self._note = cost, compute, note
        self._now = 0
        self._heap: list[tuple[int, int, Event | Send]] = []  # a Send: a piece is ready to leave
        self._sequence = 0
        self._instance_free: dict[str, int] = {}
        self._link_free: dict[tuple[str, str], int] = {}

    def submit(self, event: Event, at_ns: int) -> None:
        self._note(event)
        self._push(event, at_ns)

    def _push(self, due: Event | Send, at_ns: int) -> None:
        heapq.heappush(self._heap, (max(at_ns, self._now), self._sequence, due))
        self._sequence += 1

    def start(self, action: Action) -> None:
        emitted = self._compute(action)
        if isinstance(action, Step):
            self._start_step(action, emitted)
        elif isinstance(action, Send):
            self._start_send(action)

    def next_event(self) -> tuple[int, Event]:
        while self._heap:
            self._now, _, due = heapq.heappop(self._heap)
            if not isinstance(due, Send):
                return self._now, due
            self._start_send(due)
        raise RuntimeError("nothing is left to happen, but requests are still open")

    def _start_step(self, step: Step, emitted: tuple[Emitted, ...]) -> None:
        begin = max(self._now, self._instance_free.get(step.instance, 0))
        length = self._cost.step_ns(step)
        self._instance_free[step.instance] = begin + length
        for send in step.sends:
            self._push(send, begin + length * (send.group + 1) // send.groups)
        self._push(StepDone(step.id, step.instance, begin, emitted), begin + length)

    def _start_send(self, send: Send) -> None:
        link = (send.source, send.target)
        begin = max(self._now, self._link_free.get(link, 0))
        end = begin + self._cost.send_ns(send)
        self._link_free[link] = end
        self._push(Landed(send.rid, send.id, begin, self._cost.send_bytes(send)), end)
