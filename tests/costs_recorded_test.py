"""Steps replayed by shape from a log written by hand."""

import pytest
from costs_helpers import LINK, decode, mixed, ms, no_bytes, prefill

from pdjax.core.events import Record, Step, StepDone
from pdjax.costs.batch import Batch, CostError
from pdjax.costs.domain import OutsideDomain
from pdjax.costs.recorded import recorded, samples_of

MS = 1_000_000


def log(*steps: tuple[Step, int, int]) -> list[Record]:
    """(step, when it began, when it ended), in ms; ids as they come, dispatched at once."""
    records = []
    for id, (step, began, ended) in enumerate(steps):
        step = Step(id, step.instance, step.chunks, step.decodes, step.steps)
        records.append(Record(0, step))
        records.append(Record(ended * MS, StepDone(id, step.instance, began * MS)))
    return records


LOG = log(
    (prefill((0, 100)), 5, 25),
    (prefill((0, 100)), 30, 52),
    (prefill((0, 100)), 60, 90),
    (prefill((0, 400)), 100, 180),
    (decode(200, 300), 0, 7),
    (decode(5000, 5000), 7, 20),
)
COST = recorded(samples_of(LOG), LINK, no_bytes)


def test_a_step_lasts_from_its_beginning_not_from_its_dispatch():
    assert samples_of(LOG)[:2] == [(Batch(((0, 100),)), 0.020), (Batch(((0, 100),)), 0.022)]


def test_a_recorded_shape_lasts_as_the_median_of_its_steps():
    assert ms(COST, prefill((0, 100))) == 22
    assert ms(COST, prefill((0, 400))) == 80


def test_a_context_next_to_a_recorded_one_is_the_same_shape():
    assert ms(COST, decode(205, 305)) == 7


def test_another_shape_lasts_as_the_nearest_of_its_kind_by_ratio():
    assert ms(COST, prefill((0, 190))) == 22  # 190 is 1.9 times 100, and 400 2.1 times 190
    assert ms(COST, prefill((0, 210))) == 80
    assert ms(COST, decode(900, 900)) == 7
    assert ms(COST, decode(1500, 1500)) == 13


def test_k_iterations_count_as_k_steps_of_the_middle_one():
    cost = recorded(samples_of(log((decode(200, steps=4), 0, 40))), LINK, no_bytes)
    assert ms(cost, decode(202)) == 10
    assert ms(cost, decode(200, steps=3)) == 30


def test_of_an_open_step_that_was_cut_only_what_ran_counts():
    step = Step(0, "d/0", (), decode(200, 300, steps=8).decodes, 8, open=True)
    ends_ns = tuple(i * 10 * MS for i in (1, 2, 3))
    done = StepDone(0, "d/0", 0, (), ends_ns)
    assert samples_of([Record(0, step), Record(30 * MS, done)]) == [
        (Batch((), 2, 200 + 300 + 2), 0.010)  # the second of three
    ]


def test_steps_of_other_instances_can_be_left_out():
    assert {len(samples_of(LOG, name)) for name in ("p/0", "d/0")} == {4, 2}


def test_a_step_that_did_not_end_is_no_sample():
    assert samples_of([Record(0, prefill((0, 5)))]) == []


def test_beyond_the_record_it_warns():
    cost = recorded(samples_of(LOG), LINK, no_bytes)
    with pytest.warns(OutsideDomain, match="401 prompt tokens; it was measured from 100 to 400"):
        cost.step_ns(prefill((0, 401)))


def test_a_kind_that_was_not_recorded_is_named():
    with pytest.raises(CostError, match="no recorded step has prompt tokens and cached tokens and"):
        COST.step_ns(mixed((0, 100), 200))


def test_an_empty_log_is_refused():
    with pytest.raises(CostError, match="no step was recorded"):
        recorded([], LINK, no_bytes)
