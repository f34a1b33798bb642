"""The arrays of a KV pool, and what reads and writes them.

A pool is one (k, v) pair of arrays [P, p, K, H] per layer. Slab or pages is a matter of which
pages a request gets (core.blocks), not of the arrays. Programs address a token by its request's
table of pages: position s is in page table[s // p] at s % p. A table is filled up with P, a page
that does not exist: writes to it vanish.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from pdjax.programs.mesh import sharding

KV = tuple[jax.Array, jax.Array]
"""(k_PpKH, v_PpKH) of one layer."""

POOL_AXES = ("pages", "page", "kv_heads", "head_dim")
PIECE_AXES = (None, "tokens", "kv_heads", "head_dim")


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the bytes of a pool mean. Two pools can exchange KV when all but pages, page size
    and tp agree: those are converted on the way."""

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    pages: int
    tp: int

    @property
    def fingerprint(self) -> str:
        return (
            f"{self.model}/L{self.layers}/K{self.kv_heads}/H{self.head_dim}/{self.dtype}"
            f"/p{self.page_size}/P{self.pages}/tp{self.tp}"
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


def make_pool(layout: Layout, mesh: Mesh) -> list[KV]:
    """Zeroed arrays, heads split over the mesh."""
    shape = (layout.pages, layout.page_size, layout.kv_heads, layout.head_dim)
    place = sharding(mesh, POOL_AXES)
    zeros = jax.jit(lambda: jnp.zeros(shape, layout.dtype), out_shardings=place)
    return [(zeros(), zeros()) for _ in range(layout.layers)]


def write(
    kv: KV,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    table_Bn: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    where: NamedSharding,
) -> KV:
    """Row b's tokens go to positions start_B[b] + [0, length_B[b]); the rest is dropped."""
    pages, page = kv[0].shape[:2]
    T = k_BTKH.shape[1]
    t_1T = jnp.arange(T, dtype=jnp.int32)[None, :]
    at_BT = start_B[:, None] + t_1T
    n_BT = jnp.minimum(at_BT // page, table_Bn.shape[1] - 1)
    page_BT = jnp.take_along_axis(table_Bn, n_BT, axis=1)
    page_BT = jnp.where(t_1T < length_B[:, None], page_BT, pages)

    if page_BT.size == 1:
        # XLA makes of a scatter of one row an update that copies the pool; of two it does not.
        page_BT = jnp.pad(page_BT, ((0, 0), (0, 1)), constant_values=pages)
        at_BT = jnp.pad(at_BT, ((0, 0), (0, 1)))

    def put(pool: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        more = page_BT.shape[1] - T
        new_BTKH = jnp.pad(new_BTKH.astype(pool.dtype), ((0, 0), (0, more), (0, 0), (0, 0)))
        pool = pool.at[page_BT, at_BT % page].set(new_BTKH, mode="drop")
        return jax.lax.with_sharding_constraint(pool, where)

    return put(kv[0], k_BTKH), put(kv[1], v_BTKH)


def extract(kvs: Sequence[KV], table_n: jax.Array, start: jax.Array, T: int) -> list[jax.Array]:
    """T tokens from position `start` of one request, per layer one array [2, T, K, H]."""
    page = kvs[0][0].shape[1]
    at_T = start + jnp.arange(T, dtype=jnp.int32)
    n_T = jnp.minimum(at_T // page, table_n.shape[0] - 1)
    where = (table_n[n_T], at_T % page)
    return [jnp.stack([pool.at[where].get(mode="clip") for pool in kv]) for kv in kvs]


def insert(
    kvs: Sequence[KV],
    pieces_2TKH: Sequence[jax.Array],
    table_n: jax.Array,
    start: jax.Array,
    length: jax.Array,
    where: NamedSharding,
) -> list[KV]:
    """The other end of `extract`: `length` of the piece's tokens go to position `start` on."""
    row = (table_n[None], jnp.reshape(start, (1,)), jnp.reshape(length, (1,)))
    return [
        write(kv, piece[0][None], piece[1][None], *row, where)
        for kv, piece in zip(kvs, pieces_2TKH, strict=True)
    ]
