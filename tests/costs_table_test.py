"""Interpolation: exact at what was measured, as scipy has it between, with a warning beyond."""

import json
import warnings

import numpy as np
import pytest
from costs_helpers import LINK, decode, mixed, ms, no_bytes, prefill
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from pdjax.costs.batch import CostError
from pdjax.costs.domain import OutsideDomain
from pdjax.costs.table import Grid, Table, read_table, table

GRID = Grid((1, 4, 8), (100, 200), ((1.0, 2.0), (3.0, 7.0), (5.0, 6.0)))
# Prefill: 1 ms a token and 1 ms per 100 cached; decode: 10 ms, 1 a request, 1 per 100 of context.
TABLE = Table(
    "toy on here, tp 1",
    Grid((10, 100), (0, 1000), ((0.01, 0.02), (0.1, 0.11))),
    Grid((1, 9), (100, 900), ((0.012, 0.020), (0.020, 0.028))),
)
COST = table(TABLE, LINK, no_bytes)


@given(st.floats(1, 8), st.floats(100, 200))
def test_between_points_a_grid_is_scipys_bilinear_interpolation(row, column):
    oracle = RegularGridInterpolator((GRID.rows, GRID.columns), np.array(GRID.seconds))
    assert GRID.at(row, column) == pytest.approx(float(oracle([row, column])[0]), rel=1e-12)


def test_at_its_points_a_grid_is_exact():
    at = [[GRID.at(row, column) for column in GRID.columns] for row in GRID.rows]
    assert at == [list(line) for line in GRID.seconds]


def test_beyond_its_points_a_grid_goes_on_and_below_them_it_stays():
    assert GRID.at(12, 100) == pytest.approx(7.0)  # from 3 at 4 and 5 at 8
    assert GRID.at(4, 300) == pytest.approx(11.0)
    assert GRID.at(0, 50) == 1.0


def test_one_point_is_a_grid():
    assert Grid((4,), (100,), ((2.5,),)).at(7, 900) == 2.5


@pytest.mark.parametrize(
    ("step", "milliseconds"),
    [
        (prefill((0, 55)), 55),
        (prefill((500, 55)), 60),
        # 60 tokens, after 250 on average: (0 * 30 + 500 * 30) / 60
        (prefill((0, 30), (500, 30)), 62.5),
        (decode(500), 16),
        (decode(*[300] * 5), 18),
        # 55 + 5 tokens, and what context 300 costs 5 requests more than context 100
        (mixed((0, 55), *[300] * 5), 62),
    ],
)
def test_steps_last_as_the_table_says(step, milliseconds):
    assert ms(COST, step) == pytest.approx(milliseconds)


def test_each_quantity_beyond_the_table_warns_once_by_name_and_values():
    cost = table(TABLE, LINK, no_bytes)
    told = "`toy on here, tp 1` is asked for 101 prompt tokens; it was measured from 10 to 100"
    with pytest.warns(OutsideDomain, match=told):
        cost.step_ns(prefill((0, 101)))
    with pytest.warns(OutsideDomain, match="context per request; it was measured from 100 to 900"):
        cost.step_ns(decode(901))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost.step_ns(prefill((0, 5000)))
        cost.step_ns(decode(90))


def rows(**changed: object) -> dict:
    points = [("prefill", 16, 0), ("prefill", 64, 0), ("decode", 1, 100), ("decode", 1, 200)]
    listed = [
        {"phase": phase, "size": size, "context": context, "seconds": size * 1e-3}
        for phase, size, context in points
    ]
    return {"model": "m", "chip": "c", "tp": 2, "rows": listed, "more": "is ignored"} | changed


def test_a_table_is_read_from_rows(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(rows()))
    it = read_table(path)
    assert it.name == "m on c, tp 2"
    assert it.prefill == Grid((16, 64), (0,), ((0.016,), (0.064,)))
    assert it.decode == Grid((1,), (100, 200), ((0.001, 0.001),))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"rows": rows()["rows"][:2]}, "no row of phase `decode`"),
        (
            {"rows": [*rows()["rows"], rows()["rows"][0] | {"size": 32, "context": 9}]},
            "no row of phase `prefill` has size 16 and context 9",
        ),
        ({"tp": "two"}, "Expected `int`"),
    ],
)
def test_a_file_that_is_no_table_is_refused_in_one_line(tmp_path, changed, what):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(rows(**changed)))
    with pytest.raises(CostError, match=f"table.json` is not a table of step times: .*{what}") as e:
        read_table(path)
    assert "\n" not in str(e.value)


def test_axes_that_do_not_ascend_are_refused():
    with pytest.raises(CostError, match=r"`rows` of a grid are \(2, 1\); they must ascend"):
        Grid((2, 1), (1,), ((1.0,), (1.0,)))
    with pytest.raises(CostError, match="no table of 2 x 1"):
        Grid((1, 2), (1,), ((1.0,),))
