"""What the attention kernels for Hopper are made of: pages copied into rings of shared memory by
the copy engine, made into tiles that the matrix unit can read, and the softmax's step over them.

The matrix unit (wgmma) takes its right operand from shared memory, in bfloat16. Pages of bfloat16
are such tiles as they arrive; others are converted: int8 and float8_e4m3fn exactly (their scales
multiply scores and probabilities, not keys and values), float32 into a sum of three of bfloat16,
each what the rounding of those before it lost: 24 bits, like float32's own.
"""

# What Mosaic GPU takes is annotated otherwise in each release of jax.
# pyright: reportArgumentType=false, reportAbstractUsage=false

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.pages import Pages

ROWS = 64  # queries of a warpgroup: the M of wgmma
LOG2_E = math.log2(math.e)
# Finite, so that a row with nothing to see has no NaN, and a power of two, so that its product with
# any factor is exact: a fused multiply-add would raise e to what rounding lost.
MASKED = -(2.0**100)
# Bytes of shared memory that one block of threads can have, and each of two on a multiprocessor
# (CUDA C++ programming guide, compute capability 9.0: 228 KiB, of which each block pays 1).
SHARED_MEMORY, HALF_OF_IT = 227 * 1024, 113 * 1024
MAX_DEPTH = 6  # more would be in flight than the memory's latency times its bandwidth
_WIDE = 64  # lanes of a tile converted at a time
TILE = plgpu.Layout.WGMMA
PER_ROW, PER_KEY = TILE.reduce(1), TILE.reduce(0)


@dataclasses.dataclass(frozen=True)
class Walk:
    """One kernel's static side: S = `block` keys at a time, `depth` blocks in flight, `tiles` of
    them converted."""

    K: int
    H: int
    page: int
    dtype: jnp.dtype
    q_dtype: jnp.dtype
    scaled: bool
    block: int
    depth: int
    tiles: int
    scale: float
    window: int | None
    softcap: float | None
    interpret: bool

    @property
    def parts(self) -> int:
        """Tiles of bfloat16 that make up a block of pages."""
        return 3 if self.dtype == jnp.float32 else 1

    @property
    def q_parts(self) -> int:
        return 3 if self.q_dtype == jnp.float32 else 1

    @property
    def direct(self) -> bool:
        """Pages are tiles as they are."""
        return self.dtype == jnp.bfloat16

    @property
    def chunk(self) -> int:
        """Tokens that lie side by side, whichever page they are in."""
        return min(self.page, self.block)

    @property
    def factor(self) -> float:
        """What `scores` are still to be multiplied by: the exponent's subtraction does it too."""
        return 1.0 if self.scaled or self.softcap is not None else self.scale * LOG2_E

    @property
    def own_o(self) -> bool:
        """o takes the place of q, or of the pages, if either is of its dtype."""
        return self.q_dtype not in (jnp.bfloat16, self.dtype)

    @property
    def query_bytes(self) -> int:
        """Shared memory of one warpgroup's queries, and of its output if that has its own."""
        return ROWS * self.H * (2 * self.q_parts + (4 if self.own_o else 0))

    def filling(self, room: int, ring_of_tiles: bool) -> "Walk":
        """With as many blocks in flight as `room` bytes of shared memory hold."""
        numbers = self.block * 2 * self.H
        pages = numbers * self.dtype.itemsize + (8 * self.block if self.scaled else 0)
        tile = 0 if self.direct else 2 * self.parts * numbers
        if ring_of_tiles:
            depth = min(room // (pages + tile), MAX_DEPTH)
        else:
            depth = min((room - tile) // pages, MAX_DEPTH)
        return dataclasses.replace(self, depth=depth, tiles=depth if ring_of_tiles else 1)

    @property
    def compiler_params(self) -> plgpu.CompilerParams:
        # Nothing is reduced across warps: that scratch would cost a third block of threads.
        return plgpu.CompilerParams(
            approx_math=self.q_dtype != jnp.float32, reduction_scratch_bytes=0
        )


def interpret_params(interpret: bool) -> Any:
    """What `plgpu.kernel` takes. Raises UnsupportedError where jax is too old for these kernels."""
    if jax.__version_info__ < (0, 11):
        raise UnsupportedError(
            f"the GPU kernels need jax 0.11, which needs Python 3.12; this is {jax.__version__}: "
            "update, or use `xla`"
        )
    if not interpret:
        return None
    return plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]


def walk_of(
    q_dtype: jnp.dtype,
    pages: Pages,
    *,
    block: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    interpret: bool,
) -> Walk:
    """A walk with one block in flight. Raises UnsupportedError for what the kernels cannot do."""
    _, K, page, J = pages.kv_PKpJ.shape
    H, dtype = J // 2, pages.kv_PKpJ.dtype
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn):
        raise UnsupportedError(
            f"pages are {dtype}; the GPU kernels take bfloat16, float32, int8 and float8_e4m3fn: "
            "convert the pool, or use `xla`"
        )
    if q_dtype not in (jnp.bfloat16, jnp.float32):
        raise UnsupportedError(
            f"`q` is {q_dtype}; the GPU kernels take bfloat16 and float32: convert it, or use `xla`"
        )
    if H not in (64, 128):
        raise UnsupportedError(f"H = {H}; the GPU kernels take heads of 64 and 128: use `xla`")
    if page < 8 or page & (page - 1):
        raise UnsupportedError(
            f"pages hold {page} tokens; the GPU kernels take powers of two from 8 on: change the "
            "pool's page size, or use `xla`"
        )
    if scale <= 0:
        raise UnsupportedError(f"`scale` is {scale}; the GPU kernels take positive ones: use `xla`")
    return Walk(
        K=K,
        H=H,
        page=page,
        dtype=jnp.dtype(dtype),
        q_dtype=jnp.dtype(q_dtype),
        scaled=pages.quantised,
        block=block,
        depth=1,
        tiles=1,
        scale=scale,
        window=window,
        softcap=softcap,
        interpret=interpret,
    )


class Ring(NamedTuple):
    """Shared memory of `depth` blocks; a slot is in one after the other's use."""

    kv_DSJ: Any  # pages as they are
    tile_IXSJ: Any  # I tiles of X parts in bfloat16; None where pages are tiles already
    scale_D2S: Any  # None where nothing is scaled
    landed_D: Any  # barriers: all copies of a block are done


def ring_types(walk: Walk) -> Ring:
    """What to ask of `plgpu.kernel`."""
    D, S, J = walk.depth, walk.block, 2 * walk.H
    copies = S // walk.chunk * (3 if walk.scaled else 1)
    return Ring(
        matrix((D, S, J), walk.dtype),
        None if walk.direct else matrix((walk.tiles, walk.parts, S, J), jnp.bfloat16),
        plgpu.SMEM((D, 2, S), jnp.float32) if walk.scaled else None,
        plgpu.Barrier(num_arrivals=copies, num_barriers=D),
    )


def matrix(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory in the order that wgmma reads: tiles of 8 rows, at most 128 bytes wide."""
    size = jnp.dtype(dtype).itemsize
    columns = min(64, 128 // size)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * size)),
    )


def split(x: jax.Array, parts: int) -> jax.Array:
    """x as a sum of bfloat16 parts, [parts, *x.shape]."""
    sums = []
    for _ in range(parts):
        sums.append(x.astype(jnp.bfloat16))
        x = x - sums[-1].astype(x.dtype)
    return jnp.stack(sums)


class Block(NamedTuple):
    """Keys index * S + [0, S) of a text, and the slot of the ring that they are in."""

    index: jax.Array
    slot: jax.Array | int


class Text(NamedTuple):
    """The keys that a row of the table leads to."""

    kv_PKpJ: Any
    scale_P1X: Any
    table_Bn: Any
    row: jax.Array
    head: jax.Array
    keys: jax.Array  # how many there are


def start_block(walk: Walk, text: Text, ring: Ring, block: Block) -> None:
    """Copies the pages of a block into a slot. What lies past the text's end is never looked up:
    its last page comes instead."""
    chunk, page = walk.chunk, walk.page
    last = lax.div(text.keys - 1, chunk) * chunk
    for i in range(walk.block // chunk):
        at = jnp.minimum(block.index * walk.block + i * chunk, last)
        place, inside = text.table_Bn[text.row, lax.div(at, page)], lax.rem(at, page)
        here = pl.ds(i * chunk, chunk)
        plgpu.copy_gmem_to_smem(
            text.kv_PKpJ.at[place, text.head, pl.ds(inside, chunk)],
            ring.kv_DSJ.at[block.slot, here],
            ring.landed_D.at[block.slot],
        )
        for which in range(2 if walk.scaled else 0):
            lane = (text.head * 2 + which) * page + inside
            plgpu.copy_gmem_to_smem(
                text.scale_P1X.at[place, 0, pl.ds(lane, chunk)],
                ring.scale_D2S.at[block.slot, which, here],
                ring.landed_D.at[block.slot],
            )


def finish_block(walk: Walk, text: Text, ring: Ring, block: Block) -> None:
    """Waits for a block's copies and makes tiles of them. Values past the text's end become zero:
    memory that nobody wrote may hold NaN, and 0 * NaN must not enter the sums."""
    plgpu.barrier_wait(ring.landed_D.at[block.slot])
    pieces = walk.block // ROWS * 2 * walk.H // _WIDE
    if not walk.direct:
        pl.loop(0, pieces)(lambda i: _convert(walk, ring, block, _piece(walk, i, 2 * walk.H)))
    valid = text.keys - block.index * walk.block

    @pl.when(valid < walk.block)
    def clear() -> None:
        @pl.loop(0, pieces // 2)
        def one(i: jax.Array) -> None:
            rows, lanes = _piece(walk, i, walk.H)
            at = plgpu.broadcasted_iota(jnp.int32, (ROWS, _WIDE), 0, layout=TILE) + rows.start
            for part in range(walk.parts):
                v_SH = values_of(walk, ring, block, part)
                x = load(v_SH.at[rows, lanes], layout=TILE)
                v_SH[rows, lanes] = jnp.where(at < valid, x, jnp.zeros((), x.dtype))

    plgpu.commit_smem()


def _piece(walk: Walk, i: jax.Array, width: int) -> tuple[Any, Any]:
    """The i-th part of a block that registers hold: rows and lanes."""
    row, lane = lax.div(i, width // _WIDE), lax.rem(i, width // _WIDE)
    return pl.ds(row * ROWS, ROWS), pl.ds(lane * _WIDE, _WIDE)


def _convert(walk: Walk, ring: Ring, block: Block, piece: tuple[Any, Any]) -> None:
    layout = TILE if walk.dtype.itemsize > 1 else plgpu.Layout.WGMMA_UPCAST_2X
    x = load(ring.kv_DSJ.at[block.slot, *piece], layout=layout, optimized=False)
    if walk.dtype == jnp.float8_e4m3fn:
        x = x.astype(jnp.float32)  # Hopper has no way from there to bfloat16
    for part in range(walk.parts):
        rounded = x.astype(jnp.bfloat16)
        tile_of(walk, ring, block, part)[piece] = rounded
        if part + 1 < walk.parts:
            x -= rounded.astype(jnp.float32)


def zeros(shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, dtype), TILE)


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """Shared memory as an array of this layout; pyright may see an older jax, which has another."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def tile_of(walk: Walk, ring: Ring, block: Block, part: int) -> Any:
    if walk.direct:
        return ring.kv_DSJ.at[block.slot]
    # The lone tile's index is 0, but the compiler must not know it: it would keep the addresses of
    # all operands in registers.
    index = jnp.minimum(block.index, 0) if walk.tiles == 1 else block.slot
    return ring.tile_IXSJ.at[index, part]


def values_of(walk: Walk, ring: Ring, block: Block, part: int) -> Any:
    return tile_of(walk, ring, block, part).at[:, pl.ds(walk.H, walk.H)]


def key_scales(ring: Ring, block: Block, which: int) -> jax.Array:
    return load(ring.scale_D2S.at[block.slot, which], layout=PER_KEY, optimized=False)
