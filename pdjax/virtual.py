"""A clock made of a heap: actions take the time a cost model says, and nothing waits.

Behind it stands either nothing (a simulator) or an engine that computes each action when it
starts: then tokens are real and times are deterministic.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pdjax.core.config import Placement
from pdjax.core.events import (
    Action,
    Alarm,
    Cancel,
    Cut,
    Emitted,
    Event,
    Landed,
    Send,
    SendFailed,
    Step,
    StepDone,
    TimeUp,
)
from pdjax.cost import Cost
from pdjax.links import NEVER, Network
from pdjax.processors import Computing, Processors

Compute = Callable[[Action], tuple[Emitted, ...]]
"""Runs an action's arithmetic, if any, and returns the tokens it emits."""


class Contents(Protocol):
    """What pieces carry, as far as it can be damaged."""

    def spoil(self, send: int) -> None:
        """What piece `send` carries shall be damaged on its way."""
        ...

    def damage(self, send: int) -> str:
        """Asked once a piece has crossed: why it is not what left, or nothing if nobody looks."""
        ...


@dataclass
class Unseen:
    """Pieces without contents: damage is known because it was ordered."""

    checksum: bool = False
    spoiled: set[int] = field(default_factory=set)

    def spoil(self, send: int) -> None:
        self.spoiled.add(send)

    def damage(self, send: int) -> str:
        return "what landed is not what left" if self.checksum and send in self.spoiled else ""


@dataclass(slots=True, eq=False, kw_only=True)
class _Run(Computing):
    """A step that runs: `group` of its `groups` layer groups is next, or waits for its pieces."""

    step: Step
    emitted: tuple[Emitted, ...]
    sequence: int
    length_ns: int
    groups: int
    group: int = 0
    began_ns: int = 0
    armed_ns: int | None = None  # when it is looked at next
    ends_ns: np.ndarray | None = None  # of the iterations of an open step

    def computed_ns(self) -> int:
        """Of its time alone and without waiting, what the groups before `group` take."""
        return self.length_ns * self.group // self.groups


class _Arrival:
    """Something may have crossed the network."""


_Due = Event | Send | _Run | _Arrival


class VirtualBackend:
    """A core.loop.Backend in virtual time.

    An instance runs one step at a time. Layer group g of a step with G groups is computed after
    (g + 1)/G of the step's time; its pieces leave then. A group that awaits pieces starts when
    they have landed, and the step gets longer by what it waits. Simultaneous events keep the order
    in which they were caused, but TimeUp is the last of its nanosecond.
    """

    def __init__(
        self,
        cost: Cost,
        compute: Compute,
        note: Callable[[Event], None],
        *,
        contents: Contents | None = None,
        placement: Placement | None = None,
    ):
        """note: told of every event when it is submitted. placement: where instances are, which
        counts where links have nodes."""
        self._cost, self._compute, self._note = cost, compute, note
        self._contents = contents or Unseen()
        self._network = Network(cost.link, placement)
        self._processors = Processors(cost.sharing, placement or {}, self._look_at)
        self._now = 0
        self._heap: list[tuple[int, bool, int, _Due]] = []  # a Send: a piece is ready to leave
        self._sequence = 0
        self._steps: dict[str, deque[_Run]] = {}  # of each instance; the first is running
        self._waiting: list[_Run] = []
        self._open: dict[int, Send] = {}  # pieces that have neither landed nor failed
        self._armed_ns: int | None = None  # when the network is looked at next

    # --- core.loop.Backend ---------------------------------------------------------------

    def submit(self, event: Event, at_ns: int) -> None:
        self._note(event)
        self._push(event, at_ns)

    def start(self, action: Action) -> None:
        emitted = self._compute(action)
        match action:
            case Step():
                self._open |= {send.id: send for send in action.sends}
                self._queue_step(action, emitted)
            case Send():
                self._open[action.id] = action
                self._leave(action)
            case Cancel():
                self._cancel(action)
            case Cut():
                self._cut(action)
            case Alarm():
                self._push(TimeUp(), action.at_ns)

    def next_event(self) -> tuple[int, Event]:
        while self._heap:
            self._now, _, _, due = heapq.heappop(self._heap)
            event = self._happen(due)
            if event is not None:
                return self._now, event
        raise RuntimeError("nothing is left to happen, but requests are still open")

    def close(self) -> None:
        """Nothing runs here that would have to end."""

    # --- what faults.py does on purpose ----------------------------------------------------

    def stall(self, instance: str, seconds: float) -> None:
        """Nothing moves on the links into `instance` for so long (0: for ever)."""
        until_ns = self._now + round(seconds * 1e9) if seconds else NEVER
        self._network.stall(self._now, instance, until_ns)
        self._arm()

    def spoil(self, send: int) -> None:
        """Damages piece `send`, which has not been started."""
        self._contents.spoil(send)

    # --- what happens ----------------------------------------------------------------------

    def _push(self, due: _Due, at_ns: int) -> None:
        last = isinstance(due, TimeUp)
        sequence = due.sequence if isinstance(due, _Run) else self._next()
        heapq.heappush(self._heap, (max(at_ns, self._now), last, sequence, due))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _happen(self, due: _Due) -> Event | None:
        if isinstance(due, _Arrival):
            return self._arrive()
        if isinstance(due, _Run):
            return self._end_group(due)
        if isinstance(due, Send):
            return self._leave(due)
        return due

    # --- steps -----------------------------------------------------------------------------

    def _queue_step(self, step: Step, emitted: tuple[Emitted, ...]) -> None:
        groups = 1
        if step.sends or step.awaits:
            pieces = (*step.sends, *(self._open[id] for id in step.awaits if id in self._open))
            groups = max((piece.groups for piece in pieces), default=1)
        queue = self._steps.setdefault(step.instance, deque())
        ends_ns = self._cost.ends_ns(step) if step.open else None
        length_ns = self._cost.step_ns(step) if ends_ns is None else int(ends_ns[-1])
        queue.append(
            _Run(
                step=step,
                emitted=emitted,
                sequence=self._next(),
                length_ns=length_ns,
                groups=groups,
                ends_ns=ends_ns,
            )
        )
        if len(queue) == 1:
            self._begin(queue[0])

    def _begin(self, run: _Run) -> None:
        run.began_ns = self._now
        self._enter_group(run)

    def _enter_group(self, run: _Run) -> None:
        """Group `run.group` starts now, or waits for the pieces that it reads."""
        awaited = (self._open.get(id) for id in run.step.awaits)
        if any(piece is not None and piece.group == run.group for piece in awaited):
            self._waiting.append(run)
            return
        before_ns = run.computed_ns()
        run.group += 1
        length_ns = run.computed_ns() - before_ns
        self._processors.begin(self._now, run.step.instance, run, length_ns)
        self._look_at(run)

    def _look_at(self, run: _Run) -> None:
        """Sees to it that a run is looked at when its group ends."""
        run.armed_ns = run.due_ns
        self._push(run, run.armed_ns)

    def _cut(self, cut: Cut) -> None:
        """The iteration in progress becomes the last one of an open step."""
        run = self._steps[cut.instance][0]
        if run.step.id != cut.step or run.ends_ns is None:
            return
        last = int(run.ends_ns.searchsorted(self._now - run.began_ns))
        if last + 1 < len(run.ends_ns):
            run.ends_ns = run.ends_ns[: last + 1]
            run.left_ns -= run.due_ns - (run.began_ns + int(run.ends_ns[last]))
            self._look_at(run)

    def _end_group(self, run: _Run) -> Event | None:
        if run.armed_ns != self._now:  # its end has moved since it was set
            return None
        run.armed_ns = None
        self._processors.end(self._now, run.step.instance, run)
        for send in run.step.sends:
            if send.group == run.group - 1:
                self._leave(send)
        if run.group < run.groups:
            self._enter_group(run)
            return None
        queue = self._steps[run.step.instance]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        emitted, ends_ns = run.emitted, ()
        if run.ends_ns is not None:
            ends_ns = tuple(run.ends_ns.tolist())
        if len(ends_ns) < run.step.steps and run.step.open:
            emitted = tuple(Emitted(e.rid, e.tokens[: len(ends_ns)]) for e in emitted)
        return StepDone(run.step.id, run.step.instance, run.began_ns, emitted, ends_ns)

    # --- pieces ----------------------------------------------------------------------------

    def _leave(self, send: Send) -> None:
        if send.id in self._open:
            nbytes = self._cost.send_bytes(send)
            self._network.start(self._now, send.id, send.source, send.target, nbytes)
            self._arm()

    def _arm(self) -> None:
        """Sees to it that the network is looked at when something arrives."""
        at_ns = self._network.next_finish()
        if at_ns is not None and at_ns != self._armed_ns:
            self._armed_ns = at_ns
            self._push(_Arrival(), at_ns)

    def _arrive(self) -> Event | None:
        if self._armed_ns != self._now:  # something has changed since it was set
            return None
        self._armed_ns = None
        crossed = self._network.finish(self._now)
        self._arm()
        events = [self._landed(id, began_ns) for id, began_ns in crossed]
        for event in events[1:]:
            self._push(event, self._now)
        return events[0] if events else None

    def _landed(self, id: int, began_ns: int) -> Landed | SendFailed:
        send = self._close(id)
        why = self._contents.damage(id)
        if why:
            return SendFailed(send.rid, id, why)
        return Landed(send.rid, id, began_ns, self._cost.send_bytes(send))

    def _cancel(self, cancel: Cancel) -> None:
        if cancel.send in self._open:
            self._network.cancel(self._now, cancel.send)
            self._arm()
            self._push(SendFailed(cancel.rid, cancel.send, "cancelled"), self._now)
            self._close(cancel.send)

    def _close(self, id: int) -> Send:
        """Piece `id` has come to its end; steps that waited for it may go on."""
        send = self._open.pop(id)
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            self._enter_group(run)
        return send
