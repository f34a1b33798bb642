"""What the scheduler decides, event by event. Pools have 6 pages of 3 tokens, 2 slots decode."""

import dataclasses

import pytest
from decision_helpers import (
    PLACEMENTS,
    Driven,
    both,
    decode,
    kinds,
    of_type,
    pool,
    prefill,
    request,
    work,
)

from pdjax.core.events import Arrived, Chunk, Decode, Finish, Hold, Release, Send, Step
from pdjax.core.scheduler import Scheduler

ALL = pytest.mark.parametrize("name", PLACEMENTS)
TWO_POOLS = pytest.mark.parametrize("name", ["two_pools", "1P1D", "2P1D", "1P2D"])
SCHEDULES = pytest.mark.parametrize("schedule", ["layerwise", "whole"])


def join(rid: int, position: int, count: int = 1) -> Decode:
    """The first decode of request `rid`, in the slot of that number."""
    return Decode(rid, rid, position, count, joined=True)


# --- a request's way ---------------------------------------------------------------------


def test_a_collocated_request_prefills_then_decodes_in_one_pool():
    run = Driven({"server": both()})
    hold, step = run.arrive(0, prompt_len=4, max_tokens=3)
    assert (hold.handle.pool, hold.handle.pages) == ("server/0", (0, 1))  # 4 + 3 - 1 tokens
    assert step == Step(0, "server/0", chunks=(Chunk(0, 0, 4, True),))
    assert run.end_step() == [Step(1, "server/0", decodes=(Decode(0, 0, 4, joined=True),))]
    assert run.end_step() == [Step(2, "server/0", decodes=(Decode(0, 0, position=5),))]
    assert run.end_step() == [Finish(0, "length", 3), Release(0, "server/0")]
    run.check()


def test_a_disaggregated_request_moves_chunk_by_chunk_and_group_by_group():
    run = Driven(PLACEMENTS["1P1D"], groups=2)
    source, target, step = run.arrive(0, prompt_len=8, max_tokens=2)
    assert (source.handle.pool, source.handle.pages) == ("prefill/0", (0, 1, 2))
    assert (target.handle.pool, target.handle.capacity) == ("decode/0", 9)
    assert step.chunks == (Chunk(0, 0, 6, False),)
    assert step.sends == (
        Send(0, 0, "prefill/0", "decode/0", 0, 6, 0, 2),
        Send(1, 0, "prefill/0", "decode/0", 0, 6, 1, 2),
    )
    (step,) = run.end_step()
    assert step.chunks == (Chunk(0, 6, 2, True),)
    assert [(send.id, send.start, send.length) for send in step.sends] == [(2, 6, 2), (3, 6, 2)]
    assert run.end_step() == run.land() == run.land() == run.land() == []
    release, step = run.land()
    assert release == Release(0, "prefill/0")  # all of it has landed
    assert step == Step(2, "decode/0", decodes=(Decode(0, 0, 8, joined=True),))
    assert run.end_step() == [Finish(0, "length", 2), Release(0, "decode/0")]
    run.check()


def test_after_prefill_the_pieces_leave_when_the_last_chunk_is_done():
    run = Driven(PLACEMENTS["1P1D"], groups=2, schedule="whole")
    source, step = run.arrive(0, prompt_len=8, max_tokens=2)
    assert isinstance(source, Hold) and step.sends == ()
    target, step = run.end_step()
    assert target.handle.pool == "decode/0" and step.sends == ()
    sends = of_type(Send, run.end_step())
    assert [(send.start, send.length, send.group) for send in sends] == [(0, 8, 0), (0, 8, 1)]
    run.drain()
    run.check()


def test_a_logical_split_sends_nothing_and_decodes_from_the_prompts_pages():
    run = Driven(PLACEMENTS["logical_split"])
    actions = run.arrive(0) + run.drain()
    assert kinds(actions) == ["Hold", "Step", "Step", "Step", "Finish", "Release"]
    assert [step.instance for step in of_type(Step, actions)] == [
        "prefill/0", "decode/0", "decode/0",
    ]  # fmt: skip
    run.check()


def test_kv_may_land_before_the_step_that_sent_it_is_seen_to_end():
    run = Driven(PLACEMENTS["1P1D"])
    run.arrive(0)
    assert run.land() == []
    assert kinds(run.end_step()) == ["Release", "Step"]
    run.drain()
    run.check()


# --- one token, and the first token that stops --------------------------------------------


@ALL
@SCHEDULES
def test_one_token_is_the_prefills_own_and_the_decode_side_never_hears_of_it(name, schedule):
    run = Driven(PLACEMENTS[name], schedule=schedule)
    actions = run.arrive(0, prompt_len=4, max_tokens=1) + run.drain()
    assert kinds(actions) == ["Hold", "Step", "Finish", "Release"]
    assert not actions[1].sends
    assert actions[0].handle.pool == actions[3].pool in ("prefill/0", "server/0")
    assert actions[2] == Finish(0, "length", 1)
    run.check()


def test_one_token_needs_no_slot():
    run = Driven({"server": both(slots=1)})
    run.arrive(0, prompt_len=3, max_tokens=5)
    run.end_step()  # the only slot is taken from here on
    run.arrive(1, prompt_len=3, max_tokens=1)
    assert work(run.end_step()) == [("server/0", (Chunk(1, 0, 3, True),))]
    run.drain()
    run.check()


@TWO_POOLS
def test_a_first_token_that_stops_ends_the_request_before_its_pieces_have_landed(name):
    run = Driven(PLACEMENTS[name], groups=2, stops={0: 1})
    run.arrive(0)
    actions = run.end_step()
    assert actions[0] == Finish(0, "stop", 1)
    assert kinds(actions[1:]) == ["Cancel", "Cancel"]
    assert run.land() == []  # pages stay while the other piece flies
    assert kinds(run.land()) == ["Release", "Release"]
    run.check()


def test_a_first_token_that_stops_sends_nothing_after_prefill():
    run = Driven(PLACEMENTS["1P1D"], schedule="whole", stops={0: 1})
    run.arrive(0)
    assert kinds(run.end_step()) == ["Finish", "Release", "Release"]
    run.check()


@ALL
def test_a_stop_amid_the_output_ends_it_there(name):
    run = Driven(PLACEMENTS[name], stops={0: 2})
    actions = run.arrive(0, max_tokens=5) + run.drain()
    assert of_type(Finish, actions) == [Finish(0, "stop", 2)]
    run.check()


# --- more than fits ------------------------------------------------------------------------


@ALL
def test_more_requests_than_slots_start_in_order_and_all_finish(name):
    roomy = {role: dataclasses.replace(it, pool=pool(24)) for role, it in PLACEMENTS[name].items()}
    run = Driven(roomy, prefill_router="round_robin")
    actions = []
    for rid in range(7):
        actions += run.arrive(rid, prompt_len=3, max_tokens=6)
    actions += run.drain()
    begun = [chunk.rid for step in of_type(Step, actions) for chunk in step.chunks]
    assert begun == list(range(7))
    finishes = of_type(Finish, actions)
    assert {f.rid: f.tokens for f in finishes} == dict.fromkeys(range(7), 6)
    assert max(len(step.decodes) for step in of_type(Step, actions)) == 2
    run.check()


def test_nobody_overtakes_the_head_of_the_queue():
    run = Driven({"server": both(slots=4)})
    run.arrive(0, prompt_len=3, max_tokens=7)  # 3 of 6 pages
    run.arrive(1, prompt_len=9, max_tokens=4)  # 4 pages: waits
    run.arrive(2, prompt_len=1, max_tokens=2)  # 1 page: would fit, but waits behind
    holds = of_type(Hold, run.drain())
    assert [hold.handle.rid for hold in holds] == [1, 2]
    run.check()


def test_a_prefill_waits_for_room_in_the_slab():
    run = Driven(PLACEMENTS["1P1D"])
    run.arrive(0, prompt_len=12, max_tokens=2)
    assert run.arrive(1, prompt_len=9, max_tokens=2) == []
    run.end_step()
    assert run.end_step() == []  # its pieces fly: 4 of 6 pages are taken
    run.land()
    release, *more = run.land()
    assert release == Release(0, "prefill/0")
    assert of_type(Hold, more)[0].handle.rid == 1
    run.drain()
    run.check()


@SCHEDULES
def test_a_request_waits_homeless_for_decode_pages_and_its_kv_follows(schedule):
    run = Driven(PLACEMENTS["1P1D"], schedule=schedule)
    run.arrive(0, prompt_len=6, max_tokens=7)  # 4 of 6 decode pages
    run.end_step("prefill")
    flying = dict(run.flying)
    run.arrive(1, prompt_len=8, max_tokens=2)  # 3 pages
    for _ in range(2):  # both chunks are computed, and nothing can leave
        run.end_step("prefill")
    assert run.flying == flying
    actions = run.drain()
    assert kinds(actions).index("Finish") < kinds(actions).index("Hold")  # request 0 made room
    pieces = [(send.start, send.length) for send in of_type(Send, actions)]
    assert pieces == ([(0, 6), (6, 2)] if schedule == "layerwise" else [(0, 8)])
    run.check()


def test_homes_are_given_first_come_first_served():
    run = Driven({"prefill": prefill(), "decode": decode(slots=4)})
    run.arrive(0, prompt_len=6, max_tokens=7)  # 4 of 6 decode pages
    run.arrive(1, prompt_len=8, max_tokens=2)  # 3 pages: homeless
    run.arrive(2, prompt_len=2, max_tokens=2)  # 1 page: would fit, but waits behind
    holds = [hold.handle for hold in of_type(Hold, run.drain())]
    assert [handle.rid for handle in holds if handle.pool == "decode/0"] == [1, 2]
    run.check()


# --- batches -------------------------------------------------------------------------------


def test_a_collocated_server_prefills_first():
    run = Driven({"server": both()})
    run.arrive(0, prompt_len=3, max_tokens=4)
    run.arrive(1, prompt_len=3, max_tokens=4)
    assert work(run.end_step()) == [("server/0", (Chunk(1, 0, 3, True),))]
    assert work(run.end_step()) == [("server/0", (join(0, 3), join(1, 3)))]
    run.drain()
    run.check()


def test_a_mixed_step_carries_a_chunk_and_the_decodes():
    run = Driven({"server": both(mixed=True)})
    run.arrive(0, prompt_len=3, max_tokens=4)
    run.arrive(1, prompt_len=8, max_tokens=2)
    (step,) = of_type(Step, run.end_step())
    assert (step.chunks, step.decodes) == ((Chunk(1, 0, 6, False),), (join(0, 3),))
    (step,) = run.end_step()
    assert (step.chunks, step.decodes) == ((Chunk(1, 6, 2, True),), (Decode(0, 0, 4),))
    (step,) = run.end_step()
    assert step.decodes == (Decode(0, 0, 5), join(1, 8))
    run.drain()
    run.check()


def test_prompts_share_the_chunk_budget():
    run = Driven({"prefill": prefill(prefills=3), "decode": decode()})
    run.arrive(0, prompt_len=6, max_tokens=2)
    run.arrive(1, prompt_len=2, max_tokens=2)
    run.arrive(2, prompt_len=9, max_tokens=2)
    (step,) = of_type(Step, run.end_step())
    assert step.chunks == (Chunk(1, 0, 2, True), Chunk(2, 0, 3, False))
    (step,) = (s for s in of_type(Step, run.end_step()) if s.chunks)
    assert step.chunks == (Chunk(2, 3, 6, True),)
    run.drain()
    run.check()


def test_one_prompt_at_a_time_unless_a_role_says_otherwise():
    run = Driven(PLACEMENTS["1P1D"])
    run.arrive(0, prompt_len=2)
    run.arrive(1, prompt_len=2)
    run.arrive(2, prompt_len=2)
    (step,) = of_type(Step, run.end_step())
    assert [chunk.rid for chunk in step.chunks] == [1]
    run.drain()
    run.check()


@pytest.mark.parametrize(
    ("steps", "max_tokens", "counts"),
    [(1, 4, [1, 1, 1]), (3, 8, [3, 3, 1]), (3, 4, [3]), (3, 3, [2]), (5, 2, [1])],
)
def test_a_step_of_k_iterations_asks_for_no_more_than_is_left(steps, max_tokens, counts):
    run = Driven({"server": both(steps=steps)})
    actions = run.arrive(0, 3, max_tokens) + run.drain()
    decodes = [step for step in of_type(Step, actions) if step.decodes]
    assert [step.decodes[0].count for step in decodes] == [step.steps for step in decodes] == counts
    positions = [2 + 1 + sum(counts[:i]) for i in range(len(counts))]
    assert [step.decodes[0].position for step in decodes] == positions
    run.check()


def test_the_longest_count_sets_a_steps_iterations_and_a_chunk_sets_one():
    run = Driven({"server": both(steps=3, mixed=True)})
    run.arrive(0, 3, max_tokens=6)
    run.arrive(1, 3, max_tokens=3)
    (mixed,) = of_type(Step, run.end_step())
    assert (mixed.steps, mixed.decodes) == (1, (join(0, 3),))
    (step,) = run.end_step()
    assert step.steps == 3
    assert step.decodes == (Decode(0, 0, 4, count=3), join(1, 3, count=2))
    run.drain()
    run.check()


def test_a_stop_within_k_iterations_counts_the_tokens_up_to_it():
    run = Driven({"server": both(steps=4)}, stops={0: 3})
    actions = run.arrive(0, 3, max_tokens=9) + run.drain()
    assert of_type(Finish, actions) == [Finish(0, "stop", 3)]
    run.check()


# --- lag -----------------------------------------------------------------------------------


def test_with_a_lag_a_second_step_leaves_before_the_first_is_seen():
    run = Driven({"server": both(lag=1)})
    run.arrive(0, 3, max_tokens=4)
    assert work(run.end_step()) == [
        ("server/0", (join(0, 3),)),
        ("server/0", (Decode(0, 0, position=4),)),
    ]
    assert work(run.end_step()) == [("server/0", (Decode(0, 0, position=5),))]
    assert run.end_step() == []  # all 4 tokens are on their way
    assert kinds(run.end_step()) == ["Finish", "Release"]
    run.check()


def test_with_a_lag_a_slot_is_free_only_after_the_step_too_many():
    run = Driven({"server": both(lag=1, slots=1)}, stops={0: 2})
    run.arrive(0, 3, max_tokens=9)
    run.arrive(1, 3, max_tokens=2)
    run.end_step()
    assert run.end_step() == [Finish(0, "stop", 2)]  # another step for its slot is on its way
    assert kinds(run.end_step()) == ["Release", "Hold", "Step"]
    run.drain()
    run.check()


def test_with_a_lag_two_prompts_may_be_computed_at_once():
    run = Driven({"prefill": prefill(lag=1), "decode": decode()})
    assert kinds(run.arrive(0)) == ["Hold", "Hold", "Step"]
    assert kinds(run.arrive(1)) == ["Hold", "Hold", "Step"]
    assert kinds(run.arrive(2)) == []
    run.drain()
    run.check()


# --- several instances -----------------------------------------------------------------------


@pytest.mark.parametrize("router", ["round_robin", "shortest_queue"])
def test_requests_go_to_every_prefill_instance(router):
    run = Driven(PLACEMENTS["2P1D"], prefill_router=router)
    actions = [action for rid in range(4) for action in run.arrive(rid, 3, 2)] + run.drain()
    prefills = [s.instance for s in of_type(Step, actions) if s.chunks]
    assert prefills == ["prefill/0", "prefill/1", "prefill/0", "prefill/1"]
    run.check()


@pytest.mark.parametrize("router", ["round_robin", "shortest_queue"])
def test_requests_go_to_every_decode_instance(router):
    run = Driven(PLACEMENTS["1P2D"], decode_router=router)
    for rid in range(4):
        run.arrive(rid, 3, max_tokens=6)
    run.drain()
    homes = [hold.handle.pool for hold in of_type(Hold, (r.body for r in run.log))]
    assert [home for home in homes if home.startswith("decode")] == [
        "decode/0", "decode/1", "decode/0", "decode/1",
    ]  # fmt: skip
    run.check()


def test_a_full_decode_instance_is_passed_over():
    run = Driven(PLACEMENTS["1P2D"], decode_router="round_robin")
    homes = []
    for rid, max_tokens in enumerate([13, 2, 4]):  # 5 pages, 1 page, 2 pages
        run.arrive(rid, 3, max_tokens)
        run.end_step("prefill")
        homes.append(run.flying[min(run.flying)].target)
        run.land()
    assert homes == ["decode/0", "decode/1", "decode/1"]
    run.drain()
    run.check()


def test_the_shortest_queue_forgets_what_a_prefill_instance_has_done():
    run = Driven(PLACEMENTS["2P1D"])
    run.arrive(0, prompt_len=6)
    run.end_step()  # prefill/0 is idle again, though the request is open
    (step,) = of_type(Step, run.arrive(1))
    assert step.instance == "prefill/0"
    run.drain()
    run.check()


# --- names -----------------------------------------------------------------------------------


@ALL
def test_two_requests_of_one_client_stay_apart(name):
    run = Driven(PLACEMENTS[name], stops={1: 2})
    run.arrive(0, max_tokens=4)
    run.arrive(1, max_tokens=4)
    clients = [arrived.request.client_id for arrived in of_type(Arrived, (r.body for r in run.log))]
    assert clients[0] == clients[1]
    finishes = of_type(Finish, run.drain())
    assert {f.rid: (f.reason, f.tokens) for f in finishes} == {0: ("length", 4), 1: ("stop", 2)}
    run.check()


def test_handles_carry_the_layout_of_their_pool():
    layouts = {"prefill/0": "wide", "decode/0": "narrow"}
    scheduler = Scheduler(PLACEMENTS["1P1D"], context=40, layouts=layouts)
    holds = of_type(Hold, scheduler.on_event(Arrived(request(0)), 0))
    assert {hold.handle.pool: hold.handle.layout for hold in holds} == layouts
