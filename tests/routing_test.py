"""Which instance gets a request."""

import typing

import pytest
from decision_helpers import request

from pdjax.core.config import Estimate, Routing
from pdjax.core.policies.routing import (
    ROUTERS,
    Load,
    cache_aware_costs,
    expected_ttfts,
    fewest_tokens,
    power_of_two,
    prefill_s,
    random,
    round_robin,
    router_of,
    shortest_queue,
)

IDLE = Load(0, 0)


def test_round_robin_cycles_whatever_the_loads():
    loads = [Load(9, 900), IDLE, Load(1, 1)]
    assert [round_robin(ticket, request(0), loads) for ticket in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("loads", "choice"),
    [
        ([IDLE], 0),
        ([Load(2, 5), Load(1, 500)], 1),  # fewer requests, though more tokens
        ([Load(1, 9), Load(1, 8), Load(1, 8)], 1),  # as many requests: fewer tokens
        ([Load(3, 7), Load(1, 2), Load(1, 2)], 1),  # all the same: the first
    ],
)
def test_the_shortest_queue_has_the_fewest_requests_then_tokens_then_comes_first(loads, choice):
    assert shortest_queue(5, request(0), loads) == choice


def test_fewest_tokens_counts_requests_last():
    assert fewest_tokens(5, request(0), [Load(1, 9), Load(7, 8), Load(3, 8)]) == 2


def test_a_random_choice_is_even_and_the_same_in_every_run():
    loads = [IDLE] * 4
    choices = [random(0, request(rid), loads) for rid in range(4000)]
    assert all(900 < choices.count(i) < 1100 for i in range(4))
    assert choices[:8] == [random(7, request(rid), loads) for rid in range(8)]


def test_of_two_drawn_candidates_the_lighter_gets_the_request():
    """Nobody is drawn twice, so of two instances the lighter always wins, and of many the heaviest
    gets what neither choice avoids: nothing."""
    assert {power_of_two(0, request(rid), [Load(0, 99), IDLE]) for rid in range(50)} == {1}
    loads = [Load(0, 10**6), *[Load(0, 10)] * 7]
    choices = [power_of_two(0, request(rid), loads) for rid in range(500)]
    assert 0 not in choices and set(choices) == set(range(1, 8))


def test_lengths_in_one_bucket_count_as_equal():
    """65 and 127 tokens are both more than 64 and no more than 128; requests decide."""
    assert {power_of_two(0, request(rid), [Load(2, 65), Load(1, 127)]) for rid in range(20)} == {1}


def test_the_documented_costs_of_a_cache_aware_router():
    """Three workers of which 2, 5 and 8 of a request's 10 blocks are cached, and that hold 10, 5
    and 9 blocks: 18, 10 and 11, so the second is chosen (Dynamo's router documentation)."""
    loads = [Load(0, 0, cached, held) for cached, held in ((2, 10), (5, 5), (8, 9))]
    assert cache_aware_costs(1.0, 10, loads) == [18, 10, 11]
    router = router_of("cache_aware", Routing(cache_weight=1.0), remote=True)
    assert router(0, request(0, 10), loads) == 1


def test_prompts_on_their_way_to_be_computed_count_as_prefill():
    """10 tokens, of which 4 are cached, behind a prompt of 7 that nobody has begun: 6 and 7 to
    compute, twice; and the 7 will be held."""
    assert cache_aware_costs(2.0, 10, [Load(1, 7, cached=4, held=7, prompts=7)]) == [2 * 13 + 7]


BUSY = Load(3, 60, cached=8, prompts=20)  # the other 40 are outputs: no prompt waits for them
ESTIMATE = Estimate(step_s=1, prefill_token_s=0.1, pair_s=0.01, load_token_s=0.02, balance=2)


def test_prefill_of_the_rest_counts_the_pairs_with_what_is_cached():
    pairs = sum(range(5, 11))  # token i sees i tokens; 5.5 each on average
    assert prefill_s(ESTIMATE, 10, 4) == pytest.approx(1 + 6 * 0.1 + (pairs - 6 / 2) * 0.01)


@pytest.mark.parametrize(
    ("remote", "loads", "expected"),
    [
        (False, [IDLE, BUSY], [2.5, 2 + 1 + 0.2 + 0.18]),
        # The first loads the 8 tokens from the other: 0.16 s instead of computing them.
        (True, [IDLE, BUSY], [0.16 + 1 + 0.2 + 0.18, 2 + 1 + 0.2 + 0.18]),
        # 8 is not more than twice 4: what is here will do.
        (True, [Load(0, 0, cached=4), BUSY], [1 + 0.6 + 0.42, 2 + 1 + 0.2 + 0.18]),
    ],
)
def test_the_expected_first_token_waits_for_queue_load_and_prefill(remote, loads, expected):
    assert expected_ttfts(ESTIMATE, remote, 10, loads) == pytest.approx(expected)


def test_every_router_has_the_name_that_configs_give_it():
    sides = typing.get_type_hints(Routing)
    named = {name for side in ("prefill", "decode") for name in typing.get_args(sides[side])}
    assert {name: router.__name__ for name, router in ROUTERS.items()} == {n: n for n in named}
