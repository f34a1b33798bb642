"""Faults on purpose: a backend whose pieces and instances fail when a config says so.

It keeps what backends owe the scheduler: a piece that was cancelled is answered although its
completion was dropped, and an instance is reported down when nothing that it ran or was sent
writes any more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdjax.core.config import ConfigError, Fault, Placement, instances_of, pool_owner
from pdjax.core.events import (
    Action,
    Cancel,
    Down,
    Event,
    Landed,
    Send,
    SendFailed,
    Step,
    StepDone,
    Up,
)

NANOSECONDS = 1e9


class Breakable(Protocol):
    """A core.loop.Backend with links to stall and pieces to damage."""

    def submit(self, event: Event, at_ns: int) -> None: ...

    def start(self, action: Action) -> None: ...

    def next_event(self) -> tuple[int, Event]: ...

    def close(self) -> None: ...

    def stall(self, instance: str, seconds: float) -> None:
        """Nothing moves on the links into `instance` for so long (0: for ever)."""
        ...

    def spoil(self, send: int) -> None:
        """Piece `send`, which has not been started, is damaged on its way."""
        ...


@dataclass
class _Death:
    """An instance that is dying: `ends` is all that goes with it, `left` what has not stopped."""

    instance: str
    seconds: float
    ends: frozenset[str]
    left: set[tuple[str, int]]


def with_faults(backend: Breakable, faults: Sequence[Fault], placement: Placement) -> Breakable:
    """`backend` as it is where there are no faults, else inside one that has them.

    Raises ConfigError where a fault names an instance that the placement does not have.
    """
    known = instances_of(placement)
    for fault in faults:
        if fault.instance and fault.instance not in known:
            raise ConfigError(
                f"a fault is to `{fault.kind}` the instance `{fault.instance}`, but the placement "
                f"has {', '.join(f'`{name}`' for name in known)}"
            )
    return FaultyBackend(backend, faults, placement) if faults else backend


class FaultyBackend:
    """See with_faults. Pieces are counted over the run, from 1: those that land for `drop`, `delay`
    and `duplicate`, those that are started for `corrupt`."""

    def __init__(self, backend: Breakable, faults: Sequence[Fault], placement: Placement):
        self._inner, self._placement = backend, placement
        self._on_landing = {f.at: f for f in faults if f.kind in ("drop", "delay", "duplicate")}
        self._spoiled = {f.at for f in faults if f.kind == "corrupt"}
        self._on_start = {(f.instance, f.at): f for f in faults if f.kind == "stall"}
        self._on_end = {(f.instance, f.at): f for f in faults if f.kind == "kill"}
        self._now = 0
        self._pieces = self._landings = 0
        self._started: Counter[str] = Counter()  # steps, by instance
        self._ended: Counter[str] = Counter()
        self._steps: dict[int, Step] = {}  # under way
        self._sends: dict[int, Send] = {}
        self._kept: set[int] = set()  # pieces that landed without anybody being told
        self._ours: list[Event] = []  # what was put into the inner backend here
        self._dying: list[_Death] = []
        self.stall, self.spoil, self.close = backend.stall, backend.spoil, backend.close

    def submit(self, event: Event, at_ns: int) -> None:
        self._inner.submit(event, at_ns)

    def start(self, action: Action) -> None:
        match action:
            case Step():
                self._start_step(action)
            case Send():
                if not self._is_dying(action.source, action.target):
                    self._add(action)
                    self._inner.start(action)
            case Cancel() if action.send in self._kept:
                self._kept.discard(action.send)
                self._tell(SendFailed(action.rid, action.send, "cancelled"), self._now)
            case _:
                self._inner.start(action)

    def next_event(self) -> tuple[int, Event]:
        while True:
            self._now, event = self._inner.next_event()
            told = self._pass_on(event)
            if told is not None:
                return self._now, told

    # --- on the way in ---------------------------------------------------------------------

    def _start_step(self, step: Step) -> None:
        if self._is_dying(step.instance):
            return
        self._started[step.instance] += 1
        fault = self._on_start.get((step.instance, self._started[step.instance]))
        if fault:
            self._inner.stall(fault.instance, fault.seconds)
        self._steps[step.id] = step
        for send in step.sends:
            self._add(send)
        self._inner.start(step)
        for death in self._dying:
            self._lose_pieces(death, step.sends)

    def _add(self, send: Send) -> None:
        self._pieces += 1
        if self._pieces in self._spoiled:
            self._inner.spoil(send.id)
        self._sends[send.id] = send

    def _is_dying(self, *ends: str) -> bool:
        return any(death.ends.intersection(ends) for death in self._dying)

    def _tell(self, event: Event, at_ns: int) -> None:
        self._ours.append(event)
        self._inner.submit(event, at_ns)

    # --- on the way out --------------------------------------------------------------------

    def _pass_on(self, event: Event) -> Event | None:
        if any(event is ours for ours in self._ours):
            self._ours = [ours for ours in self._ours if ours is not event]
            if isinstance(event, Landed):
                self._kept.discard(event.send)
            return event
        match event:
            case StepDone():
                return self._step_done(event)
            case Landed() | SendFailed():
                del self._sends[event.send]
                if self._dying_with(("piece", event.send)):
                    return self._stopped(("piece", event.send))
                return self._landed(event) if isinstance(event, Landed) else event
        return event

    def _landed(self, event: Landed) -> Event | None:
        self._landings += 1
        fault = self._on_landing.get(self._landings)
        if fault is None:
            return event
        later_ns = self._now + round(fault.seconds * NANOSECONDS)
        if fault.kind == "duplicate":
            self._tell(event, later_ns)
            return event
        self._kept.add(event.send)
        if fault.kind == "delay":
            self._tell(event, later_ns)
        return None

    def _step_done(self, event: StepDone) -> Event | None:
        del self._steps[event.step]
        if self._dying_with(("step", event.step)):
            return self._stopped(("step", event.step))
        self._ended[event.instance] += 1
        fault = self._on_end.get((event.instance, self._ended[event.instance]))
        return self._kill(fault) if fault else event

    # --- instances that die ------------------------------------------------------------------

    def _kill(self, fault: Fault) -> Event | None:
        """With it die all instances that work on the same pool."""
        place = self._placement
        pool = pool_owner(fault.instance, place)
        names = [name for name in instances_of(place) if pool_owner(name, place) == pool]
        ends = frozenset([*names, *(f"{name}.host" for name in names)])
        steps = {("step", id) for id, step in self._steps.items() if step.instance in ends}
        death = _Death(fault.instance, fault.seconds, ends, steps)
        self._dying.append(death)
        self._lose_pieces(death, list(self._sends.values()))
        return self._down(death)

    def _lose_pieces(self, death: _Death, sends: Sequence[Send]) -> None:
        for send in sends:
            if death.ends.intersection((send.source, send.target)):
                death.left.add(("piece", send.id))
                self._inner.start(Cancel(send.rid, send.id))

    def _dying_with(self, what: tuple[str, int]) -> bool:
        return any(what in death.left for death in self._dying)

    def _stopped(self, what: tuple[str, int]) -> Event | None:
        for death in self._dying:
            if what in death.left:
                death.left.discard(what)
                return self._down(death)
        return None

    def _down(self, death: _Death) -> Event | None:
        """Reports the instance down, unless something of it still runs."""
        if death.left:
            return None
        self._dying.remove(death)
        if death.seconds:
            self._inner.submit(Up(death.instance), self._now + round(death.seconds * NANOSECONDS))
        return Down(death.instance, returns=bool(death.seconds))
