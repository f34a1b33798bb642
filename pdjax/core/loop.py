"""The loop that every server here runs: live engine, engine on a modelled clock, simulator."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from pdjax.core.events import (
    Action,
    Arrived,
    Event,
    Finish,
    Landed,
    Record,
    Refuse,
    Send,
    SendFailed,
    Step,
    StepDone,
)
from pdjax.core.request import Request
from pdjax.core.scheduler import Scheduler


class Backend(Protocol):
    """Turns actions into events and owns the clock."""

    def submit(self, event: Event, at_ns: int) -> None:
        """`event` (an arrival, an abort) shall come out of next_event at `at_ns`."""
        ...

    def start(self, action: Action) -> None:
        """Begins an action; returns at once."""
        ...

    def next_event(self) -> tuple[int, Event]:
        """Waits for the next event; (time in ns of the run, event)."""
        ...


class Source(Protocol):
    """Where requests come from: those known from the start, and those that others' ends cause."""

    def first(self) -> Sequence[Request]: ...

    def after(self, rid: int, t_ns: int) -> Sequence[Request]: ...


def serve(source: Source, backend: Backend, scheduler: Scheduler) -> Iterator[Record]:
    """Serves every request of `source`, yielding the log as it grows. Records of one event:
    the event itself, then the actions that it caused, with the event's time."""
    expected = _submit(backend, source.first())
    while expected or not scheduler.idle:
        t_ns, event = backend.next_event()
        expected -= isinstance(event, Arrived)
        yield Record(t_ns, event)
        for action in scheduler.on_event(event, t_ns):
            yield Record(t_ns, action)
            backend.start(action)
            if isinstance(action, (Finish, Refuse)):
                expected += _submit(backend, source.after(action.rid, t_ns))


def _submit(backend: Backend, requests: Iterable[Request]) -> int:
    requests = list(requests)
    for request in requests:
        backend.submit(Arrived(request), request.arrival_ns)
    return len(requests)


def first_difference(records: Iterable[Record], scheduler: Scheduler) -> str:
    """Replays the events of a log through a fresh scheduler. Returns nothing when every action
    comes out as recorded, else one line with the first that does not."""
    replayed: list[Action] = []
    steps: set[int] = set()
    sends: set[int] = set()
    for number, record in enumerate(records, 1):
        body = record.body
        if isinstance(body, Event):
            if replayed:
                return f"record {number}: the log goes on, the scheduler also wants {replayed[0]}"
            strange_step = isinstance(body, StepDone) and body.step not in steps
            if strange_step or (isinstance(body, Landed | SendFailed) and body.send not in sends):
                return f"record {number}: nothing that was started can end with {body}"
            replayed = scheduler.on_event(body, record.t_ns)
        elif not replayed or replayed[0] != body:
            wanted = replayed[0] if replayed else "nothing more"
            return f"record {number}: the log has {body}, the scheduler wants {wanted}"
        else:
            replayed.pop(0)
            if isinstance(body, Step):
                steps.add(body.id)
                sends.update(send.id for send in body.sends)
            elif isinstance(body, Send):
                sends.add(body.id)
    return f"the log ends, the scheduler also wants {replayed[0]}" if replayed else ""
