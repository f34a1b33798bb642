"""Mosaic GPU implementation for Hopper: decode, bound by the bandwidth to memory.

One warpgroup attends the queries of one kv head of one row, G T of them packed into the 64 rows of
the matrix unit, to a share of the keys (Flash-Decoding: Dao et al. 2023). It keeps copies of the
next blocks in flight while it computes; two or more such blocks of threads share a multiprocessor,
and fill each other's waits. The shares are combined by XLA.
"""

# What Mosaic GPU takes is annotated otherwise in each release of jax.
# pyright: reportArgumentType=false, reportAbstractUsage=false

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import hopper
from kernels_pallas import hopper_softmax as softmax
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.paged_attention.ref import Partial
from kernels_pallas.pages import Pages

MULTIPROCESSORS = 132  # of an H100 SXM and an H200
MAX_SHARES = 32


def partial_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    table_Bn: jax.Array,
    position_B: jax.Array,
    keys_B: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    run: int,
    interpret: bool = False,
) -> Partial:
    """See api.BACKENDS. `run` says nothing here: a block's pages are copied one by one."""
    B, T, N, H = q_BTNH.shape
    walk = hopper.walk_of(
        q_BTNH.dtype,
        pages,
        block=64,
        scale=scale,
        window=window,
        softcap=softcap,
        interpret=interpret,
    )
    walk = _filled(walk)
    K, G = walk.K, N // walk.K
    if T * G > hopper.ROWS:
        raise UnsupportedError(
            f"{T} tokens of {G} query heads per kv head make {T * G} rows; the GPU kernel takes up "
            f"to {hopper.ROWS}: give fewer tokens, or use prefill_attention"
        )
    R = -(-T * G // 8) * 8
    q_BKRH = q_BTNH.reshape(B, T, K, G, H).swapaxes(1, 2).reshape(B, K, T * G, H)
    q_BKRH = jnp.pad(q_BKRH, ((0, 0), (0, 0), (0, R - T * G), (0, 0)))
    shares = _shares(B * K, table_Bn.shape[1] * walk.page // walk.block)
    o_BKXRH, lse_BKXR = _kernel(
        walk, hopper.split(q_BKRH, walk.q_parts), pages, table_Bn, position_B, keys_B, G, shares
    )
    lse_BKXR = lse_BKXR[..., :R]
    top_BKR = lse_BKXR.max(2)
    weight_BKXR = jnp.exp2(lse_BKXR - top_BKR[:, :, None])
    sum_BKR = weight_BKXR.sum(2)
    o_BKRH = (o_BKXRH.astype(jnp.float32) * weight_BKXR[..., None]).sum(2) / sum_BKR[..., None]
    lse_BKR = (top_BKR + jnp.log2(sum_BKR)) * math.log(2)

    def back(x):
        x = x[:, :, : T * G].reshape(B, K, T, G, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(B, T, N, *x.shape[4:])

    return Partial(back(o_BKRH), jnp.maximum(back(lse_BKR), hopper.MASKED))


def _filled(walk: hopper.Walk) -> hopper.Walk:
    """Two blocks of threads share a multiprocessor, if that leaves each two blocks in flight."""
    rest = walk.query_bytes + 256
    pair = walk.filling(hopper.HALF_OF_IT - rest, ring_of_tiles=False)
    if pair.depth >= 2:
        return pair
    return walk.filling(hopper.SHARED_MEMORY - rest, ring_of_tiles=False)


def _shares(rows: int, blocks: int) -> int:
    """Into how many shares to split the keys: the fewest that keep the chip as busy as it gets,
    with two blocks of threads on each multiprocessor."""
    places = 2 * MULTIPROCESSORS

    def busy(shares: int) -> float:
        return rows * shares / (-(-rows * shares // places) * places)

    options = range(1, max(1, min(MAX_SHARES, blocks)) + 1)
    return next(n for n in options if busy(n) >= 0.95 * max(map(busy, options)))


def _kernel(walk, q_XBKRH, pages, table_Bn, position_B, keys_B, G, shares):
    X, B, K, R, H = q_XBKRH.shape

    def decode_attention(table, position, keys, q, kv, scale, o, lse, *scratch):
        q_smem, o_smem, p_smem, ring, arrived = scratch
        b, k, share = (lax.axis_index(name) for name in ("b", "k", "share"))
        text = hopper.Text(kv, scale, table, b, k, keys[b])
        for part in range(X):  # rows without a query have one of zeros
            q_smem[0, part] = hopper.zeros((hopper.ROWS, H), jnp.bfloat16)
        plgpu.commit_smem()
        for part in range(X):
            plgpu.copy_gmem_to_smem(q.at[part, b, k], q_smem.at[0, part, pl.ds(0, R)], arrived)
        plgpu.barrier_wait(arrived)
        queries = softmax.Queries(
            q_smem.at[0], position[b], position[b] + (R - 1) // G, lambda row: lax.div(row, G)
        )
        state = _attend_share(walk, queries, text, ring, share, shares, p_smem)
        o_RH, lse_R = softmax.normalised(state)
        out = softmax.room_for_o(walk, q_smem, o_smem, ring, 0)
        out[...] = o_RH.astype(walk.q_dtype)
        lse[b, k, share] = lse_R
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, R)], o.at[b, k, share])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        decode_attention,
        out_type=(
            jax.ShapeDtypeStruct((B, K, shares, R, H), walk.q_dtype),
            jax.ShapeDtypeStruct((B, K, shares, hopper.ROWS), jnp.float32),
        ),
        scratch_types=(
            hopper.matrix((1, X, hopper.ROWS, H), jnp.bfloat16),
            softmax.o_type(walk, 1),
            softmax.p_type(walk, 1),
            hopper.ring_types(walk),
            plgpu.Barrier(num_arrivals=X),
        ),
        grid=(shares, K, B),
        grid_names=("share", "k", "b"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=walk.compiler_params,
        interpret=hopper.interpret_params(walk.interpret),
    )(table_Bn, position_B, keys_B, q_XBKRH, *pages)


def _attend_share(walk, queries, text, ring, share, shares, p_smem) -> softmax.State:
    """The walk over one share of the blocks that the queries see."""
    first = 0
    if walk.window is not None:
        first = lax.div(jnp.maximum(queries.first - walk.window + 1, 0), walk.block)
    end = pl.cdiv(text.keys, walk.block)
    size = pl.cdiv(jnp.maximum(end - first, 0), shares)
    begin = jnp.minimum(first + share * size, end)
    end = jnp.minimum(begin + size, end)

    def start(index: jax.Array, slot: jax.Array | int) -> None:
        @pl.when(index < end)
        def _() -> None:
            hopper.start_block(walk, text, ring, hopper.Block(index, slot))

    def step(index: jax.Array, state: softmax.State) -> softmax.State:
        block = hopper.Block(index, lax.rem(index - begin, walk.depth))
        hopper.finish_block(walk, text, ring, block)
        s_RS = softmax.scores(walk, queries, text, ring, block)
        p_RS, shrink_R, state = softmax.softmax_step(walk, state, s_RS)
        state = softmax.add_values(
            walk, text, ring, block, p_RS, shrink_R, state, p_smem and p_smem.at[0]
        )
        start(index + walk.depth, block.slot)
        return state

    for slot in range(walk.depth):
        start(begin + slot, slot)
    return lax.fori_loop(begin, end, step, softmax.empty(walk))
