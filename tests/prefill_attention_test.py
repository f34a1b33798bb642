"""Every implementation of a chunk's attention equals attention in float64."""

import functools

import jax
import pytest
from kernel_problems import assert_solved, problem

from kernels_pallas.prefill_attention import prefill_attention, tpu
from kernels_pallas.prefill_attention.specs import REAL, TINY

# tpu.py's sizes, cut down: several tiles per chunk, parts per tile and steps per text.
SMALL = {"STEP": (128, 128), "TILE": 32, "PART": 16}

IMPLEMENTATIONS = ("xla", "tpu_interpret")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    for name, size in SMALL.items():
        monkeypatch.setattr(tpu, name, size)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", TINY, ids=lambda spec: spec.name)
def test_implementation_matches_float64(spec, implementation):
    p = problem(spec)
    attend = functools.partial(prefill_attention, implementation=implementation, **spec.options())
    assert_solved(spec, p, jax.jit(attend)(*p.arguments))


def test_names_of_shapes_are_unique():
    names = [spec.name for spec in (*TINY, *REAL)]
    assert len(set(names)) == len(names)
