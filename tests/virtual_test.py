"""A clock made of a heap. Steps last 100 ns and pieces 30 ns, unless a row says otherwise."""

import pytest
from decision_helpers import counting, request

from pdjax.core.events import AbortAsked, Arrived, Chunk, Emitted, Landed, Send, Step, StepDone
from pdjax.cost import Cost
from pdjax.virtual import VirtualBackend

COST = Cost(step_ns=lambda step: 100, send_ns=lambda send: 30, send_bytes=lambda send: 7)


def backend(cost: Cost = COST) -> VirtualBackend:
    return VirtualBackend(cost, counting(), lambda event: None)


def send(number: int, group: int = 0, groups: int = 1, rid: int = 0, target: str = "d") -> Send:
    return Send(number, rid, "p", target, 0, 6, group, groups)


def landings(it: VirtualBackend, count: int) -> list[tuple[int, int, int]]:
    """(piece, when it began, when it landed) of the next landings."""
    found = []
    while len(found) < count:
        t_ns, event = it.next_event()
        if isinstance(event, Landed):
            found.append((event.send, event.began_ns, t_ns))
    return found


def test_events_come_out_in_the_order_of_their_times():
    it = backend()
    for rid, at_ns in enumerate([30, 10, 20]):
        it.submit(AbortAsked(rid), at_ns)
    assert [it.next_event() for _ in range(3)] == [
        (10, AbortAsked(1)),
        (20, AbortAsked(2)),
        (30, AbortAsked(0)),
    ]


def test_simultaneous_events_keep_the_order_in_which_they_were_caused():
    it = backend()
    for rid in range(20):
        it.submit(AbortAsked(rid), 5)
    assert [it.next_event()[1].rid for _ in range(20)] == list(range(20))


def test_what_is_submitted_for_the_past_happens_now():
    it = backend()
    it.submit(AbortAsked(0), 50)
    it.next_event()
    it.submit(AbortAsked(1), 20)
    assert it.next_event() == (50, AbortAsked(1))


def test_every_submitted_event_is_noted_when_it_is_submitted():
    noted = []
    it = VirtualBackend(COST, counting(), noted.append)
    it.submit(Arrived(request(0)), 10)
    assert noted == [Arrived(request(0))]


def test_a_step_is_computed_when_it_starts_and_ends_after_its_cost():
    computed = []
    compute = lambda action: computed.append(action) or (Emitted(0, (5,)),)  # noqa: E731
    it = VirtualBackend(COST, compute, lambda event: None)
    step = Step(4, "p")
    it.start(step)
    assert computed == [step]
    assert it.next_event() == (100, StepDone(4, "p", began_ns=0, emitted=(Emitted(0, (5,)),)))


def test_an_instance_runs_one_step_at_a_time_and_instances_run_side_by_side():
    it = backend()
    for number, instance in enumerate("ppd"):
        it.start(Step(number, instance))
    ends = [it.next_event() for _ in range(3)]
    assert [(t_ns, e.step, e.began_ns) for t_ns, e in ends] == [
        (100, 0, 0),
        (100, 2, 0),
        (200, 1, 100),  # waited for step 0
    ]


def test_a_group_leaves_when_its_share_of_the_step_is_computed():
    it = backend()
    it.start(Step(0, "p", sends=tuple(send(g, g, 4) for g in range(4))))
    assert landings(it, 4) == [(0, 25, 55), (1, 55, 85), (2, 85, 115), (3, 115, 145)]


def test_a_link_takes_what_is_ready_first():
    # Two chunks in one step: group 0 of both is computed before group 1 of either.
    it = backend()
    sends = (send(0, 0, 2), send(1, 1, 2), send(2, 0, 2, rid=1), send(3, 1, 2, rid=1))
    it.start(Step(0, "p", sends=sends))
    assert landings(it, 4) == [(0, 50, 80), (2, 80, 110), (1, 110, 140), (3, 140, 170)]


def test_a_link_is_free_until_a_running_step_has_something_to_send():
    it = backend()
    it.start(Step(0, "p", sends=(send(0),)))  # ready at 100
    it.start(send(1))  # ready now
    assert landings(it, 2) == [(1, 0, 30), (0, 100, 130)]


def test_pieces_to_different_instances_do_not_wait_for_each_other():
    it = backend()
    for number, target in enumerate(["d", "e", "d"]):
        it.start(send(number, target=target))
    assert landings(it, 3) == [(0, 0, 30), (1, 0, 30), (2, 30, 60)]


def test_a_landing_says_what_crossed():
    it = backend()
    it.start(send(3, rid=8))
    assert it.next_event() == (30, Landed(8, 3, began_ns=0, nbytes=7))


def test_a_step_that_ends_as_its_last_piece_lands_is_seen_first():
    it = backend(COST._replace(send_ns=lambda send: 0))
    it.start(Step(0, "p", chunks=(Chunk(0, 0, 6, True),), sends=(send(0),)))
    assert [type(it.next_event()[1]) for _ in range(2)] == [StepDone, Landed]


def test_waiting_for_nothing_is_told():
    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        backend().next_event()
