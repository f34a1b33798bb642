"""The softmax's walk over tiles of keys and values: one warpgroup, 64 rows of queries."""

# What Mosaic GPU takes is annotated otherwise in each release of jax.
# pyright: reportArgumentType=false, reportAbstractUsage=false

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import hopper
from kernels_pallas.hopper import LOG2_E, MASKED, PER_KEY, PER_ROW, ROWS, TILE


class State(NamedTuple):
    """The softmax so far, of each row (Milakov and Gimelshein 2018, arXiv 1805.02867)."""

    o_RH: jax.Array  # not yet divided by the sum
    top_R: jax.Array  # of the scores, times log2(e)
    sum_R: jax.Array


def empty(walk: hopper.Walk) -> State:
    top_R = plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), PER_ROW)
    sum_R = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
    return State(hopper.zeros((ROWS, walk.H), jnp.float32), top_R, sum_R)


class Queries(NamedTuple):
    """A warpgroup's rows: row r stands at position first + step(r)."""

    q_XRH: Any
    first: jax.Array
    last: jax.Array
    step: Callable[[jax.Array], jax.Array]


def scores(
    walk: hopper.Walk,
    queries: Queries,
    text: hopper.Text,
    ring: hopper.Ring,
    block: hopper.Block,
    issued: Callable[[], None] = lambda: None,
) -> jax.Array:
    """Of 64 rows and a block of keys, times log2(e) over walk.factor, MASKED where a row must not
    look. `issued` is called while the matrix unit works."""
    shape, at = (ROWS, walk.block), block.index * walk.block

    def product(out_RS: Any) -> jax.Array:
        for i, j in _products(walk):
            k_SH = hopper.tile_of(walk, ring, block, j).at[:, pl.ds(0, walk.H)]
            plgpu.wgmma(out_RS, queries.q_XRH.at[i], k_SH.transpose((1, 0)))
        issued()
        return out_RS[...]

    s_RS = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    if walk.softcap is not None:
        factor = walk.scale / walk.softcap
        s_RS *= (
            _columns(hopper.key_scales(ring, block, 0) * factor, shape) if walk.scaled else factor
        )
        s_RS = jnp.tanh(s_RS) * (walk.softcap * LOG2_E)
    elif walk.scaled:
        s_RS *= _columns(hopper.key_scales(ring, block, 0) * (walk.scale * LOG2_E), shape)
    some_hidden = (at + walk.block > queries.first + 1) | (at + walk.block > text.keys)
    if walk.window is not None:
        some_hidden |= at <= queries.last - walk.window

    def mask(s_RS: jax.Array) -> jax.Array:
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE) + at
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
        position = queries.first + queries.step(row)
        seen = (key <= position) & (key < text.keys)
        if walk.window is not None:
            seen &= key > position - walk.window
        return jnp.where(seen, s_RS, MASKED)

    return lax.cond(some_hidden, mask, lambda s_RS: s_RS, s_RS)


def softmax_step(
    walk: hopper.Walk, state: State, s_RS: jax.Array
) -> tuple[jax.Array, jax.Array, State]:
    """p_RS, what the sums so far shrink by, and the state without this block's values. A row that
    has seen nothing yet sums garbage, which its first key shrinks to zero."""
    top_R = jnp.maximum(state.top_R, s_RS.max(axis=1) * walk.factor)
    shrink_R = jnp.exp2(state.top_R - top_R)
    p_RS = jnp.exp2(s_RS * walk.factor - _rows(top_R, s_RS.shape))
    return p_RS, shrink_R, State(state.o_RH, top_R, state.sum_R * shrink_R + p_RS.sum(axis=1))


def add_values(
    walk: hopper.Walk,
    text: hopper.Text,
    ring: hopper.Ring,
    block: hopper.Block,
    p_RS: jax.Array,
    shrink_R: jax.Array,
    state: State,
    p_smem: Any,
    issued: Callable[[], None] = lambda: None,
) -> State:
    """The state with p_RS times the block's values. `p_smem` is for interpret mode, which cannot
    take a matrix from registers."""
    if walk.scaled:
        scale_S = hopper.key_scales(ring, block, 1)
        at_S = plgpu.broadcasted_iota(jnp.int32, scale_S.shape, 0, layout=PER_KEY)
        valid_S = at_S < text.keys - block.index * walk.block
        p_RS *= _columns(jnp.where(valid_S, scale_S, 0.0), p_RS.shape)

    def product(out_RH: Any) -> jax.Array:
        rest_RS = p_RS
        for i in range(walk.q_parts):
            part_RS = rest_RS.astype(jnp.bfloat16)
            rest_RS -= part_RS.astype(jnp.float32)
            if walk.interpret:
                p_smem[i] = part_RS
                plgpu.commit_smem()
                part_RS = p_smem.at[i]
            for j in range(walk.parts):
                if (i, j) in _products(walk):
                    plgpu.wgmma(out_RH, part_RS, hopper.values_of(walk, ring, block, j))
            if i + 1 < walk.q_parts:
                plgpu.wgmma_wait(0)  # this part's registers are free for the next
        issued()
        return out_RH[...]

    pv_RH = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, walk.H), jnp.float32))
    return state._replace(o_RH=state.o_RH * _rows(shrink_R, pv_RH.shape) + pv_RH)


def normalised(state: State) -> tuple[jax.Array, jax.Array]:
    """o_RH and the log2 of each row's sum of exp2."""
    sum_R = jnp.where(state.sum_R > 0, state.sum_R, 1.0)
    return state.o_RH / _rows(sum_R, state.o_RH.shape), state.top_R + jnp.log2(sum_R)


def o_type(walk: hopper.Walk, warpgroups: int) -> Any:
    return hopper.matrix((warpgroups, ROWS, walk.H), walk.q_dtype) if walk.own_o else None


def room_for_o(
    walk: hopper.Walk, q_smem: Any, o_smem: Any, ring: hopper.Ring, warpgroup: Any
) -> Any:
    """Where a warpgroup that has seen all its keys may put o."""
    if walk.own_o:
        return o_smem.at[warpgroup]
    if walk.q_dtype == jnp.bfloat16:
        return q_smem.at[warpgroup, 0]
    return ring.kv_DSJ.at[0, :, pl.ds(0, walk.H)]


def p_type(walk: hopper.Walk, warpgroups: int) -> Any:
    if not walk.interpret:
        return None
    return hopper.matrix((warpgroups, walk.q_parts, ROWS, walk.block), jnp.bfloat16)


def _products(walk: hopper.Walk) -> list[tuple[int, int]]:
    """Pairs of parts of the left and the right operand: all whose product is not lost anyway."""
    return [(i, j) for i in range(walk.q_parts) for j in range(walk.parts) if i + j < 3]


def _rows(x_R: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x_R, shape, [0])


def _columns(x_S: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x_S, shape, [1])
