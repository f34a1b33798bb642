"""Orders of events that random runs meet once in thousands, each made on purpose. Pages have 3
tokens."""

from decision_helpers import PLACEMENTS, Driven, both, decode, of_type, pool, prefill

from pdjax.core.config import Cache, Recovery
from pdjax.core.events import Finish, Preempt, Retry

CACHE = Cache(prefix=True, block=3)
LEASE = Recovery(lease_s=50e-9)


def ends(actions) -> dict[int, tuple[str, int]]:
    return {f.rid: (f.reason, f.tokens) for f in of_type(Finish, actions)}


def test_one_that_is_homeless_only_when_its_last_step_ends_is_told():
    """Prefill dies for good while decode has joined early; the step ends after that."""
    run = Driven(PLACEMENTS["1P1D"], schedule="streaming", groups=2)
    run.arrive(0)
    run.end_step()
    run.land(0)  # the first group: decode begins
    actions = run.down("prefill/0") + run.drain()
    assert ends(actions)[0][0] == "failed"
    run.check()


def test_blocks_to_share_that_lie_amid_a_slab_do_not_keep_their_sharer_out():
    """Two idle blocks in pages 2 to 5, one of them shared: the 3 pages beside it are no run."""
    run = Driven({"prefill": prefill(chunk=12), "decode": decode(pool=pool(12))},
                 cache=Cache(prefix=True, block=6, remote=False))  # fmt: skip
    run.arrive(0, text=(9,) * 5, max_tokens=2, block=6)
    run.end_step("prefill")  # pages 0 and 1 are held until it has landed
    run.arrive(1, text=(7,) * 12, max_tokens=2, block=6)
    run.drain()
    actions = run.arrive(2, text=(7,) * 6 + (8,) * 7, max_tokens=2, block=6) + run.drain()
    assert ends(actions) == {2: ("length", 2)}
    run.check()


def test_a_place_is_not_taken_from_one_whose_pieces_have_landed_before_their_step_is_seen():
    placement = {
        "prefill": prefill(instances=2, pool=pool(9)),
        "decode": decode(growth=1, slots=1, steps=2),
    }
    run = Driven(placement)
    run.arrive(0, prompt_len=3, max_tokens=8)
    run.arrive(1, prompt_len=10, max_tokens=3)
    run.land(1)  # the first chunk of request 1
    run.end_step("prefill/1")  # its second leaves from inside the step that runs now
    run.end_step("prefill/0")
    run.land(0)  # request 0 decodes, and will need another page
    run.land(2)
    actions = run.end_step("decode") + run.drain()
    assert ends(actions) == {0: ("length", 8), 1: ("length", 3)}
    run.check()


def test_one_that_comes_back_from_the_host_has_room_for_a_step():
    """Three iterations in a step, and growth of one: else it leaves again before it has decoded."""
    role = decode(growth=1, steps=3, slots=3, preempt="swap", swap_tokens=12)
    run = Driven({"prefill": prefill(instances=2), "decode": role})
    run.arrive(0, prompt_len=6, max_tokens=9)
    run.arrive(1, prompt_len=7, max_tokens=9)
    assert ends(run.drain()) == {0: ("length", 9), 1: ("length", 9)}
    run.check()


def test_what_an_aborted_request_leaves_half_landed_is_not_published():
    run = Driven(PLACEMENTS["1P1D"], schedule="whole", groups=2, cache=CACHE)
    run.arrive(0, text=range(6), max_tokens=3)
    run.end_step()
    run.land(0)
    run.abort(0)
    run.down("prefill/0", returns=True)  # with the other half
    run.up("prefill/0")
    actions = run.arrive(1, text=range(7), max_tokens=3) + run.drain()
    assert ends(actions) == {1: ("length", 3)}
    run.check()


def test_a_step_that_waits_for_a_slow_piece_is_no_sign_of_death():
    run = Driven(PLACEMENTS["1P1D"], schedule="streaming", groups=2, recovery=LEASE)
    run.arrive(0)
    run.end_step()
    run.land(0)
    actions = run.wait() + run.wait()
    assert [retry.rid for retry in of_type(Retry, actions)] == [0]
    assert run.scheduler.instances["decode/0"].up
    assert ends(run.drain()) == {0: ("length", 3)}
    run.check()


def test_an_instance_may_be_told_dead_after_it_was_presumed_dead():
    run = Driven(PLACEMENTS["1P1D"], recovery=LEASE)
    run.arrive(0)
    actions = run.wait()  # its step has not ended: lost, and its piece is asked back
    actions += run.down("prefill/0")  # so nothing more comes of that piece
    assert ends(actions)[0][0] == "failed"
    run.drain()
    run.check()


def test_pages_that_are_lent_come_back_and_are_waited_for():
    """A preempted request loads its prefix from the pool that it had to leave. The oldest there
    does not give up its own pages meanwhile."""
    role = both(instances=2, pool=pool(8), growth=1, preempt="return", chunk=12)
    run = Driven({"server": role}, cache=CACHE, prefill_router="round_robin")
    run.arrive(0, text=(7,) * 4, max_tokens=12)
    run.arrive(1, text=(8,) * 3, max_tokens=1)
    run.end_step("server/1")
    run.arrive(2, text=range(14), max_tokens=8)
    actions = []
    while run.running:
        actions += run.end_step("server/0")
    assert [send.purpose for send in run.flying.values()] == ["load"]
    assert [preempt.rid for preempt in of_type(Preempt, actions)] == [2]
    assert ends(run.drain()) == {0: ("length", 12), 2: ("length", 8)}
    run.check()
