"""The arrays of a KV pool, and what reads and writes them.

A pool is, per layer, the arrays of its order: `token_major` is a pair (k, v) of [P, p, K, H];
`fused` is one array kv_PKpJ [P, K, p, 2 H] with K in [0, H) and V in [H, 2 H) of its last axis,
which is what the kernels read. Slab or pages is a matter of which pages a request gets
(core.blocks), not of the arrays. Programs address a token by its request's table of pages:
position s is in page table[s // p] at s % p. A table is filled up with P, a page that does not
exist: writes to it vanish.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from pdjax.programs.mesh import by_head, sharding, stored_heads

KV = tuple[jax.Array, ...]
"""The arrays of one layer: (k_PpKH, v_PpKH) or (kv_PKpJ,)."""

Order = Literal["token_major", "fused"]

POOL_AXES: Mapping[Order, tuple[str, ...]] = {
    "token_major": ("pages", "page", "kv_heads", "head_dim"),
    "fused": ("pages", "kv_heads", "page", "head_dim"),
}
FORMAT = 1
"""Version of what a Layout and a piece mean."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the bytes of a pool mean. Two pools can exchange KV when all but pages, page size,
    tp and order agree: those are converted on the way.

    kv_heads: of the model; see mesh.stored_heads for more devices than that. scale: how quantised
    values are scaled; `none` as long as none are.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    pages: int
    tp: int
    order: Order = "token_major"
    scale: str = "none"
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        return (
            f"v{self.format}/{self.model}/L{self.layers}/K{self.kv_heads}/H{self.head_dim}"
            f"/{self.dtype}/scale {self.scale}/{self.order}/p{self.page_size}/P{self.pages}"
            f"/tp{self.tp}"
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


def make_pool(layout: Layout, mesh: Mesh) -> list[KV]:
    """Zeroed arrays, heads split over the mesh."""
    P, p, H = layout.pages, layout.page_size, layout.head_dim
    K = stored_heads(layout.kv_heads, mesh.size)
    shape = (P, p, K, H) if layout.order == "token_major" else (P, K, p, 2 * H)
    place = sharding(mesh, POOL_AXES[layout.order])
    zeros = jax.jit(lambda: jnp.zeros(shape, layout.dtype), out_shardings=place)
    arrays = 2 if layout.order == "token_major" else 1
    return [tuple(zeros() for _ in range(arrays)) for _ in range(layout.layers)]


def order_of(kv: KV) -> Order:
    return "fused" if len(kv) == 1 else "token_major"


def pool_sharding(kv: KV, mesh: Mesh) -> NamedSharding:
    """Where the arrays of a layer lie: heads split over the mesh."""
    return sharding(mesh, POOL_AXES[order_of(kv)])


def piece_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
    """Where the arrays [2, T, K, H] of a piece lie: each device has the heads that it stores."""
    return NamedSharding(by_head(mesh, kv_heads), Spec(None, None, "tp", None))


def page_size_of(kv: KV) -> int:
    return kv[0].shape[2 if order_of(kv) == "fused" else 1]


def write(
    kv: KV,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    table_Bn: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
) -> KV:
    """Row b's tokens go to positions start_B[b] + [0, length_B[b]); the rest is dropped."""
    pages, page = kv[0].shape[0], page_size_of(kv)
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

    def put(pool: jax.Array, new_BTKX: jax.Array) -> jax.Array:
        more = page_BT.shape[1] - T
        new_BTKX = jnp.pad(new_BTKX.astype(pool.dtype), ((0, 0), (0, more), (0, 0), (0, 0)))
        return pool.at[_at(kv, page_BT, at_BT % page)].set(new_BTKX, mode="drop")

    if order_of(kv) == "fused":
        return (put(kv[0], jnp.concatenate([k_BTKH, v_BTKH], axis=-1)),)
    return put(kv[0], k_BTKH), put(kv[1], v_BTKH)


def _at(kv: KV, page_X: jax.Array, place_X: jax.Array) -> tuple:
    """Indexes a pool's array by tokens: what comes out, or goes in, is [X..., K, H or J]."""
    return (page_X, slice(None), place_X) if order_of(kv) == "fused" else (page_X, place_X)


def extract(kvs: Sequence[KV], table_n: jax.Array, start: jax.Array, T: int) -> list[jax.Array]:
    """T tokens from position `start` of one request, per layer one array [2, T, K, H]."""
    page = page_size_of(kvs[0])
    at_T = start + jnp.arange(T, dtype=jnp.int32)
    n_T = jnp.minimum(at_T // page, table_n.shape[0] - 1)
    where = _at(kvs[0], table_n[n_T], at_T % page)

    def read(kv: KV) -> jax.Array:
        parts = [pool.at[where].get(mode="clip") for pool in kv]
        return jnp.stack(jnp.split(parts[0], 2, axis=-1) if len(parts) == 1 else parts)

    return [read(kv) for kv in kvs]


def insert(
    kvs: Sequence[KV],
    pieces_2TKH: Sequence[jax.Array],
    table_n: jax.Array,
    start: jax.Array,
    length: jax.Array,
) -> list[KV]:
    """The other end of `extract`: `length` of the piece's tokens go to position `start` on."""
    row = (table_n[None], jnp.reshape(start, (1,)), jnp.reshape(length, (1,)))
    return [
        write(kv, piece[0][None], piece[1][None], *row)
        for kv, piece in zip(kvs, pieces_2TKH, strict=True)
    ]
