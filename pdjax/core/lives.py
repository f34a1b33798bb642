"""How a request comes into a queue, and how it leaves what it holds: for good or to come again."""

from collections.abc import Callable

from pdjax.core.books import Books
from pdjax.core.events import Chunk, Finish, FinishReason, Hold, Preempt, Release, Retry
from pdjax.core.policies.transfer import Piece
from pdjax.core.state import Instance, Leaving, Tracked


def enqueue(b: Books, t: Tracked, instance: Instance | None = None) -> None:
    """Into the prefill queue of `instance`, or of the one that the router chooses."""
    if instance is None or not instance.up or instance.to != instance.does:
        instance = _route(b, t)
        if instance is None:
            b.by_age(b.homeless, t.rid)
            return
    t.prefill = instance
    t.owe(t.length - b.expected_hit(t, instance))
    instance.queued_tokens += t.length
    instance.add_member(t.rid)
    b.by_age(instance.queue, t.rid)
    b.wake(instance)


def _route(b: Books, t: Tracked) -> Instance | None:
    def fits(instance: Instance) -> bool:
        takes = instance.takes_prompts and instance.up
        return takes and instance.pool.could_ever_hold(t.length)

    if not any(map(fits, b.prefillers)):
        return None
    wanted = _of_the_first_pool(b, fits) if b.switching.policy == "mixed" else fits
    return _near_decode(b, t) or b.route_prefill(t, wanted)


def _of_the_first_pool(b: Books, fits: Callable[[Instance], bool]) -> Callable[[Instance], bool]:
    """Those that do nothing but prefill, unless there are none or each has too much before it:
    then those that do both (Splitwise, ISCA 2024, section IV: the mixed pool comes second)."""
    able = list(filter(fits, b.prefillers))
    prompts = [i for i in able if i.does == "prefill"]
    full = all(i.prompt_tokens > b.switching.prompts_above for i in prompts)
    job = "both" if full and len(prompts) < len(able) else "prefill"
    return lambda instance: instance.does == job and fits(instance)


def _near_decode(b: Books, t: Tracked) -> Instance | None:
    """The decode instance that shall prefill it too, where the routing wants that."""
    if not b.routing.local_below or not t.decodes:
        return None
    decoders = [d for d in b.decoders if d.up]
    if not decoders:
        return None
    cached = max(b.load_with_cache(t, instance).cached for instance in decoders)
    if t.length - cached >= b.routing.local_below:
        return None
    return b.route_decode(t, lambda decoder: decoder.takes_decodes and decoder.up)


def end(b: Books, t: Tracked, reason: FinishReason, why: str = "") -> None:
    """The request is over for its client; what it holds goes once nothing touches it."""
    if t.ended:
        return
    t.ended = True
    b.emit(Finish(t.rid, reason, t.generated, why))
    b.cancel_flying(t)
    leave(b, t, "end")
    if t.prefill is not None:
        b.wake(t.prefill)  # who waited behind it may fit


def lose(b: Books, t: Tracked, why: str) -> None:
    """Its KV is lost or cannot be trusted."""
    t.losses += 1
    text = t.request.prompt_len + t.generated
    fits = any(i.pool.could_ever_hold(text) for i in b.prefillers)
    if not fits:
        why += f"; no prefill pool has room for its {text} tokens by now"
    if not fits or b.recovery.on_failure == "fail" or t.losses > b.recovery.attempts:
        end(b, t, "failed", why)
        return
    b.emit(Retry(t.rid, why))
    b.cancel_flying(t)
    leave(b, t, "retry")


def preempt(b: Books, t: Tracked, instance: Instance) -> None:
    """It gives up its pages of `instance`'s pool, the way that its role says. One whose KV is
    still in a prefill pool too just waits there for another place, unless that decodes as well."""
    pages = t.target is not None and t.target.pool == instance.pool.name
    comes = pages and t.source is not None and not t.in_place
    if comes and t.prefill.name not in b.seats:
        b.emit(Preempt(t.rid, instance.name, "return"))
        _lose_place(b, t)
        return
    how = t.decode.role.preempt if pages and t.prefilled else "recompute"
    if how == "swap":
        t.swap = t.decode.host.hold(t.rid, t.request.prompt_len + t.asked)
        if t.swap is None:
            how = "recompute"
        else:
            b.emit(Hold(t.swap))
    b.emit(Preempt(t.rid, instance.name, how))
    leave(b, t, how)


def _lose_place(b: Books, t: Tracked) -> None:
    b.release_target(t)
    t.decode, t.skip = None, 0
    found = b.schedule(Chunk(t.rid, 0, t.computed, t.prefilled), b.transfer.groups)
    t.unsent = [*found.inside, *found.done]
    if t.unsent:
        b.by_age(b.unplaced, t.rid)


def leave(b: Books, t: Tracked, how: Leaving) -> None:
    """It waits for nothing any more, and `how` happens once nothing touches its pages."""
    t.leaving = "end" if t.ended else how
    t.unsent.clear()
    for pool in list(b.claims):
        b.drop_claim(pool, t)
    waits = [b.unplaced, b.homeless]
    if t.prefill is not None:
        t.prefill.loading.pop(t.rid, None)
        waits.append(t.prefill.prompts)
        if t.rid in t.prefill.queue:
            b.dequeue(t)
    if t.decode is not None:
        waits += [t.decode.ready, t.decode.swapped]
    for waiting in waits:
        if t.rid in waiting:
            waiting.remove(t.rid)
    if t.slot is not None:
        b.cut(b.instances[t.decode.name])
    settle(b, t)


def settle(b: Books, t: Tracked) -> None:
    """Lets a request that is leaving go, unless a step or a piece still touches its pages."""
    if not t.leaving or t.busy:
        return
    how, t.leaving = t.leaving, ""
    if how == "swap":
        _swap_out(b, t)
        return
    if how != "retry":
        _publish(b, t)
    here = t.decode if t.prefilled else t.prefill
    _give_back(b, t)
    if how == "end":
        del b.requests[t.rid]
        return
    _start_again(t)
    enqueue(b, t, here if how == "recompute" else None)


def _publish(b: Books, t: Tracked) -> None:
    """What it leaves behind in a pool may serve others."""
    if t.spoiled:
        return
    if t.prefilled and t.target is not None and t.source is None:
        b.publish(t.decode, t.target, t, t.stored)
    elif t.in_place:
        b.publish(t.prefill, t.source, t, t.stored if t.prefilled else t.computed)


def _give_back(b: Books, t: Tracked) -> None:
    give_loan_back(b, t)
    if t.source is not None:
        b.release(t.source)
        if t.in_place:
            t.target = None
        t.source = None
    b.release_target(t)
    if t.swap is not None:
        release_swap(b, t)
    if t.prefill is not None:
        t.owe(0)
        t.prefill.drop_member(t.rid)
    if t.decode is not None:
        t.decode.drop_member(t.rid)


def _start_again(t: Tracked) -> None:
    """From nothing but its text."""
    t.spoiled = False
    t.prefill, t.decode = None, None
    t.length = t.request.prompt_len + t.generated
    t.reused = t.skip = t.dispatched = t.computed = 0
    t.asked = t.generated


def give_loan_back(b: Books, t: Tracked) -> None:
    if t.loan is not None:
        b.release(t.loan)
    t.loan = t.lender = None


def release_swap(b: Books, t: Tracked) -> None:
    t.decode.host.release(t.swap)
    b.emit(Release(t.rid, t.swap.pool))
    t.swap = None
    b.wake(t.decode)


def _swap_out(b: Books, t: Tracked) -> None:
    """Its seat is free at once, its pages when their copy is in host memory."""
    b.leave_seat(t)
    here = t.decode.name
    piece = Piece(0, t.stored, 0)
    b.emit(b.send(t, piece, here, f"{here}.host", "swap_out", groups=1))
