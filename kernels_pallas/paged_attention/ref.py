"""XLA implementation: the oracle of the kernels and the default where there is none.

It walks over each row's pages in blocks with an online softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867), as many blocks as the row's text has: no O(T S) array, no cost for what is
not there, and one compiled program for every length.
"""

import jax
import jax.numpy as jnp
from jax import lax

# New tokens that walk over the pages together, for up to so many of them and for more; a step of
# the walk takes as many cached tokens, or 128. Measured on CPU at H = 64, K = 3.
QUERY_TILES = (256, 512)
_MASKED = -1e30  # finite, so that a row with nothing to see has no NaN


def paged_attention(
    q_BTNH: jax.Array,
    k_PpKH: jax.Array,
    v_PpKH: jax.Array,
    table_Bn: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    *,
    window: int | None,
) -> jax.Array:
    """See api.paged_attention."""
    B, T, N, H = q_BTNH.shape
    P, page, K, _ = k_PpKH.shape
    tile = min(T, QUERY_TILES[0] if T <= QUERY_TILES[1] else QUERY_TILES[1])
    tiles = -(-T // tile)
    pages = max(1, max(tile, 128) // page)
    # A tile is a row of its own: it starts later and ends where its tokens or the row's do.
    q_RTNH = _pad(q_BTNH * H**-0.5, 1, tiles * tile).reshape(B * tiles, tile, N, H)
    offset_R = jnp.tile(jnp.arange(tiles, dtype=jnp.int32) * tile, B)
    start_R = jnp.repeat(start_B, tiles) + offset_R
    length_R = jnp.clip(jnp.repeat(length_B, tiles) - offset_R, 0, tile)
    row_R = jnp.repeat(jnp.arange(B, dtype=jnp.int32), tiles)
    table_Bn = _pad(table_Bn, 1, -(-table_Bn.shape[1] // pages) * pages)
    if T == 1:
        k_PpKH, v_PpKH = (pool.reshape(P, page, K * H) for pool in (k_PpKH, v_PpKH))

    def one_row(args):
        q_TNH, start, length, row = args
        q_KgH = q_TNH.reshape(tile, K, N // K, H).transpose(1, 2, 0, 3).reshape(K, -1, H)
        if T == 1:
            q_KgH = _pack(q_KgH)
        position_T = start + jnp.arange(tile, dtype=jnp.int32)
        o_KgH = _walk(
            q_KgH,
            k_PpKH,
            v_PpKH,
            table_Bn[row],
            jnp.tile(position_T, q_KgH.shape[1] // tile),
            jnp.where(length > 0, start + length, 0),
            pages,
            window,
        )
        if T == 1:
            o_KgH = _unpack(o_KgH, K)
        return o_KgH.reshape(K, N // K, tile, H).transpose(2, 0, 1, 3).reshape(tile, N, H)

    o_RTNH = lax.map(one_row, (q_RTNH, start_R, length_R, row_R))
    return o_RTNH.reshape(B, tiles * tile, N, H)[:, :T].astype(q_BTNH.dtype)


def _pack(q_KgH: jax.Array) -> jax.Array:
    """The queries of all kv heads as one head of size K H, each zero outside of its own part. With
    few queries that is one matrix product over memory as it lies, instead of K small ones."""
    K, g, H = q_KgH.shape
    own_KK = jnp.eye(K, dtype=q_KgH.dtype)
    return (q_KgH[:, :, None, :] * own_KK[:, None, :, None]).reshape(1, K * g, K * H)


def _unpack(o_1gX: jax.Array, K: int) -> jax.Array:
    """Each query's own part of what `_pack` put together, [K, g, H]."""
    own_K = jnp.arange(K)
    return o_1gX.reshape(K, -1, K, o_1gX.shape[-1] // K)[own_K, :, own_K]


def _walk(q_KgH, k_PpKH, v_PpKH, table_n, position_g, end, pages, window):
    """Queries g of one row (all its tokens and the heads of a group) over positions [0, end)."""
    K, queries, H = q_KgH.shape
    block = pages * k_PpKH.shape[1]

    def body(i, carry):
        top_Kg, sum_Kg, o_KgH = carry
        page_ids = lax.dynamic_slice(table_n, (i * pages,), (pages,))
        k_SKH = k_PpKH.at[page_ids].get(mode="clip").reshape(block, K, H)
        v_SKH = v_PpKH.at[page_ids].get(mode="clip").reshape(block, K, H)
        at_S = i * block + jnp.arange(block, dtype=jnp.int32)
        seen_gS = at_S[None, :] <= position_g[:, None]
        if window is not None:
            seen_gS &= at_S[None, :] > position_g[:, None] - window
        seen_gS &= at_S[None, :] < end
        # What lies past the end is another's or nobody's: 0 * NaN must not enter the sum.
        v_SKH = jnp.where((at_S < end)[:, None, None], v_SKH, jnp.zeros((), v_SKH.dtype))
        s_KgS = jnp.einsum("KgH,SKH->KgS", q_KgH, k_SKH, preferred_element_type=jnp.float32)
        s_KgS = jnp.where(seen_gS[None], s_KgS, _MASKED)
        new_top_Kg = jnp.maximum(top_Kg, s_KgS.max(-1))
        # A query that has seen nothing yet sums garbage here, which its first key scales to zero.
        p_KgS = jnp.exp(s_KgS - new_top_Kg[..., None])
        scale_Kg = jnp.exp(top_Kg - new_top_Kg)
        pv_KgH = jnp.einsum(
            "KgS,SKH->KgH", p_KgS.astype(v_SKH.dtype), v_SKH, preferred_element_type=jnp.float32
        )
        return (
            new_top_Kg,
            sum_Kg * scale_Kg + p_KgS.sum(-1),
            o_KgH * scale_Kg[..., None] + pv_KgH,
        )

    first = 0 if window is None else jnp.maximum(position_g[0] - window + 1, 0) // block
    start = (
        jnp.full((K, queries), _MASKED, jnp.float32),
        jnp.zeros((K, queries), jnp.float32),
        jnp.zeros((K, queries, H), jnp.float32),
    )
    _, sum_Kg, o_KgH = lax.fori_loop(first, (end + block - 1) // block, body, start)
    return o_KgH / jnp.where(sum_Kg > 0, sum_Kg, 1.0)[..., None]


def _pad(x, axis, size):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths) if size != x.shape[axis] else x
