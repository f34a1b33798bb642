"""Mosaic GPU implementation for Hopper: bulk copies from memory to memory through rings of shared
memory, no number passes a register. Scales, a 64th or less of the bytes, go by XLA."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.hopper import interpret_params
from kernels_pallas.kv_pages import ref
from kernels_pallas.kv_pages.ref import Piece
from kernels_pallas.pages import Pages

# A block of threads moves pieces of so many bytes, so many at a time. Six fit on a multiprocessor:
# 192 KiB under way, several times what latency times bandwidth asks for.
PIECE_BYTES, DEPTH = 8192, 4


def pack(
    layers: Sequence[Pages], table_n: jax.Array, *, parts: int, interpret: bool = False
) -> Piece:
    """See api.pack."""
    P, K, p, J = layers[0].kv_PKpJ.shape
    (n,), L = table_n.shape, len(layers)
    dtype = layers[0].kv_PKpJ.dtype

    def pack_pages(table, *refs):
        *kvs, out_RLKTJ, ring, landed = refs
        page, (k, i, row) = _place(p, J, dtype)
        source = jnp.clip(table[page], 0, P - 1)
        here, there = pl.ds(row, i), pl.ds(page * p + row, i)
        r, head = lax.div(k, K // parts), lax.rem(k, K // parts)
        _move(
            [kv.at[source, k, here] for kv in kvs],
            [out_RLKTJ.at[r, layer, head, there] for layer in range(L)],
            ring,
            landed,
        )

    shape = jax.ShapeDtypeStruct((parts, L, K // parts, n * p, J), dtype)
    moved = _kernel(pack_pages, shape, n, K, p, J, dtype, interpret)
    kv_RLKTJ = moved(table_n, *(layer.kv_PKpJ for layer in layers))
    return Piece(kv_RLKTJ, ref.pack_scales(layers, table_n, parts))


def unpack(
    layers: Sequence[Pages], piece: Piece, table_n: jax.Array, *, interpret: bool = False
) -> list[Pages]:
    """See api.unpack."""
    P, K, p, J = layers[0].kv_PKpJ.shape
    parts, L = piece.kv_RLKTJ.shape[:2]
    dtype = piece.kv_RLKTJ.dtype

    def unpack_pages(table, kv_RLKTJ, *refs):
        *kvs, ring, landed = refs
        page, (k, i, row) = _place(p, J, dtype)
        target = table[page]
        here, there = pl.ds(row, i), pl.ds(page * p + row, i)
        r, head = lax.div(k, K // parts), lax.rem(k, K // parts)

        @pl.when((target >= 0) & (target < P))
        def move() -> None:
            _move(
                [kv_RLKTJ.at[r, layer, head, there] for layer in range(L)],
                [kv.at[target, k, here] for kv in kvs],
                ring,
                landed,
            )

    pools = [jax.new_ref(layer.kv_PKpJ) for layer in layers]
    _kernel(unpack_pages, (), table_n.shape[0], K, p, J, dtype, interpret)(
        table_n, piece.kv_RLKTJ, *pools
    )
    scales = ref.unpack_scales(layers, piece, table_n)
    return [Pages(pool[...], scale) for pool, scale in zip(pools, scales, strict=True)]


def append(
    pages: Pages,
    kv_BKTJ: jax.Array,
    scale_BK2T: jax.Array | None,
    table_Bn: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    *,
    interpret: bool = False,
) -> Pages:
    """See api.append."""
    P, _, p, _ = pages.kv_PKpJ.shape
    B, K, T, J = kv_BKTJ.shape
    _rows(p, J, kv_BKTJ.dtype)  # refuses what cannot be moved
    rows = min(T, p)

    def append_tokens(table, start, length, new_BKTJ, kv, smem, landed):
        """One head of the part of a row's tokens that goes to one page."""
        b, k, page = (lax.axis_index(name) for name in ("b", "k", "page"))
        entry = lax.div(start[b], p) + page
        first = entry * p - start[b]  # the token that would go to the page's beginning
        begin, end = jnp.maximum(first, 0), jnp.minimum(first + p, length[b])
        target = table[b, jnp.minimum(entry, table.shape[1] - 1)]

        @pl.when((begin < end) & (target >= 0) & (target < P))
        def write() -> None:
            base = jnp.clip(first, 0, T - rows)
            plgpu.copy_gmem_to_smem(new_BKTJ.at[b, k, pl.ds(base, rows)], smem, landed)
            plgpu.barrier_wait(landed)

            def put(token: jax.Array, count: int) -> None:
                there = kv.at[target, k, pl.ds(token - first, count)]
                plgpu.copy_smem_to_gmem(smem.at[pl.ds(token - base, count)], there)

            whole = (end - begin == p) if rows == p else False
            pl.when(whole)(lambda: put(begin, rows))
            pl.when(jnp.logical_not(whole))(
                lambda: pl.loop(begin, end)(lambda token: put(token, 1))
            )
            plgpu.wait_smem_to_gmem(0)

    pool = jax.new_ref(pages.kv_PKpJ)
    plgpu.kernel(
        append_tokens,
        scratch_types=(plgpu.SMEM((rows, J), kv_BKTJ.dtype), plgpu.Barrier()),
        grid=((T + p - 2) // p + 1, K, B),
        grid_names=("page", "k", "b"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret_params(interpret),
    )(table_Bn, start_B, length_B, kv_BKTJ, pool)
    # The scales alone: XLA's way, of pages without lanes.
    bare = Pages(pages.kv_PKpJ[..., :0], pages.scale_P1X)
    scales = ref.append(bare, kv_BKTJ[..., :0], scale_BK2T, table_Bn, start_B, length_B)
    return Pages(pool[...], scales.scale_P1X)


def _rows(p: int, J: int, dtype: jnp.dtype) -> int:
    """Tokens of one head that are moved at once."""
    size = J * jnp.dtype(dtype).itemsize
    if size % 16 or p & (p - 1):
        raise UnsupportedError(
            f"pages of {p} tokens of {size} bytes; the GPU kernels move powers of two of multiples "
            "of 16 bytes: change the page size, or use `xla`"
        )
    return max(1, min(p, PIECE_BYTES // size))


def _place(p: int, J: int, dtype: jnp.dtype) -> tuple[jax.Array, tuple[jax.Array, int, jax.Array]]:
    """What a block of threads moves: entry of the table; head, rows of the page and the first."""
    rows = _rows(p, J, dtype)
    return lax.axis_index("page"), (lax.axis_index("k"), rows, lax.axis_index("part") * rows)


def _kernel(body: Any, out_type: Any, n: int, K: int, p: int, J: int, dtype: Any, interpret: bool):
    rows = _rows(p, J, dtype)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(
            plgpu.SMEM((DEPTH, rows, J), dtype),
            plgpu.Barrier(num_barriers=DEPTH),
        ),
        grid=(p // rows, K, n),
        grid_names=("part", "k", "page"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret_params(interpret),
    )


def _move(sources: list[Any], targets: list[Any], ring: Any, landed: Any) -> None:
    """Copies each source to its target, DEPTH of them under way at a time."""

    def load(i: int) -> None:
        plgpu.copy_gmem_to_smem(sources[i], ring.at[i % DEPTH], landed.at[i % DEPTH])

    for i in range(min(DEPTH, len(sources))):
        load(i)
    for i, target in enumerate(targets):
        plgpu.barrier_wait(landed.at[i % DEPTH])
        plgpu.copy_smem_to_gmem(ring.at[i % DEPTH], target)
        if i + DEPTH < len(sources):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load(i + DEPTH)
    plgpu.wait_smem_to_gmem(0)
