"""Placements of hand-checkable size and two ways to drive their decisions: `Driven` lets a test
say what happens next, `served` runs the loop in virtual time. Either log goes to the referee."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from referee import Referee

from pdjax.core.config import (
    SLO,
    Cache,
    Clock,
    Link,
    Placement,
    Pool,
    Recovery,
    Role,
    Routing,
    Switching,
    Transfer,
    pool_owner,
)
from pdjax.core.events import (
    AbortAsked,
    Action,
    Alarm,
    Arrived,
    Cancel,
    Down,
    Emitted,
    Event,
    Landed,
    Record,
    Send,
    SendFailed,
    Step,
    StepDone,
    TimeUp,
    Up,
)
from pdjax.core.loop import serve
from pdjax.core.policies.routing import Load
from pdjax.core.prefix import hash_blocks
from pdjax.core.request import Request, SamplingParams
from pdjax.core.scheduler import Scheduler
from pdjax.core.state import Instance
from pdjax.cost import Cost, affine
from pdjax.virtual import Compute, VirtualBackend

MS = 1_000_000
PAGE = 3  # tokens
CONTEXT = 40
MANY_RECORDS = 20_000  # more than any run of a few requests has
CLOCK = Clock(
    kind="modelled",
    step_s=0.01,
    prefill_token_s=0.001,
    decode_token_s=0.001,
    context_token_s=0,
)
LINK = Link(bytes_per_s=1000, latency_s=0.002)
COST = affine(
    CLOCK, LINK, send_bytes=lambda send: send.length
)  # a piece takes 2 ms + 1 ms per token


def pool(pages: int = 6, form: str = "pages") -> Pool:
    return Pool(form, tokens=pages * PAGE, page_size=PAGE)


def prefill(**changes) -> Role:
    return Role("prefill", **{"pool": pool(form="slab"), "chunk": 6, **changes})


def decode(**changes) -> Role:
    return Role("decode", **{"pool": pool(), "chunk": 6, "slots": 2, **changes})


def both(**changes) -> Role:
    return Role("both", **{"pool": pool(), "chunk": 6, "slots": 2, **changes})


PLACEMENTS: Mapping[str, Placement] = {
    "collocated": {"server": both()},
    "mixed": {"server": both(mixed=True)},
    "logical_split": {
        "prefill": prefill(pool=pool()),
        "decode": decode(beside="prefill", pool_of="prefill"),
    },
    "two_pools": {"prefill": prefill(pool=pool()), "decode": decode(beside="prefill")},
    "1P1D": {"prefill": prefill(), "decode": decode()},
    "2P1D": {"prefill": prefill(instances=2), "decode": decode()},
    "1P2D": {"prefill": prefill(), "decode": decode(instances=2)},
}


def request(rid: int, prompt_len: int = 4, max_tokens: int = 3, at_ms: int = 0, *,
            text: Sequence[int] | None = None, block: int = PAGE) -> Request:  # fmt: skip
    """A request; with `text`, whose token ids are its prompt, one that a prefix cache knows."""
    sampling = SamplingParams(max_tokens=max_tokens)
    blocks, tail = hash_blocks(text or (), block)
    length = prompt_len if text is None else len(text)
    return Request(
        rid, at_ms * MS, length, sampling, "same for all", blocks=tuple(blocks), tail=tuple(tail)
    )


def counting(stops: Mapping[int, int] | None = None) -> Compute:
    """The tokens of every request are 0, 1, 2, ...: which one a step says follows from where it
    stands in the text, so what is computed again says the same. `stops` says after how many
    tokens a text ends."""
    prompt_lens: dict[int, int] = {}  # the first last chunk of a request ends its prompt

    def say(rid: int, position: int, count: int) -> Emitted:
        first = position - prompt_lens[rid]
        end = (stops or {}).get(rid, CONTEXT)
        tokens = tuple(range(first, min(first + count, end)))
        return Emitted(rid, tokens, first + count >= end)

    def compute(action: Action) -> tuple[Emitted, ...]:
        if not isinstance(action, Step):
            return ()
        ends = {chunk.rid: chunk.start + chunk.length for chunk in action.chunks if chunk.last}
        for rid, end in ends.items():
            prompt_lens.setdefault(rid, end)
        first = [say(rid, end, 1) for rid, end in ends.items()]
        return (*first, *(say(d.rid, d.position + 1, d.count) for d in action.decodes))

    return compute


def scheduler_for(placement: Placement, *, groups: int = 1, schedule: str = "layerwise",
                  credits: int = 0, prefill_router: str = "shortest_queue",
                  decode_router: str = "shortest_queue", cache: Cache | None = None,
                  recovery: Recovery | None = None, slo: SLO | None = None,
                  switching: Switching | None = None) -> Scheduler:  # fmt: skip
    """schedule: a `transfer.schedule`, pushed, or `pull`."""
    pulls = schedule == "pull"
    return Scheduler(
        placement,
        context=CONTEXT,
        transfer=Transfer(
            schedule="whole" if pulls else schedule,
            groups=groups,
            initiator="pull" if pulls else "push",
            credits=credits,
        ),
        routing=Routing(prefill_router, decode_router),
        cache=cache or Cache(),
        recovery=recovery or Recovery(),
        switching=switching,
        slo=slo,
    )


class Listed:
    """A source whose requests are all known from the start."""

    def __init__(self, requests: Iterable[Request]):
        self._requests = list(requests)

    def first(self) -> Sequence[Request]:
        return self._requests

    def after(self, rid: int, t_ns: int) -> Sequence[Request]:
        return ()


def served(scheduler: Scheduler, requests: Iterable[Request], *,
           aborts: Iterable[tuple[int, int]] = (), stops: Mapping[int, int] | None = None,
           cost: Cost = COST) -> list[Record]:  # fmt: skip
    """The log of a run in virtual time. aborts: (rid, ms)."""
    backend = VirtualBackend(cost, counting(stops), lambda event: None)
    for rid, at_ms in aborts:
        backend.submit(AbortAsked(rid), at_ms * MS)
    log = list(itertools.islice(serve(Listed(requests), backend, scheduler), MANY_RECORDS))
    assert len(log) < MANY_RECORDS, "it goes round in circles"
    return log


class Driven:
    """A scheduler whose steps end and whose pieces land, fail or get lost when the test says so.

    Every call returns the actions that it caused. `log` is the run so far, a nanosecond per event;
    alarms ring when it is their time, or when a test lets time pass.
    """

    def __init__(self, placement: Placement, *, stops: Mapping[int, int] | None = None, **options):
        self._placement, self._options = placement, options
        self.scheduler = scheduler_for(placement, **options)
        self.running: dict[int, Step] = {}
        self.flying: dict[int, Send] = {}  # those that were dropped or cancelled too
        self.dropped: set[int] = set()
        self.cancelled: set[int] = set()
        self.alarms: list[int] = []
        self.log: list[Record] = []
        self.began: dict[int, int] = {}
        self.now = -1
        self._compute = counting(stops)

    # --- what happens ----------------------------------------------------------------------

    def tell(self, event: Event) -> list[Action]:
        early = self._ring(until=self.now)
        self.now += 1
        return early + self._tell(event) + self._ring(until=self.now)

    def tell_together(self, events: Iterable[Event]) -> list[Action]:
        """Events of one moment, in this order."""
        early = self._ring(until=self.now)
        self.now += 1
        told = [action for event in events for action in self._tell(event)]
        return early + told + self._ring(until=self.now)

    def _ring(self, until: int) -> list[Action]:
        actions: list[Action] = []
        while self.alarms and min(self.alarms) <= until:
            self.alarms.remove(min(self.alarms))
            actions += self._tell(TimeUp())
        return actions

    def _tell(self, event: Event) -> list[Action]:
        actions = self.scheduler.on_event(event, self.now)
        self.log += [Record(self.now, body) for body in (event, *actions)]
        for action in actions:
            if isinstance(action, Step):
                self.running[action.id] = action
                self.began[action.id] = self.now
                self.flying |= {send.id: send for send in action.sends}
            elif isinstance(action, Send):
                self.flying[action.id] = action
            elif isinstance(action, Cancel) and action.send in self.flying:
                self.cancelled.add(action.send)
            elif isinstance(action, Alarm):
                self.alarms.append(action.at_ns)
        return actions

    def arrive(self, rid: int, prompt_len: int = 4, max_tokens: int = 3, **how) -> list[Action]:
        return self.tell(Arrived(request(rid, prompt_len, max_tokens, **how)))

    def abort(self, rid: int) -> list[Action]:
        return self.tell(AbortAsked(rid))

    def end_step(self, instance: str = "") -> list[Action]:
        """Ends the step that runs longest, of `instance` if that is given."""
        steps = self.running.values()
        return self.tell(self.done(next(s for s in steps if s.instance.startswith(instance))))

    def land(self, send_id: int | None = None) -> list[Action]:
        """Lands a piece, or the one that left first."""
        return self.tell(self.landed(min(self.flying) if send_id is None else send_id))

    def fail(self, send_id: int | None = None, why: str = "the link broke") -> list[Action]:
        """A piece, or the one that left first, does not arrive."""
        return self.tell(self.failed(min(self.flying) if send_id is None else send_id, why))

    def drop(self, send_id: int | None = None) -> None:
        """Nothing will be heard of a piece, or of the one that left first, until it is given up."""
        self.dropped.add(min(self.flying) if send_id is None else send_id)

    def down(self, instance: str, returns: bool = False) -> list[Action]:
        """With an instance die its pool and all who work on that."""
        pool = pool_owner(instance, self._placement)
        dead = [i for i in self.scheduler.instances if pool_owner(i, self._placement) == pool]
        self.running = {i: s for i, s in self.running.items() if s.instance not in dead}
        for send in list(self.flying.values()):
            if {send.source.removesuffix(".host"), send.target.removesuffix(".host")} & {*dead}:
                self._take(send.id)
        return self.tell(Down(instance, returns))

    def up(self, instance: str) -> list[Action]:
        return self.tell(Up(instance))

    def wait(self) -> list[Action]:
        """Nothing happens until the next alarm rings."""
        self.now = max(self.now, min(self.alarms))
        return self._ring(until=self.now)

    # --- events, taken from what goes on -------------------------------------------------------

    def done(self, step: Step) -> StepDone:
        del self.running[step.id]
        return StepDone(step.id, step.instance, self.began[step.id], self._compute(step))

    def landed(self, send_id: int) -> Landed:
        send = self._take(send_id)
        return Landed(send.rid, send.id, 0, send.length)

    def failed(self, send_id: int, why: str = "the link broke") -> SendFailed:
        why = "cancelled" if send_id in self.cancelled else why
        return SendFailed(self._take(send_id).rid, send_id, why)

    def _take(self, send_id: int) -> Send:
        self.dropped.discard(send_id)
        self.cancelled.discard(send_id)
        return self.flying.pop(send_id)

    @property
    def can_end(self) -> list[Step]:
        """The oldest step of every instance, unless it awaits what is still on its way."""
        oldest = {step.instance: step for step in reversed(self.running.values())}
        ready = [s for s in oldest.values() if not set(s.awaits) & self.flying.keys()]
        return sorted(ready, key=lambda s: s.id)

    def drain(self) -> list[Action]:
        """Ends all that can end, lets time pass where only that helps, until nothing is left."""
        actions = []
        end = self.now + 5000
        while self.running or self.flying:
            assert self.now < end, "it goes round in circles"
            lands = sorted(self.flying.keys() - self.dropped - self.cancelled)
            if self.cancelled:
                actions += self.fail(min(self.cancelled))
            elif lands:
                actions += self.land(lands[0])
            elif self.can_end:
                actions += self.end_step(self.can_end[0].instance)
            else:
                assert self.alarms, "nothing will ever happen again"
                actions += self.wait()
        return actions

    def check(self) -> None:
        """To be called at the end: nothing is open and the log kept every law."""
        check_run(self.log, self._placement, self.scheduler, **self._options)


def of_type(kind: type, actions: Iterable[object]) -> list:
    return [action for action in actions if isinstance(action, kind)]


def kinds(actions: Iterable[object]) -> list[str]:
    return [type(action).__name__ for action in actions]


def work(actions: Iterable[object]) -> list[tuple[str, tuple]]:
    """Instance and work of every step."""
    return [(s.instance, s.chunks + s.decodes) for s in of_type(Step, actions)]


def follow(log: Sequence[Record], placement: Placement, *, credits: int = 0,
           cache: Cache | None = None, recovery: Recovery | None = None,
           local_prefill: bool = False, **others) -> Referee:  # fmt: skip
    """A referee who has seen the log and found nothing. The options are those of scheduler_for."""
    steps = [r.body for r in log if isinstance(r.body, Step)]
    sends = [r.body for r in log if isinstance(r.body, Send)]
    sends += [send for step in steps for send in step.sends]
    transfer = Transfer(groups=max((s.groups for s in sends), default=1), credits=credits)
    rules = {"cache": cache, "recovery": recovery, "local_prefill": local_prefill}
    referee = Referee(placement, transfer=transfer, **rules)
    for record in log:
        referee.observe(record.body, record.t_ns)
    return referee


def check_run(log: Sequence[Record], placement: Placement, scheduler: Scheduler, **options) -> None:
    """The log kept every law, and the scheduler that made it is as it was before the run."""
    follow(log, placement, **options).end()
    assert scheduler.idle
    for instance in scheduler.instances.values():
        assert_unused(instance)


def assert_unused(instance: Instance) -> None:
    """No page, slot or place in a queue is taken."""
    pools = [instance.pool, *([instance.host] if instance.host else [])]
    for each in pools:
        assert each.free == each.largest_run == each.pages, each.name
    assert instance.slots == [None] * len(instance.slots)
    assert instance.free_slots == len(instance.slots)
    assert instance.load == Load(0, 0) and instance.queued_tokens == 0
    assert instance.running == instance.landing == 0
    waiting = instance.queue, instance.loading, instance.prompts, instance.ready, instance.swapped
    assert not any(waiting)
