"""The two ends of KV's way between pools: pieces out of pages, and into pages.

A piece is some tokens of some layers of one request. It is extracted on the source mesh (arrays of
their own, so that the pool may be donated to the next step at once), carried to the target mesh by
a transport (programs.transports), and inserted there into the request's pages. On its way it has
the model's own K heads in token-major order, whatever tp, order and pages the two pools have.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from pdjax.programs import kv as pool
from pdjax.programs import moves
from pdjax.programs.checksum import sums
from pdjax.programs.mesh import by_head


class LayoutMismatch(ValueError):
    """Two pools whose bytes do not mean the same."""


class Piece(NamedTuple):
    """Arrays [2, T, K, H], one per layer, and where checksums are on that of what left, [K]."""

    kv: Any
    sums_K: Any = None


class Landing(NamedTuple):
    """Ready once a piece is in its pool (`done`, an output of the program that puts it there).
    sent_K and found_S: checksums of what left and of what the pool now has, per kv head and per
    stored kv head."""

    done: Any
    sent_K: Any = None
    found_S: Any = None

    def intact(self) -> bool:
        """Waits. Whether what landed is what left, as far as checksums were taken."""
        jax.block_until_ready(self)
        if self.sent_K is None or self.found_S is None:
            return True
        sent_K, found_S = np.asarray(self.sent_K), np.asarray(self.found_S)
        return bool(np.all(found_S.reshape(len(sent_K), -1) == sent_K[:, None]))


class TransferPrograms(NamedTuple):
    """extract(kvs, table_n, start, length, T=T) -> Piece; insert(kvs, piece, table_n, start,
    length) -> (kvs, Landing), donating kvs."""

    extract: Callable[..., Piece]
    insert: Callable[..., tuple[list[pool.KV], Landing]]


@functools.cache
def transfer_programs(
    mesh: Mesh, kv_heads: int, checksum: bool, implementation: str = "xla"
) -> TransferPrograms:
    """The programs of one mesh. Every device works on the heads that it stores: no collectives.
    `implementation`: as in programs.moves."""
    heads = by_head(mesh, kv_heads)
    on_each = functools.partial(jax.shard_map, mesh=heads, check_vma=False)
    piece, once, stored, row = Spec(None, None, "tp"), Spec("tp"), Spec(heads.axis_names), Spec()

    def pool_spec(kvs: Sequence[pool.KV]) -> Spec:
        axes = pool.POOL_AXES[pool.order_of(kvs[0])]
        return Spec(*(heads.axis_names if axis == "kv_heads" else None for axis in axes))

    @functools.partial(jax.jit, static_argnames="T")
    def extract(kvs, table_n, start, length, *, T) -> Piece:
        def local(kvs, table_n, start, length):
            kv = moves.extract(kvs, table_n, start, T, implementation)
            return Piece(kv, sums(kv, start, length) if checksum else None)

        out = Piece(piece, once if checksum else None)
        each = on_each(local, in_specs=(pool_spec(kvs), row, row, row), out_specs=out)
        return each(kvs, table_n, start, length)

    @functools.partial(jax.jit, donate_argnames="kvs")
    def insert(kvs, piece_kv, table_n, start, length):
        def local(kvs, piece_kv, table_n, start, length):
            kvs = moves.insert(kvs, piece_kv, table_n, start, length, implementation)
            done = kvs[0][0][0, 0, 0, :1]
            if not checksum:
                return kvs, Landing(done)
            found = moves.extract(kvs, table_n, start, piece_kv[0].shape[1], implementation)
            return kvs, Landing(done, None, sums(found, start, length))

        spec, landing = pool_spec(kvs), Landing(stored, None, stored if checksum else None)
        each = on_each(local, in_specs=(spec, piece, row, row, row), out_specs=(spec, landing))
        kvs, landing = each(kvs, piece_kv, table_n, start, length)
        return jax.lax.with_sharding_constraint(kvs, pool.pool_sharding(kvs[0], mesh)), landing

    def insert_piece(kvs, piece: Piece, table_n, start, length):
        kvs, landing = insert(kvs, piece.kv, table_n, start, length)
        return kvs, landing._replace(sent_K=piece.sums_K)

    return TransferPrograms(extract, insert_piece)


def corrupt(piece: Piece) -> Piece:
    """The same piece with the highest bit of every element of its first token flipped."""

    def flip(x_2TKH: Any) -> Any:
        bits = np.dtype(f"uint{8 * x_2TKH.dtype.itemsize}")
        mask_1T11 = np.zeros((1, x_2TKH.shape[1], 1, 1), bits)
        mask_1T11[:, 0] = 1 << (8 * bits.itemsize - 1)
        return (x_2TKH.view(bits) ^ mask_1T11).view(x_2TKH.dtype)

    return piece._replace(kv=[flip(x) for x in piece.kv])


# --- what pools agree on before anything moves ----------------------------------------------

_SAME = ("format", "model", "layers", "kv_heads", "head_dim", "dtype", "scale")


def check_compatible(source: pool.Layout, target: pool.Layout, names: tuple[str, str]) -> None:
    """Raises LayoutMismatch, naming both sides and all that differs, before anything is served.
    What may differ (pages, page size, order, tp) is converted on the way."""
    differ = [
        f"{field} is {getattr(source, field)} there and {getattr(target, field)} here"
        for field in _SAME
        if getattr(source, field) != getattr(target, field)
    ]
    if differ:
        raise LayoutMismatch(
            f"KV cannot go from `{names[0]}` to `{names[1]}`: {'; '.join(differ)}; serve one "
            "model with one dtype on both"
        )
