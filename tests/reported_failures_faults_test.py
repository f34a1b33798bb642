"""What users of disaggregated servers reported about aborts, failures amid a hand-off and instances
that die: nobody waits for ever, both sides are told, and every page comes back.

Does not apply: routers and proxies between the two sides (one scheduler owns a request all the
way), ranks and retries of data-parallel groups, heartbeats (a death is an event).
"""

import pytest
from decision_helpers import PLACEMENTS, Driven, decode, kinds, of_type, pool, prefill, request

from pdjax.core.config import Recovery
from pdjax.core.events import Arrived, Finish, Refuse, Release, Retry, Step

BOTH_POOLS = {"prefill/0", "decode/0"}


def pools_of(actions) -> set[str]:
    return {release.pool for release in of_type(Release, actions)}


# --- aborts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("amid", ["queued", "prefill", "sending", "decode"])
def test_an_abort_is_over_for_both_sides_with_the_last_thing_on_its_way(amid):
    run = Driven(PLACEMENTS["1P1D"], schedule="whole")
    if amid == "queued":
        run.arrive(1, prompt_len=17, max_tokens=1)
    run.arrive(0, prompt_len=6, max_tokens=5)
    if amid in ("sending", "decode"):
        run.end_step()
    if amid == "decode":
        run.land()
    actions = run.abort(0)
    assert of_type(Finish, actions) == [Finish(0, "abort", int(amid in ("sending", "decode")))]
    if amid == "sending":
        actions += run.fail()  # as asked
    elif amid != "queued":
        actions += run.end_step()
    held = {"queued": set(), "decode": {"decode/0"}}
    assert pools_of(actions) == held.get(amid, BOTH_POOLS)
    run.drain()
    run.check()


@pytest.mark.parametrize("computed", [False, True])
def test_a_client_that_leaves_before_decode_is_asked_frees_prefill_at_once(computed):
    """Between the two sides nobody is without an owner: no place is free, and it gives up."""
    run = Driven({"prefill": prefill(), "decode": decode(pool=pool(4))})
    run.arrive(0, prompt_len=6, max_tokens=7)  # all decode pages
    run.end_step()
    run.arrive(1, prompt_len=5, max_tokens=3)
    if computed:
        run.end_step("prefill")
        assert kinds(run.abort(1)) == ["Finish", "Release"]
    else:
        assert kinds(run.abort(1)) == ["Finish"]
        assert pools_of(run.end_step("prefill")) == {"prefill/0"}
    run.drain()
    run.check()


# --- pieces that do not arrive --------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
@pytest.mark.parametrize("kth", range(6))
def test_whichever_piece_fails_no_part_of_the_kv_is_used(kth, on_failure):
    """Three groups of two chunks. The whole request is computed again, or it fails."""
    run = Driven(PLACEMENTS["1P1D"], groups=3, recovery=Recovery(on_failure))
    run.arrive(0, prompt_len=8, max_tokens=3)
    actions = run.end_step() + run.end_step()
    for number in range(kth):
        actions += run.land(number)
    actions += run.fail(kth, "checksum")
    assert not [d for step in of_type(Step, actions) for d in step.decodes]
    actions += run.drain()
    (finish,) = of_type(Finish, actions)
    if on_failure == "fail":
        assert (finish.reason, finish.tokens) == ("failed", 1) and "checksum" in finish.why
    else:
        assert finish == Finish(0, "length", 3)
        assert of_type(Retry, actions) == [Retry(0, "checksum")]
        again = [c for step in of_type(Step, actions) for c in step.chunks if c.start == 0]
        assert len(again) == 1  # the prompt and the token that it had, from the beginning
    run.check()


def test_what_fails_again_and_again_is_given_up():
    run = Driven(PLACEMENTS["1P1D"], recovery=Recovery(attempts=2))
    run.arrive(0, max_tokens=9)
    actions = []
    for _ in range(3):
        actions += run.end_step("prefill") + run.fail()
    assert len(of_type(Retry, actions)) == 2
    (finish,) = of_type(Finish, actions)
    assert finish.reason == "failed" and finish.why == "the link broke"
    run.check()


def test_a_completion_that_never_comes_gives_slot_and_pages_back():
    """Lost in any state of the hand-off, also while other requests keep all sides busy."""
    run = Driven(
        {"prefill": prefill(), "decode": decode(slots=1)},
        groups=2,
        recovery=Recovery(lease_s=60e-9),
    )
    run.arrive(0)
    run.end_step()
    run.drop()
    for rid in range(1, 6):
        run.arrive(rid, prompt_len=3, max_tokens=2)
    actions = run.drain()
    assert {f.rid: f.tokens for f in of_type(Finish, actions)} == {0: 3} | dict.fromkeys(
        range(1, 6), 2
    )
    run.check()


def test_a_long_prompt_crosses_in_pieces_of_a_chunk():
    run = Driven({"prefill": prefill(pool=pool(12)), "decode": decode(pool=pool(12))})
    actions = run.arrive(0, prompt_len=20, max_tokens=2) + run.drain()
    lengths = [send.length for step in of_type(Step, actions) for send in step.sends]
    assert lengths == [6, 6, 6, 2]
    run.check()


# --- instances that die ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prefill/0", "decode/0"])
@pytest.mark.parametrize("after", range(4))
def test_what_the_old_incarnation_still_says_is_not_believed(name, after):
    """It dies at any point of a hand-off and comes back; then its old completions arrive."""
    run = Driven(PLACEMENTS["1P1D"], groups=2)
    run.arrive(0)
    for event in ("end_step", "land", "land")[:after]:
        getattr(run, event)()
    steps, sends = dict(run.running), dict(run.flying)
    old = Driven(PLACEMENTS["1P1D"])  # only to word the events
    old.running, old.flying, old._compute = steps, sends, run._compute
    old.began = run.began
    run.down(name, returns=True)
    stale = [old.done(step) for step in list(steps.values()) if step.instance == name]
    stale += [old.landed(send) for send in list(sends)]
    run.up(name)
    for event in stale:
        assert run.tell(event) == []
    (finish,) = of_type(Finish, run.drain())
    assert finish == Finish(0, "length", 3)
    run.check()


def test_the_other_instances_go_on_where_one_dies_for_good():
    run = Driven({"prefill": prefill(instances=2), "decode": decode(instances=2)})
    for rid in range(6):
        run.arrive(rid, prompt_len=3, max_tokens=3)
    run.end_step()
    actions = run.down("prefill/0") + run.down("decode/1") + run.drain()
    used = {step.instance for step in of_type(Step, actions)}
    assert used <= {"prefill/1", "decode/0"}
    assert {f.rid: (f.reason, f.tokens) for f in of_type(Finish, actions)} == dict.fromkeys(
        range(6), ("length", 3)
    )
    run.check()


@pytest.mark.parametrize("name", ["prefill/0", "decode/0"])
def test_where_nobody_is_left_clients_are_told_why(name):
    run = Driven(PLACEMENTS["1P1D"])
    run.arrive(0)
    (finish,) = of_type(Finish, run.down(name))
    assert finish.reason == "failed" and "none will come back" in finish.why
    (refuse,) = run.arrive(1)
    assert isinstance(refuse, Refuse) and "none will come back" in refuse.why
    run.drain()
    run.check()


def test_a_decode_instance_that_dies_amid_the_output_repeats_no_token():
    """The text so far is computed again: the client gets tokens 0, 1, 2, ... once each."""
    run = Driven(PLACEMENTS["1P1D"])
    run.arrive(0, prompt_len=4, max_tokens=6)
    run.end_step()
    run.land()
    run.end_step()
    run.end_step()  # three tokens so far
    run.down("decode/0", returns=True)
    run.up("decode/0")
    run.drain()
    said = [e.tokens for r in run.log for e in getattr(r.body, "emitted", ())]
    assert [token for tokens in said for token in tokens] == list(range(6))
    run.check()


def test_a_prompt_beyond_the_limit_is_refused_alike_and_nothing_is_generated():
    told = set()
    for name in ("collocated", "1P1D", "logical_split"):
        run = Driven(PLACEMENTS[name])
        actions = run.tell(Arrived(request(0, prompt_len=40, max_tokens=1)))
        assert kinds(actions) == ["Refuse"]
        told.add(actions[0].why)
        run.check()
    assert told == {"prompt 40 + max_tokens 1 = 41 tokens exceed the context of 40"}


def test_a_failed_hand_off_of_a_text_that_prefill_cannot_hold_any_more_is_told():
    """With its first token the text is one longer than all of the prefill pool."""
    run = Driven({"prefill": prefill(pool=pool(4)), "decode": decode()})
    run.arrive(0, prompt_len=12, max_tokens=3)
    run.arrive(1, prompt_len=3, max_tokens=2)
    run.end_step()
    run.end_step()
    actions = run.fail(min(run.flying)) + run.drain()
    ends = {f.rid: f.reason for f in of_type(Finish, actions)}
    assert ends == {0: "failed", 1: "length"}
    run.check()
