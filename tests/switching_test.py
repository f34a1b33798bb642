"""Instances that change their jobs: what the policies decide, and what draining means, by hand."""

import dataclasses
import math

import pytest
from decision_helpers import (
    MS,
    Driven,
    check_run,
    decode,
    of_type,
    pool,
    prefill,
    request,
    scheduler_for,
    served,
    work,
)
from switching_helpers import turning

from pdjax.core.config import SLO, ConfigError, Role, Switching, check_placement
from pdjax.core.events import Alarm, Drain, Finish, Hold, Preempt, Refuse, Send, Switch, TimeUp
from pdjax.core.loop import first_difference
from pdjax.core.policies.switching import Situation, Standing, mixed, slo
from pdjax.metrics import analyse
from pdjax.timeline import chrome_trace

OBJECTIVES = SLO(ttft_s=1.0, tpot_s=0.1)


def standing(name: str, *, ttft: float = 0, itl: float = 0, prompts: int = 0, does: str = "",
             to: str = "", switches: bool = True, decodes: int = 0) -> Standing:  # fmt: skip
    """`prefill/0` and the like; prompts of 100 tokens."""
    home = name.partition("/")[0]
    does = does or home
    return Standing(
        name, home, does, to or does, switches, 100 * prompts, prompts, decodes, ttft, itl
    )


def two_and_two(ttfts, itls, **decode_changes) -> list[Standing]:
    prefills = [standing(f"prefill/{i}", ttft=s) for i, s in enumerate(ttfts)]
    return prefills + [standing(f"decode/{i}", itl=s, **decode_changes) for i, s in enumerate(itls)]


SLO_ROWS = [
    # TTFT of the prefill instances, ITL of the decode instances, waiting -> who goes where
    ((1.2, 1.1), (0.05, 0.07), 0, ("decode/0", "prefill")),
    ((1.2, 0.9), (0.05, 0.07), 0, None),  # not all miss it
    ((1.2, 1.1), (0.05, 0.09), 0, None),  # 0.09 is no slack
    ((1.0, 1.0), (0.05, 0.07), 0, None),  # met exactly
    ((0.5, 0.7), (0.11, 0.12), 0, ("prefill/0", "decode")),
    ((0.5, 0.9), (0.11, 0.12), 0, None),
    ((1.2, 1.1), (0.11, 0.12), 0, None),  # both are late: nobody has anything to give
    ((0.0, 0.0), (0.0, 0.0), 0, None),
    ((1.2, 1.1), (0.05, 0.05), 3, ("prefill/0", "decode")),  # held up by decode, so no sign
    ((1.2,), (0.05, 0.05), 3, None),  # the last one stays
    ((1.2, 1.1), (0.05,), 0, None),
]


@pytest.mark.parametrize(("ttfts", "itls", "waiting", "expected"), SLO_ROWS)
def test_slo_moves_one_from_slack_to_need(ttfts, itls, waiting, expected):
    moves = slo(Switching(), OBJECTIVES, Situation(two_and_two(ttfts, itls), waiting, 99))
    assert list(moves) == ([expected] if expected else [])


def test_slo_rests_while_one_drains_and_for_the_cooldown():
    rules, need = Switching(cooldown_s=10), two_and_two((1.2, 1.1), (0.05, 0.05, 0.05))
    assert slo(rules, OBJECTIVES, Situation(need, 0, 10.0))
    assert not slo(rules, OBJECTIVES, Situation(need, 0, 9.9))
    draining = [*need[:-1], need[-1]._replace(to="prefill")]
    assert not slo(rules, OBJECTIVES, Situation(draining, 0, 99))


def test_slo_takes_the_one_with_the_least_to_finish_of_those_that_may():
    need = two_and_two((1.2, 1.1), (0.05, 0.05, 0.05))
    for i, (decodes, switches) in enumerate([(5, True), (2, True), (0, False)], 2):
        need[i] = need[i]._replace(decodes=decodes, switches=switches)
    assert slo(Switching(), OBJECTIVES, Situation(need, 0, 99)) == [("decode/1", "prefill")]


P, D = "prefill", "decode"
MIXED_ROWS = [
    # prefill/0, decode/0, decode/1 (prompts of 100 tokens; 4 are too many), waiting -> moves
    ((5, P), (0, D), (0, D), 0, [("decode/0", "both")]),
    ((4, P), (0, D), (0, D), 0, []),
    ((5, P), (5, "both"), (0, D), 0, [("decode/1", "both")]),  # the one that helps is full, too
    ((5, P), (2, "both"), (0, D), 0, []),
    ((5, P), (0, "both"), (0, D), 0, []),  # it is needed
    ((4, P), (1, "both"), (0, D), 0, []),  # it still has some
    ((4, P), (0, "both"), (0, D), 0, [("decode/0", "decode")]),
    ((0, P), (0, D), (0, D), 2, [("prefill/0", "both")]),
    ((0, "both"), (0, D), (0, D), 2, []),
    ((0, "both"), (0, D), (0, D), 0, [("prefill/0", "prefill")]),
]


@pytest.mark.parametrize(("p", "d0", "d1", "waiting", "expected"), MIXED_ROWS)
def test_mixed_lends_instances_and_takes_them_back(p, d0, d1, waiting, expected):
    names = ("prefill/0", "decode/0", "decode/1")
    all_three = [
        standing(name, prompts=prompts, does=does)
        for name, (prompts, does) in zip(names, (p, d0, d1), strict=True)
    ]
    rules = Switching(prompts_above=400)
    assert [*mixed(rules, OBJECTIVES, Situation(all_three, waiting, 99))] == expected


# --- what happens -----------------------------------------------------------------------------

TWO_AND_ONE = {"prefill": prefill(instances=2, switches=True), "decode": decode()}
TURNING = Switching(turning.__name__, every_s=4e-9)


def changes(log) -> list:
    return [r.body for r in log if isinstance(r.body, Drain | Switch)]


def test_a_prefill_instance_ends_its_prompt_gives_its_queue_away_and_then_decodes():
    """Prompts of 12 tokens take two steps; the decode pool is full with the first two requests."""
    run = Driven(TWO_AND_ONE, switching=TURNING, prefill_router="round_robin")
    for rid in range(4):  # 0, 2 to prefill/0; 1, 3 to prefill/1
        run.arrive(rid, 12, 3)
    actions = run.end_step("prefill/0")  # it is time to decide now
    assert Drain("prefill/1", "decode") in actions
    assert run.scheduler.instances["prefill/0"].members.keys() == {0, 2, 3}
    assert not of_type(Switch, run.end_step("prefill/1"))  # a chunk of request 1 is left
    actions = run.end_step("prefill/1")
    assert of_type(Switch, actions) == [Switch("prefill/1", "decode")]
    run.drain()
    assert {name for name, _ in work(actions)} == {"prefill/1"}  # it has room, and decodes 1
    run.check()


def test_what_found_no_place_stays_and_decodes_where_it_was_prefilled():
    """The decode pool has room for one request; the second one stays in prefill/1."""
    placement = TWO_AND_ONE | {"decode": decode(pool=pool(6))}
    run = Driven(placement, switching=Switching(turning.__name__, every_s=8e-9),
                 prefill_router="round_robin")  # fmt: skip
    run.arrive(0, 12, 6)
    run.arrive(1, 12, 6)
    for name in ("prefill/0", "prefill/0", "prefill/1", "prefill/1"):
        run.end_step(name)
    run.land()
    run.land()
    assert not changes(run.log)
    run.wait()
    assert Switch("prefill/1", "decode") in changes(run.log)
    run.drain()
    run.check()
    assert not [s for s in of_type(Send, [r.body for r in run.log]) if s.rid == 1]


def test_a_decode_instance_drains_before_it_prefills():
    placement = {"prefill": prefill(), "decode": decode(instances=2, switches=True)}
    run = Driven(placement, switching=Switching(turning.__name__, every_s=5e-9),
                 decode_router="round_robin")  # fmt: skip
    run.arrive(0, 3, 9)
    run.arrive(1, 3, 9)
    run.drain()
    log = [r.body for r in run.log]
    drained, switched = (
        log.index(Drain("decode/1", "prefill")),
        log.index(Switch("decode/1", "prefill")),
    )
    after = [h.handle for h in of_type(Hold, log[drained:switched])]
    assert "decode/1" not in {handle.pool for handle in after}
    run.check()


def test_an_instance_that_dies_while_it_drains_has_nothing_left_when_it_returns():
    run = Driven(TWO_AND_ONE, switching=TURNING, prefill_router="round_robin")
    for rid in range(4):
        run.arrive(rid, 12, 3)
    run.end_step("prefill/0")
    assert changes(run.log) == [Drain("prefill/1", "decode")]
    run.down("prefill/1", returns=True)
    assert Switch("prefill/1", "decode") in run.up("prefill/1")
    run.drain()
    run.check()


def test_an_abort_of_the_last_one_there_ends_the_drain():
    run = Driven(TWO_AND_ONE, switching=TURNING, prefill_router="round_robin")
    for rid in range(4):
        run.arrive(rid, 12, 3)
    run.end_step("prefill/0")
    assert changes(run.log) == [Drain("prefill/1", "decode")]
    assert not of_type(Switch, run.abort(1))  # its step still writes
    assert of_type(Switch, run.end_step("prefill/1")) == [Switch("prefill/1", "decode")]
    run.drain()
    run.check()


@pytest.mark.parametrize("last", ["prefill", "decode"])
def test_the_only_one_of_a_side_stays(last):
    """Whatever the policy wants: this one wants it to go, whenever it is asked."""
    roles = {"prefill": prefill(), "decode": decode()}
    placement = {n: dataclasses.replace(r, switches=n == last) for n, r in roles.items()}
    scheduler = scheduler_for(placement, switching=Switching(turning.__name__, every_s=0.01))
    log = served(scheduler, [request(rid, 6, 5, at_ms=9 * rid) for rid in range(6)])
    assert sum(isinstance(r.body, TimeUp) for r in log) > 3 and not changes(log)


def test_who_drains_stays_when_the_last_other_one_dies():
    run = Driven(TWO_AND_ONE, switching=TURNING, prefill_router="round_robin")
    for rid in range(4):
        run.arrive(rid, 12, 3)
    run.end_step("prefill/0")
    assert Switch("prefill/1", "prefill") in run.down("prefill/0")
    run.drain()
    run.check()
    assert {r.body.reason for r in run.log if isinstance(r.body, Finish)} == {"length"}


def test_the_last_one_alive_does_both():
    placement = {"prefill": prefill(switches=True), "decode": decode()}
    run = Driven(placement, switching=Switching("slo", every_s=1e-6))
    run.arrive(0, 4, 3)
    assert Switch("prefill/0", "both") in run.down("decode/0")
    run.drain()
    run.check()
    assert [r.body.reason for r in run.log if isinstance(r.body, Finish)] == ["length"]


def test_never_changes_nothing_and_never_asks():
    run = Driven(TWO_AND_ONE)
    for rid in range(4):
        run.arrive(rid, 12, 3)
    run.drain()
    assert not of_type(Alarm, [r.body for r in run.log]) and not changes(run.log)


# --- whole runs ---------------------------------------------------------------------------------


def shifting(n: int = 60) -> list:
    """Long prompts with short answers, then the other way round."""
    half = n // 2
    first = [request(rid, 24, 2, at_ms=20 * rid) for rid in range(half)]
    later = [request(rid, 2, 24, at_ms=40 * rid) for rid in range(half, n)]
    return first + later


EASY = SLO(ttft_s=0.1, tpot_s=0.02)
ELASTIC = {
    "prefill": prefill(instances=2, switches=True, pool=pool(30)),
    "decode": decode(instances=2, switches=True, pool=pool(30)),
}


@pytest.mark.parametrize("cooldown_s", [0.0, 0.3])
def test_slo_follows_the_load_and_keeps_the_cooldown(cooldown_s):
    options = {"switching": Switching("slo", every_s=0.05, cooldown_s=cooldown_s), "slo": EASY}
    scheduler = scheduler_for(ELASTIC, **options)
    log = served(scheduler, shifting())
    check_run(log, ELASTIC, scheduler, **options)
    drains = [(r.t_ns, r.body.to) for r in log if isinstance(r.body, Drain)]
    assert {to for _, to in drains} == {"prefill", "decode"}
    ends = [r.t_ns for r in log if isinstance(r.body, Switch)]
    for begin, _ in drains[1:]:
        last = max((t for t in ends if t < begin), default=-math.inf)
        assert begin - last >= cooldown_s * 1e9
    assert first_difference(log, scheduler_for(ELASTIC, **options)) == ""
    assert log == served(scheduler_for(ELASTIC, **options), shifting())


def test_mixed_helps_out_and_goes_home():
    options = {"switching": Switching("mixed", every_s=0.01, prompts_above=20)}
    placement = {"prefill": prefill(), "decode": decode(mixed=True, switches=True, pool=pool(30))}
    scheduler = scheduler_for(placement, **options)
    log = served(scheduler, [request(rid, 12, 3, at_ms=rid) for rid in range(12)])
    check_run(log, placement, scheduler, **options)
    assert changes(log) == [
        Switch("decode/0", "both"), Drain("decode/0", "decode"), Switch("decode/0", "decode")
    ]  # fmt: skip
    homes = {c.rid: name for name, items in work(r.body for r in log) for c in items
             if hasattr(c, "last")}  # fmt: skip
    assert {"prefill/0", "decode/0"} == {*homes.values()}


def test_nothing_ticks_while_nobody_is_there():
    options = {"switching": Switching("slo", every_s=0.05)}
    requests = [request(rid, 6, 3, at_ms=100_000 * rid) for rid in range(3)]
    log = served(scheduler_for(ELASTIC, **options), requests)
    ticks = sum(isinstance(r.body, TimeUp) for r in log)
    took_ms = sum((r.t_ns // MS) % 100_000 for r in log if isinstance(r.body, Finish))
    assert 0 < ticks <= took_ms / 50 + 3


def test_a_request_that_does_not_fit_wherever_it_may_come_is_refused():
    placement = {"prefill": prefill(pool=pool(4)), "decode": decode(switches=True, instances=2)}
    scheduler = scheduler_for(placement)
    log = served(scheduler, [request(0, 9, 6)])
    assert "pool `prefill/0` has 4 pages" in of_type(Refuse, [r.body for r in log])[0].why


def test_a_report_and_a_timeline_show_when_it_drained_and_when_it_changed():
    options = {"switching": Switching("mixed", every_s=0.01, prompts_above=20)}
    placement = {"prefill": prefill(), "decode": decode(switches=True, pool=pool(30))}
    log = served(scheduler_for(placement, **options), [request(rid, 12, 3) for rid in range(12)])
    run = analyse(log, placement, SLO())
    found = run.incidents[["what", "where", "how"]].values.tolist()
    assert found == [
        ["switch", "decode/0", "both"],
        ["drain", "decode/0", "decode"],
        ["switch", "decode/0", "decode"],
    ]
    names = [e["name"] for e in chrome_trace(run)["traceEvents"] if e["ph"] == "i"]
    assert names == ["switch to both", "drain to decode", "switch to decode"]


# --- what is no placement -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            {"p": prefill(pool=pool()), "d": decode(beside="p", pool_of="p", switches=True)},
            "role `d`: `pool_of` is `p`, and one of the two `switches`",
        ),
        (
            {"p": prefill(pool=pool(), switches=True), "d": decode(beside="p", pool_of="p")},
            "one of the two `switches`",
        ),
        (
            {"p": prefill(switches=True, chunk=4), "d": decode()},
            "role `p`: `chunk` 4 is not a multiple",
        ),
        ({"d": decode(switches=True)}, "has no role that does `prefill`"),
        (
            {"p": prefill(), "d": decode(switches=True, chunk=5)},
            "role `d`: `chunk` 5 is not a multiple",
        ),
    ],
)
def test_roles_that_cannot_switch_are_told_in_one_line(roles, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_placement("it", roles)
    assert "\n" not in str(error.value)


def test_a_server_that_does_both_has_nothing_to_switch_to():
    with pytest.raises(ConfigError, match="nothing to switch to"):
        Role("both", switches=True)
    with pytest.raises(ConfigError, match="`mixed` needs"):
        Role("decode", mixed=True)


def test_preempted_requests_leave_a_draining_instance():
    """`recompute` begins again where it was, unless that takes no more of it."""
    placement = {"prefill": prefill(), "decode": decode(instances=2, switches=True, growth=1,
                                                        pool=pool(5), slots=3)}  # fmt: skip
    run = Driven(placement, switching=Switching(turning.__name__, every_s=9e-9))
    for rid in range(6):
        run.arrive(rid, 4, 9)
    run.drain()
    run.check()
    assert of_type(Preempt, [r.body for r in run.log])
