"""A cost is read from a file by what the file has."""

import json

import msgspec
import pytest
from costs_helpers import LINK, decode, no_bytes, prefill

from pdjax import catalogue
from pdjax.costs.batch import CostError
from pdjax.costs.files import read_cost
from pdjax.costs.roofline import Coefficients, Roofline, roofline
from pdjax.costs.table import read_table, table

SHAPE = catalogue.model("llama3-8b")
STEPS = (prefill((0, 100)), decode(200, 300))


def test_a_calibration_is_a_roofline(tmp_path):
    line = Roofline(name="here", coefficients=Coefficients(step_s=1e-3, flop_s=1e-14))
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode({"meets_goals": True, "roofline": line}))
    found, wanted = read_cost(path, SHAPE, LINK, no_bytes), roofline(line, SHAPE, LINK, no_bytes)
    assert [found.step_ns(step) for step in STEPS] == [wanted.step_ns(step) for step in STEPS]


def test_compilers_costs_are_a_table(tmp_path):
    rows = [
        {"phase": phase, "size": size, "context": context, "seconds": size * 1e-3 + context * 1e-6}
        for phase in ("prefill", "decode")
        for size in (1, 512)
        for context in (0, 1024)
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"model": "llama3-8b", "chip": "v5e", "tp": 4, "rows": rows}))
    found, wanted = read_cost(path, SHAPE, LINK, no_bytes), table(read_table(path), LINK, no_bytes)
    assert [found.step_ns(step) for step in STEPS] == [wanted.step_ns(step) for step in STEPS]
    assert found.step_ns(STEPS[0]) == 100_000_000


@pytest.mark.parametrize("content", ["", "[]", '{"rows": 3}'])
def test_another_file_is_named(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(CostError, match=r"other\.json` (has no costs|is not a table)"):
        read_cost(path, SHAPE, LINK, no_bytes)
