"""Every kernel at every named shape, as something to compile: for tests and benchmarks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.kv_pages import append, pack, unpack
from kernels_pallas.kv_pages import specs as kv_specs
from kernels_pallas.paged_attention import fused_paged_attention
from kernels_pallas.paged_attention import specs as decode_specs
from kernels_pallas.prefill_attention import prefill_attention
from kernels_pallas.prefill_attention import specs as prefill_specs
from kernels_pallas.specs import Spec

REAL = {"decode": decode_specs.REAL, "prefill": prefill_specs.REAL, "move": kv_specs.REAL}
"""All shapes that are not only for tests, by what is done."""


POOL_TEXTS = 64
"""Texts that the pool has room for, at least, where pages are moved."""


class Case(NamedTuple):
    """function(*args); args are trees of ShapeDtypeStructs, of which `donate` are given away."""

    name: str
    spec: Spec
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def real(implementation: str) -> Iterator[Case]:
    """All kernels at all of REAL."""
    for spec in REAL["decode"]:
        yield decode(spec, implementation)
    for spec in REAL["prefill"]:
        yield prefill(spec, implementation)
    for spec in REAL["move"]:
        yield from moves(spec, implementation)


def decode(spec: Spec, implementation: str) -> Case:
    function = partial(fused_paged_attention, implementation=implementation, **spec.options())
    return Case(spec.name, spec, function, (spec.new(spec.N), spec.pages(), *spec.rows()))


def prefill(spec: Spec, implementation: str) -> Case:
    function = partial(prefill_attention, implementation=implementation, **spec.options())
    return Case(spec.name, spec, function, (spec.new(spec.N), spec.pages(), *spec.rows()))


def moves(spec: Spec, implementation: str) -> Iterator[Case]:
    """append, pack and unpack, in a pool so large that no copy of it passes for one of a piece."""
    pages = replace(spec, B=max(spec.B, POOL_TEXTS)).pages()
    new, layers = spec.new(spec.K), [pages] * kv_specs.LAYERS
    table = jax.ShapeDtypeStruct((spec.n,), jnp.int32)
    put, take, fill = (partial(f, implementation=implementation) for f in (append, pack, unpack))
    yield Case(f"append_{spec.name}", spec, put, (pages, new, new, *spec.rows()), (0,))
    yield Case(f"pack_{spec.name}", spec, take, (layers, table))
    piece = jax.eval_shape(partial(pack, implementation="xla"), layers, table)
    yield Case(f"unpack_{spec.name}", spec, fill, (layers, piece, table), (0,))
