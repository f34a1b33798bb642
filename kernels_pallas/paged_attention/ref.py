"""XLA implementation: the oracle of the kernels and the default where there is none.

It walks over each row's pages in blocks with an online softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867), as many blocks as the row's text has: no O(T S) array, no cost for what is
not there, and one compiled program for every length.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.pages import Pages, read

# New tokens that walk over the pages together, for up to so many of them and for more; a step of
# the walk takes as many cached tokens, or 128. Measured on CPU at H = 64, K = 3.
QUERY_TILES = (256, 512)
MASKED = -1e30  # finite, so that a row with nothing to see has no NaN


class Partial(NamedTuple):
    """Attention to some of a text's keys."""

    o_BTNH: jax.Array  # float32, normalised over these keys; zeros where there are none
    lse_BTN: jax.Array  # float32, log of the sum of exp of the scores; MASKED where there are none


class Text(NamedTuple):
    """Where the keys are, and which of them a query sees."""

    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # page ids -> k_SKH, v_SKH
    page: int
    kv_heads: int
    window: int | None
    softcap: float | None


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
    P, page, K, H = k_PpKH.shape
    if q_BTNH.shape[1] == 1:
        k_PpKH, v_PpKH = (pool.reshape(P, page, K * H) for pool in (k_PpKH, v_PpKH))

    def read_pages(page_ids_n):
        k, v = (pool.at[page_ids_n].get(mode="clip") for pool in (k_PpKH, v_PpKH))
        return k, v

    text = Text(read_pages, page, K, window, None)
    keys_B = jnp.where(length_B > 0, start_B + length_B, 0)
    o_BTNH, _ = _attend(text, scaled(q_BTNH, H**-0.5), table_Bn, start_B, keys_B, length_B)
    return o_BTNH.astype(q_BTNH.dtype)


def partial_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    table_Bn: jax.Array,
    position_B: jax.Array,
    keys_B: jax.Array,
    length_B: jax.Array | None = None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    run: int,
) -> Partial:
    """See api.BACKENDS. Tokens past length_B[b], if given, are not worked on."""
    del run  # a gather has no use for it
    T = q_BTNH.shape[1]
    if length_B is None:
        length_B = jnp.full_like(keys_B, T)

    def read_pages(page_ids_n):
        k_KSH, v_KSH = read(pages, page_ids_n)
        return k_KSH.swapaxes(0, 1), v_KSH.swapaxes(0, 1)

    _, K, page, _ = pages.kv_PKpJ.shape
    text = Text(read_pages, page, K, window, softcap)
    if pages.quantised:
        q_BTNH = q_BTNH.astype(jnp.float32)
    return _attend(text, scaled(q_BTNH, scale), table_Bn, position_B, keys_B, length_B)


def scaled(q: jax.Array, factor: float) -> jax.Array:
    """q times a factor that is not rounded to q's dtype."""
    return (q.astype(jnp.float32) * factor).astype(q.dtype)


def combine(partials: Sequence[Partial]) -> Partial:
    """Attention to the keys of all of these, which have none in common (Flash-Decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html)."""
    if len(partials) == 1:
        return partials[0]
    o_RBTNH, lse_RBTN = (jnp.stack(arrays) for arrays in zip(*partials, strict=True))
    lse_BTN = jax.nn.logsumexp(lse_RBTN, axis=0)
    weight_RBTN = jnp.exp(lse_RBTN - lse_BTN[None])
    return Partial((o_RBTNH * weight_RBTN[..., None]).sum(0), lse_BTN)


def _attend(text, q_BTNH, table_Bn, position_B, keys_B, length_B) -> Partial:
    """q_BTNH is scaled; row b's queries stand at position_B[b] + t and see keys [0, keys_B[b])."""
    B, T, N, H = q_BTNH.shape
    K = text.kv_heads
    tile = min(T, QUERY_TILES[0] if T <= QUERY_TILES[1] else QUERY_TILES[1])
    tiles = -(-T // tile)
    pages = max(1, max(tile, 128) // text.page)
    # A tile is a row of its own: it starts later and ends where its tokens or the row's do.
    q_RTNH = _pad(q_BTNH, 1, tiles * tile).reshape(B * tiles, tile, N, H)
    offset_R = jnp.tile(jnp.arange(tiles, dtype=jnp.int32) * tile, B)
    position_R = jnp.repeat(position_B, tiles) + offset_R
    length_R = jnp.clip(jnp.repeat(length_B, tiles) - offset_R, 0, tile)
    end_R = jnp.minimum(
        jnp.repeat(keys_B, tiles), jnp.where(length_R > 0, position_R + length_R, 0)
    )
    row_R = jnp.repeat(jnp.arange(B, dtype=jnp.int32), tiles)
    table_Bn = _pad(table_Bn, 1, -(-table_Bn.shape[1] // pages) * pages)

    def one_row(args):
        q_TNH, position, end, row = args
        q_KgH = q_TNH.reshape(tile, K, N // K, H).transpose(1, 2, 0, 3).reshape(K, -1, H)
        if T == 1:
            q_KgH = _pack(q_KgH)
        position_T = position + jnp.arange(tile, dtype=jnp.int32)
        position_g = jnp.tile(position_T, q_KgH.shape[1] // tile)
        o_KgH, lse_Kg = _walk(text, q_KgH, table_Bn[row], position_g, end, pages)
        if T == 1:
            o_KgH = _unpack(o_KgH, K)
        o_TNH = o_KgH.reshape(K, N // K, tile, H).transpose(2, 0, 1, 3).reshape(tile, N, H)
        return o_TNH, lse_Kg.reshape(N, tile).swapaxes(0, 1)

    o_RTNH, lse_RTN = lax.map(one_row, (q_RTNH, position_R, end_R, row_R))
    o_BTNH = o_RTNH.reshape(B, tiles * tile, N, H)[:, :T]
    return Partial(o_BTNH, lse_RTN.reshape(B, tiles * tile, N)[:, :T])


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


def _walk(text, q_KgH, table_n, position_g, end, pages):
    """Queries g of one row (all its tokens and the heads of a group) over positions [0, end)."""
    K, queries, H = q_KgH.shape
    block = pages * text.page

    def body(i, carry):
        top_Kg, sum_Kg, o_KgH = carry
        page_ids = lax.dynamic_slice(table_n, (i * pages,), (pages,))
        k_SKH, v_SKH = (array.reshape(block, K, H) for array in text.read(page_ids))
        at_S = i * block + jnp.arange(block, dtype=jnp.int32)
        seen_gS = at_S[None, :] <= position_g[:, None]
        if text.window is not None:
            seen_gS &= at_S[None, :] > position_g[:, None] - text.window
        seen_gS &= at_S[None, :] < end
        # What lies past the end is another's or nobody's: 0 * NaN must not enter the sum.
        v_SKH = jnp.where((at_S < end)[:, None, None], v_SKH, jnp.zeros((), v_SKH.dtype))
        s_KgS = jnp.einsum("KgH,SKH->KgS", q_KgH, k_SKH, preferred_element_type=jnp.float32)
        if text.softcap is not None:
            s_KgS = text.softcap * jnp.tanh(s_KgS / text.softcap)
        s_KgS = jnp.where(seen_gS[None], s_KgS, MASKED)
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

    first = 0 if text.window is None else jnp.maximum(position_g[0] - text.window + 1, 0) // block
    start = (
        jnp.full((K, queries), MASKED, jnp.float32),
        jnp.zeros((K, queries), jnp.float32),
        jnp.zeros((K, queries, H), jnp.float32),
    )
    top_Kg, sum_Kg, o_KgH = lax.fori_loop(first, (end + block - 1) // block, body, start)
    seen_Kg = top_Kg > MASKED
    some_Kg = jnp.where(seen_Kg, sum_Kg, 1.0)
    o_KgH = jnp.where(seen_Kg[..., None], o_KgH / some_Kg[..., None], 0.0)
    return o_KgH, jnp.where(seen_Kg, top_Kg + jnp.log(some_Kg), MASKED)


def _pad(x, axis, size):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths) if size != x.shape[axis] else x
