"""The live backend: every instance works at its own pace on the wall clock.

An instance has a worker, which dispatches its jobs in order, and a collector, which waits for
them; between two instances there is a wire, which moves pieces in order. The loop's thread only
decides. So nothing waits for what it does not need, and what an instance dispatches next may be
on its way before what it dispatched last has been seen.
"""

import heapq
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import jax

from pdjax.core.events import Action, Event, Landed, Send, Step, StepDone
from pdjax.engine.instance import Instance
from pdjax.engine.wires import Wires
from pdjax.programs.transfer import Piece

Job = Callable[[], None]


class Served(Protocol):
    """What the backend needs of an engine."""

    instances: dict[str, Instance]
    wires: Wires

    def note(self, message: Action | Event) -> None: ...


class _Thread:
    """Runs jobs in order. What a job raises is reported, and ends the run."""

    def __init__(self, name: str, report: Callable[[BaseException], None]):
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._report = report
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # the loop's thread raises it
                self._report(error)


class LiveBackend:
    """A core.loop.Backend on the wall clock; time 0 is when it is made."""

    def __init__(self, engine: Served):
        self._engine = engine
        self._begin_ns = time.monotonic_ns()
        self._last_ns = 0
        self._scheduled: list[tuple[int, int, Event]] = []
        self._sequence = 0
        self._pending = 0  # jobs whose event has not come out yet
        self._events: queue.SimpleQueue[tuple[int, Event] | BaseException] = queue.SimpleQueue()
        names = [*engine.instances, *(f"{name} collector" for name in engine.instances)]
        names += [_wire(a, b) for a in engine.instances for b in engine.instances if a != b]
        self._threads = {name: _Thread(name, self._events.put) for name in names}
        self._free_ns = dict.fromkeys(engine.instances, 0)

    # --- core.loop.Backend ---------------------------------------------------------------

    def submit(self, event: Event, at_ns: int) -> None:
        self._engine.note(event)
        heapq.heappush(self._scheduled, (at_ns, self._sequence, event))
        self._sequence += 1

    def start(self, action: Action) -> None:
        self._engine.note(action)
        if isinstance(action, Step):
            self._pending += 1 + len(action.sends)
            self._threads[action.instance].do(lambda: self._run_step(action))
        elif isinstance(action, Send):
            self._pending += 1
            wires = self._engine.wires
            self._threads[action.source].do(lambda: self._leave(action, wires.extract(action)))

    def next_event(self) -> tuple[int, Event]:
        while True:
            now = self._now()
            if self._scheduled and self._scheduled[0][0] <= now:
                at_ns, _, event = heapq.heappop(self._scheduled)
                return self._stamp(at_ns), event
            if not self._scheduled and not self._pending:
                raise RuntimeError("nothing is left to happen, but requests are still open")
            wait = (self._scheduled[0][0] - now) / 1e9 if self._scheduled else None
            try:
                came = self._events.get(timeout=wait)
            except queue.Empty:
                continue
            if isinstance(came, BaseException):
                raise came
            self._pending -= 1
            return self._stamp(came[0]), came[1]

    def close(self) -> None:
        """Ends the threads. What they would still hand on to each other is dropped."""
        for thread in self._threads.values():
            thread.stop()

    # --- jobs: each runs in a thread of its own instance or wire ----------------------------

    def _run_step(self, step: Step) -> None:
        instance = self._engine.instances[step.instance]
        dispatched_ns = self._now()
        dispatched = instance.dispatch(step, self._leave)

        def collect() -> None:
            emitted = instance.collect(dispatched)
            now = self._now()
            began_ns = max(dispatched_ns, self._free_ns[instance.name])
            self._free_ns[instance.name] = now
            self._post(now, StepDone(step.id, instance.name, began_ns, emitted))

        self._threads[f"{instance.name} collector"].do(collect)

    def _leave(self, send: Send, piece: Piece) -> None:
        self._threads[_wire(send.source, send.target)].do(lambda: self._cross(send, piece))

    def _cross(self, send: Send, piece: Piece) -> None:
        jax.block_until_ready(piece)
        began_ns = self._now()
        moved = jax.block_until_ready(self._engine.wires.move(send, piece))
        self._threads[send.target].do(lambda: self._land(send, moved, began_ns))

    def _land(self, send: Send, piece: Piece, began_ns: int) -> None:
        landed = self._engine.wires.insert(send, piece)

        def collect() -> None:
            jax.block_until_ready(landed)
            nbytes = self._engine.wires.nbytes(send)
            self._post(self._now(), Landed(send.rid, send.id, began_ns, nbytes))

        self._threads[f"{send.target} collector"].do(collect)

    # --- helpers -----------------------------------------------------------------------

    def _post(self, t_ns: int, event: Event) -> None:
        self._events.put((t_ns, event))

    def _now(self) -> int:
        return time.monotonic_ns() - self._begin_ns

    def _stamp(self, t_ns: int) -> int:
        """Times in the log never go back, though threads may overtake each other."""
        self._last_ns = max(self._last_ns, t_ns)
        return self._last_ns


def _wire(source: str, target: str) -> str:
    return f"{source} -> {target}"
