"""The benchmark for an accelerator runs from end to end, where XLA stands for the kernels."""

import dataclasses
import math

import pytest

from experiments import bench_kernels_device as bench
from kernels_pallas.paged_attention.specs import TINY as DECODED
from kernels_pallas.prefill_attention.specs import TINY as PREFILLED


@pytest.fixture
def rows(monkeypatch):
    for name in ("copy_bandwidth", "matmul_rate"):
        monkeypatch.setattr(bench, name, lambda: 1e12)
    for name in ("STEPS_BYTES", "STEPS_FLOPS"):
        monkeypatch.setattr(bench, name, 1.0)
    monkeypatch.setattr(bench, "MOVE_LAYERS", 2)
    specs = {spec.name: spec for spec in (*PREFILLED, *DECODED)}
    move = dataclasses.replace(specs["f32"], B=1, T=1)
    return list(bench.rows("xla", [specs["int8"]], [PREFILLED[-3]], move))


def test_reference_agrees_with_itself_and_every_number_is_one(rows):
    assert all(math.isfinite(row.value) for row in rows)
    errors = [row.value for row in rows if "error" in row.what or "differ" in row.what]
    assert errors == [0, 0, 0]
    assert {row.what.split(":")[0].split()[0] for row in rows} >= {"decode", "prefill", "pack"}


def test_work_is_what_a_step_must_do():
    """2 rows, 3 keys of 2 heads of 4 numbers in float32, and 2 new tokens that see 2 and 3 keys."""
    spec = dataclasses.replace(
        DECODED[0], B=2, T=2, S=3, G=1, K=2, H=4, page=8, dtype="float32", q_dtype="float32"
    )
    assert bench.prefill_case(spec, "xla").work == 4 * 4 * 2 * 2 * (2 + 3)
    one = dataclasses.replace(spec, T=1, q_dtype="bfloat16")
    assert bench.decode_case(one, "xla").work == 2 * 3 * (2 * 2 * 4 * 4) + 2 * (2 * 2 * 4 * 2)
