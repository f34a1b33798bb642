"""An engine whose instances change their jobs gives the tokens of the collocated server."""

import functools
from dataclasses import replace

import pytest
from engine_helpers import (  # fmt: skip
    COLLOCATED,
    PAGES,
    SPLIT,
    Ran,
    assert_pools_are_full,
    config_of,
    request,
    run,
)
from switching_helpers import turning, wild

from pdjax.core.config import Clock, Config, Fault, Placement, Recovery, Switching
from pdjax.core.events import Drain, Finish, Hold, Release, Step, Switch
from pdjax.core.loop import first_difference

P = replace(SPLIT["prefill"], pool=PAGES, instances=2, switches=True, chunk=16, prefills=2)
D = replace(SPLIT["decode"], instances=2)
P_LEAVES = {"prefill": P, "decode": replace(D, instances=1)}
D_LEAVES = {"prefill": replace(P, switches=False), "decode": replace(D, switches=True)}
ALL = {"prefill": replace(P, mixed=True), "decode": replace(D, switches=True, mixed=True)}
CLOCKS = pytest.mark.parametrize("clock", ["modelled", "wall"])
WHERE = {"P leaves": (P_LEAVES, turning), "D leaves": (D_LEAVES, turning), "all": (ALL, wild)}


def workload():
    return [
        request(i, (33, 16, 5)[i % 3], 2 * i, max_tokens=3 + i % 6, temperature=i % 2, seed=i)
        for i in range(12)
    ]


@functools.cache
def collocated():
    return run(config_of(COLLOCATED), workload()).tokens


def switching(clock: str, placement: Placement, policy=turning, **changes) -> Config:
    rules = Switching(policy.__name__, every_s=0.015)
    return config_of(placement, clock=Clock(clock), switching=rules, **changes)


def in_its_pool_at_drains(ran: Ran) -> list[int]:
    """How many requests have KV in the pool of the instance when it begins to drain."""
    held: dict[str, set[int]] = {}
    counts = []
    for record in ran.records:
        match record.body:
            case Hold(handle=handle):
                held.setdefault(handle.pool, set()).add(handle.rid)
            case Release(rid=rid, pool=pool):
                held[pool].discard(rid)
            case Drain(instance=instance):
                counts.append(len(held.get(instance, ())))
    return counts


def check(ran: Ran) -> None:
    assert ran.tokens == collocated()
    assert {end.reason for end in ran.all(Finish)} == {"length"}
    assert_pools_are_full(ran.scheduler)
    assert not first_difference(ran.records, ran.engine.scheduler())


@CLOCKS
@pytest.mark.parametrize("where", WHERE)
def test_every_request_gets_its_tokens_while_instances_change_their_jobs(where, clock):
    placement, policy = WHERE[where]
    ran = run(switching(clock, placement, policy), workload())
    check(ran)
    assert ran.all(Switch)


def test_two_requests_are_in_flight_where_a_prefill_instance_turns_to_decode():
    ran = run(switching("modelled", P_LEAVES), workload())
    check(ran)
    first = ran.all(Drain)[0]
    assert first == Drain("prefill/1", "decode")
    assert in_its_pool_at_drains(ran)[0] >= 2
    used = {(bool(s.chunks), bool(s.decodes)) for s in ran.all(Step) if s.instance == "prefill/1"}
    assert used == {(True, False), (False, True)}


@CLOCKS
def test_tokens_survive_the_death_of_one_that_drains(clock):
    """It dies in its third step; the drain begins with the second."""
    faults = (Fault("kill", at=3, instance="prefill/1", seconds=0.02),)
    ran = run(switching(clock, P_LEAVES, faults=faults, recovery=Recovery(attempts=8)), workload())
    check(ran)
    assert ran.all(Drain)
