"""An abort, whenever it comes, ends the request at once and frees what it held as soon as nothing
touches it. Pools have 6 pages of 3 tokens, 2 slots decode."""

import dataclasses

import pytest
from decision_helpers import PLACEMENTS, Driven, decode, kinds, of_type, prefill, work

from pdjax.core.events import Chunk, Finish, Hold, Step

ALL = pytest.mark.parametrize("name", PLACEMENTS)
TWO_POOLS = pytest.mark.parametrize("name", ["two_pools", "1P1D", "2P1D", "1P2D"])
SCHEDULES = pytest.mark.parametrize("schedule", ["layerwise", "whole"])


def test_whoever_waits_behind_an_aborted_head_starts_at_once():
    run = Driven(PLACEMENTS["1P1D"])
    run.arrive(0, prompt_len=6, max_tokens=2)
    run.end_step()  # its piece flies on: prefill has nothing to do, and 4 free pages
    assert run.arrive(1, prompt_len=15, max_tokens=2) == []
    assert run.arrive(2, prompt_len=3, max_tokens=2) == []
    assert work(run.abort(1)) == [("prefill/0", (Chunk(2, 0, 3, True),))]
    run.drain()
    run.check()


@ALL
def test_an_abort_in_the_queue_leaves_no_trace(name):
    run = Driven(PLACEMENTS[name])
    for rid in range(4):
        run.arrive(rid, prompt_len=12, max_tokens=2)
    assert run.abort(3) == [Finish(3, "abort", 0)]
    assert 3 not in {hold.handle.rid for hold in of_type(Hold, run.drain())}
    run.check()


@ALL
@SCHEDULES
def test_pages_stay_while_the_step_of_an_aborted_prompt_runs(name, schedule):
    run = Driven(PLACEMENTS[name], schedule=schedule)
    run.arrive(0, prompt_len=8)
    flying = bool(run.flying)
    finish, *cancels = run.abort(0)
    assert finish == Finish(0, "abort", 0)
    assert kinds(cancels) == ["Cancel"] * flying
    assert kinds(run.end_step()) == ([] if flying else ["Release"])
    if flying:
        assert kinds(run.land()) == ["Release", "Release"]
    assert not run.running and not run.flying
    run.check()


@ALL
def test_an_abort_between_chunks_stops_the_prefill(name):
    run = Driven(PLACEMENTS[name])
    run.arrive(0, prompt_len=14, max_tokens=2)
    run.end_step()
    run.abort(0)
    assert of_type(Step, run.drain()) == []
    run.check()


@TWO_POOLS
def test_pages_stay_on_both_sides_while_pieces_of_an_aborted_request_fly(name):
    run = Driven(PLACEMENTS[name], groups=2)
    run.arrive(0)
    run.end_step()
    assert kinds(run.abort(0)) == ["Finish", "Cancel", "Cancel"]
    assert run.land() == []  # too late to be cancelled
    assert {(r.rid, r.pool) for r in run.land()} == {(0, "prefill/0"), (0, "decode/0")}
    run.check()


def test_an_abort_while_homeless_makes_way_for_the_next():
    run = Driven(PLACEMENTS["1P1D"])
    run.arrive(0, prompt_len=6, max_tokens=7)  # 4 of 6 decode pages
    run.arrive(1, prompt_len=8, max_tokens=2)  # 3 pages: will be homeless
    for _ in range(3):
        run.end_step("prefill")
    run.arrive(2, prompt_len=2, max_tokens=2)  # 1 page: waits behind
    actions = run.abort(1)
    assert kinds(actions)[:2] == ["Finish", "Release"]
    assert [h.handle.rid for h in of_type(Hold, actions) if h.handle.pool == "decode/0"] == [2]
    run.drain()
    run.check()


def test_an_abort_while_ready_for_a_slot_leaves_the_line():
    run = Driven({"prefill": prefill(), "decode": decode(slots=1)})
    for rid in range(3):
        run.arrive(rid, prompt_len=3, max_tokens=4)
        run.end_step("prefill")
        run.land()
    assert kinds(run.abort(1)) == ["Finish", "Release"]
    decoded = [d.rid for step in of_type(Step, run.drain()) for d in step.decodes]
    assert 1 not in decoded and 2 in decoded
    run.check()


@ALL
@pytest.mark.parametrize("lag", [0, 1])
def test_an_aborted_decode_keeps_slot_and_pages_until_its_steps_are_done(name, lag):
    placement = PLACEMENTS[name].items()
    run = Driven({role: dataclasses.replace(it, lag=lag) for role, it in placement})
    run.arrive(0, prompt_len=3, max_tokens=9)
    run.end_step()
    if run.flying:
        run.land()
    assert len(run.running) == 1 + lag
    assert run.abort(0) == [Finish(0, "abort", 1)]
    for _ in range(lag):
        assert run.end_step() == []
    assert kinds(run.end_step()) == ["Release"]
    run.check()


@ALL
def test_aborts_after_the_end_or_of_strangers_are_ignored(name):
    run = Driven(PLACEMENTS[name])
    assert run.abort(0) == []  # it has not arrived
    run.arrive(0)
    run.drain()
    assert run.abort(0) == run.abort(17) == []
    run.check()


@ALL
def test_a_second_abort_changes_nothing(name):
    run = Driven(PLACEMENTS[name])
    run.arrive(0)
    run.abort(0)
    assert run.abort(0) == []
    run.drain()
    run.check()
