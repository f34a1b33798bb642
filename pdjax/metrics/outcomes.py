"""What became of each request, read off a log as it passes: nothing of a record is kept.

The definitions are those of the package; a request that has ended takes about 40 bytes.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

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
    """A request that has not ended: its arrival, how many tokens it has, which steps brought them,
    and the number of the record of its last Retry; steps from before it say nothing that counts.

    brought: (number of its first token, time, ends) of each step: token `first + i` came
    `ends[i]` ns after that time, or all of them at it where there are no ends.
    """

    arrival_ns: int
    tokens: int = 0
    brought: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    lost: int = 0

    def bring(self, count: int, time_ns: int, ends_ns: tuple[int, ...]) -> None:
        if count:
            self.brought.append((self.tokens, time_ns, ends_ns))
            self.tokens += count

    def row(self, ended_s: float = NAN, completed: bool = False) -> tuple[float, ...]:
        """Its entries of Outcomes."""
        arrival_s, ttft_s, tpot_s, gaps = self.arrival_ns * NS, NAN, NAN, self.tokens - 1
        if self.tokens:
            first_s = self._time_ns(0) * NS
            ttft_s = first_s - arrival_s
            if completed and gaps:
                tpot_s = (self._time_ns(gaps) * NS - first_s) / gaps
        return arrival_s, ttft_s, tpot_s, ended_s, completed

    def _time_ns(self, token: int) -> int:
        at = bisect_right(self.brought, token, key=itemgetter(0)) - 1
        first, time_ns, ends_ns = self.brought[at]
        return time_ns + ends_ns[token - first] if ends_ns else time_ns


class Tally:
    """Takes in a log record by record. An event or action it has no use for costs it nothing."""

    def __init__(self):
        self._open: dict[int, _Open] = {}
        self._dispatched: dict[int, int] = {}  # step that runs -> its record
        self._columns = tuple(array("d") for _ in Outcomes._fields)
        self._number = 0
        # By type, since most records are of none of these.
        self._readers: dict[type, Callable[[Any, int], None]] = {
            Arrived: self._arrived,
            Step: self._step,
            StepDone: self._step_done,
            Retry: self._retry,
            Finish: self._finish,
            Refuse: self._refuse,
        }

    def add(self, record: Record) -> None:
        self._number += 1
        read = self._readers.get(type(record.body))
        if read is not None:
            read(record.body, record.t_ns)

    def _arrived(self, event: Arrived, t_ns: int) -> None:
        self._open[event.request.id] = _Open(event.request.arrival_ns)

    def _step(self, step: Step, t_ns: int) -> None:
        self._dispatched[step.id] = self._number

    def _step_done(self, done: StepDone, t_ns: int) -> None:
        dispatched = self._dispatched.pop(done.step, None)
        if dispatched is None:
            return  # told twice
        time_ns = done.began_ns if done.ends_ns else t_ns
        for emitted in done.emitted:
            one = self._open.get(emitted.rid)
            if one is not None and dispatched > one.lost:
                one.bring(len(emitted.tokens), time_ns, done.ends_ns)

    def _retry(self, retry: Retry, t_ns: int) -> None:
        self._open[retry.rid].lost = self._number

    def _finish(self, finish: Finish, t_ns: int) -> None:
        one = self._open.pop(finish.rid)
        one.tokens = min(one.tokens, finish.tokens)
        self._write(one.row(t_ns * NS, finish.reason in ("stop", "length")))

    def _refuse(self, refuse: Refuse, t_ns: int) -> None:
        self._write(self._open.pop(refuse.rid).row(t_ns * NS))

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
