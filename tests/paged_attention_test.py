"""Paged attention equals dense attention, written out in float64, on what the pages hold."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.paged_attention.ref import QUERY_TILES

PAGE, H = 4, 8
BLOCKS = 300  # tokens: more than the implementation reads at once
TOLERANCE = {
    "float32": {"atol": 2e-6, "rtol": 2e-5},
    # Both inputs have 8 bits: q is rounded once more when scaled, p and the result at the end.
    "bfloat16": {"atol": 1.5e-2, "rtol": 1.5e-2},
}

attend = jax.jit(paged_attention, static_argnames="window")


class Problem(NamedTuple):
    """Rows of new tokens over their texts. The arguments of paged_attention, and the texts."""

    q_BTNH: np.ndarray
    k_PpKH: np.ndarray
    v_PpKH: np.ndarray
    table_Bn: np.ndarray
    start_B: np.ndarray
    length_B: np.ndarray
    texts: list[tuple[np.ndarray, np.ndarray]]  # per row (k_SKH, v_SKH)

    def solve(self, window: int | None = None) -> np.ndarray:
        return np.asarray(attend(*self[:6], window=window))


def problem(
    rows: list[tuple[int, int]], *, T: int, N: int = 4, K: int = 2, dtype: str = "float32"
) -> Problem:
    """rows: (tokens cached before, new tokens) of each. Pages are dealt out in random order;
    whatever no token was written to is NaN."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    B, width = len(rows), -(-max(BLOCKS, T + 50) // PAGE)
    P = sum(-(-(start + length) // PAGE) for start, length in rows) + 3
    free = rng.permutation(P).tolist()
    k_PpKH, v_PpKH = (np.full((P, PAGE, K, H), np.nan, jnp.dtype(dtype)) for _ in range(2))
    table_Bn = np.full((B, width), P, np.int32)
    texts = []
    for b, (start, length) in enumerate(rows):
        S = start + length
        pages = [free.pop() for _ in range(-(-S // PAGE))]
        table_Bn[b, : len(pages)] = pages
        text = normal(S, K, H), normal(S, K, H)
        for pool, written in zip((k_PpKH, v_PpKH), text, strict=True):
            for s in range(S):
                pool[table_Bn[b, s // PAGE], s % PAGE] = written[s]
        texts.append(text)
    starts, lengths = np.array(rows, np.int32).T
    return Problem(normal(B, T, N, H), k_PpKH, v_PpKH, table_Bn, starts, lengths, texts)


def expected(p: Problem, b: int, window: int | None = None) -> np.ndarray:
    """Row b's o_TNH in float64, for its `length` new tokens."""
    start, length = int(p.start_B[b]), int(p.length_B[b])
    k_SKH, v_SKH = (array.astype(np.float64) for array in p.texts[b])
    N, group = p.q_BTNH.shape[2], p.q_BTNH.shape[2] // k_SKH.shape[1]
    o_TNH = np.zeros((length, N, H))
    for t in range(length):
        end = start + t + 1
        first = 0 if window is None else max(end - window, 0)
        for n in range(N):
            k_SH, v_SH = k_SKH[first:end, n // group], v_SKH[first:end, n // group]
            s_S = k_SH @ p.q_BTNH[b, t, n].astype(np.float64) / np.sqrt(H)
            p_S = np.exp(s_S - s_S.max())
            o_TNH[t, n] = p_S / p_S.sum() @ v_SH
    return o_TNH


def assert_solved(p: Problem, window: int | None = None, dtype: str = "float32") -> None:
    got_BTNH = p.solve(window).astype(np.float64)
    assert np.isfinite(got_BTNH).all()
    for b, length in enumerate(p.length_B):
        want_TNH = expected(p, b, window)
        np.testing.assert_allclose(
            got_BTNH[b, :length], want_TNH, **TOLERANCE[dtype], err_msg=f"row {b}"
        )


# Texts of one token, around a page's end, of several blocks; the last row has none.
DECODES = [(0, 1), (PAGE - 2, 1), (PAGE - 1, 1), (PAGE, 1), (3 * PAGE - 1, 1), (BLOCKS - 1, 1)]
PREFILLS = [(0, 8), (0, 1), (PAGE, PAGE), (PAGE - 1, PAGE + 1), (127, 2), (BLOCKS - 8, 8)]
EMPTY = [(0, 0)]


@pytest.mark.parametrize(
    ("dtype", "window"),
    [("float32", None), ("float32", 1), ("float32", 7), ("float32", 150), ("bfloat16", None)],
)
@pytest.mark.parametrize(("rows", "T"), [(DECODES, 1), (PREFILLS, 8)], ids=["decode", "prefill"])
def test_paged_matches_dense(rows, T, dtype, window):
    assert_solved(problem(rows + EMPTY, T=T, dtype=dtype), window, dtype)


@pytest.mark.parametrize(("N", "K"), [(3, 3), (6, 3), (6, 1)])
def test_each_group_of_heads_reads_its_own_kv_head(N, K):
    assert_solved(problem([(5, 3), (0, 2)], T=3, N=N, K=K))


@pytest.mark.parametrize("window", [None, 40])
def test_more_tokens_than_a_tile_match_dense(window):
    """Rows that end in the second tile, at the first one's end, and in the first."""
    T = QUERY_TILES[1] + 40
    rows = [(0, T), (50, T - 3), (2, QUERY_TILES[1]), (0, 5), (0, QUERY_TILES[1] + 1)]
    assert_solved(problem(rows, T=T, N=2, K=1), window)


def test_rows_without_tokens_give_zeros():
    for T in (1, 8):
        p = problem([*EMPTY, (3, 1), *EMPTY], T=T)
        assert not p.solve()[[0, 2]].any()
        assert p.solve()[1, 0].all()


def test_a_row_does_not_see_other_rows_or_its_own_later_tokens():
    """Changing all K and V that a token must not see changes no bit of its result."""
    p = problem([(5, 3), (9, 2)], T=4)
    before = p.solve()
    later = p.table_Bn[0, 6 // PAGE], 6 % PAGE  # row 0's token 6 on; its first new token is 5
    k_PpKH, v_PpKH = p.k_PpKH.copy(), p.v_PpKH.copy()
    for pool in (k_PpKH, v_PpKH):
        pool[p.table_Bn[1, :3]] = 100.0
        pool[later] = -100.0
    after = p._replace(k_PpKH=k_PpKH, v_PpKH=v_PpKH).solve()
    np.testing.assert_array_equal(after[0, 0], before[0, 0])
    assert (after[0, 1] != before[0, 1]).any() and (after[1] != before[1]).any()
