"""The experiment on forms of KV memory: its verdicts by hand, and that its config says what it
claims."""

import pytest
from metrics_test import COLLOCATED_LOG, disaggregated_log, measured
from record_builders import DISAGGREGATED

from configs import pool_forms
from experiments.pool_forms import CLAIMED, cells, direction, fragmentation, show


def repeat(**changes: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    return {**dict.fromkeys(CLAIMED, (100.0, 10.0, 2.0, 50.0)), **changes}


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.04, "same"), (0.96, "same"), (1.06, "higher"), (0.94, "lower")]
)
def test_small_differences_are_none(ratio, expected):
    assert direction(ratio) == expected


def test_verdict_needs_all_repeats_to_agree():
    repeats = [
        repeat(two_pools=(50.0, 12.0, 2.0, 40.0)),
        repeat(two_pools=(60.0, 13.0, 3.0, 45.0)),
    ]
    found = {cell.column: cell for cell in cells(repeats) if cell.form == "two_pools"}
    verdicts = {column: cell.verdict for column, cell in found.items()}
    # Claimed of two pools: TTFT, TPOT and memory lower, throughput higher.
    assert verdicts == {
        "TTFT p50 ms": "as claimed",
        "TPOT p50 ms": "not so",
        "requests/s": "unclear",
        "KV held, mean MB": "as claimed",
    }
    assert found["TTFT p50 ms"].value == 55
    assert found["TTFT p50 ms"].ratios == (0.5, 0.6)
    assert found["TTFT p50 ms"].claimed_ratio == pytest.approx(420 / 940)


def test_table_shows_every_form_with_its_verdicts(capsys):
    show(cells([repeat()]), dict.fromkeys(CLAIMED, "both/0 10%"))
    text = capsys.readouterr().out
    assert all(form in text for form in CLAIMED)
    row = next(line for line in text.splitlines() if "two_pools" in line and "TTFT" in line)
    assert [cell.strip() for cell in row.split("│")[3:7]] == ["100", "x0.45", "x1.00", "not so"]


def test_fragmentation_names_every_pool():
    # 1 - (30 * 8 + 25 * 8) / (40 * 12 + 30 * 20 + 25 * 12), as tests/metrics_test.py counts
    assert fragmentation(measured(COLLOCATED_LOG)) == "both/0 68%"
    # 8 tokens held for 70 ms, stored for 30; 4 of the 6 free pages are one run.
    slab = fragmentation(measured(disaggregated_log(40, 55), DISAGGREGATED))
    assert "prefill/0 57%, external 33%" in slab


def test_all_forms_have_one_device_and_room_for_as_many_tokens():
    placements = pool_forms.get_config().placements
    assert placements.keys() == CLAIMED.keys()
    for placement in placements.values():
        assert sum(not role.beside for role in placement.values()) == 1
        assert sum(role.pool.tokens for role in placement.values() if not role.pool_of) == 8192
