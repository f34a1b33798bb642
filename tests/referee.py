"""What every log must keep, whatever was decided. The referee reads events and actions only; it
shares no code with the scheduler and knows nothing of its policies."""

from collections import Counter

from referee_books import Leases, Texts
from referee_jobs import Jobs
from referee_memory import HOST, Memory, Writer

from pdjax.core import events as ev
from pdjax.core.config import Cache, Placement, Recovery, Role, Transfer, instances_of, role_of
from pdjax.core.request import Request


class Referee:
    """Follows one run; an AssertionError names the law that was broken."""

    def __init__(
        self,
        placement: Placement,
        *,
        transfer: Transfer | None = None,
        cache: Cache | None = None,
        recovery: Recovery | None = None,
        local_prefill: bool = False,
    ):
        self._placement, self._transfer = placement, transfer or Transfer()
        self._cache, self._recovery = cache or Cache(), recovery or Recovery()
        self._local_prefill = local_prefill  # decode roles prefill what they decode
        self._leases = Leases(round(self._recovery.lease_s * 1e9))
        self._groups = range(self._transfer.groups)
        self._texts = Texts(self._cache.block)
        self._memory = Memory(placement, len(self._groups), self._texts.same)
        self._requests: dict[int, Request] = {}
        self._aborted: set[int] = set()
        self._stopped: set[int] = set()
        self._ended: dict[int, ev.Finish | ev.Refuse] = {}
        self._running: dict[int, ev.Step] = {}
        self._void: set[tuple[int, int]] = set()  # (step, request): its token is worth nothing
        self._flying: dict[int, ev.Send] = {}
        self._cancelled: set[int] = set()
        self._asked: Counter[int] = Counter()  # output tokens by request
        self._seen: Counter[int] = Counter()
        self._seats: dict[tuple[str, int], int] = {}
        self._accepted: set[tuple[int, str]] = set()  # hand-offs that have not decoded, by pool
        self._preempted: dict[int, ev.Preempt] = {}  # and not yet gone on
        self._again: set[int] = set()  # was preempted or tried again
        self._retries: Counter[int] = Counter()
        self._hurt: set[int] = set()  # lost something to a failure
        self._down: set[str] = set()
        self._gone: set[str] = set()  # down for good
        self._jobs = Jobs(placement)
        self._ringing = False  # what is decided now is because time is up
        self._now = 0

    def observe(self, body: ev.Event | ev.Action, t_ns: int = 0) -> None:
        if isinstance(body, ev.Event):
            self._between_events()
            self._ringing = isinstance(body, ev.TimeUp)
        assert t_ns >= self._now, "time does not go back"
        self._now = t_ns
        match body:
            case ev.Arrived():
                self._arrive(body.request)
            case ev.AbortAsked():
                self._aborted.add(body.rid)
            case ev.StepDone():
                self._step_done(body)
            case ev.Landed() | ev.SendFailed():
                self._send_done(body)
            case ev.Down():
                self._go_down(body.instance)
                self._gone |= set() if body.returns else self._on_the_pool_of(body.instance)
            case ev.Up():
                self._down -= self._on_the_pool_of(body.instance)
            case ev.TimeUp():
                self._leases.ring(t_ns)
                flying = {send.rid for send in self._flying.values()}
                self._hurt |= {rid for rid in flying if self._leases.over(rid, t_ns)}
            case ev.Hold():
                self._hold(body)
            case ev.Grow():
                assert body.handle.rid not in self._ended
                self._memory.grow(body.handle)
            case ev.Release():
                self._release(body)
            case ev.Send():
                self._send(body, within=None)
            case ev.Cancel():
                self._cancelled.add(body.send)
            case ev.Step():
                self._step(body)
            case ev.Reuse():
                self._reuse(body)
            case ev.Preempt():
                self._preempt(body)
            case ev.Retry():
                self._retry(body)
            case ev.Drain():
                self._jobs.drain(body, self._gone)
            case ev.Switch():
                swapped = [p.instance for p in self._preempted.values() if p.how == "swap"]
                decoding = {name for (name, _), r in self._seats.items() if r not in self._ended}
                self._jobs.switch(body, self._running.values(), decoding | {*swapped})
            case ev.Alarm():
                self._leases.alarm(body.at_ns, t_ns)
            case ev.Finish():
                self._finish(body)
            case ev.Refuse():
                self._end(body)

    def end(self) -> None:
        self._between_events()
        assert not self._running and not self._flying, "nothing goes on after the end"
        assert self._memory.empty, "what was held is released"
        assert self._ended.keys() == self._requests.keys(), "every request ends"

    def _between_events(self) -> None:
        """What holds whenever all that an event caused has been said."""
        for instance in self._down:
            pool = self._memory.pool(instance)
            assert not self._memory.holders(pool), "pages of a dead instance are held"
        waited = [s.rid for s in self._flying.values() if s.id not in self._cancelled]
        self._leases.check(waited, self._now)

    def _arrive(self, request: Request) -> None:
        assert request.id not in self._requests, "ids are unique"
        self._requests[request.id] = request
        self._texts.add(request)

    # --- memory ----------------------------------------------------------------------------

    def _role(self, instance: str) -> Role:
        return self._placement[role_of(instance)]

    def _hold(self, hold: ev.Hold) -> None:
        handle = hold.handle
        assert handle.rid not in self._ended
        assert handle.pool.removesuffix(HOST) not in self._down, "no memory where all is lost"
        assert self._cache.prefix or not handle.shared, "no cache, nothing shared"
        self._memory.hold(handle)
        if handle.shared < len(handle.pages):  # no loan
            self._accept(handle.rid, handle.pool)
            swapped = self._preempted.get(handle.rid)
            if HOST not in handle.pool and not (swapped and swapped.how == "swap"):
                self._jobs.came(handle.rid, handle.pool)

    def _accept(self, rid: int, pool: str) -> None:
        """Counts hand-offs against the credits of the decode instance that takes them."""
        owners = [i for i in instances_of(self._placement) if self._memory.pool(i) == pool]
        prefills = any(self._jobs.does(i, "prefill") for i in owners)
        if prefills or not owners or rid in self._preempted:
            return
        self._accepted.add((rid, pool))
        waiting = [
            r for r, where in self._accepted if where == pool and not self._is_there(r, pool)
        ]
        credits = self._transfer.credits
        assert not credits or len(waiting) <= credits, "more hand-offs than credits"

    def _is_there(self, rid: int, pool: str) -> bool:
        """Whether the whole prompt has come; one that has ended does not count."""
        prompt = self._requests[rid].prompt_len
        handle = self._memory.handle(rid, pool)
        return rid in self._ended or self._memory.has(handle, 0, prompt, self._groups)

    def _release(self, release: ev.Release) -> None:
        self._look_for_the_dead(release.pool)
        for step in self._running.values():
            names = {work.rid for work in (*step.chunks, *step.decodes)}
            uses = release.rid in names and self._memory.pool(step.instance) == release.pool
            assert not uses, "released while a step uses it"
        for send in self._flying.values():
            ends = self._memory.pool(send.source), self._memory.pool(send.target)
            dead = release.pool.removesuffix(HOST) in self._down
            assert send.rid != release.rid or release.pool not in ends or dead, (
                "released while a piece flies"
            )
        self._memory.release(release.rid, release.pool)
        self._accepted.discard((release.rid, release.pool))

    def _reuse(self, reuse: ev.Reuse) -> None:
        assert self._cache.prefix
        handle = self._memory.handle(reuse.rid, reuse.instance)
        assert 0 < reuse.tokens <= handle.capacity
        if reuse.how != "remote":
            size = handle.capacity // len(handle.pages)
            assert reuse.tokens == handle.shared * size, "reused is what is shared"

    # --- steps -----------------------------------------------------------------------------

    def _step(self, step: ev.Step) -> None:
        role = self._role(step.instance)
        beside = [s for s in self._running.values() if s.instance == step.instance]
        assert step.instance not in self._down, "no work for the dead"
        assert len(beside) <= role.lag, "more steps at once than the lag allows"
        assert step.chunks or step.decodes
        assert role.mixed or not (step.chunks and step.decodes), "only a mixed step has both"
        assert sum(chunk.length for chunk in step.chunks) <= role.chunk
        assert step.steps == max((work.count for work in step.decodes), default=1) <= role.steps
        assert step.steps == 1 or not step.chunks
        self._running[step.id] = step
        self._leases.renew(("step", step.id), self._now)
        for send_id in step.awaits:
            assert self._memory.pool(step.instance) == self._memory.pool(
                self._flying[send_id].target
            ), "awaits what goes elsewhere"
        for chunk in step.chunks:
            self._chunk(chunk, step)
        for work in step.decodes:
            assert 0 <= work.slot < role.slots
            self._decode(work, step)
        for send in step.sends:
            assert send.source == step.instance
            self._send(send, within=step)

    def _before(self, step: ev.Step, writer: Writer) -> bool:
        """Whether the writer is done before the step reads: it ran there before, or is awaited."""
        kind, number = writer
        if kind == "step":
            return self._running[number].instance == step.instance
        return number in step.awaits

    def _work_on(self, rid: int, start: int, end: int, step: ev.Step) -> None:
        assert rid not in self._ended, "an ended request gets no work"
        handle = self._memory.handle(rid, step.instance)
        self._memory.read(
            handle, 0, start, groups=self._groups, after=lambda w: self._before(step, w)
        )
        self._memory.write(handle, start, end, ("step", step.id), self._groups)

    def _chunk(self, chunk: ev.Chunk, step: ev.Step) -> None:
        rid, end = chunk.rid, chunk.start + chunk.length
        page = self._memory.handle(rid, step.instance)
        assert chunk.length > 0
        assert chunk.last or end % (page.capacity // len(page.pages)) == 0, "ends within a page"
        text = self._requests[rid].prompt_len + self._asked[rid]
        assert chunk.last == (end == text), "the last chunk ends the text"
        self._work_on(rid, chunk.start, end, step)
        preempted = self._preempted.get(rid)
        self._jobs.work(rid, step.instance, "prefill")
        if not self._jobs.does(step.instance, "prefill") and not self._local_prefill:
            assert preempted == ev.Preempt(rid, step.instance, "recompute"), (
                "a decode role prefills"
            )
        if chunk.last:
            assert self._asked[rid] == self._seen[rid] < self._requests[rid].max_tokens
            self._asked[rid] += 1
            if preempted and preempted.how == "recompute":
                del self._preempted[rid]

    def _decode(self, work: ev.Decode, step: ev.Step) -> None:
        rid, request = work.rid, self._requests[work.rid]
        assert work.position == request.prompt_len + self._asked[rid] - 1
        assert self._asked[rid] > 0, "decoded before the first token"
        assert self._jobs.does(step.instance, "decode"), "it does not decode now"
        self._jobs.work(rid, step.instance, "decode")
        assert 0 < work.count <= request.max_tokens - self._asked[rid], "more tokens than asked for"
        self._work_on(rid, work.position, work.position + work.count, step)
        seat = step.instance, work.slot
        before = self._seats.get(seat)
        assert work.joined == (before != rid), "`joined` says who has just come"
        if before is not None and before != rid:
            assert before in self._ended, "a slot has one request"
        others = [s for s in self._running.values() if s is not step and s.instance == seat[0]]
        assert all(d.rid == rid for s in others for d in s.decodes if d.slot == work.slot), (
            "the last step of the one before goes on"
        )
        self._seats[seat] = rid
        self._asked[rid] += work.count
        self._accepted.discard((rid, self._memory.pool(step.instance)))
        self._preempted.pop(rid, None)

    def _step_done(self, done: ev.StepDone) -> None:
        step = self._running.pop(done.step, None)
        if step is None:
            return  # told twice
        self._memory.settle(("step", step.id))
        ends = {c.rid: c.start + c.length for c in step.chunks if c.last}
        first = ends | {d.rid: d.position + 1 for d in step.decodes}
        for emitted in done.emitted:
            rid = emitted.rid
            if rid in self._ended or (step.id, rid) in self._void:
                continue
            if emitted.tokens:
                index = first[rid] - self._requests[rid].prompt_len
                assert index == self._seen[rid], "a token is said twice, or left out"
            self._seen[rid] += len(emitted.tokens)
            self._texts.extend(rid, emitted.tokens)
            self._stopped |= {rid} if emitted.stopped else set()

    # --- pieces ----------------------------------------------------------------------------

    def _send(self, send: ev.Send, within: ev.Step | None) -> None:
        rid, end = send.rid, send.start + send.length
        assert rid not in self._ended
        assert send.length > 0 and send.groups in (1, len(self._groups))
        self._check_ends(send)
        source, target = (self._memory.handle(rid, name) for name in (send.source, send.target))
        assert source.pool != target.pool, "nothing is sent to where it is"
        groups = self._groups if send.groups == 1 else [send.group]
        self._memory.read(
            source,
            send.start,
            end,
            groups=groups,
            after=lambda w: within is not None and self._before(within, w),
        )
        again = rid in self._again or not self._memory.has(target, send.start, end, groups)
        assert again, "everything is sent once"
        self._memory.write(target, send.start, end, ("send", send.id), groups)
        self._flying[send.id] = send
        self._leases.renew(rid, self._now)

    def _check_ends(self, send: ev.Send) -> None:
        ends = [name.removesuffix(HOST) for name in (send.source, send.target)]
        assert not self._down & set(ends), "nothing goes to or from the dead"
        match send.purpose:
            case "hand_off":
                assert self._role(send.source).prefills_here
                assert self._role(send.target).decodes_here
            case "load":
                again = ev.Preempt(send.rid, send.target, "recompute")
                prefills = self._role(send.target).prefills_here
                assert prefills or self._preempted.get(send.rid) == again
            case "swap_out":
                assert send.target == send.source + HOST
            case "swap_in":
                assert send.source == send.target + HOST

    def _send_done(self, done: ev.Landed | ev.SendFailed) -> None:
        send = self._flying.pop(done.send, None)
        if send is None:
            return  # told twice, or too late
        self._memory.settle(("send", send.id), arrived=isinstance(done, ev.Landed))
        self._leases.renew(send.rid, self._now)
        if isinstance(done, ev.SendFailed):
            self._lost(send)

    def _lost(self, send: ev.Send) -> None:
        self._hurt.add(send.rid)
        for step in self._running.values():
            if send.id in step.awaits:
                self._forget(step, send.rid)

    def _forget(self, step: ev.Step, rid: int) -> None:
        """What the step says of this request is worth nothing any more."""
        self._void.add((step.id, rid))
        self._asked[rid] = self._seen[rid]

    # --- failures and pressure -------------------------------------------------------------

    def _on_the_pool_of(self, instance: str) -> set[str]:
        pool = self._memory.pool(instance)
        return {i for i in instances_of(self._placement) if self._memory.pool(i) == pool}

    def _go_down(self, instance: str) -> None:
        """With the instance die its pool and all who work on that."""
        dead = self._count_as_dead(instance)
        for send in list(self._flying.values()):
            if dead & {send.source.removesuffix(HOST), send.target.removesuffix(HOST)}:
                del self._flying[send.id]
                self._memory.settle(("send", send.id), arrived=False)
                self._lost(send)

    def _count_as_dead(self, instance: str) -> set[str]:
        dead = self._on_the_pool_of(instance)
        self._down |= dead
        self._hurt |= set(self._memory.holders(self._memory.pool(instance)))
        for name in dead:
            self._hurt |= set(self._memory.holders(name + HOST))
            self._memory.lose(name)
        for step in [s for s in self._running.values() if s.instance in dead]:
            for work in (*step.chunks, *step.decodes):
                self._forget(step, work.rid)
            del self._running[step.id]
        return dead

    def _look_for_the_dead(self, pool: str) -> None:
        """A step without an end for as long as a lease counts as lost, with its instance, unless it
        awaits pieces; what is on its way to others may still come."""
        for step in list(self._running.values()) if self._ringing else ():
            awaits = self._flying.keys() & set(step.awaits)
            late = self._leases.over(("step", step.id), self._now)
            if late and not awaits and self._memory.pool(step.instance) == pool:
                self._count_as_dead(step.instance)

    def _preempt(self, preempt: ev.Preempt) -> None:
        rid, asked = preempt.rid, self._role(preempt.instance).preempt
        assert rid not in self._ended and self._memory.handle(rid, preempt.instance)
        elsewhere = preempt.how == "return" and self._memory.tables(rid) > 1
        assert preempt.how in (asked, "recompute") or elsewhere, "not as the role says"
        there = self._memory.holders(self._memory.pool(preempt.instance))
        ages = {each: age for age, each in enumerate(self._requests)}
        older = [other for other in there if ages[other] < ages[rid]]
        assert older and not self._ended.keys() >= {*older}, "only for an older one"
        self._preempted[rid] = preempt
        self._leave_seats(rid)

    def _retry(self, retry: ev.Retry) -> None:
        rid = retry.rid
        assert rid not in self._ended
        assert rid in self._hurt, "nothing of it was lost"
        assert self._recovery.on_failure == "recompute", "failures are final"
        self._retries[rid] += 1
        assert self._retries[rid] <= self._recovery.attempts, "too many attempts"
        for step in self._running.values():
            if any(work.rid == rid for work in (*step.chunks, *step.decodes)):
                self._forget(step, rid)
        self._asked[rid] = self._seen[rid]
        self._preempted.pop(rid, None)
        self._leave_seats(rid)

    def _leave_seats(self, rid: int) -> None:
        self._again.add(rid)
        self._seats = {seat: who for seat, who in self._seats.items() if who != rid}

    # --- ends ------------------------------------------------------------------------------

    def _finish(self, finish: ev.Finish) -> None:
        rid = finish.rid
        assert finish.tokens == self._seen[rid] <= self._requests[rid].max_tokens
        match finish.reason:
            case "abort":
                assert rid in self._aborted
            case "stop":
                assert rid in self._stopped
            case "length":
                assert finish.tokens == self._requests[rid].max_tokens
                assert rid not in self._stopped
            case "failed":
                self._check_failed(finish)
        self._end(finish)

    def _check_failed(self, finish: ev.Finish) -> None:
        assert finish.why, "its client is told why"
        assert finish.rid in self._hurt or self._down, "nothing failed"
        final = self._recovery.on_failure == "fail"
        tried = self._retries[finish.rid] >= self._recovery.attempts
        roles = [role for role in self._placement.values() if role.prefills_here]
        text = self._requests[finish.rid].prompt_len + self._seen[finish.rid]
        owners = [self._placement[role.pool_of] if role.pool_of else role for role in roles]
        too_long = all(text > o.pool.pages * o.pool.page_size for o in owners)
        assert final or tried or too_long or self._down, "it had attempts left"

    def _end(self, end: ev.Finish | ev.Refuse) -> None:
        assert end.rid in self._requests
        assert end.rid not in self._ended, "a request ends once"
        self._ended[end.rid] = end
