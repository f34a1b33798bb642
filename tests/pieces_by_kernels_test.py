"""Pieces that kernels take out of a pool and put into one are those of XLA, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_problems import assert_no_races

from pdjax.programs import kv as pool
from pdjax.programs import moves
from pdjax.programs.mesh import make_mesh
from pdjax.programs.transfer import corrupt, transfer_programs
from pdjax.programs.transports import device_put

LAYERS, PAGES, PAGE, K, H = 2, 7, 16, 2, 64
TABLE_n = np.asarray([5, 2, 6, 0, PAGES], np.int32)  # 64 tokens, and room for 16 more
T = 40
# (start, length): over whole pages, from inside one, into one, both, inside one, one token, a whole
# one, nothing, and to the end of the text in a piece that is padded past its table.
PIECES = [(0, 32), (7, 25), (16, 20), (3, 40), (20, 9), (31, 1), (48, 16), (5, 0), (40, 24)]


def implementations() -> list[str]:
    interpreted = jax.__version_info__ >= (0, 11)  # Mosaic GPU kernels
    return ["tpu_interpret", *(["gpu_interpret"] if interpreted else [])]


def filled(seed: int, dtype: str, tp: int = 1) -> list[pool.KV]:
    """A fused pool of random numbers."""
    mesh = make_mesh(jax.devices()[:tp])
    layout = pool.Layout("it", LAYERS, K, H, dtype, PAGE, PAGES, tp, "fused")
    rng = np.random.default_rng(seed)

    def fresh(x: jax.Array) -> jax.Array:
        return jax.device_put(rng.standard_normal(x.shape).astype(x.dtype), x.sharding)

    return [tuple(map(fresh, kv)) for kv in pool.make_pool(layout, mesh)]


def same(got: object, want: object) -> None:
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), got, want
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", implementations())
def test_a_piece_is_what_xla_makes_of_it(implementation: str, dtype: str):
    extract = jax.jit(moves.extract, static_argnames=("T", "implementation"))
    insert = jax.jit(moves.insert, static_argnames="implementation")
    source, target = filled(1, dtype), filled(2, dtype)
    for start, length in PIECES:
        span = np.int32(start), np.int32(length)
        want = pool.extract(source, jnp.asarray(TABLE_n), span[0], T)
        got = extract(source, TABLE_n, span[0], T=T, implementation=implementation)
        same([x[:, :length] for x in got], [x[:, :length] for x in want])
        put = functools.partial(insert, target, want, TABLE_n, *span)
        same(put(implementation=implementation), pool.insert(target, want, TABLE_n, *span))
    assert_no_races()


def test_damage_is_told_on_the_way_from_one_tp_to_another():
    source, target = filled(1, "float32", tp=1), filled(2, "float32", tp=2)
    here, there = (make_mesh(jax.devices()[:tp]) for tp in (1, 2))
    extract = transfer_programs(here, K, True, "tpu_interpret").extract
    insert = transfer_programs(there, K, True, "tpu_interpret").insert
    span = np.int32(3), np.int32(30)
    piece = extract(source, TABLE_n, *span, T=T)
    piece = piece._replace(kv=device_put(piece.kv, there))
    target, landing = insert(target, corrupt(piece), TABLE_n, *span)
    assert not landing.intact()
    target, landing = insert(target, piece, TABLE_n, *span)
    assert landing.intact()
