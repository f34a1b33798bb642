"""Which waiting prompt is next: short ones may overtake, but nobody starves."""

import typing

import pytest
from decision_helpers import PLACEMENTS, request, served

from pdjax.core.config import Routing
from pdjax.core.events import Step
from pdjax.core.policies.ordering import ORDERS, Waiting, fcfs, hrrn, next_of, sjf
from pdjax.core.scheduler import Scheduler

LONG_FIRST = [Waiting(900, 60), Waiting(500, 4), Waiting(100, 2), Waiting(90, 2)]


def test_orders_choose_by_age_by_size_and_by_their_ratio():
    assert fcfs(LONG_FIRST) == 0
    assert sjf(LONG_FIRST) == 2  # of equals the oldest
    assert hrrn(LONG_FIRST) == 1  # 125 ns per token against 15, 50 and 45


@pytest.mark.parametrize("order", ORDERS.values())
def test_who_has_waited_for_the_bound_is_next(order):
    assert next_of(order, LONG_FIRST, bound_ns=900) == 0
    assert next_of(order, LONG_FIRST, bound_ns=901) == order(LONG_FIRST)
    assert next_of(order, LONG_FIRST, bound_ns=0) == order(LONG_FIRST)


def test_short_prompts_overtake_and_the_bound_ends_that():
    requests = [request(0, 2, 2), request(1, 15, 2)]
    requests += [request(2 + i, 2, 2, at_ms=11 * i) for i in range(30)]

    def starts(**routing) -> list[int]:
        scheduler = Scheduler(PLACEMENTS["1P1D"], context=40, routing=Routing(**routing))
        log = served(scheduler, requests)
        steps = [r.body for r in log if isinstance(r.body, Step)]
        order = [chunk.rid for step in steps for chunk in step.chunks]
        assert scheduler.idle
        return list(dict.fromkeys(order))

    assert starts() == sorted(starts())
    assert starts(order="sjf")[-1] == 1  # starved to the end
    place = starts(order="sjf", order_bound_s=0.1).index(1)
    assert 3 < place < 15
    assert 1 < starts(order="hrrn").index(1) < 31


def test_every_order_has_the_name_that_configs_give_it():
    named = typing.get_args(typing.get_type_hints(Routing)["order"])
    assert {name: order.__name__ for name, order in ORDERS.items()} == {n: n for n in named}
