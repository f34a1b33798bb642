"""What an instance's next step has in it, and what follows when a step is done."""

import msgspec

from pdjax.core.books import Books
from pdjax.core.events import Chunk, Decode, Emitted, Reuse, Send, Step, StepDone
from pdjax.core.lives import end, settle
from pdjax.core.moving import (
    assign,
    begin_load,
    find_places,
    hand_off,
    hand_over,
    leave_now,
    leaving,
    send_on,
    skip_to,
    swap_in,
    tokens_with_room,
)
from pdjax.core.policies.batching import Prompt, plan_chunks
from pdjax.core.policies.ordering import Waiting, fcfs, next_of
from pdjax.core.policies.transfer import Piece
from pdjax.core.pressure import make_room
from pdjax.core.state import Instance, RunningStep, Tracked
from pdjax.core.switching import end_drain, observe


def start_work(b: Books, instance: Instance) -> None:
    role = instance.role
    if instance.up:
        end_drain(b, instance)
    if not instance.up or instance.running > role.lag:
        if instance.has_news:
            b.cut(instance)
        return
    swap_in(b, instance)
    _seat_ready(b, instance)
    chunks = _plan_prefill(b, instance)
    decodes = ()
    if role.decodes_here and (role.mixed or not chunks):
        decodes = _plan_decode(b, instance, 1 if chunks else role.steps)
        # Those who decode may have taken the pages of one whose chunk was planned.
        chunks = tuple(chunk for chunk in chunks if chunk.rid in instance.prompts)
    if chunks or decodes:
        _start_step(b, instance, chunks, decodes)


def _iterations(b: Books, instance: Instance, decodes: tuple[Decode, ...]) -> int:
    """How many steps will be as this one unless something happens: until the first request has
    all its tokens, or needs a page."""
    if instance.role.lag or instance.role.steps > 1 or not decodes:
        return 1
    if len(decodes) < len(instance.slots) - instance.free_slots:
        return 1  # somebody there waits for pages, which may come at any time
    tracked = [b.requests[d.rid] for d in decodes]
    if any(t.flying for t in tracked):
        return 1
    return min(
        min(t.request.max_tokens - t.asked, t.target.capacity - d.position)
        for t, d in zip(tracked, decodes, strict=True)
    )


# --- prefill ------------------------------------------------------------------------------------


def _plan_prefill(b: Books, instance: Instance) -> tuple[Chunk, ...]:
    while instance.queue and len(instance.prompts) < instance.role.prefills:
        t = b.requests[_next_prompt(b, instance)]
        if not _hold_source(b, t):
            break
        b.dequeue(t)
        if not begin_load(b, t):
            instance.prompts.append(t.rid)
    if not instance.prompts:
        return ()
    tracked = [b.requests[rid] for rid in instance.prompts]
    prompts = [Prompt(t.rid, t.dispatched, t.length) for t in tracked]
    return plan_chunks(prompts, budget=instance.role.chunk, page_size=instance.pool.page_size)


def _next_prompt(b: Books, instance: Instance) -> int:
    queue = instance.queue
    if b.order is fcfs or len(queue) == 1:
        return queue[0]
    tracked = [b.requests[rid] for rid in queue]
    waiting = [Waiting(b.now_ns - t.request.arrival_ns, t.length) for t in tracked]
    return queue[next_of(b.order, waiting, round(b.routing.order_bound_s * 1e9))]


def _hold_source(b: Books, t: Tracked) -> bool:
    """Memory where the text is computed, and a slot where the same instance decodes."""
    instance = t.prefill
    seat = b.seats.get(instance.name) if t.decodes else None
    if seat is instance and not instance.free_slots:
        return False
    tokens = t.length if seat is None else tokens_with_room(seat.role, t)
    # The last token is computed in any case: the next one is sampled from what comes of it.
    blocks = (t.length - 1) // b.cache.block if b.cache.prefix else 0
    t.source = b.hold(instance, t, tokens, blocks)
    if t.source is None:
        return False
    skip_to(t, t.source.shared * instance.pool.page_size)
    if t.reused:
        b.emit(Reuse(t.rid, instance.name, t.reused, "local"))
    if seat is not None:
        t.target = t.source
        assign(t, seat)
        if seat is instance:
            _take_slot(b, t)
    return True


# --- decode -------------------------------------------------------------------------------------


def _seat_ready(b: Books, instance: Instance) -> None:
    while instance.ready and instance.free_slots:
        _take_slot(b, b.requests[instance.ready.popleft()])


def _take_slot(b: Books, t: Tracked) -> None:
    t.slot = t.decode.slots.index(None)
    t.decode.slots[t.slot] = t.rid
    t.decode.free_slots -= 1
    t.seated = t.joined = True
    b.give_credit_back(t)


def _plan_decode(b: Books, instance: Instance, steps: int) -> tuple[Decode, ...]:
    taken = (rid for rid in instance.slots if rid is not None)  # the first slots, mostly
    seated = [b.requests[next(taken)] for _ in range(len(instance.slots) - instance.free_slots)]
    role = instance.role
    if role.growth or role.switches:  # older ones may take pages from younger ones
        seated.sort(key=lambda t: t.age)
    decodes = []
    for t in seated:
        count = min(steps, t.request.max_tokens - t.asked)
        preempted = t.slot is None  # by an older one, a moment ago
        if preempted or t.leaving or not t.prefilled or not count:
            continue
        position = t.request.prompt_len + t.asked - 1
        if make_room(b, instance, t, position + count):
            decodes.append(Decode(t.slot, t.rid, position, count, t.joined))
    return tuple(sorted(decodes, key=lambda d: d.slot))


# --- a step ---------------------------------------------------------------------------------------


def _start_step(
    b: Books, instance: Instance, chunks: tuple[Chunk, ...], decodes: tuple[Decode, ...]
) -> None:
    sends: list[Send] = []
    leave_after: list[tuple[int, Piece]] = []
    for chunk in chunks:
        _dispatch_chunk(b, chunk, sends, leave_after)
    awaits: list[int] = []
    more = _iterations(b, instance, decodes) if b.macro_steps and not chunks else 1
    if more > 1:
        decodes = tuple(msgspec.structs.replace(d, count=more) for d in decodes)
    for decode in decodes:
        t = b.requests[decode.rid]
        t.asked += decode.count
        t.busy += 1
        t.joined = False
        awaits += t.flying
    steps = max((decode.count for decode in decodes), default=1)
    step = Step(
        b.next_step,
        instance.name,
        chunks,
        decodes,
        steps,
        tuple(sends),
        tuple(awaits),
        open=more > 1,
    )
    if step.open:
        b.open_steps[instance.name] = step.id
    b.next_step += 1
    instance.running += 1
    b.running[step.id] = RunningStep(step, leave_after)
    b.leases.grant(("step", step.id), b.now_ns)
    b.emit(step)
    if instance.role.lag:
        b.wake(instance)  # another step may follow at once


def _dispatch_chunk(
    b: Books, chunk: Chunk, sends: list[Send], leave_after: list[tuple[int, Piece]]
) -> None:
    t = b.requests[chunk.rid]
    first = t.dispatched == t.reused
    t.dispatched += chunk.length
    t.busy += 1
    if chunk.last:
        t.asked += 1
        t.prefill.prompts.remove(chunk.rid)
    inside, after = leaving(b, t, chunk)
    found = ()
    if first and t.reused:  # what a cache had leaves as if it had just been computed
        found = sum(leaving(b, t, Chunk(t.rid, 0, t.reused, last=False)), start=())
    leaves = inside or after or found
    if leaves and t.target is None and t.rid not in b.unplaced and not b.pulls:
        b.by_age(b.unplaced, t.rid)
        find_places(b)
    leave_now(b, t, found)
    if t.target is None:  # no room there yet: all of it leaves later
        inside, after = (), inside + after
    wanted = [hand_off(b, t, piece) for piece in inside]
    sends += [send_on(b, t, piece) for piece in wanted if piece is not None]
    leave_after += [(t.rid, piece) for piece in after]


def step_done(b: Books, done: StepDone) -> None:
    running = b.running.pop(done.step, None)
    if running is None:
        return  # told twice, or its instance has been down since
    b.leases.drop(("step", done.step))
    instance = b.instances[done.instance]
    observe(b, running.step, done)
    instance.running -= 1
    b.open_steps.pop(instance.name, None)
    b.wake(instance)
    emitted = {e.rid: e for e in done.emitted}
    # One that is leaving may start again at once: then these pieces are not of its new life.
    leave_after = [
        (rid, piece) for rid, piece in running.leave_after if not b.requests[rid].leaving
    ]
    for chunk in running.step.chunks:
        _chunk_done(b, b.requests[chunk.rid], chunk, emitted.get(chunk.rid))
    for rid, piece in leave_after:
        if rid in b.requests:
            leave_now(b, b.requests[rid], (piece,))
    for decode in running.step.decodes:
        t = b.requests[decode.rid]
        t.busy -= 1
        if running.step.open:
            t.asked -= decode.count - len(done.ends_ns)
        _take_tokens(b, t, emitted.get(decode.rid))
        settle(b, t)
    for chunk in running.step.chunks:
        if chunk.rid in b.requests:
            hand_over(b, b.requests[chunk.rid])


def _chunk_done(b: Books, t: Tracked, chunk: Chunk, emitted: Emitted | None) -> None:
    t.busy -= 1
    t.computed += chunk.length
    t.owe(t.length - t.computed)
    if t.leaving != "retry":
        b.publish(t.prefill, t.source, t, t.computed)
    if chunk.last:
        _take_tokens(b, t, emitted)
        if t.decode is not t.prefill and t.prefill is not None:
            t.prefill.drop_member(t.rid)
    settle(b, t)


def _take_tokens(b: Books, t: Tracked, emitted: Emitted | None) -> None:
    """Tokens of KV that was lost in the meantime do not count: it is computed again."""
    if t.ended or t.leaving == "retry" or emitted is None:
        return
    b.learn(t, emitted.tokens)
    if emitted.stopped:
        end(b, t, "stop")
    elif t.generated >= t.request.max_tokens:
        end(b, t, "length")
