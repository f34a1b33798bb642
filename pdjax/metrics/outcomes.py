"""What became of each request, read off a log as it passes: nothing of a record is kept.

The definitions are those of the package; a request that has ended takes about 40 bytes.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pdjax.core.config import SLO
from pdjax.core.events import Arrived, Finish, Record, Refuse, Retry, Step, StepDone
from pdjax.metrics.moves import NS

NAN = float("nan")


class Outcomes(NamedTuple):
    """An entry per request, in the order in which they ended, unfinished ones last. Seconds, NaN
    where there is no such thing (see the package); `completed`: it got all its tokens."""

    arrival_s: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    ended_s: np.ndarray
    completed: np.ndarray

    def attained(self, slo: SLO) -> np.ndarray:
        """Which of them completed within both SLOs."""
        return self.completed & in_time(self.ttft_s, self.tpot_s, slo)


def in_time(ttft_s, tpot_s, slo: SLO):
    """Of arrays or columns. A one-token request has no TPOT to miss."""
    return (ttft_s <= slo.ttft_s) & ~(tpot_s > slo.tpot_s)


@dataclass(slots=True)
class _Open:
    """A request that has not ended: its arrival, the times of its tokens (ns), and the number of
    the record of its last Retry; steps from before it say nothing that counts."""

    arrival_ns: int
    tokens: list[int] = field(default_factory=list)
    lost: int = 0

    def row(self, ended_s: float = NAN, completed: bool = False) -> tuple[float, ...]:
        """Its entries of Outcomes."""
        tokens, arrival_s = self.tokens, self.arrival_ns * NS
        ttft_s = tokens[0] * NS - arrival_s if tokens else NAN
        gaps = len(tokens) - 1
        tpot_s = (tokens[-1] * NS - tokens[0] * NS) / gaps if completed and gaps > 0 else NAN
        return arrival_s, ttft_s, tpot_s, ended_s, completed


class Tally:
    """Takes in a log record by record. An event or action it has no use for costs it nothing."""

    def __init__(self):
        self._open: dict[int, _Open] = {}
        self._dispatched: dict[int, int] = {}  # step that runs -> its record
        self._columns = tuple(array("d") for _ in Outcomes._fields)
        self._number = 0

    def add(self, record: Record) -> None:
        self._number += 1
        match record.body:
            case Arrived(request=request):
                self._open[request.id] = _Open(request.arrival_ns)
            case Step(id=id):
                self._dispatched[id] = self._number
            case StepDone() as done:
                self._step_done(done, record.t_ns)
            case Retry(rid=rid):
                self._open[rid].lost = self._number
            case Finish(rid=rid, reason=reason, tokens=count):
                one = self._open.pop(rid)
                del one.tokens[count:]
                self._write(one.row(record.t_ns * NS, reason in ("stop", "length")))
            case Refuse(rid=rid):
                self._write(self._open.pop(rid).row(record.t_ns * NS))

    def _step_done(self, done: StepDone, t_ns: int) -> None:
        dispatched = self._dispatched.pop(done.step, None)
        if dispatched is None:
            return  # told twice
        ends = [done.began_ns + end for end in done.ends_ns]
        for emitted in done.emitted:
            one = self._open.get(emitted.rid)
            if one is not None and dispatched > one.lost:
                one.tokens += ends[: len(emitted.tokens)] or [t_ns] * len(emitted.tokens)

    def _write(self, row: tuple[float, ...]) -> None:
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def outcomes(self) -> Outcomes:
        """Of the requests so far; those still open are unfinished, and stay open."""
        columns = [np.array(column) for column in self._columns]
        unfinished = [one.row() for one in self._open.values()]
        more = np.array(unfinished).reshape(-1, len(columns)).T
        *times, completed = (np.concatenate(pair) for pair in zip(columns, more, strict=True))
        return Outcomes(*times, completed.astype(bool))


def outcomes(records: Iterable[Record]) -> Outcomes:
    """What became of each request of a log; records are read once and may be made as they are."""
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally.outcomes()
