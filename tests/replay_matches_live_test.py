"""Feeding a recorded log's events to a fresh scheduler gives the log's actions, each one; a log in
which anything decided was changed is told with the first line that differs."""

import msgspec
import pytest
from decision_helpers import PLACEMENTS, request, scheduler_for, served

from pdjax.core.events import (
    Arrived,
    Finish,
    Hold,
    Landed,
    Record,
    Step,
    StepDone,
    read_jsonl,
    write_jsonl,
)
from pdjax.core.loop import first_difference

ALL = pytest.mark.parametrize("name", PLACEMENTS)
REQUESTS = [
    request(0, 8, 4),
    request(1, 3, 1, at_ms=5),
    request(2, 30, 30, at_ms=6),  # refused
    request(3, 6, 9, at_ms=7),
    request(4, 2, 5, at_ms=40),
    request(5, 7, 3, at_ms=41),
]


def record(name: str, **options) -> list[Record]:
    scheduler = scheduler_for(PLACEMENTS[name], groups=2, **options)
    return served(scheduler, REQUESTS, aborts=[(3, 60)], stops={4: 2})


def replay(log: list[Record], name: str, **options) -> str:
    return first_difference(log, scheduler_for(PLACEMENTS[name], groups=2, **options))


def position(log: list[Record], kind: type, nth: int = 0) -> int:
    return [i for i, line in enumerate(log) if isinstance(line.body, kind)][nth]


def changed(log: list[Record], at: int, **fields) -> list[Record]:
    body = msgspec.structs.replace(log[at].body, **fields)
    return [*log[:at], Record(log[at].t_ns, body), *log[at + 1 :]]


@ALL
@pytest.mark.parametrize("schedule", ["layerwise", "whole"])
def test_a_recorded_run_replays_through_its_file(name, schedule, tmp_path):
    write_jsonl(tmp_path / "events.jsonl", record(name, schedule=schedule))
    log = list(read_jsonl(tmp_path / "events.jsonl"))
    assert replay(log, name, schedule=schedule) == ""


@ALL
def test_the_same_requests_give_the_same_log(name):
    assert record(name) == record(name)


@ALL
def test_times_do_not_decide(name):
    later = [Record(line.t_ns * 3 + 7, line.body) for line in record(name)]
    assert replay(later, name) == ""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Step, {"instance": "decode/0"}),
        (Finish, {"tokens": 99}),
        (Finish, {"reason": "abort"}),
    ],
)
def test_a_changed_action_is_told_with_its_line(kind, fields):
    log = record("1P1D")
    at = position(log, kind)
    said = replay(changed(log, at, **fields), "1P1D")
    assert said.startswith(f"record {at + 1}: the log has {kind.__name__}(")
    assert f"the scheduler wants {log[at].body}" in said


def test_other_pages_are_told():
    log = record("1P1D")
    at = position(log, Hold, 2)
    handle = msgspec.structs.replace(log[at].body.handle, pages=(5, 4, 3))
    said = replay(changed(log, at, handle=handle), "1P1D")
    assert said.startswith(f"record {at + 1}: the log has Hold(")


def test_a_missing_action_is_told_where_the_log_goes_on():
    log = record("1P1D")
    at = position(log, Step)
    said = replay(log[:at] + log[at + 1 :], "1P1D")
    assert said == f"record {at + 1}: the log goes on, the scheduler also wants {log[at].body}"


def test_an_action_too_many_is_told():
    log = record("1P1D")
    at = position(log, Step) + 1
    extra = Record(0, Finish(0, "abort", 0))
    said = replay([*log[:at], extra, *log[at:]], "1P1D")
    assert said == (f"record {at + 1}: the log has {extra.body}, the scheduler wants nothing more")


def test_a_log_that_ends_early_is_told():
    log = record("1P1D")
    at = position(log, Step)
    said = replay(log[:at], "1P1D")
    assert said == f"the log ends, the scheduler also wants {log[at].body}"


def test_a_changed_event_shows_in_what_follows():
    log = record("1P1D")
    at = position(log, Arrived)
    longer = msgspec.structs.replace(log[at].body.request, prompt_len=2)
    said = replay(changed(log, at, request=longer), "1P1D")
    assert said.startswith(f"record {at + 2}: ")


@pytest.mark.parametrize(("kind", "id"), [(StepDone, "step"), (Landed, "send")])
def test_an_event_that_cannot_have_happened_is_told_with_its_line(kind, id):
    log = record("1P1D")
    at = position(log, kind)
    strange = changed(log, at, **{id: 999})
    said = replay(strange, "1P1D")
    assert said == f"record {at + 1}: nothing that was started can end with {strange[at].body}"


@pytest.mark.parametrize("kind", [StepDone, Landed])
def test_an_event_that_is_told_twice_changes_nothing(kind):
    log = record("1P1D")
    assert replay([*log, log[position(log, kind, -1)]], "1P1D") == ""


def test_a_lost_event_is_told_with_the_line_after_it():
    log = record("1P1D")
    at = position(log, StepDone)
    assert log[at + 1].is_event is False  # it caused something
    said = replay(log[:at] + log[at + 1 :], "1P1D")
    assert said.startswith(f"record {at + 1}: ")


@pytest.mark.parametrize("other", ["2P1D", "1P2D", "two_pools", "collocated"])
def test_another_placement_decides_otherwise(other):
    log = record("1P1D", prefill_router="round_robin", decode_router="round_robin")
    said = replay(log, other, prefill_router="round_robin", decode_router="round_robin")
    assert said.startswith("record ")
