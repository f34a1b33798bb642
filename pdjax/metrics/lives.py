"""What the log says about each request, pass by pass, and where its time went.

A request that is preempted or retried starts a new pass: it queues, is prefilled, transferred or
swapped back, and decodes again. At every moment it is in exactly one stage, so its five stages,
each summed over its passes, add up to its E2E, and work that is done again counts in the stage
that does it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdjax.core.events import (
    Arrived,
    Finish,
    Landed,
    Preempt,
    Purpose,
    Record,
    Refuse,
    Retry,
    Reuse,
    Send,
    Step,
    StepDone,
)
from pdjax.core.request import Request

STAGES = ("prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode")


class LogError(ValueError):
    """A log that cannot be analysed: empty, without its beginning, or of another placement."""


class Span(NamedTuple):
    """A request was in `stage` from `began` to `ended` (ns); `purpose`: of the KV it waited for."""

    stage: str
    purpose: Purpose | None
    began: int
    ended: int


@dataclass
class Pass:
    """One try at a request, from its arrival or from the interruption that began it.

    Times are ns, None where it never came to that. `arrives`: the purpose of the sends that
    bring its KV to where it decodes, of which `flying` have not landed; `ready`: the moments at
    which they could leave. `waited`: what decode steps lost to waiting for its pieces.
    """

    begin: int
    load_sent: int | None = None
    load_landed: int | None = None
    first_chunk: int | None = None
    prefill_began: int | None = None
    prefilled: int | None = None
    sent: int | None = None
    group_landed: int | None = None  # all of layer group 0
    landed: int | None = None
    first_decode: int | None = None
    arrives: Purpose = "hand_off"
    flying: int = 0
    ready: set[tuple[int, int]] = field(default_factory=set)
    waited: int = 0
    computed: int = 0  # tokens of chunks that were done
    reused: Counter[str] = field(default_factory=Counter)  # tokens, by Reuse.how

    def spans(self, end: int) -> Iterator[Span]:
        """From `begin` to `end`, without gaps."""
        joined = self.landed and self.first_decode and self.landed > self.first_decode
        marks = (
            ("prefill_queue", None, self.load_sent),
            ("transfer_exposed", "load", self.load_landed),
            ("prefill_queue", None, self.first_chunk),
            ("prefill", None, self.prefilled),
            ("decode_queue", None, self.sent),  # no room at the target until then
            # A step that began before all had landed needed the first layer group to begin, and
            # waited for the others inside: see `waited`.
            ("transfer_exposed", self.arrives, self.group_landed if joined else self.landed),
            ("decode_queue", None, self.first_decode),
            (*self._open_stage(), end),
        )
        now = min(self.begin, end)
        for stage, purpose, mark in marks:
            until = min(max(now, mark or now), end)
            if stage == "decode" and self.waited:
                waited = min(self.waited, until - now)
                yield Span("transfer_exposed", self.arrives, now, now + waited)
                now += waited
            yield Span(stage, purpose, now, until)
            now = until

    def _open_stage(self) -> tuple[str, Purpose | None]:
        """What it was at when it ended or was interrupted, and what it then waited for."""
        if self.first_decode is not None:
            return "decode", None
        if self.flying:
            return "transfer_exposed", self.arrives
        if self.prefilled is not None or self.arrives == "swap_in":
            return "decode_queue", None
        if self.first_chunk is not None:
            return "prefill", None
        loading = self.load_sent is not None and self.load_landed is None
        return ("transfer_exposed", "load") if loading else ("prefill_queue", None)


@dataclass
class Life:
    """One request: its passes, the times (ns) of the tokens its client saw, and its end."""

    request: Request
    passes: list[Pass]
    tokens: list[int] = field(default_factory=list)
    outcome: str = "unfinished"
    ended: int | None = None
    why: str = ""
    interruptions: Counter[str] = field(default_factory=Counter)  # `preempt` and `retry`
    lost: int = 0  # the record of its last Retry; steps from before it say nothing that counts

    @property
    def started(self) -> bool:
        return self.passes[0].first_chunk is not None

    def spans(self) -> Iterator[Span]:
        """Those of all passes, up to the last token; none of a request without one."""
        if not self.tokens:
            return
        ends = [*(again.begin for again in self.passes[1:]), self.tokens[-1]]
        for one, end in zip(self.passes, ends, strict=True):
            yield from one.spans(min(end, self.tokens[-1]))

    def interrupted_ns(self) -> int:
        """From each interruption until the next token, or the end; nothing counts twice."""
        total = until = 0
        for again in self.passes[1:]:
            begin = max(again.begin, until)
            later = [t for t in self.tokens if t > again.begin] or [self.ended or begin]
            until = max(begin, later[0])
            total += until - begin
        return total


class Landing(NamedTuple):
    """A piece's way, in ns, and its bytes."""

    began: int
    landed: int
    nbytes: int


class Log:
    """A log read once, front to back: plans by step id, sends and their (first) landings by id,
    steps that ended, and the lives. Raises LogError where a record names what none before it
    introduced."""

    def __init__(self, records: Sequence[Record]):
        if not any(isinstance(record.body, Arrived) for record in records):
            raise LogError(f"a log of {len(records)} records in which no request arrives")
        self.plans: dict[int, Step] = {}
        self.sends: dict[int, Send] = {}
        self.landings: dict[int, Landing] = {}
        self.done: list[tuple[int, StepDone]] = []
        self.waits: dict[int, int] = {}  # step -> ns it waited for pieces
        self.lives: dict[int, Life] = {}
        self._pass_of: dict[tuple[str, int, int], Pass] = {}  # (`step` or `send`, id, request)
        self._dispatched: dict[int, int] = {}  # step that runs -> its record
        for number, record in enumerate(records, 1):
            self._number = number
            try:
                self._take_in(record)
            except KeyError as error:
                raise LogError(
                    f"record {number} ({type(record.body).__name__}) names request, step or piece "
                    f"{error}, which the log does not introduce; it lacks its beginning"
                ) from None

    def _take_in(self, record: Record) -> None:
        t_ns = record.t_ns
        match record.body:
            case Arrived(request=request):
                self.lives[request.id] = Life(request, [Pass(request.arrival_ns)])
            case Step() as step:
                self._step(step, t_ns)
            case Send() as send:
                self._send(send, t_ns, (t_ns, 0))
            case StepDone(step=step) as done:
                plan = self.plans[step]
                if step in self._dispatched:  # else its end is told twice
                    self._step_done(done, plan, t_ns)
            case Landed() as landed:
                self._landed(landed, t_ns)
            case Reuse(rid=rid, tokens=tokens, how=how):
                self.lives[rid].passes[-1].reused[how] = tokens
            case Preempt(rid=rid, how=how):
                self._interrupt(rid, "preempt", Pass(t_ns))
                self.lives[rid].passes[-1].arrives = "swap_in" if how == "swap" else "hand_off"
            case Retry(rid=rid):
                self._interrupt(rid, "retry", Pass(t_ns))
                self.lives[rid].lost = self._number
            case Finish(rid=rid, reason=outcome, tokens=count, why=why):
                life = self.lives[rid]
                life.outcome, life.ended, life.why = outcome, t_ns, why
                life.tokens = life.tokens[:count]
            case Refuse(rid=rid, why=why):
                life = self.lives[rid]
                life.outcome, life.ended, life.why = "refused", t_ns, why

    def _interrupt(self, rid: int, kind: str, again: Pass) -> None:
        self.lives[rid].interruptions[kind] += 1
        self.lives[rid].passes.append(again)

    def _step(self, step: Step, t_ns: int) -> None:
        self.plans[step.id] = step
        self._dispatched[step.id] = self._number
        for chunk in step.chunks:
            one = self.lives[chunk.rid].passes[-1]
            one.first_chunk = _first(one.first_chunk, t_ns)
            self._pass_of["step", step.id, chunk.rid] = one
        for decode in step.decodes:
            one = self.lives[decode.rid].passes[-1]
            one.first_decode = _first(one.first_decode, t_ns)
        for send in step.sends:
            self._send(send, t_ns, (step.id, send.group))

    def _send(self, send: Send, t_ns: int, moment: tuple[int, int]) -> None:
        one = self.lives[send.rid].passes[-1]
        self.sends[send.id] = send
        self._pass_of["send", send.id, send.rid] = one
        if send.purpose == "load":
            one.load_sent = _first(one.load_sent, t_ns)
        elif send.purpose != "swap_out":
            one.arrives, one.sent = send.purpose, t_ns
            one.flying += 1
            one.ready.add(moment)

    def _landed(self, landed: Landed, t_ns: int) -> None:
        send = self.sends[landed.send]
        if send.id in self.landings:
            return  # a duplicate
        self.landings[send.id] = Landing(landed.began_ns, t_ns, landed.nbytes)
        one = self.pass_of(send)
        if send.purpose == "load":
            one.load_landed = t_ns
        elif send.purpose != "swap_out":
            one.landed = t_ns
            one.flying -= 1
            if send.group == 0:
                one.group_landed = t_ns

    def _step_done(self, done: StepDone, plan: Step, t_ns: int) -> None:
        self.done.append((t_ns, done))
        for chunk in plan.chunks:
            one = self._pass_of["step", plan.id, chunk.rid]
            one.computed += chunk.length
            one.prefill_began = _first(one.prefill_began, done.began_ns)
            if chunk.last:
                one.prefilled = _first(one.prefilled, t_ns)
        awaited = [self.sends[send] for send in plan.awaits if send in self.landings]
        landed = [(send, self.landings[send.id].landed) for send in awaited]
        self.waits[plan.id] = waited_ns(landed, plan.steps, done.began_ns, t_ns)
        for send in {send.rid: send for send in awaited}.values():
            self.pass_of(send).waited += self.waits[plan.id]
        dispatched = self._dispatched.pop(plan.id)
        for emitted in done.emitted:
            life = self.lives[emitted.rid]
            if life.ended is None and dispatched > life.lost:
                ends = [done.began_ns + end for end in done.ends_ns]
                life.tokens += ends[: len(emitted.tokens)] or [t_ns] * len(emitted.tokens)

    def pass_of(self, send: Send) -> Pass:
        """The pass of its request in which a piece was sent."""
        return self._pass_of["send", send.id, send.rid]


def waited_ns(awaited: Sequence[tuple[Send, int]], steps: int, began_ns: int, ended_ns: int) -> int:
    """How long a step that joined pieces on their way waited for them.

    Its G layer groups are taken to last equally long, d. Group g starts when it has landed and
    the group before it is done, so the step ends at the latest of began + S G d (S iterations)
    and landed_g + (S G - g) d: d is the largest for which that is the time it ended, and
    what it lasted beyond S G d it waited.
    """
    lasted = ended_ns - began_ns
    if not awaited or lasted <= 0:
        return 0
    groups = steps * awaited[0][0].groups
    paces = [(ended_ns - landed) / (groups - s.group) for s, landed in awaited if landed > began_ns]
    return max(0, round(lasted - groups * min([lasted / groups, *paces])))


def closed_form_ns(wire_ns: float, prefill_ns: float, moments: int) -> float:
    """What of a transfer in `moments` equal pieces, ready one after the other during a prefill,
    that prefill cannot hide: max(Tx / n, Tx - Tp (n - 1) / n). With one piece that is Tx."""
    n = moments
    return max(wire_ns / n, wire_ns - prefill_ns * (n - 1) / n)


def union_ns(spans: Sequence[tuple[int, int]]) -> int:
    """Length of the union of [began, ended] spans."""
    ordered, total, until = sorted(spans), 0, 0
    for began, ended in ordered:
        total += max(0, ended - max(began, until))
        until = max(until, ended)
    return total


def _first(known: int | None, t_ns: int) -> int:
    return t_ns if known is None else known
