"""All interleavings of two requests through pools of a few blocks: whenever steps end, pieces land,
a client gives up or a piece fails, something can still happen until both have ended, no state ever
comes back, and at the end every pool is full. Both requests fit alone, and not together.

One prefill and one decode instance, or one server, and each way to preempt. States count as the
same when they differ in page numbers and in ids only.
"""

import dataclasses
from typing import Any, NamedTuple

import pytest
from any_placement import MANY
from decision_helpers import Driven, both, decode, follow, pool, prefill
from switching_helpers import wild

from pdjax.core.config import Placement, Switching
from pdjax.core.events import Arrived, KVHandle, Preempt, Send, Step, Switch
from pdjax.core.ledger import Ledger
from pdjax.core.state import Instance

Choice = tuple[str, Any]
SHAPES = [(4, 5), (5, 4)]  # prompt tokens, output tokens: 8 tokens, 3 pages each


def play(placement: Placement, path: list[Choice], options: dict) -> Driven:
    run = Driven(placement, **options)
    for what, which in path:
        getattr(run, what)(which, *(SHAPES[which] if what == "arrive" else ()))
    return run


def gone_wrong(path: list[Choice]) -> int:
    return sum(what in ("abort", "fail") for what, _ in path)


def choices(run: Driven, path: list[Choice], wrong: int) -> list[Choice]:
    """All that may happen next. On each path `wrong` things may go wrong: aborts, lost pieces."""
    arrived = sum(what == "arrive" for what, _ in path)
    well = gone_wrong(path) < wrong
    found: list[Choice] = [("arrive", arrived)] if arrived < len(SHAPES) else []
    found += [("end_step", step.instance) for step in run.can_end]
    found += [("land", send) for send in sorted(run.flying)]
    found += [("fail", send) for send in sorted(run.flying) if well or send in run.cancelled]
    open_requests = [rid for rid, t in run.scheduler.requests.items() if not t.ended]
    return found + [("abort", rid) for rid in open_requests if well]


def state(run: Driven) -> tuple:
    """All that decides how it goes on."""
    instances = run.scheduler.instances.values()
    books = [_plain(vars_of(each)) for each in (*run.scheduler.requests.values(), *instances)]
    on_the_way = [(_plain(send), send.id in run.cancelled) for send in run.flying.values()]
    arrived = sum(isinstance(record.body, Arrived) for record in run.log)
    alarms = tuple(at - run.now for at in run.alarms)
    return tuple(books), _plain(list(run.running.values())), tuple(on_the_way), arrived, alarms


def vars_of(tracked: Any) -> list:
    return [getattr(tracked, field.name) for field in dataclasses.fields(tracked)]


def _plain(value: Any) -> Any:
    """A value to compare by, without page numbers and ids of steps and sends."""
    match value:
        case Instance():
            return value.name
        case Ledger():
            return value.free
        case KVHandle():
            return value.pool, value.capacity
        case Send():
            return value.rid, value.start, value.length, value.group, value.purpose
        case Step():
            return value.instance, value.chunks, value.decodes, len(value.awaits)
        case dict():
            return _plain(list(value.values())) if value else ()
        case list():
            return tuple(map(_plain, value))
        case _:
            return str(value) if hasattr(value, "append") else value  # a deque


class Explored(NamedTuple):
    states: int
    preempted: int  # states on whose way somebody was preempted
    switched: int  # and an instance changed its job


def explore(placement: Placement, *, wrong: int = 2, **options) -> Explored:
    """Every state, depth first; each path to one is played anew. AssertionError where a law is
    broken, nothing can go on, or a state comes back."""
    seen: set[tuple] = set()
    above: set[tuple] = set()  # on the path to here
    preempted = switched = 0
    stack: list[tuple[list[Choice], tuple | None]] = [([], None)]
    while stack:
        path, left = stack.pop()
        if left is not None:
            above.discard(left)
            continue
        run = play(placement, path, options)
        here = *state(run), gone_wrong(path)
        assert here not in above, f"round in circles: {path}"
        if here in seen:
            continue
        seen.add(here)
        above.add(here)
        stack.append((path, here))
        following = choices(run, path, wrong)
        if following:
            follow(run.log, placement, **options)
            stack += [([*path, choice], None) for choice in following]
        else:
            assert run.scheduler.idle, f"nothing can happen, and it is not over: {path}"
            run.check()
        preempted += any(isinstance(record.body, Preempt) for record in run.log)
        switched += any(isinstance(record.body, Switch) for record in run.log)
    return Explored(len(seen), preempted, switched)


def pressed(how: str, **more) -> dict:
    """Of a role that takes pages as it goes on, from a pool that both together overfill."""
    return {"pool": pool(4), "growth": 1, "preempt": how, "swap_tokens": 9, **more}


HOW = pytest.mark.parametrize("how", ["recompute", "return", "swap"])


@HOW
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "whole"},
        {"schedule": "pull"},
        {"schedule": "streaming", "groups": 2, "wrong": 1 + (MANY > 1)},
    ],
    ids=["whole", "pull", "streaming"],
)
def test_one_prefill_and_one_decode_instance_always_come_to_an_end(how, options):
    placement = {"prefill": prefill(pool=pool(4)), "decode": decode(**pressed(how))}
    explored = explore(placement, **options)
    assert explored.states > 200 and explored.preempted, explored


@HOW
@pytest.mark.parametrize("mixed", [False, True])
def test_one_server_always_comes_to_an_end(how, mixed):
    explored = explore({"server": both(**pressed(how, mixed=mixed, chunk=3))})
    assert explored.states > 50 and explored.preempted, explored


@HOW
def test_instances_that_change_their_jobs_always_come_to_an_end(how):
    """As good as drawn, whenever they are asked: to both, from both, to the other side."""
    placement = {
        "prefill": prefill(pool=pool(4), switches=True),
        "decode": decode(**pressed(how, switches=True)),
    }
    switching = Switching(wild.__name__, every_s=4e-9)
    explored = explore(placement, schedule="whole", wrong=1, switching=switching)
    assert explored.states > 200 and explored.preempted and explored.switched, explored


@pytest.mark.parametrize("lag", [0, 1])
def test_a_credit_of_one_never_blocks(lag):
    placement = {"prefill": prefill(lag=lag), "decode": decode(lag=lag, pool=pool(4))}
    explored = explore(placement, credits=1)
    assert explored.states > 100, explored
