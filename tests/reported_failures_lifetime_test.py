"""What users of disaggregated servers reported about pages that were freed too early or never, and
a first design's pitfalls: each behaviour on a case of a few pages. Pools have pages of 3 tokens.

Reports of the same kind that need real arrays are in reported_failures_on_arrays_test.py. Those
about virtual page numbers after compaction do not apply: no page is ever moved.
"""

import dataclasses

import pytest
from decision_helpers import PLACEMENTS, Driven, both, decode, kinds, of_type, pool, prefill

from pdjax.core.config import Cache, Recovery
from pdjax.core.events import (
    AbortAsked,
    Finish,
    Hold,
    Release,
    Retry,
    Reuse,
    Send,
    Step,
)
from pdjax.core.ledger import Ledger, StaleAddress

CACHE = Cache(prefix=True, block=3)
SHORT = {"prefill": prefill(), "decode": decode(pool=pool(3))}  # room for one request at a time


def holders(actions, where: str) -> list[int]:
    return [hold.handle.rid for hold in of_type(Hold, actions) if hold.handle.pool == where]


# --- pages that something still writes or reads ------------------------------------------------


def test_pages_of_an_aborted_hand_off_have_no_new_owner_until_its_writes_are_done():
    run = Driven(SHORT, groups=2)
    run.arrive(0, prompt_len=6, max_tokens=3)
    run.arrive(1, prompt_len=6, max_tokens=3)
    run.end_step()
    run.land()  # half of request 0 is there
    aborted = run.abort(0)
    assert kinds(aborted)[:2] == ["Finish", "Cancel"]
    assert 1 not in holders(aborted + run.end_step(), "decode/0")
    last = run.land()  # its writes land though it is long over
    assert kinds(last).index("Release") < kinds(last).index("Hold")
    assert holders(last, "decode/0") == [1]
    run.drain()
    run.check()


def test_pages_of_an_aborted_load_stay_on_both_sides_until_the_load_has_ended():
    run = Driven({"prefill": prefill(instances=2), "decode": decode()}, cache=CACHE,
                 prefill_router="round_robin")  # fmt: skip
    run.arrive(0, text=range(9), max_tokens=1)
    run.drain()
    loading = run.arrive(1, text=range(9), max_tokens=1)
    (load,) = of_type(Send, loading)
    assert (load.purpose, load.source, load.target) == ("load", "prefill/0", "prefill/1")
    assert not of_type(Release, run.abort(1))
    released = {(r.rid, r.pool) for r in of_type(Release, run.fail())}
    assert released == {(1, "prefill/0"), (1, "prefill/1")}
    run.check()


def test_a_step_that_is_on_its_way_keeps_the_pages_of_an_aborted_request():
    run = Driven({"server": both(lag=1)})
    run.arrive(0, prompt_len=3, max_tokens=9)
    run.end_step()
    assert len(run.running) == 2
    assert kinds(run.abort(0)) == ["Finish"]
    assert run.end_step() == []
    assert kinds(run.end_step()) == ["Release"]
    run.check()


def test_a_chunk_leaves_only_when_it_has_been_computed():
    run = Driven({"prefill": prefill(chunk=3), "decode": decode()}, schedule="chunkwise")
    first = run.arrive(0, prompt_len=8, max_tokens=2)
    left = [[(s.start, s.length) for s in of_type(Send, first)]]
    for _ in range(3):
        left.append([(s.start, s.length) for s in of_type(Send, run.end_step("prefill"))])
    assert left == [[], [(0, 3)], [(3, 3)], [(6, 2)]]
    run.drain()
    run.check()


def test_a_prefill_slab_is_freed_when_the_last_piece_has_landed_and_not_before():
    run = Driven(PLACEMENTS["1P1D"], groups=3, schedule="whole")
    run.arrive(0, prompt_len=6, max_tokens=2)
    run.end_step()
    assert [of_type(Release, run.land()) for _ in range(3)] == [[], [], [Release(0, "prefill/0")]]
    run.drain()
    run.check()


# --- pages that nobody frees ---------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["recompute", "fail"])
@pytest.mark.parametrize("side", ["prefill/0", "decode/0"])
def test_pages_come_back_when_the_other_side_dies_amid_a_hand_off(side, failure):
    run = Driven(PLACEMENTS["1P1D"], groups=2, recovery=Recovery(failure))
    run.arrive(0)
    run.end_step()
    run.land()
    actions = run.down(side, returns=True)
    assert {r.pool for r in of_type(Release, actions)} == {"prefill/0", "decode/0"}
    again = of_type(Retry, actions), of_type(Finish, actions)
    assert [len(some) for some in again] == ([1, 0] if failure == "recompute" else [0, 1])
    run.up(side)
    run.drain()
    run.check()


@pytest.mark.parametrize("abort", [False, True])
def test_an_end_that_is_told_twice_or_after_an_abort_changes_nothing(abort):
    run = Driven(PLACEMENTS["1P1D"], groups=2)
    run.arrive(0)
    step, sends = next(iter(run.running.values())), sorted(run.flying)
    if abort:
        run.abort(0)
    told = [run.done(step), *(run.landed(send) for send in sends)]
    for event in told:
        run.tell(event)
        assert run.tell(event) == []
    run.drain()
    assert [run.tell(event) for event in told] == [[], [], []]
    assert run.abort(0) == []
    run.check()


@pytest.mark.parametrize("order", [0, 1])
def test_an_abort_and_an_end_in_one_moment_free_the_same_in_either_order(order):
    run = Driven(PLACEMENTS["1P1D"])
    run.arrive(0)
    run.end_step()
    events = [AbortAsked(0), run.landed(min(run.flying))]
    run.tell_together(events if order else events[::-1])
    run.drain()
    released = {(r.body.rid, r.body.pool) for r in run.log if isinstance(r.body, Release)}
    assert released == {(0, "prefill/0"), (0, "decode/0")}
    run.check()


def test_nothing_is_left_where_a_cached_prefix_changes_the_chunks():
    """Of three chunks the first is cached: two are computed, and every page comes back."""
    run = Driven({"prefill": prefill(chunk=3), "decode": decode()}, cache=CACHE)
    run.arrive(0, text=range(4), max_tokens=1)
    run.drain()
    actions = run.arrive(1, text=range(8), max_tokens=2) + run.drain()
    assert of_type(Reuse, actions) == [Reuse(1, "prefill/0", 3, "local")]
    chunks = [(c.start, c.length) for step in of_type(Step, actions) for c in step.chunks]
    assert chunks == [(3, 3), (6, 2)]
    moved = sum(s.length for step in of_type(Step, actions) for s in step.sends)
    moved += sum(s.length for s in of_type(Send, actions))
    assert moved == 8  # the part that was not computed too
    run.check()


# --- leases --------------------------------------------------------------------------------------


def test_kv_that_waits_for_its_place_longer_than_a_lease_is_still_there():
    """A lease is for what is on its way; what waits is held."""
    run = Driven(PLACEMENTS["1P1D"], recovery=Recovery(lease_s=20e-9))
    run.down("decode/0", returns=True)
    run.arrive(0, prompt_len=6, max_tokens=3)
    run.end_step()  # computed, and there is no place
    run.now += 1000
    run.up("decode/0")
    actions = run.drain()
    assert of_type(Finish, actions) == [Finish(0, "length", 3)]
    assert not of_type(Step, (a for a in actions if isinstance(a, Step) and a.chunks))
    run.check()


def test_a_lost_completion_runs_into_the_lease_and_is_cancelled_before_pages_come_back():
    run = Driven(PLACEMENTS["1P1D"], recovery=Recovery(lease_s=50e-9))
    run.arrive(0)
    run.end_step()
    run.drop()
    late = run.wait()
    assert kinds(late)[:2] == ["Retry", "Cancel"] and not of_type(Release, late)
    answered = run.fail()
    assert {r.pool for r in of_type(Release, answered)} == {"prefill/0", "decode/0"}
    (finish,) = of_type(Finish, run.drain())
    assert finish == Finish(0, "length", 3)
    run.check()


def test_a_piece_that_lands_in_the_last_moment_renews_the_lease():
    run = Driven(PLACEMENTS["1P1D"], groups=2, recovery=Recovery(lease_s=50e-9))
    run.arrive(0)
    run.end_step()
    left_at = run.now - 1
    run.now = left_at + 50 - 1
    assert not of_type(Retry, run.land())  # and the alarm, in the same nanosecond
    assert not of_type(Retry, run.land())
    run.drain()
    run.check()


def test_a_second_turn_after_the_cache_forgot_computes_all_again():
    forgetful = dataclasses.replace(CACHE, retention_s=10e-9)
    reused = []
    for pause in (0, 100):
        run = Driven(PLACEMENTS["1P1D"], cache=forgetful)
        run.arrive(0, text=range(6), max_tokens=1)
        run.drain()
        run.now += pause
        actions = run.arrive(1, text=range(9), max_tokens=1) + run.drain()
        reused.append([reuse.tokens for reuse in of_type(Reuse, actions)])
        assert of_type(Finish, actions) == [Finish(1, "length", 1)]
        run.check()
    assert reused == [[6], []]


# --- addresses -----------------------------------------------------------------------------------


def test_an_address_is_a_pool_and_a_page_and_a_generation():
    one, other = (Ledger(name, pages=4, page_size=3, form="pages") for name in ("one", "other"))
    handle = one.hold(0, 6)
    with pytest.raises(StaleAddress, match=r"`one`.*`other`"):
        other.check(handle)
    one.check(handle)
    one.release(handle)
    again = one.hold(1, 12)
    assert set(handle.pages) <= set(again.pages)
    with pytest.raises(StaleAddress, match="generation"):
        one.check(handle)


def test_more_tokens_than_the_handle_has_room_for_are_never_asked_for():
    """A hand-off of 9 tokens into room for 8 cannot come up: decode pages cover prompt and output
    (or growth) before anything leaves, whatever the two page sizes."""
    placement = {"prefill": prefill(), "decode": decode(growth=1, steps=3)}
    for prompt_len in range(1, 13):
        run = Driven(placement)
        run.arrive(0, prompt_len, max_tokens=4)
        run.drain()
        run.check()  # the referee measures every write against the capacity


def test_page_classes_serve_short_and_long_outputs_from_one_pool():
    """8 of 10 outputs have less than 10 tokens, 2 have more than 100: small blocks for the first,
    large ones for the others, one pool, and all of it comes back."""
    classes = pool(120)
    classes = dataclasses.replace(classes, classes=(3, 12, 48))
    placement = {"prefill": prefill(), "decode": decode(pool=classes, slots=10)}
    run = Driven(placement)
    for rid in range(10):
        run.arrive(rid, prompt_len=6, max_tokens=30 if rid % 5 == 0 else 4)
    run.drain()
    run.check()
