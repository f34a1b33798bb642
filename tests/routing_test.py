"""Which instance gets a request."""

import pytest
from decision_helpers import request

from pdjax.core.policies.routing import ROUTERS, Load, round_robin, shortest_queue

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


def test_every_router_has_the_name_that_configs_give_it():
    assert {name: router.__name__ for name, router in ROUTERS.items()} == {
        "round_robin": "round_robin",
        "shortest_queue": "shortest_queue",
    }
