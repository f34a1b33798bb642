"""Every implementation of a chunk's attention equals attention in float64."""

import functools

import jax
import pytest
from kernel_problems import assert_solved, problem

from kernels_pallas.prefill_attention import prefill_attention
from kernels_pallas.prefill_attention.specs import REAL, TINY

IMPLEMENTATIONS = ("xla", "tpu_interpret")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", TINY, ids=lambda spec: spec.name)
def test_implementation_matches_float64(spec, implementation):
    p = problem(spec)
    attend = functools.partial(prefill_attention, implementation=implementation, **spec.options())
    assert_solved(spec, p, jax.jit(attend)(*p.arguments))


def test_names_of_shapes_are_unique():
    names = [spec.name for spec in (*TINY, *REAL)]
    assert len(set(names)) == len(names)
