"""Chunked prefill with a token budget, simulated: what Sarathi-Serve claims for it."""

import numpy as np
import pytest

from pdjax.reproduce import sarathi
from pdjax.reproduce.sarathi import budgets, capacity, lengths, serve


@pytest.fixture(scope="module")
def placements():
    return sarathi._placements((512, 2048))


def test_lengths_go_through_the_published_quantiles():
    prompt, output = lengths(np.random.default_rng(0), 100_000).T
    assert np.percentile(prompt, 50) == pytest.approx(1730, rel=0.02)
    assert np.percentile(prompt, 90) == pytest.approx(5696, rel=0.02)
    assert np.percentile(output, [50, 90]) == pytest.approx([415, 834], rel=0.02)
    assert (prompt + output).max() <= sarathi.CONTEXT


def test_a_smaller_budget_trades_ttft_for_the_tail_of_tbt(placements):
    small, large = (serve(placements[f"budget {n}"], 2.0, 150) for n in (512, 2048))
    assert small.tbt_p99 < large.tbt_p99
    assert small.ttft_p50 > large.ttft_p50


def test_decodes_apart_have_the_shortest_tail(placements):
    tails = {name: serve(placement, 1.0, 150).tbt_p99 for name, placement in placements.items()}
    assert min(tails, key=tails.__getitem__) == "1P1D"


def test_capacity_is_the_highest_rate_within_the_slo(placements):
    rates = (0.5, 1.0, 8.0, 50.0)
    found = capacity(placements["budget 512"], sarathi.STRICT_S, rates, 100)
    assert serve(placements["budget 512"], found, 100).within(sarathi.STRICT_S)
    over = rates[rates.index(found) + 1]
    assert not serve(placements["budget 512"], over, 100).within(sarathi.STRICT_S)
    assert capacity(placements["budget 512"], 1e-6, rates, 30) == 0


def test_the_reproduction_judges_order_and_gain():
    found = budgets((512, 2048), rate=1.0, n=60, rates=(0.5, 4.0))
    assert found.figure.startswith("<svg")
    assert sum(bool(row.verdict) for row in found.rows) == 4
