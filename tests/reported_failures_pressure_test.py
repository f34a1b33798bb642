"""What users of disaggregated servers reported about memory that runs out, waiting that never ends,
and first and last tokens. Pages have 3 tokens.

Does not apply: draft models, grammars and penalties (none here), multi-process ranks, pipeline
stages, and advice when not to split (that is what comparing placements is for). Instances that
change their jobs with requests in flight: switching_test.py and switching_on_arrays_test.py.
"""

import pytest
from decision_helpers import (
    MS,
    PLACEMENTS,
    Driven,
    both,
    check_run,
    decode,
    kinds,
    of_type,
    pool,
    prefill,
    request,
    scheduler_for,
    served,
)

from pdjax.core.events import Finish, Hold, Landed, Preempt, Refuse, Send, Step, StepDone

ALL = pytest.mark.parametrize("name", PLACEMENTS)
HOW = pytest.mark.parametrize("how", ["recompute", "return", "swap"])


def finished(actions) -> dict[int, tuple[str, int]]:
    return {f.rid: (f.reason, f.tokens) for f in of_type(Finish, actions)}


# --- memory runs out -----------------------------------------------------------------------------


@HOW
def test_where_a_preempted_request_goes_on_is_what_its_role_says(how):
    """Two that grow to 6 pages each, in 8: one is preempted, and both get all their tokens."""
    role = decode(pool=pool(8), growth=1, preempt=how, swap_tokens=30)
    run = Driven({"prefill": prefill(), "decode": role})
    for rid in range(2):
        run.arrive(rid, prompt_len=6, max_tokens=13)
    actions = run.drain()
    assert finished(actions) == {0: ("length", 13), 1: ("length", 13)}
    preempted = of_type(Preempt, actions)
    assert preempted and {(p.rid, p.instance, p.how) for p in preempted} == {(1, "decode/0", how)}
    later = actions[actions.index(preempted[0]) :]
    prefilled = {step.instance for step in of_type(Step, later) if step.chunks}
    assert prefilled == {"recompute": {"decode/0"}, "return": {"prefill/0"}, "swap": set()}[how]
    purposes = {send.purpose for send in of_type(Send, later)}
    assert ("swap_out" in purposes and "swap_in" in purposes) == (how == "swap")
    run.check()


def test_where_host_memory_is_full_a_preempted_request_is_computed_again():
    role = decode(pool=pool(8), growth=1, preempt="swap", swap_tokens=3)
    run = Driven({"prefill": prefill(), "decode": role})
    for rid in range(2):
        run.arrive(rid, prompt_len=6, max_tokens=13)
    actions = run.drain()
    assert {preempt.how for preempt in of_type(Preempt, actions)} == {"recompute"}
    assert finished(actions) == {0: ("length", 13), 1: ("length", 13)}
    run.check()


def test_a_preempted_request_never_asks_for_the_kv_that_prefill_gave_away():
    """Its hand-off was one of a kind: sent back, the text is computed and sent anew."""
    role = decode(pool=pool(8), growth=1, preempt="return")
    run = Driven({"prefill": prefill(), "decode": role}, schedule="whole")
    for rid in range(2):
        run.arrive(rid, prompt_len=6, max_tokens=13)
    actions = run.drain()
    holds = [h.handle for h in of_type(Hold, (r.body for r in run.log)) if h.handle.rid == 1]
    assert [handle.pool for handle in holds] == ["prefill/0", "decode/0"] * 2
    again = [s for s in of_type(Send, actions) if s.rid == 1][-1]
    assert again.length > 6  # prompt and the tokens that it had
    run.check()


@pytest.mark.parametrize("first", [0, 1])
@HOW
def test_two_hand_offs_that_fill_the_pool_do_not_wait_for_each_other(how, first):
    """7 pages; A needs 4 and one more, B 3 and one more; both are on their way at once."""
    role = decode(pool=pool(7), growth=1, preempt=how, swap_tokens=30)
    run = Driven({"prefill": prefill(pool=pool(8), prefills=2, chunk=21), "decode": role})
    run.arrive(0, prompt_len=10, max_tokens=6)
    run.arrive(1, prompt_len=7, max_tokens=6)
    run.end_step("prefill")
    run.end_step("prefill")
    flights = {send.rid: send.id for send in run.flying.values()}
    assert flights.keys() == {0, 1}
    actions = run.land(flights[first]) + run.drain()
    assert finished(actions) == {0: ("length", 6), 1: ("length", 6)}
    run.check()


@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_a_prompt_that_no_pool_can_hold_is_refused_when_it_comes_and_never_waits(small):
    pools = {"prefill": prefill(pool=pool(10)), "decode": decode(pool=pool(10))}
    pools[small] = {"prefill": prefill, "decode": decode}[small](pool=pool(4))
    run = Driven(pools)
    (refuse,) = run.arrive(0, prompt_len=13, max_tokens=2)
    assert isinstance(refuse, Refuse)
    assert f"pool `{small}/0` has 4 pages" in refuse.why
    run.arrive(1, prompt_len=3)
    run.drain()
    run.check()


def test_chunks_pass_through_where_prefill_waits_for_a_full_decode_pool():
    """Neither side holds what the other needs: with one credit, many requests go through."""
    run = Driven({"prefill": prefill(prefills=2), "decode": decode(pool=pool(4))}, credits=1)
    for rid in range(8):
        run.arrive(rid, prompt_len=8, max_tokens=3)
    assert finished(run.drain()) == dict.fromkeys(range(8), ("length", 3))
    run.check()


# --- waiting --------------------------------------------------------------------------------------


def test_many_at_once_over_one_link_all_get_through():
    requests = [request(rid, prompt_len=4, max_tokens=2) for rid in range(32)]
    scheduler = scheduler_for(PLACEMENTS["1P1D"])
    log = served(scheduler, requests)
    check_run(log, PLACEMENTS["1P1D"], scheduler)
    landed = [record.t_ns for record in log if isinstance(record.body, Landed)]
    assert len(landed) == 32 and landed == sorted(landed)


def test_short_prompts_behind_a_long_one_are_served_in_the_order_they_came():
    """One of 17 tokens, nine of 2: first come, first served, and with a budget for several prompts
    the short ones share the long one's last chunk."""
    run = Driven({"prefill": prefill(pool=pool(24), prefills=4), "decode": decode(pool=pool(24))})
    actions = run.arrive(0, prompt_len=17, max_tokens=1)
    for rid in range(1, 10):
        actions += run.arrive(rid, prompt_len=2, max_tokens=1)
    actions += run.drain()
    assert [finish.rid for finish in of_type(Finish, actions)] == list(range(10))
    chunks = [[c.rid for c in step.chunks] for step in of_type(Step, actions)]
    assert chunks[:4] == [[0], [0], [0], [1, 2, 3]]
    run.check()


def test_two_prefill_instances_that_are_asked_at_once_get_about_as_much():
    """No signal is late: the router sees what it has given out itself."""
    run = Driven({"prefill": prefill(instances=2), "decode": decode()})
    for rid in range(83):
        run.arrive(rid, prompt_len=3, max_tokens=1)
    loads = [i.load.requests for i in run.scheduler.instances.values() if i.role.prefills_here]
    assert sorted(loads) == [41, 42]
    run.drain()
    run.check()


def test_finished_transfers_do_not_wait_behind_one_that_is_still_on_its_way():
    run = Driven(PLACEMENTS["1P1D"], schedule="whole")
    for rid in range(2):
        run.arrive(rid, prompt_len=6, max_tokens=3)
        run.end_step("prefill")
    late, early = sorted(run.flying)
    decoded = [d.rid for step in of_type(Step, run.land(early)) for d in step.decodes]
    assert decoded == [1]
    run.land(late)
    run.drain()
    run.check()


# --- first and last tokens -----------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_every_request_gets_as_many_tokens_as_it_asked_for(name, max_tokens):
    run = Driven(PLACEMENTS[name])
    actions = run.arrive(0, max_tokens=max_tokens) + run.drain()
    assert finished(actions) == {0: ("length", max_tokens)}
    said = [t for r in run.log for e in getattr(r.body, "emitted", ()) for t in e.tokens]
    assert said == list(range(max_tokens))  # no position is sampled twice
    run.check()


@pytest.mark.parametrize("name", ["two_pools", "1P1D", "2P1D", "1P2D"])
def test_one_token_moves_nothing_and_takes_no_decode_pages(name):
    run = Driven(PLACEMENTS[name])
    assert kinds(run.arrive(0, max_tokens=1) + run.drain()) == ["Hold", "Step", "Finish", "Release"]
    run.check()


@ALL
@pytest.mark.parametrize(("stops", "max_tokens"), [(1, 1), (1, 2), (2, 2), (1, 5)])
def test_a_stop_at_the_hand_over_counts_as_a_stop(name, stops, max_tokens):
    """Also where the same token is the last that was asked for."""
    run = Driven(PLACEMENTS[name], stops={0: stops})
    actions = run.arrive(0, max_tokens=max_tokens) + run.drain()
    assert finished(actions) == {0: ("stop", stops)}
    run.check()


def test_the_first_token_is_said_by_prefill_and_once():
    scheduler = scheduler_for(PLACEMENTS["1P1D"])
    log = served(scheduler, [request(0, prompt_len=4, max_tokens=3)])
    said = [
        (record.t_ns // MS, record.body.instance, emitted.tokens)
        for record in log
        if isinstance(record.body, StepDone)
        for emitted in record.body.emitted
    ]
    # 10 ms and 1 ms per token; the prompt's KV takes 2 ms and 1 ms per token from there on
    assert said == [(14, "prefill/0", (0,)), (31, "decode/0", (1,)), (42, "decode/0", (2,))]


@ALL
def test_empty_prompts_and_no_tokens_are_refused_and_touch_no_pool(name):
    run = Driven(PLACEMENTS[name])
    for rid, (prompt_len, max_tokens) in enumerate([(0, 3), (4, 0), (0, 0)]):
        assert kinds(run.arrive(rid, prompt_len, max_tokens)) == ["Refuse"]
    assert finished(run.arrive(3, prompt_len=1, max_tokens=2) + run.drain()) == {3: ("length", 2)}
    run.check()


def test_a_prompt_of_three_chunks_ends_also_where_it_is_alone_and_computed_again():
    role = both(chunk=3, growth=1, pool=pool(5))
    run = Driven({"server": role})
    run.arrive(0, prompt_len=8, max_tokens=6)
    run.arrive(1, prompt_len=3, max_tokens=6)
    assert finished(run.drain()) == {0: ("length", 6), 1: ("length", 6)}
    run.check()
