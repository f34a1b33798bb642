"""The decisions: events in, actions out. A collocated server, chunked prefill, a logical split,
two pools and xPyD are placements and policies over this one state machine.

The life of a request: queue -> prompts (holds memory where it is prefilled) -> its KV goes to
the decode pool (nothing moves when that is the same pool) -> ready -> slot -> Finish. Memory for
prompt and output is reserved before a request gets a slot, so decoding always progresses, and a
prefill waits only for decodes: no circle of waiting can form.
"""

from pdjax.core.config import Placement, Routing, Transfer
from pdjax.core.events import (
    AbortAsked,
    Action,
    Arrived,
    Chunk,
    Decode,
    Emitted,
    Event,
    Finish,
    FinishReason,
    Hold,
    KVHandle,
    Landed,
    Refuse,
    Release,
    Send,
    Step,
    StepDone,
)
from pdjax.core.policies.admission import Need, why_refused
from pdjax.core.policies.batching import Prompt, plan_chunks
from pdjax.core.policies.routing import ROUTERS
from pdjax.core.policies.transfer import SCHEDULES, Leaving, Piece
from pdjax.core.request import Request
from pdjax.core.state import Instance, RunningStep, Tracked, build_instances


class Scheduler:
    """Pure bookkeeping: the same events give the same actions, whatever backend runs them.

    layouts: fingerprint of each pool's arrays, by pool name (empty for a simulator).
    """

    def __init__(
        self,
        placement: Placement,
        *,
        context: int,
        transfer: Transfer | None = None,
        routing: Routing | None = None,
        layouts: dict[str, str] | None = None,
    ):
        transfer, routing = transfer or Transfer(), routing or Routing()
        self.instances = build_instances(placement, layouts or {})
        self.requests: dict[int, Tracked] = {}
        self._context = context
        self._groups = transfer.groups
        self._schedule = SCHEDULES[transfer.schedule]
        self._route_prefill = ROUTERS[routing.prefill]
        self._route_decode = ROUTERS[routing.decode]
        self._prefillers = [i for i in self.instances.values() if i.role.prefills_here]
        self._decoders = [i for i in self.instances.values() if i.role.decodes_here]
        self._seats = _decoders_on_the_same_pool(self._prefillers, self._decoders)
        self._unplaced: dict[int, None] = {}  # requests that wait for pages of a decode pool
        self._users = _users_of_pools(self.instances)
        self._running: dict[int, RunningStep] = {}
        self._awake: dict[str, Instance] = {}  # instances that may have something to start
        self._actions: list[Action] = []
        self._next_step = self._next_send = self._routed = self._placed = 0

    @property
    def idle(self) -> bool:
        return not self.requests

    def on_event(self, event: Event, now_ns: int) -> list[Action]:
        """Everything that is to be done because `event` happened at `now_ns`, in order."""
        self._actions = []
        match event:
            case Arrived():
                self._arrive(event.request)
            case AbortAsked():
                if event.rid in self.requests:
                    self._end(self.requests[event.rid], "abort")
            case StepDone():
                self._step_done(event)
            case Landed():
                self._landed(self.requests[event.rid])
        self._find_places()
        while self._awake:
            self._start_work(self._awake.pop(next(iter(self._awake))))
        return self._actions

    # --- requests come ---------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        why = why_refused(request, self._context, self._needs(request))
        if why:
            self._actions.append(Refuse(request.id, why))
            return
        loads = [instance.load for instance in self._prefillers]
        instance = self._prefillers[self._route_prefill(self._routed, request, loads)]
        self._routed += 1
        self.requests[request.id] = Tracked(request, instance)
        instance.queue.append(request.id)
        instance.open_requests += 1
        instance.open_tokens += request.prompt_len
        self._wake(instance)

    def _needs(self, request: Request) -> list[Need]:
        needs = [(self._source_tokens(i, request), i.pool) for i in self._prefillers]
        if request.max_tokens > 1:
            needs += [(request.cache_len, i.pool) for i in self._decoders]
        return [Need(tokens, pool.name, pool.pages, pool.page_size) for tokens, pool in needs]

    def _source_tokens(self, instance: Instance, request: Request) -> int:
        """A pool that is also decoded from has to hold the output too."""
        return request.cache_len if instance.name in self._seats else request.prompt_len

    # --- instances get work ----------------------------------------------------------

    def _start_work(self, instance: Instance) -> None:
        role = instance.role
        if instance.running > role.lag:
            return
        self._seat_ready(instance)
        chunks = self._plan_prefill(instance) if role.prefills_here else ()
        decodes = ()
        if role.decodes_here and (role.mixed or not chunks):
            decodes = self._plan_decode(instance, 1 if chunks else role.steps)
        if chunks or decodes:
            self._start_step(instance, chunks, decodes)

    def _plan_prefill(self, instance: Instance) -> tuple[Chunk, ...]:
        role = instance.role
        while instance.queue and len(instance.prompts) < role.prefills:
            if not self._hold_source(self.requests[instance.queue[0]]):
                break
            instance.prompts.append(instance.queue.popleft())
        tracked = [self.requests[rid] for rid in instance.prompts]
        prompts = [Prompt(t.request.id, t.dispatched, t.request.prompt_len) for t in tracked]
        return plan_chunks(prompts, budget=role.chunk, page_size=instance.pool.page_size)

    def _hold_source(self, t: Tracked) -> bool:
        """Memory where the prompt is computed, and a slot where the same instance decodes."""
        instance = t.prefill
        seat = self._seats.get(instance.name) if t.request.max_tokens > 1 else None
        if seat is instance and not instance.free_slots:
            return False
        t.source = instance.pool.hold(t.request.id, self._source_tokens(instance, t.request))
        if t.source is None:
            return False
        self._actions.append(Hold(t.source))
        if seat is not None:
            t.target = t.source
            self._assign(t, seat)
            if seat is instance:
                self._take_slot(t)
        return True

    def _plan_decode(self, instance: Instance, steps: int) -> tuple[Decode, ...]:
        decodes = []
        for slot, rid in enumerate(instance.slots):
            if rid is None:
                continue
            t = self.requests[rid]
            if t.ended or not t.arrived_at_target:
                continue
            count = min(steps, t.request.max_tokens - t.asked)
            if count:
                position = t.request.prompt_len + t.asked - 1
                decodes.append(Decode(slot, rid, position, count))
        return tuple(decodes)

    def _seat_ready(self, instance: Instance) -> None:
        while instance.ready and instance.free_slots:
            self._take_slot(self.requests[instance.ready.popleft()])

    def _take_slot(self, t: Tracked) -> None:
        t.slot = t.decode.slots.index(None)
        t.decode.slots[t.slot] = t.request.id
        t.decode.free_slots -= 1

    def _start_step(
        self, instance: Instance, chunks: tuple[Chunk, ...], decodes: tuple[Decode, ...]
    ) -> None:
        sends, leave_after = [], []
        for chunk in chunks:
            t = self.requests[chunk.rid]
            t.dispatched += chunk.length
            t.busy += 1
            if chunk.last:
                t.asked = 1
                instance.prompts.remove(chunk.rid)
            inside, after = self._leaving(t, chunk)
            if (inside or after) and t.target is None:
                self._unplaced[chunk.rid] = None
                self._find_places()
            if t.target is None:  # no room there yet: all of it leaves later
                inside, after = (), inside + after
            sends += [self._send(t, piece) for piece in inside]
            leave_after += [(chunk.rid, piece) for piece in after]
        for decode in decodes:
            t = self.requests[decode.rid]
            t.asked += decode.count
            t.busy += 1
        steps = max((decode.count for decode in decodes), default=1)
        step = Step(self._next_step, instance.name, chunks, decodes, steps, tuple(sends))
        self._next_step += 1
        instance.running += 1
        self._running[step.id] = RunningStep(step, leave_after)
        self._actions.append(step)
        self._wake(instance)  # with a lag, another step may follow at once

    # --- KV moves ----------------------------------------------------------------------

    def _leaving(self, t: Tracked, chunk: Chunk) -> Leaving:
        """Nothing where nothing is decoded, or where it is decoded in place."""
        if t.request.max_tokens == 1 or t.decodes_in_place:
            return Leaving()
        return self._schedule(chunk, self._groups)

    def _send(self, t: Tracked, piece: Piece) -> Send:
        send = Send(
            self._next_send,
            t.request.id,
            t.prefill.name,
            t.decode.name,
            piece.start,
            piece.length,
            piece.group,
            self._groups,
        )
        self._next_send += 1
        t.busy += 1
        t.sending += 1
        return send

    def _send_unsent(self, t: Tracked) -> None:
        if t.target is not None and not t.ended:
            self._actions += [self._send(t, piece) for piece in t.unsent]
            t.unsent.clear()

    def _find_places(self) -> None:
        """Pages in a decode pool for those that wait for them, first come first served."""
        while self._unplaced:
            rid = next(iter(self._unplaced))
            t = self.requests[rid]
            fits = [d for d in self._decoders if d.pool.can_hold(t.request.cache_len)]
            if not fits:
                return
            choice = self._route_decode(self._placed, t.request, [d.load for d in fits])
            self._placed += 1
            del self._unplaced[rid]
            self._assign(t, fits[choice])
            t.target = fits[choice].pool.hold(rid, t.request.cache_len)
            assert t.target is not None, "can_hold said that there is room"
            self._actions.append(Hold(t.target))
            self._send_unsent(t)

    def _assign(self, t: Tracked, decoder: Instance) -> None:
        t.decode = decoder
        if decoder is not t.prefill:
            decoder.open_requests += 1
        decoder.open_tokens += t.request.max_tokens

    def _landed(self, t: Tracked) -> None:
        t.busy -= 1
        t.sending -= 1
        self._hand_over(t)
        self._settle(t)

    def _hand_over(self, t: Tracked) -> None:
        """Once all KV is in the target pool the source is free and decoding may begin."""
        if t.ended or t.decode is None or not t.arrived_at_target:
            return
        if t.source is not None and t.source is not t.target:
            self._release(t.source)
        t.source = None
        self._wake(t.decode)
        if t.slot is None:
            t.decode.ready.append(t.request.id)

    # --- steps end ---------------------------------------------------------------------

    def _step_done(self, done: StepDone) -> None:
        running = self._running.pop(done.step)
        instance = self.instances[done.instance]
        instance.running -= 1
        self._wake(instance)
        emitted = {e.rid: e for e in done.emitted}
        for chunk in running.step.chunks:
            self._chunk_done(self.requests[chunk.rid], chunk, emitted.get(chunk.rid))
        for rid, piece in running.leave_after:
            self._leave(rid, piece)
        for decode in running.step.decodes:
            t = self.requests[decode.rid]
            t.busy -= 1
            self._take_tokens(t, emitted.get(decode.rid))
            self._settle(t)
        for chunk in running.step.chunks:
            if chunk.rid in self.requests:
                self._hand_over(self.requests[chunk.rid])

    def _chunk_done(self, t: Tracked, chunk: Chunk, emitted: Emitted | None) -> None:
        t.busy -= 1
        t.computed += chunk.length
        t.prefill.open_tokens -= chunk.length
        if chunk.last:
            self._take_tokens(t, emitted)
            if t.decode is not t.prefill:
                t.prefill.open_requests -= 1
        self._settle(t)

    def _leave(self, rid: int, piece: Piece) -> None:
        t = self.requests.get(rid)
        if t is not None and not t.ended:
            t.unsent.append(piece)
            self._send_unsent(t)

    def _take_tokens(self, t: Tracked, emitted: Emitted | None) -> None:
        if t.ended or emitted is None:
            return
        t.generated += len(emitted.tokens)
        if emitted.stopped:
            self._end(t, "stop")
        elif t.generated >= t.request.max_tokens:
            self._end(t, "length")

    # --- requests end --------------------------------------------------------------------

    def _end(self, t: Tracked, reason: FinishReason) -> None:
        """The request is over for its client; what it holds goes once nothing touches it."""
        if t.ended:
            return
        t.ended = True
        rid = t.request.id
        self._actions.append(Finish(rid, reason, t.generated))
        self._unplaced.pop(rid, None)
        t.unsent.clear()
        waits = [t.prefill.queue, t.prefill.prompts, *([t.decode.ready] if t.decode else [])]
        for waiting in waits:
            if rid in waiting:
                waiting.remove(rid)
        self._wake(t.prefill)  # who waited behind it may fit
        self._settle(t)

    def _settle(self, t: Tracked) -> None:
        if not t.ended or t.busy or t.request.id not in self.requests:
            return
        if t.source is not None:
            self._release(t.source)
        if t.target is not None and t.target is not t.source:
            self._release(t.target)
        if t.slot is not None:
            t.decode.slots[t.slot] = None
            t.decode.free_slots += 1
        self._forget_load(t)
        del self.requests[t.request.id]

    def _release(self, handle: KVHandle) -> None:
        users = self._users[handle.pool]
        users[0].pool.release(handle)
        self._actions.append(Release(handle.rid, handle.pool))
        for instance in users:
            self._wake(instance)

    def _forget_load(self, t: Tracked) -> None:
        t.prefill.open_tokens -= t.request.prompt_len - t.computed
        if not t.prefilled or t.decode is t.prefill:
            t.prefill.open_requests -= 1
        if t.decode is not None:
            t.decode.open_tokens -= t.request.max_tokens
            if t.decode is not t.prefill:
                t.decode.open_requests -= 1
            self._wake(t.decode)

    def _wake(self, instance: Instance) -> None:
        self._awake[instance.name] = instance


def _decoders_on_the_same_pool(
    prefillers: list[Instance], decoders: list[Instance]
) -> dict[str, Instance]:
    """Prefill instance -> the instance that decodes from the same pool, where there is one."""
    return {p.name: d for p in prefillers for d in decoders if p.pool is d.pool}


def _users_of_pools(instances: dict[str, Instance]) -> dict[str, list[Instance]]:
    users: dict[str, list[Instance]] = {}
    for instance in instances.values():
        users.setdefault(instance.pool.name, []).append(instance)
    return users
