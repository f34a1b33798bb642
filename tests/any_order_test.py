"""Requests come and go, steps end, pieces land, fail, get lost or are told twice, instances die and
come back, and time runs out, in any order that a machine may see. Whatever happens, the referee's
laws hold, every request ends, and every pool is full again. PDJAX_MANY=20 tries harder."""

from any_placement import BOUNDED, MANY, OPTIONS_WITH_RECOVERY, STOPS, arrivals, placements
from decision_helpers import Driven, scheduler_for
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pdjax.core.events import AbortAsked, Event, Landed, SendFailed, StepDone
from pdjax.core.loop import first_difference


class AnyOrder(RuleBasedStateMachine):
    """An instance's steps end one after the other; anything else comes as it likes."""

    @initialize(placement=placements(), options=OPTIONS_WITH_RECOVERY, stops=STOPS)
    def begin(self, placement, options, stops):
        self.placement, self.options = placement, options
        self.block = options["cache"].block
        self.run = Driven(placement, stops=stops, **options)
        self.arrived = 0
        self.down: dict[str, bool] = {}  # instance -> whether it returns

    @precondition(lambda self: self.arrived < 12)
    @rule(several=st.lists(arrivals(), min_size=1, max_size=4))
    def requests_arrive(self, several):
        for asked in several:
            self.run.arrive(self.arrived, block=self.block, **asked)
            self.arrived += 1

    @rule(choices=st.lists(st.integers(0, 11), min_size=1, max_size=15))
    def work_goes_on(self, choices):
        """Each choice ends one of the steps or pieces that can end."""
        for choice in choices:
            steps, sends = self.run.can_end, sorted(self.run.flying.keys() - self.run.dropped)
            if not steps and not sends:
                return
            index = choice % (len(steps) + len(sends))
            if index < len(steps):
                self.run.end_step(steps[index].instance)
            elif sends[index - len(steps)] in self.run.cancelled and choice % 2:
                self.run.fail(sends[index - len(steps)])
            else:  # also those that were cancelled too late
                self.run.land(sends[index - len(steps)])

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def a_client_gives_up(self, data):
        self.run.abort(data.draw(st.integers(0, self.arrived)))

    @precondition(lambda self: self.run.flying.keys() - self.run.dropped)
    @rule(data=st.data(), silently=st.booleans())
    def a_piece_is_lost(self, data, silently):
        send = data.draw(st.sampled_from(sorted(self.run.flying.keys() - self.run.dropped)))
        if silently and self.options["recovery"].lease_s:
            self.run.drop(send)
        else:
            self.run.fail(send)

    @precondition(lambda self: self.run.log)
    @rule(data=st.data())
    def something_is_told_again(self, data):
        told = [r.body for r in self.run.log if isinstance(r.body, StepDone | Landed | SendFailed)]
        if told:
            self.run.tell(data.draw(st.sampled_from(told)))

    @precondition(lambda self: len(self.down) < 2)
    @rule(data=st.data(), returns=st.booleans())
    def an_instance_dies(self, data, returns):
        alive = sorted(self.run.scheduler.instances.keys() - self.down.keys())
        if alive:
            name = data.draw(st.sampled_from(alive))
            self.down[name] = returns
            self.run.down(name, returns)

    @precondition(lambda self: any(self.down.values()))
    @rule(data=st.data())
    def an_instance_comes_back(self, data):
        name = data.draw(st.sampled_from(sorted(n for n, back in self.down.items() if back)))
        del self.down[name]
        self.run.up(name)

    @precondition(lambda self: self.run.alarms)
    @rule()
    def time_runs_out(self):
        self.run.wait()

    @precondition(lambda self: self.run.running or self.run.flying)
    @rule(data=st.data())
    def much_happens_at_once(self, data):
        """Ends of steps and pieces, and an abort, within one nanosecond, in any order."""
        steps = [step for step in self.run.can_end if data.draw(st.booleans())]
        sends = sorted(self.run.flying.keys() - self.run.dropped)
        sends = [send for send in sends if data.draw(st.booleans())]
        events: list[Event] = [self.run.done(step) for step in steps]
        events += [self.run.landed(send) for send in sends]
        events += [AbortAsked(data.draw(st.integers(0, self.arrived)))]
        self.run.tell_together(data.draw(st.permutations(events)))

    def teardown(self):
        if not hasattr(self, "run"):
            return
        for name, returns in self.down.items():
            if returns:
                self.run.up(name)
        self.run.drain()
        self.run.check()
        again = scheduler_for(self.placement, **self.options)
        assert first_difference(self.run.log, again) == ""


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(BOUNDED, max_examples=200 * MANY, stateful_step_count=30)
