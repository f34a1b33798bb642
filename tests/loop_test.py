"""The loop that every backend runs: what it asks of a source, and the order of its records."""

from decision_helpers import COST, PLACEMENTS, Listed, counting, kinds, request, scheduler_for

from pdjax.core.events import Action, Arrived, Finish, Refuse
from pdjax.core.loop import serve
from pdjax.virtual import VirtualBackend
from pdjax.workload import Source

TOO_LONG = request(1, prompt_len=30, max_tokens=30)


def backend() -> VirtualBackend:
    return VirtualBackend(COST, counting(), lambda event: None)


def test_the_end_or_refusal_of_a_request_brings_the_next_of_a_closed_loop():
    source = Source((request(0), TOO_LONG, request(2)), concurrency=1)
    log = list(serve(source, backend(), scheduler_for(PLACEMENTS["1P1D"])))
    told = [record for record in log if isinstance(record.body, Arrived | Finish | Refuse)]
    assert kinds(record.body for record in told) == [
        "Arrived", "Finish", "Arrived", "Refuse", "Arrived", "Finish",
    ]  # fmt: skip
    times = [record.t_ns for record in told]
    assert times[1] == times[2] == times[3] == times[4]  # each at the end of the one before


def test_an_events_actions_follow_it_and_have_its_time():
    log = list(
        serve(Listed([request(0), request(1)]), backend(), scheduler_for(PLACEMENTS["1P1D"]))
    )
    assert [record.t_ns for record in log] == sorted(record.t_ns for record in log)
    event_ns = None
    for record in log:
        event_ns = record.t_ns if record.is_event else event_ns
        assert record.t_ns == event_ns


def test_an_action_is_logged_before_it_starts_so_that_a_crash_leaves_it_in_the_log():
    started: list[Action] = []

    class Told(VirtualBackend):
        def start(self, action: Action) -> None:
            started.append(action)
            super().start(action)

    told = Told(COST, counting(), lambda event: None)
    seen = []
    for record in serve(Listed([request(0)]), told, scheduler_for(PLACEMENTS["1P1D"])):
        assert started == seen
        seen += [] if record.is_event else [record.body]
    assert started == seen


def test_a_source_without_requests_gives_an_empty_log():
    assert list(serve(Listed([]), backend(), scheduler_for(PLACEMENTS["1P1D"]))) == []
