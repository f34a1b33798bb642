"""Splitwise's table: its medians, exactly; and its own simulator's way of reading them."""

import numpy as np
import pandas as pd
import pytest
from costs_helpers import LINK, decode, mixed, ms, no_bytes, prefill
from scipy.interpolate import interp1d

from pdjax.costs.batch import CostError
from pdjax.costs.domain import OutsideDomain
from pdjax.costs.splitwise import as_simulated, read, splitwise


@pytest.fixture(scope="module")
def path(traces):
    return traces / "splitwise-sim" / "perf_model.csv"


@pytest.fixture(scope="module")
def a100(path):
    return read(path, "llama2-70b", "a100-80gb", 8)


def test_llama2_70b_takes_the_published_milliseconds(path, a100):
    h100 = splitwise(read(path, "llama2-70b", "h100-80gb", 8), LINK, no_bytes)
    a100 = splitwise(a100, LINK, no_bytes)
    steps = (prefill((0, 512)), decode(512), prefill((0, 2048)))
    assert [round(ms(a100, step), 1) for step in steps] == [93.0, 45.0, 274.2]
    assert [round(ms(h100, step), 1) for step in steps] == [53.9, 30.6, 136.8]
    many = (prefill(*[(0, 512)] * 64), decode(*[512] * 64))
    assert [round(ms(a100, step), 1) for step in many] == [7554.0, 71.6]
    assert [round(ms(h100, step)) for step in many] == [2936, 50]


def test_every_measured_point_is_the_median_of_its_repeats(path):
    table = pd.read_csv(path)
    groups = table.groupby(["model", "hardware", "tensor_parallel"])
    assert len(groups) == 12
    for key, rows in groups:
        cost = splitwise(read(path, *key), LINK, no_bytes)
        for (length, batch), point in rows.groupby(["prompt_size", "batch_size"]):
            prompt, token = np.median(point["prompt_time"]), np.median(point["token_time"])
            assert ms(cost, prefill(*[(0, length)] * batch)) == pytest.approx(prompt, abs=1e-6)
            assert ms(cost, decode(*[length] * batch)) == pytest.approx(token, abs=1e-6)


def test_prompts_between_one_long_and_many_short_take_between_their_times(a100):
    cost = splitwise(a100, LINK, no_bytes)
    long, short, between = (
        ms(cost, prefill(*[(0, n)] * (8192 // n))) for n in (8192, 512, 2048)
    )  # 1 x 8192 tokens, 16 x 512 and 4 x 2048, half way in logs
    assert between == pytest.approx((long + short) / 2)
    assert ms(cost, prefill((0, 8192))) < between < short


def test_decodes_beside_a_prompt_are_tokens_of_it(a100):
    cost = splitwise(a100, LINK, no_bytes)
    assert ms(cost, mixed((0, 500), *[512] * 12)) == ms(cost, prefill((0, 512)))


def test_batches_beyond_the_table_warn(a100):
    cost = splitwise(a100, LINK, no_bytes)
    with pytest.warns(OutsideDomain, match="65 decoding requests; it was measured from 1 to 64"):
        cost.step_ns(decode(*[512] * 65))


def test_as_simulated_is_the_peers_interpolation_over_tokens(path, a100):
    """interp1d over the medians by tokens, extrapolated, as performance_model.py does it."""
    cost = as_simulated(a100, LINK, no_bytes)
    rows = pd.read_csv(path).query(
        "model == 'llama2-70b' and hardware == 'a100-80gb' and tensor_parallel == 8"
    )
    rows = rows.assign(batch_tokens=rows["prompt_size"] * rows["batch_size"])
    medians = rows.groupby("batch_tokens")[["prompt_time", "token_time"]].median()
    prompt, token = (
        interp1d(medians.index, medians[time], fill_value="extrapolate") for time in medians
    )
    for tokens in (1, 100, 1500, 8192, 40_000):
        assert ms(cost, prefill((0, tokens))) == pytest.approx(float(prompt(tokens)), abs=1e-6)
    for requests in (1, 30, 200):
        step = decode(*[999] * requests)
        assert ms(cost, step) == pytest.approx(float(token(requests)), abs=1e-6)
    beside = ms(cost, mixed((0, 1000), *[999] * 24))
    assert beside == pytest.approx(1.1 * float(prompt(1024)), abs=1e-6)


def test_the_simulators_lookup_misses_what_a_batch_costs(a100):
    """Its fault: 64 decodes are read at 64 tokens, below all that was measured."""
    ours, theirs = (make(a100, LINK, no_bytes) for make in (splitwise, as_simulated))
    step = decode(*[512] * 64)
    assert ms(ours, step) > 1.6 * ms(theirs, step)


def test_what_was_not_measured_is_refused_with_what_was(path, tmp_path):
    with pytest.raises(
        CostError, match="has no llama2-70b on v5e, tp 8; it has bloom-176b on a100"
    ):
        read(path, "llama2-70b", "v5e", 8)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(CostError, match=r"other.csv` is not Splitwise's perf_model.csv"):
        read(other, "llama2-70b", "a100-80gb", 8)
