"""Every implementation of attention over fused pages equals attention in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_problems import Problem, assert_solved, problem

from kernels_pallas import compat, tpu_walk
from kernels_pallas import specs as spec_types
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.paged_attention import fused_paged_attention, tpu
from kernels_pallas.paged_attention.specs import REAL, TINY
from kernels_pallas.pages import Pages

# tpu.py's sizes, cut down: a text of 160 tokens then has several steps.
SMALL = {"STEP": 128}

IMPLEMENTATIONS = ("xla", "tpu_interpret")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    for name, size in SMALL.items():
        monkeypatch.setattr(tpu, name, size)


def attend(spec: spec_types.Spec, p: Problem, implementation: str, **more) -> jax.Array:
    function = functools.partial(
        fused_paged_attention, implementation=implementation, **{**spec.options(), **more}
    )
    return jax.jit(function)(*p.arguments)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", TINY, ids=lambda spec: spec.name)
def test_implementation_matches_float64(spec, implementation):
    p = problem(spec)
    assert_solved(spec, p, attend(spec, p, implementation))


@pytest.mark.parametrize("spec", [TINY[0], TINY[2]], ids=lambda spec: spec.name)
def test_row_cut_between_two_cores_matches_float64(spec, monkeypatch):
    """As on v5p: the steps of all rows are cut in the middle, here inside a row of many."""
    monkeypatch.setattr(compat, "tensor_cores", lambda: 2)
    spec = dataclasses.replace(spec, B=2, S=400)
    p = problem(spec)
    assert_solved(spec, p, attend(spec, p, "tpu_interpret"))


def test_tables_too_large_for_scalar_memory_go_in_several_calls(monkeypatch):
    spec = TINY[0]
    monkeypatch.setattr(tpu_walk, "TABLE_BYTES", 4 * 4 * spec.n)
    p = problem(spec)
    assert_solved(spec, p, attend(spec, p, "tpu_interpret"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page", [16, 32])
def test_text_in_two_pools_matches_text_in_one(implementation, page):
    """The first tokens of each text lie in one pool, the others in another of larger pages."""
    spec = dataclasses.replace(TINY[0], B=6, T=2)
    p = problem(spec)
    end_B = p.start_B + p.length_B
    split_B = np.array([50, 0, 17, 1, 9, 15], np.int32)  # of 96, 0, 17, 1, 16 and 15 tokens
    n = -(-spec.S // page)
    _, K, _, J = p.pages.kv_PKpJ.shape
    second_PKpJ = np.full((spec.B * n, K, page, J), np.nan, np.float32)
    table_Bn = np.arange(spec.B * n, dtype=np.int32).reshape(spec.B, n)
    first_PKpJ = np.array(p.pages.kv_PKpJ)
    for b in range(spec.B):
        for s in range(split_B[b], end_B[b]):
            old = p.table_Bn[b, s // spec.page], slice(None), s % spec.page
            at = s - split_B[b]
            second_PKpJ[table_Bn[b, at // page], :, at % page] = first_PKpJ[old]
            first_PKpJ[old] = np.nan
    got = fused_paged_attention(
        p.q_BTNH,
        (Pages(jnp.asarray(first_PKpJ)), Pages(jnp.asarray(second_PKpJ))),
        (p.table_Bn, table_Bn),
        p.start_B,
        p.length_B,
        split_B=split_B,
        implementation=implementation,
    )
    assert_solved(spec, p, got)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"H": 24}, "H = 24 with pages of J = 48"),
        ({"page": 12}, "page size 12: the TPU kernel"),
        ({"T": 96}, "192 rows; the TPU"),
    ],
)
def test_named_implementation_declines_in_one_line(sizes, message):
    p = problem(dataclasses.replace(TINY[0], **sizes))
    with pytest.raises(UnsupportedError, match=message) as error:
        fused_paged_attention(*p.arguments, implementation="tpu_interpret")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="`implementation` 'cuda' is none of auto, xla, tpu"):
        fused_paged_attention(*p.arguments, implementation="cuda")


def test_pages_and_scales_must_fit():
    p = problem(TINY[0])
    pages = Pages(np.zeros_like(p.pages.kv_PKpJ, np.int8))
    with pytest.raises(ValueError, match="pages of int8 need `scale_P1X`"):
        fused_paged_attention(p.q_BTNH, pages, *p.arguments[2:])
    with pytest.raises(ValueError, match="2 pool"):
        fused_paged_attention(p.q_BTNH, [p.pages] * 2, [p.table_Bn] * 2, p.start_B, p.length_B)


def test_names_of_shapes_are_unique():
    names = [spec.name for spec in (*TINY, *REAL)]
    assert len(set(names)) == len(names)
