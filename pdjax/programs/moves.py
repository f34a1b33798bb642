"""Pieces out of a pool and into it: by the kernels where they read the pool, by XLA elsewhere.

Kernels move whole pages of fused pools, pages that a piece fills only in part are merged token by
token. A piece on its way is token-major whatever the pools are (programs.transfer), so beside the
kernel XLA makes one pass over the piece.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.kv_pages import Piece, append, pack, unpack
from kernels_pallas.pages import Pages
from pdjax.programs import kv as pool


def extract(
    kvs: Sequence[pool.KV], table_n: jax.Array, start: jax.Array, T: int, implementation: str
) -> list[jax.Array]:
    """As kv.extract, but what is past the end of the text may be any bits. `implementation`: one of
    kernels_pallas.dispatch.IMPLEMENTATIONS; token-major pools are XLA's whatever it is."""
    if not _by_kernels(kvs, implementation):
        return pool.extract(kvs, table_n, start, T)
    page_ids_n = _touched(kvs, table_n, start, T)
    piece = pack([Pages(*kv) for kv in kvs], page_ids_n, implementation=implementation)
    within = start % pool.page_size_of(kvs[0])
    kv_LKTJ = lax.dynamic_slice_in_dim(piece.kv_RLKTJ[0], within, T, axis=2)
    return [jnp.stack(jnp.split(kv_KTJ.swapaxes(0, 1), 2, axis=-1)) for kv_KTJ in kv_LKTJ]


def insert(
    kvs: Sequence[pool.KV],
    pieces_2TKH: Sequence[jax.Array],
    table_n: jax.Array,
    start: jax.Array,
    length: jax.Array,
    implementation: str,
) -> list[pool.KV]:
    """As kv.insert; `implementation` as in `extract`."""
    if not _by_kernels(kvs, implementation):
        return pool.insert(kvs, pieces_2TKH, table_n, start, length)
    layers = _fill_pages(kvs, pieces_2TKH, table_n, start, length, implementation)
    offset_2, length_2 = _edges(start, length, pool.page_size_of(kvs[0]))
    edge_2p = offset_2[:, None] + jnp.arange(pool.page_size_of(kvs[0]), dtype=jnp.int32)[None]
    rows = (jnp.stack([table_n, table_n]), start + offset_2, length_2)
    filled = []
    for pages, piece_2TKH in zip(layers, pieces_2TKH, strict=True):
        k_2pKH, v_2pKH = piece_2TKH.at[:, edge_2p].get(mode="clip")
        filled.append((append(pages, k_2pKH, v_2pKH, *rows, implementation=implementation)[0],))
    return filled


def _by_kernels(kvs: Sequence[pool.KV], implementation: str) -> bool:
    return implementation != "xla" and pool.order_of(kvs[0]) == "fused"


def _touched(kvs: Sequence[pool.KV], table_n: jax.Array, start: jax.Array, T: int) -> jax.Array:
    """The pages that T tokens from `start` on may touch; past the table's end one that does not
    exist."""
    page = pool.page_size_of(kvs[0])
    n = (T + page - 2) // page + 1
    table_n = jnp.pad(table_n, (0, n), constant_values=kvs[0][0].shape[0])
    return lax.dynamic_slice_in_dim(table_n, start // page, n)


def _fill_pages(
    kvs: Sequence[pool.KV],
    pieces_2TKH: Sequence[jax.Array],
    table_n: jax.Array,
    start: jax.Array,
    length: jax.Array,
    implementation: str,
) -> list[Pages]:
    """The pages of which the piece has every token."""
    T, page = pieces_2TKH[0].shape[1], pool.page_size_of(kvs[0])
    page_ids_n = _touched(kvs, table_n, start, T)
    begin_n = (start // page + jnp.arange(len(page_ids_n), dtype=jnp.int32)) * page
    whole_n = (start <= begin_n) & (begin_n + page <= start + length)
    page_ids_n = jnp.where(whole_n, page_ids_n, kvs[0][0].shape[0])

    def in_pages(piece_2TKH: jax.Array) -> jax.Array:
        kv_KTJ = jnp.concatenate(list(piece_2TKH), axis=-1).swapaxes(0, 1)
        room_KTJ = jnp.zeros(
            (kv_KTJ.shape[0], len(page_ids_n) * page, kv_KTJ.shape[2]), kv_KTJ.dtype
        )
        return lax.dynamic_update_slice_in_dim(room_KTJ, kv_KTJ, start % page, axis=1)

    piece = Piece(jnp.stack([in_pages(piece_2TKH) for piece_2TKH in pieces_2TKH])[None])
    layers = [Pages(*kv) for kv in kvs]
    return unpack(layers, piece, page_ids_n, implementation=implementation)


def _edges(start: jax.Array, length: jax.Array, page: int) -> tuple[jax.Array, jax.Array]:
    """Where in the piece the tokens begin that share the first page with others, and those that
    share the last one; and how many they are. A piece inside of one page has the former only."""
    end = start + length
    head = jnp.where(start % page > 0, jnp.minimum(length, page - start % page), 0)
    tail = jnp.minimum(end % page, length - head)
    return jnp.stack([jnp.zeros_like(length), length - tail]), jnp.stack([head, tail])
