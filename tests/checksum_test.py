"""A checksum tells what landed from what left, and depends on nothing but values and places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.programs.checksum import sums

LAYERS, T, K, H = 2, 4, 2, 3
WORD = 2**32


def piece(dtype: str, seed: int = 0) -> list[np.ndarray]:
    rng, size = np.random.default_rng(seed), 2 * T * K * H * jnp.dtype(dtype).itemsize
    drawn = [np.frombuffer(rng.bytes(size), jnp.dtype(dtype)) for _ in range(LAYERS)]
    return [x.reshape(2, T, K, H).copy() for x in drawn]


def by_hand(layers: list[np.ndarray], start: int, length: int) -> list[int]:
    """The documented sum in Python's integers, element by element."""
    totals = [0] * K
    for layer, x_2TKH in enumerate(layers):
        bits = x_2TKH.view(f"uint{8 * x_2TKH.dtype.itemsize}")
        for (row, t, k, h), value in np.ndenumerate(bits):
            if t >= length:
                continue
            place = ((start + t) * H + h) * 2 * len(layers) + 2 * layer + row
            word = int(value) ^ (place * 0x9E3779B9 % WORD)
            word = (word ^ (word >> 16)) * 0x85EBCA6B % WORD
            word = (word ^ (word >> 13)) * 0xC2B2AE35 % WORD
            totals[k] = (totals[k] + (word ^ (word >> 16))) % WORD
    return totals


def ours(layers: list[np.ndarray], start: int = 5, length: int = T) -> list[int]:
    return sums(layers, np.int32(start), np.int32(length)).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_it_is_the_documented_sum_on_the_host_and_on_the_device(dtype):
    layers = piece(dtype)
    for start, length in [(0, T), (1000, 3), (7, 1)]:
        expected = by_hand(layers, start, length)
        assert ours(layers, start, length) == expected
        on_device = jax.jit(sums)([jnp.asarray(x) for x in layers], start, length)
        assert np.asarray(on_device).tolist() == expected


def test_padding_does_not_count():
    layers = piece("float32")
    padded = [np.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0)), constant_values=7) for x in layers]
    assert ours(padded, length=T) == ours(layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_single_flipped_bit_changes_the_sum_of_its_head_alone(dtype):
    layers = piece(dtype)
    before = ours(layers)
    for layer, x in enumerate(layers):
        bits = x.view(f"uint{8 * x.dtype.itemsize}")
        for at in np.ndindex(bits.shape):
            for bit in range(8 * x.dtype.itemsize):
                bits[at] ^= bits.dtype.type(1 << bit)
                after = ours(layers)
                bits[at] ^= bits.dtype.type(1 << bit)
                assert [a != b for a, b in zip(before, after, strict=True)] == [
                    k == at[2] for k in range(K)
                ], (layer, at, bit)


@pytest.mark.parametrize(
    "move",
    [
        lambda a, b: (b, a),  # layers
        lambda a, b: (a[::-1], b[::-1]),  # k and v
        lambda a, b: (a[:, ::-1], b[:, ::-1]),  # tokens
        lambda a, b: (a[..., ::-1], b[..., ::-1]),  # inside a head
        lambda a, b: (a[:, :, ::-1], b[:, :, ::-1]),  # heads
        lambda a, b: (-a, -b),  # every sign
    ],
)
def test_values_in_other_places_change_it(move):
    layers = piece("float32")
    assert ours([np.ascontiguousarray(x) for x in move(*layers)]) != ours(layers)


def test_it_knows_where_in_its_text_a_piece_belongs():
    assert ours(piece("float32"), start=4) != ours(piece("float32"), start=5)
