"""After any schedule of submits, aborts, stops and ends every pool is back to its free count, every
request ended exactly once, no instance has work left, and a replay decides the same."""

import dataclasses

from decision_helpers import PLACEMENTS, Driven, check_run, pool, request, scheduler_for, served
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pdjax.core.config import Placement, Role
from pdjax.core.loop import first_difference

# The same examples in every run, so that CI fails only where the code changed.
BOUNDED = settings(derandomize=True, deadline=None)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any kind, with pools that one request may fill and features switched on or off."""
    kind = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))]
    lag, steps = draw(st.integers(0, 1)), draw(st.integers(1, 3))

    def vary(role: Role) -> Role:
        size, form = draw(st.integers(3, 12)), draw(st.sampled_from(["pages", "slab"]))
        return dataclasses.replace(
            role,
            lag=lag,
            steps=steps,
            pool=pool(size, form),
            slots=draw(st.integers(1, 3)),
            prefills=draw(st.integers(1, 3)),
            chunk=draw(st.sampled_from([3, 6, 12])),
        )

    return {name: vary(role) for name, role in kind.items()}


OPTIONS = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 3),
        "schedule": st.sampled_from(["layerwise", "whole"]),
        "prefill_router": st.sampled_from(["round_robin", "shortest_queue"]),
        "decode_router": st.sampled_from(["round_robin", "shortest_queue"]),
    }
)
# Prompt tokens, most output tokens: now and then more than a pool or the context holds, or none.
SHAPES = st.tuples(st.integers(0, 20), st.integers(0, 12))
STOPS = st.dictionaries(st.integers(0, 9), st.integers(1, 6))


@settings(BOUNDED, max_examples=200)
@given(
    placement=placements(),
    options=OPTIONS,
    shapes=st.lists(st.tuples(SHAPES, st.integers(0, 200)), min_size=1, max_size=10),
    stops=STOPS,
    aborts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400)), max_size=5),
)
def test_any_run_in_virtual_time_conserves_the_pools_and_replays(
    placement, options, shapes, stops, aborts
):
    requests = [request(rid, *shape, at_ms=ms) for rid, (shape, ms) in enumerate(shapes)]
    scheduler = scheduler_for(placement, **options)
    log = served(scheduler, requests, stops=stops, aborts=aborts)
    check_run(log, placement, scheduler)
    assert first_difference(log, scheduler_for(placement, **options)) == ""


class AnyOrder(RuleBasedStateMachine):
    """Requests come and go while steps end and pieces land in any order that a machine may see:
    an instance's steps one after the other, pieces as they like."""

    @initialize(placement=placements(), options=OPTIONS, stops=STOPS)
    def begin(self, placement, options, stops):
        self.placement, self.options = placement, options
        self.run = Driven(placement, stops=stops, **options)
        self.arrived = 0

    @precondition(lambda self: self.arrived < 10)
    @rule(shape=SHAPES)
    def arrive(self, shape):
        self.run.arrive(self.arrived, *shape)
        self.arrived += 1

    @rule(rid=st.integers(0, 10))
    def abort(self, rid):
        self.run.abort(rid)

    @precondition(lambda self: self.run.running)
    @rule(data=st.data())
    def end_a_step(self, data):
        running = sorted({step.instance for step in self.run.running.values()})
        self.run.end_step(data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.run.flying)
    @rule(data=st.data())
    def land_a_piece(self, data):
        self.run.land(data.draw(st.sampled_from(sorted(self.run.flying))))

    def teardown(self):
        if not hasattr(self, "run"):
            return
        self.run.drain()
        self.run.check()
        again = scheduler_for(self.placement, **self.options)
        assert first_difference(self.run.log, again) == ""


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(BOUNDED, max_examples=150, stateful_step_count=40)
