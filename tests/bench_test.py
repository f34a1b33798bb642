"""A benchmark's file says of each row whether its goal was met, and whether all were."""

import json
from pathlib import Path

import pytest

from experiments.bench_common import Row, report


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [
        (1.05, "<= 1.05", True),
        (1.06, "<= 1.05", False),
        (1.0, ">= 1.0", True),
        (0.99, ">= 1.0", False),
        (7.0, "", None),
    ],
)
def test_a_goal_is_met_at_its_bound_and_on_the_right_side(value, goal, met):
    assert Row("it", value, "x", goal).met is met


def test_the_file_lists_every_row_and_says_whether_all_goals_are_met(tmp_path: Path):
    path = tmp_path / "bench.json"
    rows = [Row("slow", 2.0, "x", "<= 1.0"), Row("rate", 5.0, "tok/s")]
    assert report(rows, str(path), {"seed": 0}) is False
    said = json.loads(path.read_text())
    assert said["meets_goals"] is False
    assert said["rows"][0] == {
        "what": "slow", "value": 2.0, "unit": "x", "goal": "<= 1.0", "met": False
    }  # fmt: skip
    assert said["rows"][1]["met"] is None
    assert report(rows[1:], str(path), {}) is True
    assert json.loads(path.read_text())["meets_goals"] is True


def test_an_interrupt_keeps_the_rows_that_are_there_and_meets_no_goals(tmp_path: Path):
    def rows():
        yield Row("fast", 0.5, "x", "<= 1.0")
        raise KeyboardInterrupt

    path = tmp_path / "bench.json"
    assert report(rows(), str(path), {"seed": 0}) is False
    said = json.loads(path.read_text())
    assert [row["what"] for row in said["rows"]] == ["fast"]
    assert said["setting"] == {"seed": 0, "complete": False}
    assert said["meets_goals"] is False
