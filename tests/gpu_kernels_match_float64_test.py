"""The Hopper kernels, interpreted, equal attention in float64, move every bit, and do not race."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_problems import Problem, assert_solved, problem, random_tokens

from kernels_pallas import kv_pages
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.kv_pages.specs import TINY as MOVED
from kernels_pallas.paged_attention import fused_paged_attention
from kernels_pallas.paged_attention import gpu as decode
from kernels_pallas.paged_attention.specs import TINY as DECODED
from kernels_pallas.prefill_attention import prefill_attention
from kernels_pallas.prefill_attention.specs import TINY as PREFILLED
from kernels_pallas.specs import Spec

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax interprets Mosaic GPU kernels from 0.11 on"
)

_F32: dict[str, Any] = {"dtype": "float32", "q_dtype": "float32"}
# Texts of many blocks of 64 or 128 keys, so that every slot of the ring is used again.
LONG = (
    Spec(name="long", B=1, S=400, K=1, G=2, H=64, **_F32),
    Spec(name="long_bf16", B=1, S=900, K=1, G=2, H=64, page=128),
    Spec(name="long_window", B=1, S=700, K=1, G=1, H=64, page=8, window=500),
    Spec(name="long_int8", B=1, S=400, K=1, G=4, H=128, page=32, dtype="int8"),
    Spec(name="mixed", B=1, S=300, K=1, G=1, H=64, q_dtype="float32"),
)


@pytest.fixture
def no_race():
    """Fails a test whose kernels raced; what failed before must not stay."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()
    yield
    assert not interpret_pallas_call.get_races().races_found
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def attend(function, spec: Spec, p: Problem) -> jax.Array:
    function = functools.partial(function, implementation="gpu_interpret", **spec.options())
    return jax.block_until_ready(jax.jit(function)(*p.arguments))


@needs_interpreter
@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("spec", DECODED, ids=lambda spec: spec.name)
def test_decode_matches_float64(spec):
    p = problem(spec)
    assert_solved(spec, p, attend(fused_paged_attention, spec, p))


@needs_interpreter
@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize(
    ("spec", "shares"),
    [(spec, 1) for spec in LONG] + [(LONG[1], 3)],
    ids=lambda x: getattr(x, "name", x),
)
def test_long_decode_matches_float64(spec, shares, monkeypatch):
    monkeypatch.setattr(decode, "_shares", lambda rows, blocks: shares)
    p = problem(spec)
    assert_solved(spec, p, attend(fused_paged_attention, spec, p))


@needs_interpreter
@pytest.mark.usefixtures("no_race")
def test_text_in_two_pools_matches_float64():
    """All texts, some of which end before, go over to the second pool after two pages."""
    spec = Spec(name="two pools", B=4, T=3, S=96, K=2, G=2, H=64, **_F32)
    p = problem(spec)
    q_BTNH, pages, table_Bn, start_B, length_B = jax.tree.map(jnp.asarray, p.arguments)
    got = fused_paged_attention(
        q_BTNH,
        (pages, pages),
        (table_Bn, table_Bn[:, 2:]),
        start_B,
        length_B,
        split_B=jnp.full(spec.B, 2 * spec.page, jnp.int32),
        implementation="gpu_interpret",
    )
    assert_solved(spec, p, got)


@needs_interpreter
@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("spec", PREFILLED, ids=lambda spec: spec.name)
def test_prefill_matches_float64(spec):
    p = problem(spec)
    assert_solved(spec, p, attend(prefill_attention, spec, p))


@needs_interpreter
@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("spec", LONG, ids=lambda spec: spec.name)
def test_long_prefill_matches_float64(spec):
    """With one query head per kv head, the two warpgroups attend 128 tokens of it."""
    spec = dataclasses.replace(spec, T=150)
    p = problem(spec)
    assert_solved(spec, p, attend(prefill_attention, spec, p))


@needs_interpreter
@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("spec", MOVED[1:4], ids=lambda spec: spec.name)
def test_moved_bits_are_the_reference_s(spec):
    p = problem(spec)
    pages, *rows = jax.tree.map(jnp.asarray, p.arguments[1:])
    layers = [pages] * 5
    table_n = rows[0][0]  # the longest row's: all its pages exist
    shape = (spec.B, spec.T, spec.K, spec.H)
    new_BTKH = jnp.asarray(random_tokens(np.random.default_rng(1), shape, spec.q_dtype))

    def moved(implementation: str):
        piece = kv_pages.pack(layers, table_n, parts=2, implementation=implementation)
        target = jax.tree.map(lambda x: x[::-1], layers)
        gone = table_n.at[0].set(10**6)
        unpacked = kv_pages.unpack(target, piece, gone, implementation=implementation)
        appended = kv_pages.append(pages, new_BTKH, -new_BTKH, *rows, implementation=implementation)
        return piece, unpacked, appended

    for got, want in zip(*map(jax.tree.leaves, map(moved, ("gpu_interpret", "xla"))), strict=True):
        bits = f"uint{8 * got.dtype.itemsize}"
        np.testing.assert_array_equal(np.asarray(got).view(bits), np.asarray(want).view(bits))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"H": 96}, "H = 96; the GPU kernels take heads of 64 and 128"),
        ({"page": 24}, "pages hold 24 tokens; the GPU kernels take powers of two"),
        ({"dtype": "float16"}, "pages are float16"),
        ({"T": 40}, "40 tokens of 2 query heads per kv head make 80 rows"),
    ],
)
def test_what_it_cannot_do_is_one_line(change, message):
    spec = dataclasses.replace(DECODED[0], **change)
    with pytest.raises(UnsupportedError, match=message) as error:
        fused_paged_attention(*problem(spec).arguments, implementation="gpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "blocks", "shares"),
    [
        (1024, 64, 1),  # 3.9 waves of 264 blocks of threads
        (64, 64, 4),  # 256 of 264
        (8, 512, 31),  # 248 of 264, as good as 256
        (8, 2, 2),  # no more shares than blocks of keys
        (300, 64, 6),  # 1800 of 1848, not 300 of 528
    ],
)
def test_shares_fill_the_chip(rows, blocks, shares):
    assert decode._shares(rows, blocks) == shares
