"""The live backend: every instance works at its own pace on the wall clock.

An instance has a thread, which dispatches its jobs in order, and a collector, which waits for
them; between two instances there is a wire, which moves pieces in order (engine.flights). The
loop's thread only decides. So nothing waits for what it does not need, and what an instance
dispatches next may be on its way before what it dispatched last has been seen.
"""

import heapq
import queue
import time
from typing import Protocol

from pdjax.core.config import Config, Placement
from pdjax.core.events import Action, Alarm, Cancel, Event, Send, Step, StepDone, TimeUp
from pdjax.engine.flights import Flights
from pdjax.engine.instance import Instance
from pdjax.engine.threads import Threads
from pdjax.engine.wires import Wires
from pdjax.links import Network


class Served(Protocol):
    """What the backend needs of an engine."""

    config: Config
    placement: Placement
    instances: dict[str, Instance]
    wires: Wires

    def note(self, message: Action | Event) -> None: ...


class LiveBackend:
    """A core.loop.Backend on the wall clock; time 0 is when it is made."""

    def __init__(self, engine: Served):
        self._engine = engine
        self._begin_ns = time.monotonic_ns()
        self._last_ns = 0
        self._scheduled: list[tuple[int, bool, int, Event]] = []  # (when, is last, number, what)
        self._sequence = 0
        self._pending = 0  # jobs whose event has not come out yet
        self._events: queue.SimpleQueue[tuple[int, Event] | BaseException] = queue.SimpleQueue()
        self._threads = Threads(self._events.put)
        network = Network(engine.config.transfer.link, engine.placement)
        self._flights = Flights(engine.wires, network, self._threads, self._now, self._post)
        self._free_ns = dict.fromkeys(engine.instances, 0)

    # --- core.loop.Backend ---------------------------------------------------------------

    def submit(self, event: Event, at_ns: int) -> None:
        self._engine.note(event)
        self._schedule(event, at_ns)

    def start(self, action: Action) -> None:
        self._engine.note(action)
        match action:
            case Step():
                self._pending += 1 + len(action.sends)
                for send in action.sends:
                    self._flights.add(send)
                self._threads.do(action.instance, lambda: self._run_step(action))
            case Send():
                self._pending += 1
                self._flights.add(action)
                self._threads.do(action.source, lambda: self._flights.leave(action))
            case Cancel():
                self._flights.cancel(action.send)
            case Alarm():
                self._schedule(TimeUp(), action.at_ns)

    def next_event(self) -> tuple[int, Event]:
        while True:
            wait = self._seconds_to_scheduled()
            due = wait is not None and wait <= 0
            if due and not (self._alarm_is_next() and not self._events.empty()):
                at_ns, _, _, event = heapq.heappop(self._scheduled)
                return self._stamp(at_ns), event
            if not self._scheduled and not self._pending:
                raise RuntimeError("nothing is left to happen, but requests are still open")
            try:
                came = self._events.get(timeout=None if wait is None else max(wait, 0))
            except queue.Empty:
                continue
            if isinstance(came, BaseException):
                raise came
            self._pending -= 1
            return self._stamp(came[0]), came[1]

    def close(self) -> None:
        """Ends the threads. What they would still hand on to each other is dropped."""
        self._flights.close()
        self._threads.stop()

    # --- what faults.py does on purpose ----------------------------------------------------

    def stall(self, instance: str, seconds: float) -> None:
        """Nothing moves on the links into `instance` for so long (0: for ever)."""
        self._flights.stall(instance, seconds)

    def spoil(self, send: int) -> None:
        """Damages piece `send`, which has not been started."""
        self._engine.wires.spoil(send)

    # --- steps -----------------------------------------------------------------------------

    def _run_step(self, step: Step) -> None:
        instance, flights = self._engine.instances[step.instance], self._flights
        dispatched_ns = self._now()
        dispatched = instance.dispatch(step, flights.leave, lambda group: flights.join(step, group))

        def collect() -> None:
            emitted = instance.collect(dispatched)
            began_ns = max(dispatched_ns, self._free_ns[instance.name])
            done = StepDone(step.id, instance.name, began_ns, emitted)
            self._free_ns[instance.name] = self._post(done)

        self._threads.do(f"{instance.name} collector", collect)

    # --- time --------------------------------------------------------------------------------

    def _schedule(self, event: Event, at_ns: int) -> None:
        last = isinstance(event, TimeUp)
        heapq.heappush(self._scheduled, (at_ns, last, self._sequence, event))
        self._sequence += 1

    def _seconds_to_scheduled(self) -> float | None:
        return (self._scheduled[0][0] - self._now()) / 1e9 if self._scheduled else None

    def _alarm_is_next(self) -> bool:
        """What has happened by now comes out before an alarm does."""
        return isinstance(self._scheduled[0][3], TimeUp)

    def _post(self, event: Event) -> int:
        """`event` has happened now; returns when that is."""
        now_ns = self._now()
        self._events.put((now_ns, event))
        return now_ns

    def _now(self) -> int:
        return time.monotonic_ns() - self._begin_ns

    def _stamp(self, t_ns: int) -> int:
        """Times in the log never go back, though threads may overtake each other."""
        self._last_ns = max(self._last_ns, t_ns)
        return self._last_ns
