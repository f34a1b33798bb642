"""A clock made of a heap. Steps last 100 ns and pieces 30 ns, unless a row says otherwise."""

import pytest

from pdjax.core.config import Link
from pdjax.core.events import (
    AbortAsked,
    Action,
    Alarm,
    Arrived,
    Cancel,
    Chunk,
    Emitted,
    Event,
    Landed,
    Send,
    SendFailed,
    Step,
    StepDone,
    TimeUp,
)
from pdjax.core.request import Request, SamplingParams
from pdjax.cost import Cost
from pdjax.virtual import Unseen, VirtualBackend

COST = Cost(step_ns=lambda step: 100, send_bytes=lambda send: 30, link=Link(bytes_per_s=1e9))
NO_LINK = COST._replace(link=Link())


def nothing(action: Action) -> tuple[Emitted, ...]:
    return ()


def backend(cost: Cost = COST, **options) -> VirtualBackend:
    return VirtualBackend(cost, nothing, lambda event: None, **options)


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
    it = VirtualBackend(COST, nothing, noted.append)
    arrived = Arrived(Request(0, 10, 4, SamplingParams()))
    it.submit(arrived, 10)
    assert noted == [arrived]


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


def test_pieces_to_different_instances_share_the_way_out():
    it = backend()
    for number, target in enumerate(["d", "e", "d"]):
        it.start(send(number, target=target))
    # 0 and 1 have half each until 60; then 2, which waited for 0, has all of it.
    assert landings(it, 3) == [(0, 0, 60), (1, 0, 60), (2, 60, 90)]


def test_pieces_to_different_instances_do_not_meet_where_links_are_exclusive():
    it = backend(COST._replace(link=Link(bytes_per_s=1e9, sharing="exclusive")))
    for number, target in enumerate(["d", "e", "d"]):
        it.start(send(number, target=target))
    assert landings(it, 3) == [(0, 0, 30), (1, 0, 30), (2, 0, 30)]


def test_the_latency_of_a_link_comes_once_to_pieces_that_follow_each_other():
    it = backend(COST._replace(link=Link(bytes_per_s=1e9, latency_s=500e-9)))
    for number in range(3):
        it.start(send(number))
    assert landings(it, 3) == [(0, 0, 530), (1, 30, 560), (2, 60, 590)]


def test_without_a_link_a_piece_lands_at_once():
    it = backend(NO_LINK)
    for number in range(2):
        it.start(send(number))
    assert landings(it, 2) == [(0, 0, 0), (1, 0, 0)]


def test_a_landing_says_what_crossed():
    it = backend()
    it.start(send(3, rid=8))
    assert it.next_event() == (30, Landed(8, 3, began_ns=0, nbytes=30))


def test_a_step_that_ends_as_its_last_piece_lands_is_seen_first():
    it = backend(NO_LINK)
    it.start(Step(0, "p", chunks=(Chunk(0, 0, 6, True),), sends=(send(0),)))
    assert [type(it.next_event()[1]) for _ in range(2)] == [StepDone, Landed]


def test_waiting_for_nothing_is_told():
    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        backend().next_event()


# --- Pieces that do not land ---------------------------------------------------------------


def events(it: VirtualBackend) -> list[tuple[int, Event]]:
    """Whatever is left to happen."""
    found = []
    while True:
        try:
            found.append(it.next_event())
        except RuntimeError:
            return found


def test_a_cancelled_piece_fails_at_once_and_others_have_its_bandwidth():
    it = backend()
    for number, target in enumerate("de"):
        it.start(send(number, target=target))
    it.submit(AbortAsked(0), 20)  # each has sent 10 of its 30 bytes
    it.next_event()
    it.start(Cancel(0, 0))
    assert events(it) == [(20, SendFailed(0, 0, "cancelled")), (40, Landed(0, 1, 0, 30))]


def test_a_piece_that_was_cancelled_before_its_group_was_computed_does_not_leave():
    it = backend()
    it.start(Step(0, "p", sends=(send(0, 0, 2), send(1, 1, 2))))
    it.start(Cancel(0, 1))
    assert [(t, type(e)) for t, e in events(it)] == [(0, SendFailed), (80, Landed), (100, StepDone)]


def test_cancelling_a_piece_that_landed_or_failed_does_nothing():
    it = backend()
    it.start(send(0))
    it.next_event()
    it.start(Cancel(0, 0))
    it.start(send(1))
    for _ in range(2):
        it.start(Cancel(0, 1))
    assert events(it) == [(30, SendFailed(0, 1, "cancelled"))]


def test_a_spoiled_piece_fails_where_somebody_looks():
    for checksum, kind in [(True, SendFailed), (False, Landed)]:
        it = backend(contents=Unseen(checksum))
        it.spoil(1)
        for number in range(3):
            it.start(send(number))
        assert [type(e) for _, e in events(it)] == [Landed, kind, Landed]


def test_a_stalled_instance_gets_its_pieces_later_and_others_get_theirs_sooner():
    it = backend()
    for number, target in enumerate("de"):
        it.start(send(number, target=target))
    it.stall("d", 100e-9)
    assert landings(it, 2) == [(1, 0, 30), (0, 0, 130)]


def test_without_a_link_a_stall_holds_pieces_all_the_same():
    it = backend(NO_LINK)
    it.stall("d", 100e-9)
    it.start(send(0))
    assert landings(it, 1) == [(0, 100, 100)]  # nothing crosses before the stall ends


def test_a_stall_without_an_end_is_ended_by_cancelling():
    it = backend()
    it.stall("d", 0)
    it.start(send(0))
    it.start(Alarm(1000))
    assert it.next_event() == (1000, TimeUp())
    it.start(Cancel(0, 0))
    assert events(it) == [(1000, SendFailed(0, 0, "cancelled"))]


# --- Alarms --------------------------------------------------------------------------------


def test_an_alarm_is_the_last_of_its_nanosecond():
    it = backend()
    it.start(Alarm(100))
    it.start(Step(0, "p"))
    it.submit(AbortAsked(3), 100)
    it.start(Alarm(99))
    assert [(t, type(e)) for t, e in events(it)] == [
        (99, TimeUp), (100, StepDone), (100, AbortAsked), (100, TimeUp),
    ]  # fmt: skip


def test_what_an_event_causes_at_once_still_comes_before_the_alarm():
    it = backend(NO_LINK)
    it.start(Alarm(100))
    it.start(Step(0, "p"))
    assert isinstance(it.next_event()[1], StepDone)
    it.start(send(0))  # lands at once
    assert [type(e) for _, e in events(it)] == [Landed, TimeUp]


# --- Steps that await pieces -----------------------------------------------------------------


def awaiting(id: int, *pieces: int) -> Step:
    return Step(id, "d", awaits=pieces)


def done(it: VirtualBackend) -> dict[int, tuple[int, int]]:
    """Step -> when it began and ended."""
    return {e.step: (e.began_ns, t) for t, e in events(it) if isinstance(e, StepDone)}


@pytest.mark.parametrize(
    ("leave", "ends"),
    [
        # Two groups of 50 ns each; pieces take 30 ns, one after the other.
        ((0, 1), 130),  # group 0 waits until 30; group 1 is there in time, at 60, and runs from 80
        ((1, 0), 160),  # group 1 lands first, group 0 at 60
    ],
)
def test_a_group_starts_when_its_pieces_have_landed(leave, ends):
    it = backend()
    for group in leave:
        it.start(send(group, group, 2))
    it.start(awaiting(0, 0, 1))
    assert done(it) == {0: (0, ends)}


def test_the_last_group_waits_for_a_late_piece():
    it = backend()
    slow = send(1, 1, 2)
    it.start(Step(7, "p", sends=(send(0, 0, 2), slow)))  # ready at 50 and 100
    it.start(awaiting(0, 0, 1))
    # Group 0 lands at 80 and runs to 130, where group 1 lands: no further wait.
    assert done(it) == {7: (0, 100), 0: (0, 180)}


def test_a_step_behind_one_that_waits_starts_when_that_is_done():
    it = backend()
    it.start(send(0))
    it.start(awaiting(0, 0))
    it.start(Step(1, "d"))
    assert done(it) == {0: (0, 130), 1: (130, 230)}


def test_a_step_does_not_wait_for_pieces_that_landed_failed_or_never_were():
    it = backend(contents=Unseen(checksum=True))
    it.spoil(1)
    for number in range(2):
        it.start(send(number))
    assert [type(it.next_event()[1]) for _ in range(2)] == [Landed, SendFailed]
    it.start(awaiting(0, 0, 1, 77))
    assert done(it) == {0: (60, 160)}


def test_a_step_goes_on_when_the_piece_it_waits_for_is_cancelled():
    it = backend()
    it.stall("d", 0)
    it.start(send(0))
    it.start(awaiting(0, 0))
    it.start(Alarm(500))
    it.next_event()
    it.start(Cancel(0, 0))
    assert done(it) == {0: (0, 600)}
