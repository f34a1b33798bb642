"""Instances that go down and come back, and leases that run out."""

import itertools

from pdjax.core.books import Books
from pdjax.core.lives import end, enqueue, leave, lose, release_swap, settle
from pdjax.core.moving import lose_load
from pdjax.core.placement import JOBS
from pdjax.core.state import Instance, Tracked
from pdjax.core.switching import stand_in


def down(b: Books, name: str, returns: bool, presumed: bool = False) -> None:
    """Everything in the instance's pool is gone, for all that work on that pool. `presumed`: it was
    not told so, so pieces of it may still come."""
    dead = b.users[b.instances[name].pool.name]
    if not b.instances[name].up:
        if not presumed:  # it had been presumed: now nothing of it comes any more
            for rid in _drop_pieces(b, dead, presumed):
                settle(b, b.requests[rid])
        return
    for instance in dead:
        instance.up, instance.returns = False, returns
    touched = _stop_steps(b, dead) | _drop_pieces(b, dead, presumed) | _drop_memory(b, dead)
    for instance in dead:
        waiting = [*instance.queue, *instance.prompts, *instance.loading, *instance.swapped]
        touched |= {*waiting, *instance.ready}
        instance.pool.reset()
        if instance.host is not None:
            instance.host.reset()
    for t in sorted((b.requests[rid] for rid in touched), key=lambda t: t.age):
        _go_on_without(b, t, dead, f"instance `{name}` went down")
    stand_in(b)
    end_the_stranded(b)


def up(b: Books, name: str) -> None:
    for instance in b.users[b.instances[name].pool.name]:
        instance.up = instance.returns = True
        b.wake(instance)
    waiting = list(b.homeless)
    b.homeless.clear()
    for rid in waiting:
        enqueue(b, b.requests[rid])


def nobody_for(b: Books, prefill: bool, decode: bool) -> str:
    """Why one that needs these sides could never be served now, or nothing."""
    takers = {"prefill": b.prefillers, "decode": b.decoders}
    for side in ["prefill"] * prefill + ["decode"] * decode:
        every = itertools.chain(takers[side], b.instances.values())  # the first is one, usually
        if not any((i.up or i.returns) and side in JOBS[i.to] for i in every):
            return f"no {side} instance is up, and none will come back"
    return ""


def end_the_stranded(b: Books) -> None:
    """Ends those that wait for a side which is down for good."""
    if not nobody_for(b, prefill=True, decode=True):
        return
    for t in list(b.requests.values()):
        prefill = not t.prefilled and (t.prefill is None or not t.prefill.up)
        decode = t.decodes and (t.decode is None or not t.decode.up)
        why = nobody_for(b, prefill, decode)
        if why:
            end(b, t, "failed", why)


def _stop_steps(b: Books, dead: list[Instance]) -> set[int]:
    names, touched = {i.name for i in dead}, set()
    for step_id, running in list(b.running.items()):
        step = running.step
        if step.instance not in names:
            continue
        del b.running[step_id]
        b.leases.drop(("step", step_id))
        for rid in [work.rid for work in (*step.chunks, *step.decodes)]:
            b.requests[rid].busy -= 1
            touched.add(rid)
    for instance in dead:
        instance.running = 0
        b.open_steps.pop(instance.name, None)
    return touched


def _drop_pieces(b: Books, dead: list[Instance], presumed: bool) -> set[int]:
    """Nothing comes of pieces to or from the dead; but where that is not sure, a piece with a
    living end stays in the books until it has been cancelled."""
    names = {i.name for i in dead} | {f"{i.name}.host" for i in dead}
    lost = [s for s in b.flying.values() if s.source in names or s.target in names]
    for send in lost:
        if not presumed or {send.source, send.target} <= names:
            b.landed(send.id)
        b.requests[send.rid].spoiled = True
    return {send.rid for send in lost}


def _drop_memory(b: Books, dead: list[Instance]) -> set[int]:
    """Nothing touches these pages any more, whoever else still works for their requests."""
    pools = {dead[0].pool.name} | {f"{i.name}.host" for i in dead}
    touched = set()
    for t in b.requests.values():
        handles = {id(h): h for h in (t.source, t.target, t.loan) if h is not None}
        for handle in handles.values():
            if handle.pool in pools:
                b.release(handle)
                touched.add(t.rid)
        if t.swap is not None and t.swap.pool in pools:
            release_swap(b, t)
            touched.add(t.rid)
        for name in ("source", "target", "loan"):
            handle = getattr(t, name)
            if handle is not None and handle.pool in pools:
                setattr(t, name, None)
    return touched


def _go_on_without(b: Books, t: Tracked, dead: list[Instance], why: str) -> None:
    if t.leaving:
        settle(b, t)
    elif t.lender in dead:
        lose_load(b, t)
    elif t.prefill is not None and t.rid in t.prefill.queue:
        leave(b, t, "return")  # it had nothing yet, and goes to another queue
    else:
        lose(b, t, why)


def time_up(b: Books) -> None:
    if b.alarm_ns is None or b.now_ns < b.alarm_ns:
        return
    b.alarm_ns = None
    for holder in b.leases.run_out(b.now_ns):
        if isinstance(holder, tuple):
            running = b.running.get(holder[1])
            if running is not None and any(send in b.flying for send in running.step.awaits):
                b.leases.grant(holder, b.now_ns)  # it waits itself, and others watch those
            elif running is not None:
                down(b, running.step.instance, returns=False, presumed=True)
        elif holder in b.requests:
            _hand_off_expired(b, b.requests[holder])


def _hand_off_expired(b: Books, t: Tracked) -> None:
    if t.leaving:
        return  # cancelled already; its pages wait for the answer
    if any(send.purpose == "load" for send in t.flying.values()):
        lose_load(b, t)
    else:
        lose(b, t, f"a transfer made no progress for {b.recovery.lease_s:g} s")
