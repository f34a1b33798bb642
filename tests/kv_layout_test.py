"""A pool's order changes where bytes lie, never which tokens they belong to."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.programs import kv as pool
from pdjax.programs.mesh import make_mesh

LAYERS, P, PAGE, K, H = 2, 6, 4, 2, 3  # an odd head size
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8"]
TABLE_n = np.asarray([4, 1, 5, P], np.int32)  # 12 tokens


def layout(order: pool.Order, dtype: str, tp: int = 1) -> pool.Layout:
    return pool.Layout("it", LAYERS, K, H, dtype, PAGE, P, tp, order)


def tokens(seed: int, rows: int, T: int, dtype: str) -> np.ndarray:
    """Small whole numbers, which every dtype has, as [k or v, B, T, K, H]."""
    drawn = np.random.default_rng(seed).integers(-8, 8, (2, rows, T, K, H))
    return drawn.astype(jnp.dtype(dtype))


def read(kv: pool.KV, order: pool.Order) -> np.ndarray:
    """A layer as [k or v, P, p, K, H], by the docstring of the order alone."""
    arrays = [np.asarray(array) for array in kv]
    if order == "token_major":
        return np.stack(arrays)
    k_PKpH, v_PKpH = arrays[0][..., :H], arrays[0][..., H:]
    return np.stack([k_PKpH, v_PKpH]).transpose(0, 1, 3, 2, 4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["token_major", "fused"])
def test_a_token_is_found_where_its_table_says(order, dtype, tp):
    mesh = make_mesh(jax.devices()[:tp])
    kv = pool.make_pool(layout(order, dtype, tp), mesh)[0]
    new = tokens(0, 2, 5, dtype)
    table_Bn = np.asarray([TABLE_n, [0, 2, 3, P]], np.int32)
    start_B, length_B = np.asarray([2, 7], np.int32), np.asarray([5, 1], np.int32)
    kv = jax.jit(pool.write)(kv, *new, table_Bn, start_B, length_B)
    expected = np.zeros((2, P, PAGE, K, H), new.dtype)
    for row, (start, length) in enumerate(zip(start_B, length_B, strict=True)):
        for t in range(length):
            page, place = table_Bn[row, (start + t) // PAGE], (start + t) % PAGE
            expected[:, page, place] = new[:, row, t]
    np.testing.assert_array_equal(read(kv, order), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("orders", [("token_major", "fused"), ("fused", "token_major")])
def test_a_piece_of_one_order_goes_into_the_other(orders, dtype):
    mesh = make_mesh(jax.devices()[:1])
    source, target = (pool.make_pool(layout(order, dtype), mesh) for order in orders)
    new = tokens(1, 1, 12, dtype)
    row = TABLE_n[None], np.zeros(1, np.int32), np.full(1, 12, np.int32)
    source = [pool.write(kv, *new, *row) for kv in source]
    piece = pool.extract(source, jnp.asarray(TABLE_n), jnp.int32(3), 8)
    np.testing.assert_array_equal(np.asarray(piece[1]), new[:, 0, 3:11])
    target = pool.insert(target, piece, jnp.asarray(TABLE_n), jnp.int32(3), jnp.int32(7))
    got = [read(kv, orders[1]) for kv in target]
    at = np.arange(3, 10)
    for layer in got:
        np.testing.assert_array_equal(layer[:, TABLE_n[at // PAGE], at % PAGE], new[:, 0, 3:10])
        assert np.count_nonzero(layer) == np.count_nonzero(new[:, 0, 3:10])  # and nothing else


@pytest.mark.parametrize("order", ["token_major", "fused"])
def test_a_pool_is_updated_in_its_own_memory(order):
    mesh = make_mesh(jax.devices()[:2])
    kvs = pool.make_pool(layout(order, "float32", 2), mesh)
    write = jax.jit(pool.write, donate_argnums=0)

    def pointers(kv: Sequence[jax.Array]) -> list[int]:
        return [s.data.unsafe_buffer_pointer() for array in kv for s in array.addressable_shards]

    before = pointers(kvs[0])
    for T in (1, 5):
        row = TABLE_n[None], np.zeros(1, np.int32), np.full(1, T, np.int32)
        kvs[0] = write(kvs[0], *tokens(2, 1, T, "float32"), *row)
        assert pointers(kvs[0]) == before
