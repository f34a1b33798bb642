"""Faults on purpose, in virtual time. Steps last 100 ns, pieces 30 ns. What backends owe the
scheduler holds under every fault, and every request still ends."""

import pytest
from decision_helpers import COST as SERVED_COST
from decision_helpers import MS, PLACEMENTS, Listed, check_run, counting, request, scheduler_for

from pdjax.core.config import ConfigError, Fault, Link, Recovery
from pdjax.core.events import (
    Alarm,
    Cancel,
    Down,
    Event,
    Finish,
    Landed,
    Record,
    Send,
    SendFailed,
    Step,
    StepDone,
    TimeUp,
    Up,
)
from pdjax.core.loop import serve
from pdjax.cost import Cost
from pdjax.faults import Breakable, with_faults
from pdjax.virtual import Unseen, VirtualBackend

PAIR = PLACEMENTS["1P1D"]
P, D = "prefill/0", "decode/0"
COST = Cost(lambda step: 100, lambda send: 30, Link(bytes_per_s=1e9))


def backend(*faults: Fault, placement=PAIR, **options) -> Breakable:
    inner = VirtualBackend(COST, lambda action: (), lambda event: None, **options)
    return with_faults(inner, faults, placement)


def send(id: int, source: str = P, target: str = D, group: int = 0, groups: int = 1) -> Send:
    return Send(id, 7, source, target, 0, 6, group, groups)


def events(it: Breakable) -> list[tuple[int, Event]]:
    """Whatever is left to happen."""
    found = []
    while True:
        try:
            found.append(it.next_event())
        except RuntimeError:
            return found


def landed(id: int, began_ns: int) -> Landed:
    return Landed(7, id, began_ns, 30)


def cancelled(id: int) -> SendFailed:
    return SendFailed(7, id, "cancelled")


# --- Completions ---------------------------------------------------------------------------


def three(*faults: Fault) -> list[tuple[int, Event]]:
    it = backend(*faults)
    for id in range(3):
        it.start(send(id))
    return events(it)


def test_without_faults_a_backend_is_itself():
    inner = VirtualBackend(COST, lambda action: (), lambda event: None)
    assert with_faults(inner, (), PAIR) is inner


def test_the_kth_completion_is_dropped():
    assert three(Fault("drop", at=2)) == [(30, landed(0, 0)), (90, landed(2, 60))]


def test_the_kth_completion_is_delayed():
    assert three(Fault("delay", at=1, seconds=75e-9)) == [
        (60, landed(1, 30)), (90, landed(2, 60)), (105, landed(0, 0)),
    ]  # fmt: skip


def test_the_kth_completion_comes_twice_and_is_counted_once():
    assert three(Fault("duplicate", at=1, seconds=45e-9), Fault("drop", at=2)) == [
        (30, landed(0, 0)), (75, landed(0, 0)), (90, landed(2, 60)),
    ]  # fmt: skip


def test_a_duplicate_without_a_delay_follows_at_once():
    assert three(Fault("duplicate", at=3))[-2:] == [(90, landed(2, 60))] * 2


@pytest.mark.parametrize(("checksum", "second"), [(True, SendFailed), (False, Landed)])
def test_the_kth_piece_is_corrupted_which_a_checksum_notices(checksum, second):
    it = backend(Fault("corrupt", at=2), contents=Unseen(checksum))
    for id in (4, 5, 6):
        it.start(send(id))
    assert [type(event) for _, event in events(it)] == [Landed, second, Landed]


def test_pieces_inside_steps_count_as_well():
    it = backend(Fault("corrupt", at=2), Fault("drop", at=1), contents=Unseen(checksum=True))
    it.start(Step(0, P, sends=(send(0, group=0, groups=2), send(1, group=1, groups=2))))
    assert [type(event) for _, event in events(it)] == [StepDone, SendFailed]


@pytest.mark.parametrize("kind", ["drop", "delay"])
def test_cancelling_a_piece_whose_completion_was_swallowed_is_answered(kind):
    it = backend(Fault(kind, at=1, seconds=1e-6))
    it.start(send(0))
    it.start(Alarm(50))
    assert it.next_event() == (50, TimeUp())
    it.start(Cancel(7, 0))
    assert it.next_event() == (50, cancelled(0))
    it.start(Cancel(7, 0))  # it has failed: nothing follows
    late = [(1030, landed(0, 0))] if kind == "delay" else []
    assert events(it) == late


def test_cancelling_a_piece_under_way_is_the_backends_own_affair():
    it = backend(Fault("drop", at=1))
    it.start(send(0))
    it.start(Cancel(7, 0))
    assert events(it) == [(0, cancelled(0))]


# --- Stalls ----------------------------------------------------------------------------------


def test_the_links_into_an_instance_stall_from_its_kth_step_on():
    it = backend(Fault("stall", at=2, instance=D, seconds=300e-9))
    it.start(send(0))
    for id in range(2):
        it.start(Step(id, D))
        it.start(send(10 + id, D, P))  # the other direction is free
        events_now = [it.next_event() for _ in range(3 if id == 0 else 2)]
        it.start(send(20 + id))
    assert events_now[-1][0] == 200
    # The stall began with step 1, at 100; piece 20 left then and waited.
    assert events(it) == [(430, landed(20, 100)), (460, landed(21, 430))]


# --- Instances that die ------------------------------------------------------------------------


def test_an_instance_dies_instead_of_ending_its_kth_step():
    it = backend(Fault("kill", at=2, instance=D))
    for id in range(2):
        it.start(Step(id, D))
    it.start(Step(9, P))
    assert [(t, type(e)) for t, e in events(it)] == [(100, StepDone), (100, StepDone), (200, Down)]


def test_an_instance_comes_back_and_works_again():
    it = backend(Fault("kill", at=1, instance=D, seconds=500e-9))
    it.start(Step(0, D))
    assert it.next_event() == (100, Down(D, returns=True))
    assert it.next_event() == (600, Up(D))
    it.start(Step(1, D))
    it.start(send(0))
    assert events(it) == [(630, landed(0, 600)), (700, StepDone(1, D, 600))]


def test_pieces_to_and_from_a_dead_instance_are_not_heard_of():
    it = backend(Fault("kill", at=1, instance=D, seconds=500e-9))
    it.stall(D, 0)
    it.stall(f"{D}.host", 0)
    it.stall(P, 1000e-9)
    it.start(send(0))
    it.start(send(1, D, f"{D}.host"))
    it.start(send(2, D, P))
    it.start(send(3, "prefill/1", P))
    it.start(Step(0, D))
    assert events(it) == [(100, Down(D, returns=True)), (600, Up(D)), (1030, landed(3, 1000))]


def test_an_instance_is_down_when_its_last_step_has_stopped():
    """Until then it would still write into its pool."""
    it = backend(Fault("kill", at=1, instance=D))
    for id in range(2):  # one waits behind the other
        it.start(Step(id, D))
    assert events(it) == [(200, Down(D))]


def test_what_is_started_while_an_instance_dies_never_runs():
    it = backend(Fault("kill", at=1, instance=D))
    it.start(Alarm(150))
    for id in range(2):
        it.start(Step(id, D))
    assert it.next_event() == (150, TimeUp())  # it is dying, nobody knows
    it.start(Step(2, D))
    it.start(send(0))
    it.start(send(1, D, P))
    it.start(Step(3, P, sends=(send(2),)))
    assert events(it) == [(200, Down(D)), (250, StepDone(3, P, 150))]


def test_with_an_instance_dies_whoever_works_on_its_pool():
    it = backend(Fault("kill", at=1, instance=P), placement=PLACEMENTS["logical_split"])
    it.start(Step(0, P))
    it.start(Step(1, D))
    assert events(it) == [(100, Down(P))]


def test_a_step_that_waits_for_a_piece_of_a_dead_instance_goes_on():
    it = backend(Fault("kill", at=1, instance=P))
    it.stall(D, 0)
    it.start(send(0))
    it.start(Step(0, D, awaits=(0,)))
    it.start(Step(1, P))
    assert events(it) == [(100, Down(P)), (200, StepDone(0, D, 0))]


def test_a_fault_of_an_instance_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"`kill` .*`decode/3`, .*has `prefill/0`, `decode/0`"):
        backend(Fault("kill", instance="decode/3"))


# --- With a scheduler ----------------------------------------------------------------------------

REQUESTS = [request(i, 4 + i % 5, 2 + i % 4, at_ms=7 * i) for i in range(8)]
FAULTS = {
    "drop": [Fault("drop", at=3)],
    "delay past the lease": [Fault("delay", at=3, seconds=0.5)],
    "delay": [Fault("delay", at=3, seconds=0.01)],
    "duplicate": [Fault("duplicate", at=2), Fault("duplicate", at=5, seconds=0.05)],
    "corrupt": [Fault("corrupt", at=2), Fault("corrupt", at=9)],
    "stall": [Fault("stall", at=2, instance="decode/0", seconds=0.3)],
    "stall for ever": [Fault("stall", at=2, instance="decode/0")],
    "kill prefill": [Fault("kill", at=3, instance="prefill/0", seconds=0.1)],
    "kill decode": [Fault("kill", at=3, instance="decode/0", seconds=0.1)],
    "kill decode twice": [
        Fault("kill", at=2, instance="decode/0", seconds=0.1),
        Fault("kill", at=5, instance="decode/0", seconds=0.1),
    ],
    "kill decode for good": [Fault("kill", at=3, instance="decode/0")],
}


def served(name: str, faults: list[Fault], recovery: Recovery) -> list[Record]:
    """The log of a run under faults, which kept every law of the referee."""
    scheduler = scheduler_for(PLACEMENTS[name], groups=2, recovery=recovery)
    inner = VirtualBackend(
        SERVED_COST, counting(), lambda event: None, contents=Unseen(checksum=True)
    )
    it = with_faults(inner, faults, PLACEMENTS[name])
    log = list(serve(Listed(REQUESTS), it, scheduler))
    check_run(log, PLACEMENTS[name], scheduler, recovery=recovery)
    assert log[-1].t_ns < 20_000 * MS
    return log


@pytest.mark.parametrize("name", ["1P1D", "2P1D", "1P2D"])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_every_request_ends_under_every_fault(name, faults, on_failure):
    recovery = Recovery(on_failure=on_failure, attempts=8, lease_s=0.2)
    log = served(name, faults, recovery)
    ends = [record.body for record in log if isinstance(record.body, Finish)]
    assert sorted(end.rid for end in ends) == [r.id for r in REQUESTS]
    for_good = any(fault.kind in ("stall", "kill") and not fault.seconds for fault in faults)
    if on_failure == "recompute" and not for_good:
        assert {end.reason for end in ends} == {"length"}
