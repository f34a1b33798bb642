"""Mosaic GPU implementation for Hopper: chunks of new tokens, bound by the matrix unit.

Two warpgroups attend 64 queries each, of two heads that share their keys or of 128 tokens, and
take turns: one multiplies while the other computes its softmax (FlashAttention-3: Shah et al.
2024, arXiv 2407.08608, section 3.1). A third copies blocks of pages, and converts those that the
matrix unit cannot read.
"""

# What Mosaic GPU takes is annotated otherwise in each release of jax.
# pyright: reportArgumentType=false, reportAbstractUsage=false

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import hopper
from kernels_pallas import hopper_softmax as softmax
from kernels_pallas.hopper import ROWS
from kernels_pallas.pages import Pages

# Registers of a thread that attends and of one that copies, of 65536 for all: converting takes more
# than copying.
COPYING, CONVERTING = (232, 40), (208, 88)


def prefill_attention(
    q_CTNH: jax.Array,
    pages: Pages,
    table_Cn: jax.Array,
    start_C: jax.Array,
    length_C: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    run: int,
    interpret: bool = False,
) -> jax.Array:
    """See api.BACKENDS. `run` says nothing here: a block's pages are copied one by one."""
    T, G = q_CTNH.shape[1], q_CTNH.shape[2] // pages.kv_PKpJ.shape[1]
    walk = hopper.walk_of(
        q_CTNH.dtype,
        pages,
        block=128 if pages.kv_PKpJ.dtype == jnp.bfloat16 else 64,
        scale=scale,
        window=window,
        softcap=softcap,
        interpret=interpret,
    )
    # Float32's three parts leave no room for the queries of a second one.
    attending = 1 if walk.q_parts > 1 else 2
    room = hopper.SHARED_MEMORY - attending * walk.query_bytes - 256
    walk = walk.filling(room, ring_of_tiles=True)
    heads = attending if G % attending == 0 else 1
    q_CTNH = jnp.pad(q_CTNH, ((0, 0), (0, -T % (ROWS * attending // heads)), (0, 0), (0, 0)))
    q_XCTNH = hopper.split(q_CTNH, walk.q_parts)
    return _kernel(
        walk, q_XCTNH, pages, table_Cn, start_C, length_C, heads=heads, attending=attending
    )[:, :T]


def _kernel(walk, q_XCTNH, pages, table_Cn, start_C, length_C, *, heads, attending):
    X, C, T, N, H = q_XCTNH.shape
    tokens = ROWS * attending // heads
    registers = COPYING if walk.direct else CONVERTING

    def prefill_attention(table, start, length, q, kv, scale, o, *scratch):
        q_smem, o_smem, p_smem, ring, sync = scratch
        c, warpgroup = lax.axis_index("c"), lax.axis_index("warpgroup")
        first_head = lax.axis_index("heads") * heads
        offset = (T // tokens - 1 - lax.axis_index("tile")) * tokens  # the longest walks first
        text = hopper.Text(
            kv, scale, table, c, lax.div(first_head, N // walk.K), start[c] + length[c]
        )
        walked = _walked(walk, start[c] + offset, tokens, text, offset < length[c])

        @pl.when(warpgroup < attending)
        def attend() -> None:
            plgpu.set_max_registers(registers[0], action="increase")
            mine = offset + (0 if heads > 1 else warpgroup * ROWS)
            head = first_head + (warpgroup if heads > 1 else 0)
            there = pl.ds(mine, ROWS)
            for part in range(X):
                plgpu.copy_gmem_to_smem(
                    q.at[part, c, there, head],
                    q_smem.at[warpgroup, part],
                    sync.arrived_W.at[warpgroup],
                )
            plgpu.barrier_wait(sync.arrived_W.at[warpgroup])
            first = start[c] + mine
            queries = softmax.Queries(
                q_smem.at[warpgroup], first, first + ROWS - 1, lambda row: row
            )
            state = _attend(walk, queries, text, ring, sync, walked, p_smem, warpgroup)
            out = softmax.room_for_o(walk, q_smem, o_smem, ring, warpgroup)
            out[...] = softmax.normalised(state)[0].astype(walk.q_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, o.at[c, there, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == attending)
        def copy() -> None:
            plgpu.set_max_registers(registers[1], action="decrease")
            _copy(walk, text, ring, sync, walked)

    return plgpu.kernel(
        prefill_attention,
        out_type=jax.ShapeDtypeStruct((C, T, N, H), walk.q_dtype),
        scratch_types=(
            hopper.matrix((attending, X, ROWS, H), jnp.bfloat16),
            softmax.o_type(walk, attending),
            softmax.p_type(walk, attending),
            hopper.ring_types(walk),
            Sync(
                plgpu.Barrier(num_arrivals=X, num_barriers=attending),
                plgpu.Barrier(num_barriers=walk.depth),
                plgpu.Barrier(num_arrivals=attending, num_barriers=walk.depth),
                plgpu.Barrier(num_arrivals=attending),
            ),
        ),
        grid=(N // heads, T // tokens, C),
        grid_names=("heads", "tile", "c"),
        num_threads=attending + 1,
        thread_name="warpgroup",
        compiler_params=walk.compiler_params,
        interpret=hopper.interpret_params(walk.interpret),
    )(table_Cn, start_C, length_C, q_XCTNH, *pages)


class Sync(NamedTuple):
    """Barriers between the warpgroups."""

    arrived_W: Any  # a warpgroup's queries
    ready_D: Any  # a block's tiles
    free_D: Any  # a slot, which all have read
    turn: Any  # the matrix unit


def _walked(walk, position, tokens, text, any_new) -> tuple[jax.Array, jax.Array]:
    """The blocks [begin, end) that tokens from `position` on see."""
    begin = 0
    if walk.window is not None:
        begin = lax.div(jnp.maximum(position - walk.window + 1, 0), walk.block)
    end = pl.cdiv(jnp.minimum(text.keys, position + tokens), walk.block)
    end = jnp.where(any_new, end, 0)
    return jnp.minimum(begin, end), end


def _copy(walk, text, ring, sync, walked) -> None:
    begin, end = walked
    lag = 0 if walk.depth < 3 else 1  # a copy is under way while the one before is converted

    def block_at(index: jax.Array) -> hopper.Block:
        return hopper.Block(index, lax.rem(index - begin, walk.depth))

    @pl.loop(begin, end + lag)
    def step(index: jax.Array) -> None:
        @pl.when(index < end)
        def start() -> None:
            block = block_at(index)

            @pl.when(index - begin >= walk.depth)
            def _() -> None:
                plgpu.barrier_wait(sync.free_D.at[block.slot])

            hopper.start_block(walk, text, ring, block)

        @pl.when(index - lag >= begin)
        def finish() -> None:
            block = block_at(index - lag)
            hopper.finish_block(walk, text, ring, block)
            plgpu.barrier_arrive(sync.ready_D.at[block.slot])

    @pl.loop(jnp.maximum(begin, end - walk.depth), end)  # no arrival stays unseen
    def drain(index: jax.Array) -> None:
        plgpu.barrier_wait(sync.free_D.at[block_at(index).slot])


def _attend(walk, queries, text, ring, sync, walked, p_smem, warpgroup) -> softmax.State:
    begin, end = walked

    def swap() -> None:
        """The other one's turn at the matrix unit."""
        plgpu.barrier_arrive(sync.turn)
        plgpu.barrier_wait(sync.turn)

    def step(index: jax.Array, state: softmax.State) -> softmax.State:
        block = hopper.Block(index, lax.rem(index - begin, walk.depth))
        plgpu.barrier_wait(sync.ready_D.at[block.slot])
        s_RS = softmax.scores(walk, queries, text, ring, block, issued=swap)
        p_RS, shrink_R, state = softmax.softmax_step(walk, state, s_RS)
        swap()
        mine = p_smem and p_smem.at[warpgroup]
        state = softmax.add_values(walk, text, ring, block, p_RS, shrink_R, state, mine)
        plgpu.barrier_arrive(sync.free_D.at[block.slot])
        return state

    pl.when(warpgroup == 1)(swap)
    state = lax.fori_loop(begin, end, step, softmax.empty(walk))
    pl.when(warpgroup == 0)(swap)
    return state
