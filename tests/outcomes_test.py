"""What is read off a log as it passes is what the tables say of it."""

import numpy as np
import pytest
from decision_helpers import PLACEMENTS, request, scheduler_for, served

from pdjax.core.config import SLO, Recovery
from pdjax.core.events import Record, Retry
from pdjax.metrics import analyse, growth_of, outcomes, queue_growth

SLOS = SLO(ttft_s=0.06, tpot_s=0.03)


def same(log: list[Record], placement: str) -> None:
    run = analyse(log, PLACEMENTS[placement], SLOS)
    seen = outcomes(log)
    order = np.argsort(seen.arrival_s, kind="stable")
    table = run.requests.sort_values("arrival_s", kind="stable")
    for column in seen._fields:
        np.testing.assert_array_equal(getattr(seen, column)[order], table[column], column)
    np.testing.assert_array_equal(seen.attained(SLOS)[order], table["attained"])
    assert growth_of(seen.arrival_s, seen.ended_s) == pytest.approx(queue_growth(run), nan_ok=True)


def requests(count: int = 24):
    return [request(rid, 2 + rid % 9, 1 + rid % 6, at_ms=15 * rid) for rid in range(count)]


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_outcomes_are_the_columns_of_the_request_table(placement):
    log = served(scheduler_for(PLACEMENTS[placement]), requests())
    same(log, placement)


def test_outcomes_of_aborted_stopped_and_refused_requests():
    asked = [*requests(), request(24, 39, 9, at_ms=400)]  # 24 is longer than the context
    log = served(
        scheduler_for(PLACEMENTS["1P1D"]), asked, aborts=[(5, 120), (9, 136)], stops={3: 2, 11: 1}
    )
    ends = outcomes(log)
    assert not ends.completed.all() and len(ends.completed) == len(asked)
    same(log, "1P1D")


def test_outcomes_of_a_log_that_was_cut_short():
    log = served(scheduler_for(PLACEMENTS["1P1D"]), requests())
    cut = log[: len(log) // 2]
    assert np.isnan(outcomes(cut).ended_s).any()
    same(cut, "1P1D")


def test_tokens_that_a_step_brings_after_a_retry_do_not_count():
    scheduler = scheduler_for(PLACEMENTS["1P1D"], recovery=Recovery())
    log = served(scheduler, requests(2))
    at = next(i for i, record in enumerate(log) if type(record.body).__name__ == "StepDone")
    lost = [*log[:at], Record(log[at].t_ns, Retry(0, "lost")), *log[at:]]
    same(lost, "1P1D")
    assert outcomes(log).ttft_s[0] > 0 and np.isnan(outcomes(lost).ttft_s[0])
