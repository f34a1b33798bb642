"""Decisions that were checked by eye, one small log per kind of placement; a replay must give the
same. Where a change is meant, write them anew and read the difference:

    python tests/decisions_are_golden_test.py && git diff tests/golden/decisions

Pools have 6 pages of 3 tokens, two slots decode, a chunk has at most 6 tokens. A step lasts 10 ms
and 1 ms per token in or out, a piece 2 ms and 1 ms per token.
"""

from pathlib import Path

import pytest
from decision_helpers import PLACEMENTS, check_run, request, scheduler_for, served

from pdjax.core.events import Record, read_jsonl, write_jsonl
from pdjax.core.loop import first_difference
from pdjax.core.scheduler import Scheduler

FOLDER = Path(__file__).parent / "golden" / "decisions"
REQUESTS = [
    request(0, prompt_len=8, max_tokens=3),  # two chunks
    request(1, prompt_len=3, max_tokens=1, at_ms=5),  # its first token is its last
    request(2, prompt_len=4, max_tokens=6, at_ms=10),  # stops at its second token
    request(3, prompt_len=17, max_tokens=3, at_ms=20),  # 19 tokens: no decode pool has them
    request(4, prompt_len=5, max_tokens=5, at_ms=25),  # given up at 70 ms
]
ABORTS = [(4, 70)]
STOPS = {2: 2}
OPTIONS = {"groups": 2, "prefill_router": "round_robin"}


def golden(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"


def scheduler(name: str) -> Scheduler:
    return scheduler_for(PLACEMENTS[name], **OPTIONS)


def run(name: str) -> list[Record]:
    return served(scheduler(name), REQUESTS, aborts=ABORTS, stops=STOPS)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_golden_events_give_the_golden_decisions(name):
    assert first_difference(read_jsonl(golden(name)), scheduler(name)) == ""


@pytest.mark.parametrize("name", PLACEMENTS)
def test_golden_logs_keep_every_law(name):
    log, fresh = list(read_jsonl(golden(name))), scheduler(name)
    assert first_difference(log, fresh) == ""
    check_run(log, PLACEMENTS[name], fresh)


def test_every_kind_of_placement_has_its_log():
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(PLACEMENTS)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in PLACEMENTS:
        write_jsonl(golden(name), run(name))
