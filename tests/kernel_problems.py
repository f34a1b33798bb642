"""Random problems of a kernel's named shapes, with everything poisoned that it must not read, and
attention written out in float64."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from kernels_pallas.pages import QUANTISED, Pages, dequantise, quantise
from kernels_pallas.specs import Spec


class Text(NamedTuple):
    """What one row's pages hold, as the kernel is to see it: dequantised."""

    k_KSH: np.ndarray
    v_KSH: np.ndarray


class Problem(NamedTuple):
    q_BTNH: np.ndarray
    pages: Pages
    table_Bn: np.ndarray
    start_B: np.ndarray
    length_B: np.ndarray
    texts: list[Text]

    @property
    def arguments(self) -> tuple:
        return self[:5]


def lengths(spec: Spec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """start_B and length_B: texts of 1, p - 1, p, p + 1 and S tokens, one of none, the rest random.
    New tokens are as many of T as there are."""
    p = spec.page * spec.run
    ends = [spec.S, 0, p + 1, 1, p, p - 1][: spec.B]
    ends += rng.integers(1, spec.S, spec.B - len(ends)).tolist()
    length_B = np.minimum(ends, spec.T).astype(np.int32)
    length_B[-1] = min(length_B[-1], 1 + spec.T // 2)
    return (np.array(ends) - length_B).astype(np.int32), length_B


def random_tokens(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def problem(spec: Spec, seed: int = 0) -> Problem:
    """Pages are dealt out in random order, in runs; what no token was written to is NaN (127 in
    integer pages, whose scales are NaN), and tables end in pages that do not exist."""
    rng = np.random.default_rng(seed)
    start_B, length_B = lengths(spec, rng)
    unit = spec.page * spec.run
    counts = [-(-int(end) // unit) for end in start_B + length_B]
    P, K, p, J = (sum(counts) + 2) * spec.run, spec.K, spec.page, 2 * spec.H
    free = rng.permutation(P // spec.run).tolist()
    kv_PKpJ, scale_PK2p = poisoned(P, K, p, J, spec.dtype)
    table_Bn = np.full((spec.B, spec.n), P + 5, np.int32)
    texts = []
    for b, count in enumerate(counts):
        first = np.array([free.pop() for _ in range(count)], np.int32) * spec.run
        pages = (first[:, None] + np.arange(spec.run, dtype=np.int32)).reshape(-1)
        table_Bn[b, : len(pages)] = pages
        S = int(start_B[b] + length_B[b])
        kv_KSJ, scale_K2S, text = random_text(rng, (K, S, J), spec.dtype)
        texts.append(text)
        page_S, at_S = table_Bn[b, np.arange(S) // p], np.arange(S) % p
        kv_PKpJ[page_S, :, at_S] = kv_KSJ.swapaxes(0, 1)
        scale_PK2p[page_S, :, :, at_S] = scale_K2S.transpose(2, 0, 1)
    scale = scale_PK2p.reshape(P, 1, -1) if spec.dtype in QUANTISED else None
    q_BTNH = random_tokens(rng, (spec.B, spec.T, spec.N, spec.H), spec.q_dtype)
    return Problem(q_BTNH, Pages(kv_PKpJ, scale), table_Bn, start_B, length_B, texts)


def poisoned(P: int, K: int, p: int, J: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """kv_PKpJ and scale_PK2p, all NaN."""
    bad = 127 if dtype == "int8" else np.nan
    return np.full((P, K, p, J), bad, jnp.dtype(dtype)), np.full((P, K, 2, p), np.nan, np.float32)


def random_text(
    rng: np.random.Generator, shape: tuple[int, int, int], dtype: str
) -> tuple[np.ndarray, np.ndarray, Text]:
    """kv_KSJ and scale_K2S as pages hold them, and what they mean."""
    kv_KSJ = random_tokens(rng, shape, "float32")
    K, S, J = shape
    scale_KS2 = np.ones((K, S, 2), np.float32)
    if dtype in QUANTISED:
        # Tokens of different size: a scale that is not applied, or another's, shows.
        kv_KSJ *= rng.uniform(0.3, 3.0, (K, S, 1)).astype(np.float32)
        kv_KSJ, scale_KS2 = map(np.asarray, quantise(jnp.asarray(kv_KSJ), jnp.dtype(dtype)))
        meant = np.asarray(dequantise(jnp.asarray(kv_KSJ), jnp.asarray(scale_KS2)))
    else:
        kv_KSJ = kv_KSJ.astype(jnp.dtype(dtype))
        meant = kv_KSJ.astype(np.float32)
    text = Text(meant[..., : J // 2], meant[..., J // 2 :])
    return kv_KSJ, scale_KS2.swapaxes(1, 2), text


def expected(spec: Spec, p: Problem, b: int) -> np.ndarray:
    """Row b's o_TNH in float64, for its `length` new tokens."""
    start, length = int(p.start_B[b]), int(p.length_B[b])
    k_KSH, v_KSH = (array.astype(np.float64) for array in p.texts[b])
    q_TNH = p.q_BTNH[b, :length].astype(np.float64)
    q_KGTH = q_TNH.reshape(length, spec.K, spec.G, spec.H).transpose(1, 2, 0, 3)
    s_KGTS = np.einsum("kgth,ksh->kgts", q_KGTH, k_KSH) * spec.H**-0.5
    if spec.softcap is not None:
        s_KGTS = spec.softcap * np.tanh(s_KGTS / spec.softcap)
    at_S, at_T1 = np.arange(k_KSH.shape[1]), (start + np.arange(length))[:, None]
    seen_TS = at_S <= at_T1
    if spec.window is not None:
        seen_TS &= at_S > at_T1 - spec.window
    s_KGTS = np.where(seen_TS, s_KGTS, -np.inf)
    p_KGTS = np.exp(s_KGTS - s_KGTS.max(-1, keepdims=True, initial=-1e30))
    p_KGTS /= p_KGTS.sum(-1, keepdims=True)
    o_KGTH = np.einsum("kgts,ksh->kgth", p_KGTS, v_KSH)
    return o_KGTH.transpose(2, 0, 1, 3).reshape(length, spec.N, spec.H)


def tolerance(spec: Spec) -> dict[str, float]:
    """A result is a mean of values of size up to 4. In bfloat16 the queries (times their scale),
    the values, the probabilities and the result are rounded to 8 bits: four times half of 2**-8
    of 4 at the most. In float32 rounding grows with the root of S."""
    if spec.q_dtype == "float32":
        return {"atol": 3e-7 * spec.S**0.5, "rtol": 1e-5}
    return {"atol": 4 * 4 * 2**-9, "rtol": 2**-8}


def assert_no_races() -> None:
    """The interpreter of TPU kernels saw no copy in conflict with another access."""
    assert interpreter.races is None or not interpreter.races.races_found


def assert_solved(spec: Spec, p: Problem, got_BTNH: jax.Array) -> None:
    got = np.asarray(got_BTNH)
    assert got.dtype == p.q_BTNH.dtype and got.shape == p.q_BTNH.shape
    got = got.astype(np.float64)
    assert np.isfinite(got).all(), f"rows {np.unique(np.argwhere(~np.isfinite(got))[:, 0])}"
    for b, length in enumerate(p.length_B):
        np.testing.assert_allclose(
            got[b, :length], expected(spec, p, b), **tolerance(spec), err_msg=f"row {b}"
        )
        assert length or not got[b].any()
    assert_no_races()
