"""`transfer.initiator`: KV that decode instances pull waits where it was computed, until one has a
free slot for it."""

import pytest
from decision_helpers import check_run, decode, pool, prefill, request, scheduler_for, served

from pdjax.core.config import Placement
from pdjax.core.events import Finish, Hold, Record, Release, Send, StepDone

PLACEMENT = {"prefill": prefill(pool=pool(12)), "decode": decode(pool=pool(12), slots=1)}
REQUESTS = [request(rid, 6, max_tokens=6) for rid in range(4)]


def run(initiator: str, placement: Placement = PLACEMENT, requests=REQUESTS) -> list[Record]:
    """Both initiators with the same schedule."""
    scheduler = scheduler_for(placement, schedule={"push": "whole"}.get(initiator, initiator))
    log = served(scheduler, requests)
    check_run(log, placement, scheduler)
    return log


def held_ns(log: list[Record], name: str) -> int:
    """How long requests held memory of a pool, all together."""
    total = 0
    for record in log:
        body = record.body
        if isinstance(body, Hold) and body.handle.pool == name:
            total -= record.t_ns
        elif isinstance(body, Release) and body.pool == name:
            total += record.t_ns
    return total


def tokens(log: list[Record]) -> dict[int, list[int]]:
    said: dict[int, list[int]] = {}
    for record in log:
        for emitted in record.body.emitted if isinstance(record.body, StepDone) else ():
            said.setdefault(emitted.rid, []).extend(emitted.tokens)
    return said


def test_pulled_kv_waits_in_the_prefill_pool_and_pushed_kv_in_the_decode_pool():
    push, pull = run("push"), run("pull")
    assert held_ns(pull, "prefill/0") > 1.2 * held_ns(push, "prefill/0")
    assert held_ns(pull, "decode/0") < held_ns(push, "decode/0") / 1.2
    assert tokens(pull) == tokens(push) and len(tokens(pull)) == 4


def test_nothing_is_pulled_before_the_prompt_is_computed_and_its_slot_is_free():
    """One slot: the decode pool holds one request at a time, and each only once it is computed."""
    computed: set[int] = set()
    held: set[int] = set()
    for record in run("pull"):
        match record.body:
            case StepDone(instance="prefill/0", emitted=emitted):
                computed |= {e.rid for e in emitted}
            case Hold(handle=handle) if handle.pool == "decode/0":
                assert not held and handle.rid in computed
                held.add(handle.rid)
            case Release(rid=rid, pool="decode/0"):
                held.remove(rid)
            case Send(rid=rid):
                assert rid in held


@pytest.mark.parametrize("slots", [1, 2])
def test_a_prefill_pool_full_of_kv_that_waits_only_waits(slots: int):
    """Two pages more than one prompt: prefill stands still until decode has fetched."""
    roles = {"prefill": prefill(pool=pool(4)), "decode": decode(pool=pool(6), slots=slots)}
    log = run("pull", roles, [request(rid, 6, max_tokens=4) for rid in range(6)])
    assert sum(isinstance(record.body, Finish) for record in log) == 6
