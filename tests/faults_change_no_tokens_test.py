"""A run of the tiny model in which pieces and instances fail on purpose gives every request the
tokens that it gets collocated, with its memory given back: on the modelled clock and live."""

import functools

import pytest
from engine_helpers import (
    COLLOCATED,
    LAYERS,
    SPLIT,
    assert_pools_are_full,
    config_of,
    request,
    run,
)

from pdjax.core.config import Clock, Config, Fault, Link, Recovery, Transfer
from pdjax.core.events import Down, Finish, Landed, Retry, SendFailed, Step, Up
from pdjax.core.loop import first_difference

MODELLED, LIVE = Clock("modelled"), Clock("wall")
CLOCKS = [MODELLED, LIVE]
SLOW = Link(bytes_per_s=1e7, latency_s=1e-4)
PATIENT = Recovery(attempts=8, lease_s=2.0)  # more than a program takes to compile


def workload():
    return [
        request(i, (5, 16, 33)[i % 3], 2 * i, max_tokens=2 + i % 5, temperature=i % 2, seed=i)
        for i in range(8)
    ]


@functools.cache
def collocated():
    return run(config_of(COLLOCATED), workload()).tokens


def failing(clock: Clock, *faults: Fault, recovery: Recovery = PATIENT, **transfer) -> Config:
    given = {"groups": LAYERS, "link": SLOW, "checksum": True} | transfer
    return config_of(
        SPLIT, clock=clock, faults=faults, recovery=recovery, transfer=Transfer(**given)
    )


FAULTS = {
    "drop": [Fault("drop", at=6)],
    "delay": [Fault("delay", at=6, seconds=0.05)],
    "late": [Fault("delay", at=6, seconds=3.0)],
    "duplicate": [Fault("duplicate", at=3), Fault("duplicate", at=9, seconds=0.01)],
    "corrupt": [Fault("corrupt", at=2), Fault("corrupt", at=11)],
    "stall": [Fault("stall", at=2, instance="decode/0", seconds=0.1)],
    "kill prefill": [Fault("kill", at=3, instance="prefill/0", seconds=0.05)],
    "kill decode": [Fault("kill", at=4, instance="decode/0", seconds=0.05)],
}


@pytest.mark.parametrize("clock", CLOCKS, ids=["modelled", "live"])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_every_request_gets_its_tokens_under_every_fault(faults, clock):
    collocated()  # compiles, so that the lease does not run out over that
    ran = run(failing(clock, *faults), workload())
    assert ran.tokens == collocated()
    assert {end.reason for end in ran.all(Finish)} == {"length"}
    for end in ran.all(Finish):
        assert end.tokens == len(ran.tokens[end.rid])
    assert_pools_are_full(ran.scheduler)
    assert not first_difference(ran.records, ran.engine.scheduler())


@pytest.mark.parametrize("clock", CLOCKS, ids=["modelled", "live"])
def test_faults_leave_their_traces_in_the_log(clock):
    """Otherwise the test above would show nothing."""
    collocated()
    ran = run(failing(clock, *FAULTS["corrupt"]), workload())
    assert [failed.why for failed in ran.all(SendFailed)].count(
        "what landed is not what left: their checksums differ"
    ) == 2 and len(ran.all(Retry)) >= 1
    ran = run(failing(clock, *FAULTS["kill decode"]), workload())
    assert ran.all(Down) == [Down("decode/0", returns=True)] and ran.all(Up) == [Up("decode/0")]
    assert ran.all(Retry)
    ran = run(failing(clock, *FAULTS["drop"]), workload())
    assert [failed.why for failed in ran.all(SendFailed)] == ["cancelled"]
    ran = run(failing(clock, *FAULTS["duplicate"]), workload())
    assert len(ran.all(Landed)) == 2 + len({landed.send for landed in ran.all(Landed)})


def test_a_corrupt_piece_that_nobody_checks_changes_tokens():
    """So what a checksum finds is real damage."""
    config = failing(MODELLED, *(Fault("corrupt", at=at) for at in range(1, 9)), checksum=False)
    ran = run(config, workload())
    assert not ran.all(SendFailed) and ran.tokens != collocated()


@pytest.mark.parametrize("clock", CLOCKS, ids=["modelled", "live"])
def test_requests_fail_where_the_config_says_so_and_others_get_their_tokens(clock):
    collocated()
    recovery = Recovery(on_failure="fail", lease_s=2.0)
    ran = run(failing(clock, *FAULTS["kill decode"], recovery=recovery), workload())
    failed = {end.rid for end in ran.all(Finish) if end.reason == "failed"}
    assert failed and len(failed) < len(workload())
    for rid, tokens in ran.tokens.items():
        expected = collocated()[rid]
        assert tokens == expected[: len(tokens)] and (rid in failed or tokens == expected)
    assert_pools_are_full(ran.scheduler)


@pytest.mark.parametrize("clock", CLOCKS, ids=["modelled", "live"])
@pytest.mark.parametrize("faults", [[], FAULTS["corrupt"], FAULTS["kill prefill"]], ids=str)
def test_a_streaming_join_gives_the_same_tokens(faults, clock):
    collocated()
    ran = run(failing(clock, *faults, schedule="streaming"), workload())
    assert ran.tokens == collocated()
    assert any(step.awaits for step in ran.all(Step))
    assert_pools_are_full(ran.scheduler)


@pytest.mark.parametrize("clock", CLOCKS, ids=["modelled", "live"])
def test_a_step_joins_before_its_last_pieces_have_landed(clock):
    collocated()
    ran = run(failing(clock, schedule="streaming"), workload())
    landed: set[int] = set()
    early = 0
    for record in ran.records:
        if isinstance(record.body, Landed):
            landed.add(record.body.send)
        elif isinstance(record.body, Step):
            early += not landed.issuperset(record.body.awaits)
    assert early
