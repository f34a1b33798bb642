"""The decisions: events in, actions out. A collocated server, chunked prefill, a logical split,
two pools and xPyD are placements and policies over this one state machine.

The life of a request: queue -> prompts (holds memory where its text is computed) -> its KV goes
to the decode pool (nothing moves when that is the same pool) -> ready -> slot -> Finish. The parts
work on the same Books: stepping fills steps, moving sends KV, pressure takes pages from the young,
recovery mourns instances, switching gives them other jobs, lives lets requests in and out.

No circle of waiting can form: decoding waits for nothing but pages of its own pool, which the
oldest there always gets; prefill waits for decode pools only, and holds nothing of theirs.
"""

from pdjax.core.books import Books
from pdjax.core.config import SLO, Cache, Config, Placement, Recovery, Routing, Switching, Transfer
from pdjax.core.events import (
    AbortAsked,
    Action,
    Alarm,
    Arrived,
    Down,
    Event,
    Landed,
    Refuse,
    SendFailed,
    StepDone,
    TimeUp,
    Up,
)
from pdjax.core.lives import end, enqueue
from pdjax.core.moving import find_places, landed, send_failed
from pdjax.core.overload import why_too_late
from pdjax.core.policies.admission import Need, why_refused
from pdjax.core.recovery import down, end_the_stranded, nobody_for, time_up, up
from pdjax.core.request import Request
from pdjax.core.state import Instance, Tracked
from pdjax.core.stepping import start_work, step_done
from pdjax.core.switching import tick


class Scheduler:
    """Pure bookkeeping: the same events give the same actions, whatever backend runs them.

    layouts: fingerprint of each pool's arrays, by pool name (empty for a simulator). macro_steps:
    decode steps that will be alike are one open step, for backends that can cut it.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        context: int,
        transfer: Transfer | None = None,
        routing: Routing | None = None,
        cache: Cache | None = None,
        recovery: Recovery | None = None,
        switching: Switching | None = None,
        slo: SLO | None = None,
        layouts: dict[str, str] | None = None,
        macro_steps: bool = False,
    ):
        self._slo = slo or SLO()
        self._books = Books(
            placement,
            context=context,
            transfer=transfer or Transfer(),
            routing=routing or Routing(),
            cache=cache or Cache(),
            recovery=recovery or Recovery(),
            switching=switching or Switching(),
            layouts=layouts or {},
            macro_steps=macro_steps,
        )
        self._one_of_each_role = [self.instances[f"{name}/0"] for name in placement]

    @classmethod
    def of(
        cls,
        config: Config,
        placement: str,
        *,
        layouts: dict[str, str] | None = None,
        macro_steps: bool = False,
    ) -> "Scheduler":
        """The scheduler that a config describes."""
        return cls(
            config.placements[placement],
            context=config.model.context,
            transfer=config.transfer,
            routing=config.routing,
            cache=config.cache,
            recovery=config.recovery,
            switching=config.switching,
            slo=config.slo,
            layouts=layouts,
            macro_steps=macro_steps,
        )

    @property
    def instances(self) -> dict[str, Instance]:
        return self._books.instances

    @property
    def requests(self) -> dict[int, Tracked]:
        return self._books.requests

    @property
    def idle(self) -> bool:
        return not self._books.requests

    def on_event(self, event: Event, now_ns: int) -> list[Action]:
        """Everything that is to be done because `event` happened at `now_ns`, in order. What was
        not awaited (told twice, too late, from an instance that died) changes nothing."""
        b = self._books
        b.actions, b.now_ns = [], now_ns
        match event:  # those that come most often first
            case StepDone():
                step_done(b, event)
            case Landed():
                landed(b, event.send)
            case Arrived():
                self._arrive(event.request)
            case AbortAsked():
                if event.rid in b.requests:
                    end(b, b.requests[event.rid], "abort")
            case SendFailed():
                send_failed(b, event)
            case Down():
                down(b, event.instance, event.returns)
            case Up():
                up(b, event.instance)
            case TimeUp():
                time_up(b)
                tick(b, self._slo)
        if b.homeless:
            end_the_stranded(b)
        find_places(b)
        while b.awake:
            start_work(b, b.awake.pop(next(iter(b.awake))))
            find_places(b)
        self._set_alarm()
        return b.actions

    def _arrive(self, request: Request) -> None:
        b = self._books
        why = why_refused(request, b.context, self._needs(request))
        why = why or nobody_for(b, prefill=True, decode=request.max_tokens > 1)
        t = Tracked(request, b.arrived, request.prompt_len)
        t.blocks, t.tail = list(request.blocks), request.tail
        why = why or why_too_late(b, t, self._slo)
        if why:
            b.emit(Refuse(request.id, why))
            return
        b.arrived += 1
        b.requests[request.id] = t
        enqueue(b, t)

    def _needs(self, request: Request) -> list[Need]:
        """What it needs in the pools that it may come to: those of one instance of each role, since
        others of the role have the same."""
        b, whole, needs = self._books, request.cache_len, []
        one_of_each = self._one_of_each_role
        decodes = [i for i in one_of_each if i.role.decodes_here]
        everywhere = any(i.role.switches for i in one_of_each)
        everywhere |= any(d.role.growth and d.role.preempt == "return" for d in decodes)
        for instance in one_of_each:
            if instance.role.prefills_here:
                tokens = whole if everywhere or instance.name in b.seats else request.prompt_len
                needs.append((tokens, instance.pool))
        if request.max_tokens > 1:
            needs += [(whole, instance.pool) for instance in decodes]
        return [Need(tokens, pool.name, pool.pages, pool.page_size) for tokens, pool in needs]

    def _set_alarm(self) -> None:
        b = self._books
        if b.alarm_ns is None and b.leases.next_ns is not None:
            b.alarm_ns = b.leases.next_ns
            b.emit(Alarm(b.alarm_ns))
        if b.tick_ns is None and b.requests and b.switching.policy != "never":
            b.tick_ns = b.now_ns + round(b.switching.every_s * 1e9)
            b.emit(Alarm(b.tick_ns))
