"""Splitwise's clusters from its measured table, in both readings."""

import numpy as np
import pytest

from pdjax.costs.domain import OutsideDomain
from pdjax.reproduce import splitwise
from pdjax.reproduce.splitwise import (
    A100,
    ISO_COST,
    ISO_POWER,
    ISO_POWER_CODE,
    Cluster,
    highest,
    independent,
    iso_power,
    misses,
    slowdowns,
)

pytestmark = pytest.mark.filterwarnings(f"ignore::{OutsideDomain.__module__}.OutsideDomain")


@pytest.fixture(autouse=True)
def at_the_traces(traces, monkeypatch):
    monkeypatch.setenv("PDJAX_TRACES", str(traces))


def _machines(cluster: Cluster) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, count in filter(None, cluster):
        counts[name] = counts.get(name, 0) + count
    return counts


def test_clusters_draw_equal_power_and_cost_the_same():
    """Within a machine: units of splitwise-sim, a fifth of 40 DGX-H100; capped ones draw 0.7."""
    power = {A100: 24.8, "h100-80gb": 44.0, "h100-80gb-pcap": 0.7 * 44.0}
    for (cluster,) in (*ISO_POWER.values(), *ISO_POWER_CODE.values()):
        total = sum(power[name] * count for name, count in _machines(cluster).items())
        assert abs(total - 8 * 44.0) < 24.8
    cost = {A100: 2.21, "h100-80gb": 4.76, "h100-80gb-pcap": 4.76}
    for design in ISO_COST.values():
        for cluster in design:
            total = sum(cost[name] * count for name, count in _machines(cluster).items())
            assert abs(total - 8 * 4.76) < 2.21


def test_prompts_and_outputs_are_drawn_apart():
    prompt, output = independent("conv")(np.random.default_rng(0), 20_000).T
    assert abs(np.corrcoef(prompt, output)[0, 1]) < 0.03
    assert prompt.mean() == pytest.approx(1155, rel=0.05)  # Azure's table of the trace
    assert output.mean() == pytest.approx(211, rel=0.05)


def test_nearly_alone_on_an_a100_nobody_is_slowed_down():
    draw = lambda rng, n: np.tile([512, 50], (n, 1))  # noqa: E731
    took, _ = slowdowns(Cluster((A100, 1)), draw, 0.0005, 20, "as measured")
    assert took["TTFT"] == pytest.approx(np.ones(20), abs=1e-3)
    assert took["TBT"] == pytest.approx(np.ones(20), rel=0.01)
    assert misses(took) == ""


def test_the_limit_that_is_missed_is_named():
    fine, late = np.ones(100), np.full(100, 1.4)
    assert misses({"TTFT": fine, "TBT": late, "E2E": fine}) == "TBT p50"
    assert misses({"TTFT": fine, "TBT": fine, "E2E": np.append(fine[:98], [9, 9])}) == "E2E p99"


def test_reading_the_table_as_the_simulator_does_flatters_token_machines():
    """40 requests/s: five machines decode all, and batches must not seem free."""
    cluster, draw = ISO_POWER["Splitwise-AA"][0], independent("conv")
    measured, simulated = (
        np.median(slowdowns(cluster, draw, 40, 300, mode)[0]["TBT"])
        for mode in ("as measured", "as simulated")
    )
    assert simulated < 1.1 < measured


def test_more_machines_carry_more():
    draw = independent("code")
    one, two = (
        highest((Cluster(("h100-80gb", n)),), draw, 150, "as measured", (2, 4, 8, 16)).rate
        for n in (1, 4)
    )
    assert one < two


def test_the_reproduction_compares_every_design(monkeypatch):
    monkeypatch.setattr(splitwise, "RATES", (10, 20))
    found = iso_power(n=100, runs=(("code", "as measured"),))
    assert found.figure.startswith("<svg")
    assert sum(bool(row.verdict) for row in found.rows) == 3 + 1  # bars, and the headline
    assert len(found.rows) == 3 + 1 + len(ISO_POWER_CODE) + 1


def test_a_published_bar_is_met_within_a_quarter_or_not():
    bar = splitwise.Bar("Splitwise-AA", "Baseline-A100", 2.0, "figure")
    verdicts = [
        splitwise._bar_row("conv", each, ratio, "power").verdict
        for each, ratio in ((bar, 2.5), (bar, 2.51), (bar, "the latter has none"),
                            (bar._replace(ratio=None), 1.01), (bar._replace(ratio=None), 1.0))
    ]  # fmt: skip
    yes, no = "reproduced", "not reproduced"
    small = splitwise._bar_row("conv", bar._replace(ratio=1.18), 1.0, "power")
    assert small.verdict == no  # within a quarter, and no gain all the same
    assert verdicts == [yes, no, no, yes, no]
