"""After any run in virtual time every pool is back to its free count, every request ended exactly
once, no instance has work left, and a replay decides the same."""

from any_placement import BOUNDED, OPTIONS_IN_MS, STOPS, arrivals, placements
from decision_helpers import check_run, request, scheduler_for, served
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.loop import first_difference


@settings(BOUNDED, max_examples=200)
@given(
    placement=placements(),
    options=OPTIONS_IN_MS,
    asked=st.lists(st.tuples(arrivals(), st.integers(0, 200)), min_size=1, max_size=10),
    stops=STOPS,
    aborts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400)), max_size=5),
)
def test_any_run_in_virtual_time_conserves_the_pools_and_replays(
    placement, options, asked, stops, aborts
):
    requests = [request(rid, at_ms=ms, **shape) for rid, (shape, ms) in enumerate(asked)]
    scheduler = scheduler_for(placement, **options)
    log = served(scheduler, requests, stops=stops, aborts=aborts)
    check_run(log, placement, scheduler, **options)
    assert first_difference(log, scheduler_for(placement, **options)) == ""
