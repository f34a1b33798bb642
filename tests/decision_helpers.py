"""Placements of hand-checkable size and two ways to drive their decisions: `Driven` lets a test
say what happens next, `served` runs the loop in virtual time. Either log goes to the referee."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from referee import Referee

from pdjax.core.config import Clock, Link, Placement, Pool, Role, Routing, Transfer
from pdjax.core.events import (
    AbortAsked,
    Action,
    Arrived,
    Emitted,
    Event,
    Landed,
    Record,
    Send,
    Step,
    StepDone,
)
from pdjax.core.loop import serve
from pdjax.core.request import Request, SamplingParams
from pdjax.core.scheduler import Scheduler
from pdjax.cost import Cost, affine
from pdjax.virtual import Compute, VirtualBackend

MS = 1_000_000
PAGE = 3  # tokens
CONTEXT = 40
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


def request(rid: int, prompt_len: int = 4, max_tokens: int = 3, at_ms: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(rid, at_ms * MS, prompt_len, sampling, client_id="same for all")


def counting(stops: Mapping[int, int] | None = None) -> Compute:
    """The tokens of every request are 0, 1, 2, ...; `stops` says after how many a text ends."""
    said: Counter[int] = Counter()

    def say(rid: int, count: int) -> Emitted:
        end = (stops or {}).get(rid, CONTEXT)
        first = said[rid]
        said[rid] = min(first + count, end)
        return Emitted(rid, tuple(range(first, said[rid])), said[rid] == end)

    def compute(action: Action) -> tuple[Emitted, ...]:
        if not isinstance(action, Step):
            return ()
        first = [say(chunk.rid, 1) for chunk in action.chunks if chunk.last]
        return (*first, *(say(work.rid, work.count) for work in action.decodes))

    return compute


def scheduler_for(placement: Placement, *, groups: int = 1, schedule: str = "layerwise",
                  prefill_router: str = "shortest_queue",
                  decode_router: str = "shortest_queue") -> Scheduler:  # fmt: skip
    return Scheduler(
        placement,
        context=CONTEXT,
        transfer=Transfer(schedule=schedule, groups=groups),
        routing=Routing(prefill_router, decode_router),
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
    return list(serve(Listed(requests), backend, scheduler))


class Driven:
    """A scheduler whose steps end and whose pieces land when the test says so.

    Every call returns the actions that it caused. `log` is the run so far, a time unit per event.
    """

    def __init__(self, placement: Placement, *, stops: Mapping[int, int] | None = None, **options):
        self._placement = placement
        self.scheduler = scheduler_for(placement, **options)
        self.running: dict[int, Step] = {}
        self.flying: dict[int, Send] = {}
        self.log: list[Record] = []
        self._compute = counting(stops)
        self._events = 0

    def tell(self, event: Event) -> list[Action]:
        actions = self.scheduler.on_event(event, self._events)
        self.log += [Record(self._events, body) for body in (event, *actions)]
        self._events += 1
        for action in actions:
            if isinstance(action, Step):
                self.running[action.id] = action
                self.flying |= {send.id: send for send in action.sends}
            elif isinstance(action, Send):
                self.flying[action.id] = action
        return actions

    def arrive(self, rid: int, prompt_len: int = 4, max_tokens: int = 3) -> list[Action]:
        return self.tell(Arrived(request(rid, prompt_len, max_tokens)))

    def abort(self, rid: int) -> list[Action]:
        return self.tell(AbortAsked(rid))

    def end_step(self, instance: str = "") -> list[Action]:
        """Ends the step that runs longest, of `instance` if that is given."""
        steps = self.running.values()
        step = next(step for step in steps if step.instance.startswith(instance))
        del self.running[step.id]
        return self.tell(StepDone(step.id, step.instance, 0, self._compute(step)))

    def land(self, send_id: int | None = None) -> list[Action]:
        """Lands a piece, or the one that left first."""
        send = self.flying.pop(min(self.flying) if send_id is None else send_id)
        return self.tell(Landed(send.rid, send.id, 0, send.length))

    def drain(self) -> list[Action]:
        """Lands every piece and ends every step until nothing is left to happen."""
        actions = []
        while self.running or self.flying:
            actions += self.land() if self.flying else self.end_step()
        return actions

    def check(self) -> None:
        """To be called at the end: nothing is open and the log kept every law."""
        check_run(self.log, self._placement, self.scheduler)


def of_type(kind: type, actions: Iterable[object]) -> list:
    return [action for action in actions if isinstance(action, kind)]


def kinds(actions: Iterable[object]) -> list[str]:
    return [type(action).__name__ for action in actions]


def work(actions: Iterable[object]) -> list[tuple[str, tuple]]:
    """Instance and work of every step."""
    return [(s.instance, s.chunks + s.decodes) for s in of_type(Step, actions)]


def check_run(log: Sequence[Record], placement: Placement, scheduler: Scheduler) -> None:
    """The log kept every law, and the scheduler that made it is as it was before the run."""
    referee = Referee(placement)
    for record in log:
        referee.observe(record.body)
    referee.end()
    assert scheduler.idle
    for instance in scheduler.instances.values():
        assert instance.pool.free == instance.pool.largest_run == instance.pool.pages
        assert instance.slots == [None] * len(instance.slots)
        assert instance.free_slots == len(instance.slots)
        assert instance.load == (0, 0)
        assert not (instance.queue or instance.prompts or instance.ready or instance.running)
