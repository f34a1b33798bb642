"""KV moves between pages and buffers without a change, and nothing else moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_problems import assert_no_races, poisoned, problem, random_text, random_tokens

from kernels_pallas.kv_pages import append, pack, unpack
from kernels_pallas.kv_pages.specs import LAYERS, REAL, TINY
from kernels_pallas.pages import QUANTISED, Pages
from kernels_pallas.specs import Spec

IMPLEMENTATIONS = ("xla", "tpu_interpret")


def layers_of(spec: Spec) -> tuple[list[Pages], np.ndarray]:
    """Full pages of random tokens, some of them named by a table."""
    rng = np.random.default_rng(1)
    P, n = spec.n + 3, spec.n
    layers = []
    for _ in range(LAYERS):
        kv_KSJ, scale_K2S, _ = random_text(rng, (spec.K, P * spec.page, 2 * spec.H), spec.dtype)
        kv_KPpJ = kv_KSJ.reshape(spec.K, P, spec.page, -1)
        scale_K2Pp = scale_K2S.reshape(spec.K, 2, P, spec.page)
        scale_P1X = jnp.asarray(scale_K2Pp.transpose(2, 0, 1, 3).reshape(P, 1, -1))
        kv_PKpJ = jnp.asarray(kv_KPpJ.swapaxes(0, 1))
        layers.append(Pages(kv_PKpJ, scale_P1X if spec.dtype in QUANTISED else None))
    return layers, rng.permutation(P)[:n].astype(np.int32)


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """For comparisons in which NaN equals NaN."""
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("spec", TINY, ids=lambda spec: spec.name)
def test_packed_tokens_stand_in_order(spec, parts, implementation):
    layers, table_n = layers_of(spec)
    piece = jax.jit(functools.partial(pack, parts=parts, implementation=implementation))(
        layers, table_n
    )
    for r in range(parts):
        heads = slice(r * spec.K // parts, (r + 1) * spec.K // parts)
        for i, layer in enumerate(layers):
            for s in (0, spec.page - 1, spec.page, spec.n * spec.page - 1):
                page, at = table_n[s // spec.page], s % spec.page
                np.testing.assert_array_equal(
                    bits(piece.kv_RLKTJ[r, i, :, s]), bits(layer.kv_PKpJ[page, heads, at])
                )
                if layer.scale_P1X is not None:
                    scale_K2p = layer.scale_P1X[page, 0].reshape(spec.K, 2, spec.page)
                    np.testing.assert_array_equal(
                        piece.scale_RLK2T[r, i, :, :, s], scale_K2p[heads, :, at]
                    )
    assert_no_races()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", TINY, ids=lambda spec: spec.name)
def test_unpack_inverts_pack_and_touches_no_other_page(spec, implementation):
    layers, table_n = layers_of(spec)
    piece = pack(layers, table_n, parts=2, implementation="xla")
    P = layers[0].kv_PKpJ.shape[0]
    empty, empty_scale = poisoned(P, spec.K, spec.page, 2 * spec.H, spec.dtype)
    scale = jnp.asarray(empty_scale.reshape(P, 1, -1)) if spec.dtype in QUANTISED else None
    target = [Pages(jnp.asarray(empty), scale)] * LAYERS
    gone = table_n.copy()
    gone[-2:] = P, P + 7  # dropped: a table's tail
    got = jax.jit(functools.partial(unpack, implementation=implementation))(target, piece, gone)
    for layer, before, after in zip(layers, target, got, strict=True):
        for x, old, new in zip(layer, before, after, strict=True):
            if x is not None:
                want = np.array(bits(old))
                want[gone[:-2]] = bits(x)[gone[:-2]]
                np.testing.assert_array_equal(bits(new), want)
    assert_no_races()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_of_another_size_hold_the_same_tokens(implementation):
    layers, table_n = layers_of(TINY[0])
    piece = pack(layers, table_n, implementation=implementation)
    _, K, p, J = layers[0].kv_PKpJ.shape
    wide = [Pages(jnp.zeros((5, K, 2 * p, J), jnp.float32))] * LAYERS
    wide = unpack(wide, piece, jnp.array([3, 1]), implementation=implementation)
    again = pack(wide, jnp.array([3, 1]), implementation=implementation)
    np.testing.assert_array_equal(again.kv_RLKTJ, piece.kv_RLKTJ)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_on_the_way_means_nearly_the_same(dtype):
    """Half a step of int8 is 1/254 of a token's largest number; fp8 has 3 bits and a hidden one."""
    layers, table_n = layers_of(TINY[0])
    exact = np.asarray(pack(layers, table_n).kv_RLKTJ)
    piece = pack(layers, table_n, dtype=dtype)
    assert piece.kv_RLKTJ.dtype == dtype
    got = np.asarray(pack(unpack(layers, piece, table_n), table_n).kv_RLKTJ)
    halves = np.abs(exact.reshape(*exact.shape[:-1], 2, -1))
    largest = np.repeat(halves.max(-1), halves.shape[-1], -1)
    step = largest / 254 if dtype == "int8" else np.abs(exact) / 16 + largest / 448 / 2**9
    assert (np.abs(got - exact) <= step * 1.001).all() and (got != exact).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", TINY, ids=lambda spec: spec.name)
def test_append_writes_new_tokens_and_nothing_else(spec, implementation):
    """Undo the new tokens, append them again, and compare every bit."""
    p = problem(spec)
    rng = np.random.default_rng(2)
    k_BTKH, v_BTKH = (
        random_tokens(rng, (spec.B, spec.T, spec.K, spec.H), spec.q_dtype) for _ in range(2)
    )
    pages = Pages(*(None if x is None else jnp.asarray(x) for x in p.pages))
    got = jax.jit(functools.partial(append, implementation=implementation))(
        pages, k_BTKH, v_BTKH, *p.arguments[2:]
    )
    want = jax.jit(functools.partial(append, implementation="xla"))(
        pages, k_BTKH, v_BTKH, *p.arguments[2:]
    )
    kv_PKpJ = np.array(p.pages.kv_PKpJ)
    for b in range(spec.B):
        for t in range(p.length_B[b]):
            page, at = divmod(int(p.start_B[b]) + t, spec.page)
            where = p.table_Bn[b, page], slice(None), at
            new_KJ = np.concatenate([k_BTKH[b, t], v_BTKH[b, t]], -1)
            if spec.dtype in QUANTISED:
                scale_K2p = np.asarray(got.scale_P1X[where[0]]).reshape(spec.K, 2, spec.page)
                scale_KJ = np.repeat(scale_K2p[..., at], spec.H, -1)
                got_KJ = np.asarray(got.kv_PKpJ[where]).astype(np.float32) * scale_KJ
                np.testing.assert_allclose(got_KJ, new_KJ.astype(np.float32), atol=0.13, rtol=0.07)
                kv_PKpJ[where] = got.kv_PKpJ[where]
            else:
                kv_PKpJ[where] = new_KJ
    np.testing.assert_array_equal(bits(got.kv_PKpJ), bits(kv_PKpJ))
    if got.scale_P1X is not None:
        np.testing.assert_array_equal(bits(got.scale_P1X), bits(want.scale_P1X))
    assert_no_races()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_donated_pages_are_updated_in_place(implementation):
    spec = TINY[0]
    p = problem(spec)
    k_BTKH = v_BTKH = random_tokens(
        np.random.default_rng(2), (spec.B, spec.T, spec.K, spec.H), spec.q_dtype
    )
    function = jax.jit(functools.partial(append, implementation=implementation), donate_argnums=0)
    pages = Pages(jnp.array(p.pages.kv_PKpJ))
    before = pages.kv_PKpJ.unsafe_buffer_pointer()
    after = function(pages, k_BTKH, v_BTKH, *p.arguments[2:]).kv_PKpJ
    assert after.unsafe_buffer_pointer() == before


def test_pieces_that_do_not_fit_are_refused():
    layers, table_n = layers_of(TINY[0])
    piece = pack(layers, table_n)
    with pytest.raises(ValueError, match="does not fill 3 pages of 2 layers"):
        unpack(layers, piece, table_n[:3])
    with pytest.raises(ValueError, match="cannot split 2 kv heads into `parts` = 3"):
        pack(layers, table_n, parts=3)


def test_names_of_shapes_are_unique():
    names = [spec.name for spec in (*TINY, *REAL)]
    assert len(set(names)) == len(names)
