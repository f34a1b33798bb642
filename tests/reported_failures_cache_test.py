"""What users of disaggregated servers reported about prefix caches that do not fit the hand-off.
Blocks are pages of 3 tokens; the referee follows which token of which text every page holds, so a
hit that is one token off is an error in any of these.

That hashes are the same in every process is in prefix_test.py; first tokens after full hits, on
arrays, are in reported_failures_on_arrays_test.py.
"""

import itertools
from collections import Counter

import pytest
from decision_helpers import PLACEMENTS, Driven, both, decode, of_type, pool, prefill

from pdjax.core.config import Cache
from pdjax.core.events import Hold, Release, Reuse, Send, Step

CACHE = Cache(prefix=True, block=3)
LOCAL = Cache(prefix=True, block=3, remote=False)


def reused(actions) -> dict[str, int]:
    tokens = Counter()
    for reuse in of_type(Reuse, actions):
        tokens[reuse.how] += reuse.tokens
    return dict(tokens)


def sent(actions) -> list[tuple[int, int]]:
    pieces = of_type(Send, actions) + [s for step in of_type(Step, actions) for s in step.sends]
    return sorted((s.start, s.length) for s in pieces if s.purpose == "hand_off")


@pytest.mark.parametrize("length", range(1, 10))
def test_a_prompt_that_comes_twice_moves_only_what_the_decode_pool_lacks(length):
    """Also prompts shorter than a block, of whole blocks, and one token less or more. The prefill
    pool is free afterwards even where nothing had to be sent."""
    run = Driven(PLACEMENTS["1P1D"], cache=LOCAL)
    text = range(length)
    run.arrive(0, text=text, max_tokens=2)
    run.drain()
    actions = run.arrive(1, text=text, max_tokens=2) + run.drain()
    local, target = 3 * ((length - 1) // 3), 3 * (length // 3)
    expected = {"local": local, "target": target}
    assert reused(actions) == {how: tokens for how, tokens in expected.items() if tokens}
    assert sum(count for _, count in sent(actions)) == length - target
    assert Release(1, "prefill/0") in actions
    run.check()


def test_prefill_may_have_more_of_a_text_than_decode():
    """A first answer of one token leaves KV on the prefill side only."""
    run = Driven(PLACEMENTS["1P1D"], cache=LOCAL)
    run.arrive(0, text=range(7), max_tokens=1)
    run.drain()
    actions = run.arrive(1, text=range(8), max_tokens=2) + run.drain()
    assert reused(actions) == {"local": 6}
    assert sum(count for _, count in sent(actions)) == 8
    run.check()


def test_decode_may_have_more_of_a_text_than_prefill():
    """The second turn goes on with tokens that only the decode pool has; the prefill pool loads
    them from there, or computes them where the cache is local."""
    answer = range(5)  # what `counting` says
    for cache, expected in [(LOCAL, {"local": 3}), (CACHE, {"local": 3, "remote": 3})]:
        run = Driven(PLACEMENTS["1P1D"], cache=cache)
        run.arrive(0, text=(7, 7, 7, 7), max_tokens=5)
        run.drain()
        second = run.arrive(1, text=(7, 7, 7, 7, *answer, 7), max_tokens=2) + run.drain()
        assert reused(second) == expected | {"target": 6}
        run.check()


@pytest.mark.parametrize("length", [5, 6, 7])
def test_the_first_token_of_prefill_shifts_no_position(length):
    """Generated tokens continue the text where the prompt ended, amid a block or at its end."""
    run = Driven({"server": both()}, cache=CACHE)
    run.arrive(0, text=(7,) * length, max_tokens=8)
    run.drain()
    text = (*(7,) * length, *range(8))
    actions = run.arrive(1, text=text[:15], max_tokens=2) + run.drain()
    stored = length + 7  # the last token was never fed back
    assert reused(actions) == {"local": min(3 * (stored // 3), 12)}
    run.check()


def test_pools_that_are_split_hit_as_often_as_one_pool():
    """20 requests with the same 8 tokens before others of their own."""

    def served(name: str) -> dict[str, int]:
        run = Driven(PLACEMENTS[name], cache=LOCAL)
        for rid in range(20):
            run.arrive(rid, text=(*(7,) * 8, rid), max_tokens=2)
            run.drain()
        run.check()
        return reused(record.body for record in run.log)

    one, two = served("collocated"), served("1P1D")
    assert one == {"local": 19 * 6}
    assert two == {"local": 19 * 6, "target": 19 * 6}


@pytest.mark.parametrize("router", ["round_robin", "shortest_queue"])
def test_a_prefix_that_all_share_does_not_bring_all_to_one_instance(router):
    run = Driven({"prefill": prefill(instances=2, pool=pool(12)), "decode": decode()},
                 cache=CACHE, prefill_router=router)  # fmt: skip
    for rid in range(100):
        run.arrive(rid, text=(7, 7, 7, rid), max_tokens=1)
    run.drain()
    run.check()
    homes = Counter(s.instance for s in of_type(Step, (r.body for r in run.log)) for _ in s.chunks)
    assert abs(homes["prefill/0"] - homes["prefill/1"]) <= 10


def test_which_pool_lends_a_prefix_is_a_rule_and_not_chance():
    """The one that has most of it; the first of equals, in the placement's order."""
    lenders = []
    for _ in range(2):
        run = Driven(
            {"prefill": prefill(instances=3, pool=pool(12)), "decode": decode()},
            cache=CACHE, prefill_router="round_robin",
        )  # fmt: skip
        for rid, length in enumerate([4, 10, 10]):
            run.arrive(rid, text=range(length), max_tokens=1)
            run.drain()
        loads = of_type(Send, (record.body for record in run.log))
        lenders.append([(send.source, send.target, send.start, send.length) for send in loads])
        run.check()
    assert lenders[0] == lenders[1] == [
        ("prefill/0", "prefill/1", 0, 3), ("prefill/1", "prefill/2", 0, 9),
    ]  # fmt: skip


def test_what_is_shared_is_not_evicted_under_its_readers():
    """A pool of 6 pages, 3 of them shared by two: a third request waits and does not take them."""
    run = Driven({"server": both(slots=3)}, cache=CACHE)
    run.arrive(0, text=(7,) * 10, max_tokens=3)
    run.end_step()
    run.end_step()
    run.arrive(1, text=(*(7,) * 9, 8), max_tokens=3)
    run.end_step()
    waits = run.arrive(2, text=range(8), max_tokens=2)
    assert not of_type(Hold, waits)
    run.drain()
    run.check()


def test_many_texts_through_a_small_pool_evict_each_other_and_end():
    run = Driven(PLACEMENTS["1P1D"], cache=CACHE)
    for rid, (first, length) in enumerate(itertools.product([7, 8, 9], [3, 7, 12])):
        run.arrive(rid, text=(first,) * length, max_tokens=3)
    run.drain()
    run.check()
