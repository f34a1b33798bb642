"""KV from one mesh to another. Nothing else in pdjax copies between meshes: with JAX's guard
`jax_transfer_guard_device_to_device = "disallow_explicit"` any other copy raises.

A piece is some tokens of some layers of one request. It is extracted on the source mesh (an array
of its own, so that the pool may be donated to the next step at once), put onto the target
mesh with the target's split over heads, and inserted there into the request's pages.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from pdjax.architecture import Architecture
from pdjax.programs import kv as pool
from pdjax.programs.mesh import sharding


class LayoutMismatch(ValueError):
    """Two pools whose bytes do not mean the same."""


class TransferPrograms(NamedTuple):
    """extract(kvs, table_n, start, T=T) -> piece; insert(kvs, piece, table_n, start, length) ->
    (kvs, landed), donating kvs; `landed` is ready once the piece is in the pool."""

    extract: Callable
    insert: Callable


@functools.cache
def transfer_programs(arch: Architecture, mesh: Mesh) -> TransferPrograms:
    @functools.partial(jax.jit, static_argnames="T")
    def extract(kvs, table_n, start, *, T):
        return pool.extract(kvs, table_n, start, T)

    @functools.partial(jax.jit, donate_argnames="kvs")
    def insert(kvs, piece, table_n, start, length):
        kvs = pool.insert(kvs, piece, table_n, start, length)
        return jax.lax.with_sharding_constraint(kvs, pool.pool_sharding(kvs[0], mesh)), length

    return TransferPrograms(extract, insert)


def move(piece_2TKH: Sequence[jax.Array], target: Mesh) -> list[jax.Array]:
    """The piece on the target mesh. jax.device_put moves each head's K and V from the devices
    that have them to those that want them, whatever tp is on the two sides."""
    with jax.transfer_guard_device_to_device("allow"):
        return jax.device_put(list(piece_2TKH), sharding(target, pool.PIECE_AXES))


def check_compatible(source: pool.Layout, target: pool.Layout, names: tuple[str, str]) -> None:
    """Raises LayoutMismatch, naming both sides, before anything is served."""
    for field in ("model", "layers", "kv_heads", "head_dim", "dtype"):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            raise LayoutMismatch(
                f"KV cannot go from `{names[0]}` to `{names[1]}`: {field} is {ours} there and "
                f"{theirs} here; serve one model with one dtype on both"
            )
