"""Flash attention for TPU (Dao et al. 2022, arXiv 2205.14135) as a walk (tpu_walk) over pages.

A row is a tile of consecutive tokens of one chunk; its keys end with its last token, so blocks
above the diagonal are not steps at all, nor are tiles past a chunk's length. Only the scores of one
tile and one block exist at a time.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import tpu_walk
from kernels_pallas.paged_attention.ref import scaled
from kernels_pallas.pages import Pages
from kernels_pallas.tpu_step import ARITHMETIC
from kernels_pallas.tpu_walk import LOG2E, Plan, Rows

# A tile's queries per kv head: each token of the cache that is read meets so many. From 600 on the
# matrix units of v6e, which have most work to do per byte, are busier than the memory.
TILE = 1024
PART = 512  # queries whose scores with a block are computed together
SUMS = 8192  # queries times kv heads whose sums fit the vector memory
STEP = 512, 4096  # tokens of a step, and tokens times kv heads: the larger of both
SCORES = 2**18  # at most, of one part and one block


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
    """See api.BACKENDS."""
    tpu_walk.check(q_CTNH, pages, table_Cn, run)
    plan = _plan(q_CTNH, pages, table_Cn, window, softcap, run)
    C, T, N, H = q_CTNH.shape
    tiles = plan.V // C
    q_CTNH = scaled(q_CTNH, scale * LOG2E if softcap is None else scale / softcap)
    q_CTNH = jnp.pad(q_CTNH, ((0, 0), (0, tiles * plan.T - T), (0, 0), (0, plan.lanes - H)))
    q = q_CTNH.reshape(plan.V, plan.T, plan.K, plan.G, plan.lanes)
    q_VKRH = q.transpose(0, 2, 3, 1, 4).reshape(plan.V, plan.K, plan.rows, plan.lanes)
    o_VKRH = tpu_walk.walk(
        plan, ARITHMETIC, q_VKRH, pages, table_Cn, _rows(plan, start_C, length_C), interpret
    )[0]
    o = o_VKRH[..., -H:].reshape(plan.V, plan.K, plan.G, plan.T, H)
    return o.transpose(0, 3, 1, 2, 4).reshape(C, tiles * plan.T, N, H)[:, :T]


def _plan(q_CTNH, pages: Pages, table_Cn, window, softcap, run: int) -> Plan:
    C, T, N, _ = q_CTNH.shape
    K = pages.kv_PKpJ.shape[1]
    G = N // K
    # Tokens of a tile fill whole registers, of 8 rows of 4 bytes or 16 of 2.
    tile = min(TILE // G, SUMS // (G * K), pl.cdiv(T, 16) * 16) // 16 * 16
    tile = max(tile, 16)
    part = min(PART, G * tile)
    return tpu_walk.plan_of(
        q_CTNH,
        pages,
        table_Cn,
        run,
        tokens=min(max(STEP[0], STEP[1] // K), SCORES // part),
        V=C * pl.cdiv(T, tile),
        T=tile,
        heads=1,
        rows=G * tile,
        partial=False,
        window=window,
        softcap=softcap,
        loop=True,
        part=part,
        o_dtype=q_CTNH.dtype,
    )


def _rows(plan: Plan, start_C: jax.Array, length_C: jax.Array) -> Rows:
    tiles = plan.V // start_C.shape[0]
    offset_V = jnp.tile(jnp.arange(tiles, dtype=jnp.int32) * plan.T, start_C.shape[0])
    position_V = jnp.repeat(start_C, tiles) + offset_V
    new_V = jnp.clip(jnp.repeat(length_C, tiles) - offset_V, 0, plan.T)
    text_V = jnp.repeat(jnp.arange(start_C.shape[0], dtype=jnp.int32), tiles)
    return Rows(text_V, position_V, jnp.where(new_V > 0, position_V + new_V, 0))
