"""What experiments.tpu_costs writes, the simulator reads; compilers' numbers are made up here."""

import json

import pytest
from decision_helpers import Listed

from experiments import tpu_step_costs
from pdjax.architecture import LLAMA3_8B
from pdjax.core.config import Config, Link, Model, Pool, Role
from pdjax.core.request import Request, SamplingParams
from pdjax.costs.table import read_table, table
from pdjax.metrics import outcomes
from pdjax.sim import simulate

CONTEXTS = (1024, 4096)
SIZES = (("decode", 1), ("decode", 32), ("prefill", 512))


@pytest.fixture
def path(monkeypatch, tmp_path):
    """A written table. Matrices take a second, collectives 2, a layer's attention a millisecond per
    1,024 cached tokens and row: of 32 layers, 1/32 second per cached token and row."""
    made_up = {
        "_dense_s": lambda case, programs: 1.0,
        "_collective_s": lambda case, programs: 2.0,
        "_attention_s": lambda case, kernel, context: case.rows * context / 1024e3,
    }
    for name, function in made_up.items():
        monkeypatch.setattr(tpu_step_costs, name, function)
    monkeypatch.setattr(tpu_step_costs.aot, "compile_step", lambda case: {"group": None})
    kernels = {"append_to_pages": None, "attention_over_pages": None}
    monkeypatch.setattr(tpu_step_costs.aot_tpu, "schedules", lambda chip, compiled: kernels)
    rows = [
        row
        for size in SIZES
        for row in tpu_step_costs.rows_of(LLAMA3_8B, "v5e", 4, *size, CONTEXTS)
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tpu_step_costs.table_of("llama3-8b", "v5e", 4, rows)))
    return path


def test_a_written_table_has_every_size_at_every_context(path):
    it = read_table(path)
    assert it.name == "llama3-8b on v5e, tp 4"
    assert (it.prefill.rows, it.prefill.columns) == ((512,), (0, *CONTEXTS))
    assert (it.decode.rows, it.decode.columns) == ((1, 32), CONTEXTS)
    assert it.prefill.at(512, 4096) == pytest.approx(3 + 32 * 4e-3)
    assert it.decode.at(32, 1024) == pytest.approx(3 + 32 * 32e-3)


def test_a_simulated_request_takes_what_the_table_says(path):
    """Three chunks of 512 tokens after 0, 512 and 1,024; then 4 steps that see 1,537 to 1,540."""
    pool = Pool(tokens=1 << 16, page_size=16)
    prefill, decode = (Role(does, pool=pool, chunk=512, slots=1) for does in ("prefill", "decode"))
    config = Config({"pd": {"p": prefill, "d": decode}}, model=Model("none", context=4096))
    cost = table(read_table(path), Link(), lambda send: 0)
    request = Request(0, 0, 1536, SamplingParams(max_tokens=5))
    ends = outcomes(simulate(config, "pd", Listed([request]), cost))
    assert ends.ttft_s[0] == pytest.approx(3 * 3 + (0 + 512 + 1024) / 32e3, rel=1e-9)
    decoded_s = ends.ended_s[0] - ends.arrival_s[0] - ends.ttft_s[0]
    assert decoded_s == pytest.approx(4 * 3 + (1537 + 1538 + 1539 + 1540) / 32e3, rel=1e-9)
