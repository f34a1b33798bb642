"""Instances get other jobs. What one leaves it drains: nothing new of that kind comes to it, what
it has it finishes, and then the change is said. KV in its pool stays, whatever the job: what an
instance has prefilled and nobody had room for it decodes itself as soon as that is its job.
"""

from pdjax.core.books import Books
from pdjax.core.config import SLO, Does
from pdjax.core.events import Drain, Step, StepDone, Switch
from pdjax.core.lives import enqueue, leave
from pdjax.core.moving import stay
from pdjax.core.placement import JOBS
from pdjax.core.policies.routing import prefill_s
from pdjax.core.policies.switching import SWITCHERS, Pace, Situation, Standing
from pdjax.core.state import Instance


def tick(b: Books, slo: SLO) -> None:
    """Asks the policy, where it is time to. A move that would leave a side with nobody is none."""
    if b.tick_ns is None or b.now_ns < b.tick_ns:
        return
    b.tick_ns = None
    now = _situation(b)
    for name, to in SWITCHERS[b.switching.policy](b.switching, slo, now):
        if _others_take(b, b.instances[name], to):
            move(b, b.instances[name], to)
    b.paces.clear()
    b.waited = frozenset(b.unplaced)


def _others_take(b: Books, instance: Instance, to: Does) -> bool:
    """Whether some other instance takes each kind of work that it would leave, or not come to."""
    takers = {"prefill": b.prefillers, "decode": b.decoders}
    left = (JOBS[instance.does] | JOBS[instance.to]) - JOBS[to]
    return all(any(i.up and i is not instance for i in takers[job]) for job in left)


def move(b: Books, instance: Instance, to: Does) -> None:
    """It shall do `to`: at once where it leaves nothing by that, else when it has drained."""
    instance.to, b.switched_ns = to, b.now_ns
    if JOBS[instance.does] <= JOBS[to]:
        _switch(b, instance)
        return
    b.emit(Drain(instance.name, to))
    _take_sides(b, instance)
    if not instance.takes_prompts:
        for rid in list(instance.queue):
            leave(b, b.requests[rid], "return")  # it has nothing yet, and goes to another queue
    b.wake(instance)


def end_drain(b: Books, instance: Instance) -> None:
    """The change happens once nothing is left of what it shall not do any more."""
    if instance.to == instance.does:
        return
    left = JOBS[instance.does] - JOBS[instance.to]
    for t in map(b.requests.__getitem__, instance.members):
        if "prefill" in left and t.prefill is instance and not t.prefilled:
            return
        if "decode" in left and t.decode is instance:
            return
    _switch(b, instance)


def _switch(b: Books, instance: Instance) -> None:
    instance.does, b.switched_ns = instance.to, b.now_ns
    b.emit(Switch(instance.name, instance.does))
    _take_sides(b, instance)
    b.wake(instance)


def _take_sides(b: Books, instance: Instance) -> None:
    """What it takes has changed: those whom that concerns come to it, or stay there."""
    b.sort_sides()
    if instance.takes_decodes:
        for rid in [*instance.members, *b.unplaced]:
            t = b.requests[rid]
            here = t.prefill is instance and t.source is not None and t.target is None
            if here and t.decodes and not t.leaving:
                stay(b, t)
    if instance.takes_prompts:
        waiting = list(b.homeless)
        b.homeless.clear()
        for rid in waiting:
            enqueue(b, b.requests[rid])


def stand_in(b: Books) -> None:
    """Where nobody is left for a side, one that can goes over to it; the last of all does both."""
    alive = [i for i in b.instances.values() if i.up or i.returns]
    for side in ("prefill", "decode") if b.switching.policy != "never" else ():
        able = [i for i in alive if i.up and i.role.switches]
        if not able or any(side in JOBS[i.to] for i in alive):
            continue
        one = next((i for i in able if side in JOBS[i.does]), able[0])  # it may not have left yet
        others = any(JOBS[i.to] - {side} for i in alive if i is not one)
        move(b, one, side if others else "both")


# --- what the policy is told --------------------------------------------------------------------


def observe(b: Books, step: Step, done: StepDone) -> None:
    """Takes note of how long a step took."""
    if b.switching.policy != "slo":
        return
    pace = b.paces.setdefault(step.instance, Pace())
    lasted_ns = b.now_ns - done.began_ns
    if step.chunks:
        pace.prompt_ns += lasted_ns
        pace.prompt_tokens += sum(chunk.length for chunk in step.chunks)
    if step.decodes:
        pace.decode_ns += lasted_ns
        pace.iterations += step.steps


def _situation(b: Books) -> Situation:
    standings = [_standing(b, i) for i in b.instances.values() if i.up]
    waiting = sum(rid in b.waited for rid in b.unplaced)
    return Situation(standings, waiting, (b.now_ns - b.switched_ns) / 1e9)


def _standing(b: Books, instance: Instance) -> Standing:
    """Estimates are those of `routing.estimate` where no step has shown better."""
    there, estimate = [b.requests[rid] for rid in instance.members], b.routing.estimate
    prompts = [t for t in there if t.prefill is instance and not t.prefilled]
    decodes = sum(t.decode is instance for t in there)
    pace = b.paces.get(instance.name, Pace())
    ttft_s = sum(prefill_s(estimate, t.length, t.computed) for t in prompts)
    itl_s = estimate.decode_step_s + estimate.decode_request_s * decodes if decodes else 0.0
    if pace.prompt_tokens:
        ttft_s = instance.prompt_tokens * pace.prompt_ns / pace.prompt_tokens / 1e9
    if pace.iterations:
        itl_s = pace.decode_ns / pace.iterations / 1e9
    return Standing(
        instance.name,
        instance.role.does,
        instance.does,
        instance.to,
        instance.role.switches,
        instance.prompt_tokens,
        len(prompts),
        decodes,
        ttft_s,
        itl_s,
    )
