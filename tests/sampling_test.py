"""Sampling draws from the distribution asked for, by a key that is the request's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pdjax.programs.sampling import Sampling, _mask, sample

V, DRAWS = 12, 8192
LOGITS_V = np.random.default_rng(0).normal(0, 1.5, V).astype(np.float32)


def how(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, rid=0) -> Sampling:
    def full(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (rows,)).copy()

    return Sampling(
        full(temperature, np.float32),
        full(top_p, np.float32),
        full(top_k, np.int32),
        full(seed, np.uint32),
        full(rid, np.int32),
    )


def draw(choice: Sampling, position_B, logits_BV=None) -> np.ndarray:
    rows = len(choice.seed_B)
    if logits_BV is None:
        logits_BV = np.tile(LOGITS_V, (rows, 1))
    position_B = np.broadcast_to(np.asarray(position_B, np.int32), (rows,))
    return np.asarray(jax.jit(sample)(jnp.asarray(logits_BV), choice, jnp.asarray(position_B)))


def probabilities(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """What each token's chance should be, token by token in float64."""
    p_V = np.exp(LOGITS_V.astype(np.float64) / temperature)
    order = np.argsort(-p_V)
    kept = list(order[:top_k] if top_k else order)
    total, nucleus = 0.0, []
    for token in kept:
        nucleus.append(token)
        total += p_V[token] / p_V[kept].sum()
        if total >= top_p:
            break
    chosen_V = np.zeros(V)
    chosen_V[nucleus] = p_V[nucleus] / p_V[nucleus].sum()
    return chosen_V


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 3, 1.0),
        (1.0, V + 5, 1.0),  # more than there are
        (1.0, 0, 0.6),
        (1.0, 0, 0.01),  # less than the likeliest token: that one alone
        (1.5, 5, 0.7),  # top-p of what top-k left
    ],
)
def test_frequencies_match_the_distribution(temperature, top_k, top_p):
    choice = how(DRAWS, temperature=temperature, top_k=top_k, top_p=top_p)
    counts_V = np.bincount(draw(choice, np.arange(DRAWS)), minlength=V)
    expected_V = DRAWS * probabilities(temperature, top_k, top_p)
    support = expected_V > 0
    assert counts_V[~support].sum() == 0
    assert (counts_V[support] > 0).all()
    if support.sum() > 1:
        # The seed is fixed: this can fail only when the code changes.
        assert stats.chisquare(counts_V[support], expected_V[support]).pvalue > 1e-3


def test_the_statistic_tells_a_wrong_temperature():
    """That the test above could fail."""
    counts_V = np.bincount(draw(how(DRAWS), np.arange(DRAWS)), minlength=V)
    assert stats.chisquare(counts_V, DRAWS * probabilities(1.1, 0, 1.0)).pvalue < 1e-6


def test_requests_and_seeds_draw_from_the_distribution_too():
    """Independent over requests at one position, and over seeds of one request."""
    expected_V = DRAWS * probabilities(1.0, 0, 1.0)
    for vary in ("rid", "seed"):
        choice = how(DRAWS, **{vary: np.arange(DRAWS)})
        counts_V = np.bincount(draw(choice, 7), minlength=V)
        assert stats.chisquare(counts_V, expected_V).pvalue > 1e-3


def test_greedy_is_argmax_whatever_else_is_asked():
    logits_BV = np.random.default_rng(1).normal(size=(64, V)).astype(np.float32)
    choice = how(64, temperature=0, top_k=3, top_p=0.5, seed=np.arange(64))
    np.testing.assert_array_equal(draw(choice, 0, logits_BV), logits_BV.argmax(-1))


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    temperature = np.arange(64) % 2
    got = draw(how(64, temperature=temperature), np.arange(64))
    assert (got[temperature == 0] == LOGITS_V.argmax()).all()
    assert len(set(got[temperature == 1])) > 3


def test_top_k_of_1_is_greedy():
    logits_BV = np.random.default_rng(1).normal(size=(64, V)).astype(np.float32)
    got = draw(how(64, temperature=5.0, top_k=1), np.arange(64), logits_BV)
    np.testing.assert_array_equal(got, logits_BV.argmax(-1))


def test_a_draw_depends_on_seed_request_and_position_only():
    """Not on the place in the batch, nor on who else is in it."""
    rng = np.random.default_rng(2)
    choice = how(32, seed=rng.integers(0, 9, 32), rid=rng.integers(0, 9, 32), top_k=8)
    position_B = rng.integers(0, 99, 32)
    logits_BV = rng.normal(size=(32, V)).astype(np.float32)
    got = draw(choice, position_B, logits_BV)
    order = rng.permutation(32)
    moved = jax.tree.map(lambda a: a[order], choice)
    np.testing.assert_array_equal(draw(moved, position_B[order], logits_BV[order]), got[order])
    for row in (0, 31):
        alone = jax.tree.map(lambda a, row=row: a[row : row + 1], choice)
        assert draw(alone, position_B[row], logits_BV[row : row + 1]) == got[row]


@pytest.mark.parametrize("other", [{"seed": 1}, {"rid": 1}, {}])
def test_another_seed_request_or_position_draws_anew(other):
    """Chance alone makes two draws agree as often as two independent ones do."""
    position = np.arange(DRAWS)
    one, two = draw(how(DRAWS), position), draw(how(DRAWS, **other), position + (not other))
    p_V = probabilities(1.0, 0, 1.0)
    p_same = (p_V**2).sum()
    sigma = np.sqrt(p_same * (1 - p_same) / DRAWS)
    assert abs((one == two).mean() - p_same) < 4 * sigma


def by_sorting(logits_V: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which tokens may be drawn, by the definition, in float64."""
    sorted_V = np.sort(logits_V.astype(np.float64))[::-1]
    sorted_V = sorted_V[: top_k or None]
    p_V = np.exp(sorted_V - sorted_V[0])
    before_V = np.cumsum(p_V) - p_V
    kept = np.sum(before_V < top_p * p_V.sum()) if top_p < 1 else len(sorted_V)
    return logits_V >= sorted_V[kept - 1]


@pytest.mark.parametrize("decimals", [8, 1])  # with 1 many are equally likely
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 1.0), (0, 0.9), (200, 0.53), (1, 0.2)])
def test_the_tokens_that_may_be_drawn_are_those_that_sorting_gives(decimals, top_k, top_p):
    rng = np.random.default_rng(top_k + decimals)
    for _ in range(5):
        logits_V = rng.normal(0, 3, 3000).round(decimals).astype(np.float32)
        one = jax.tree.map(lambda x: x[0], how(1, top_k=top_k, top_p=top_p))
        mask_V = np.asarray(jax.jit(_mask)(jnp.asarray(logits_V), one))
        np.testing.assert_array_equal(mask_V == 0, by_sorting(logits_V, top_k, top_p))


def test_infinite_logits_are_never_and_always_drawn():
    logits_V = np.array([-np.inf, 1.0, -np.inf, 0.5], np.float32)
    one = jax.tree.map(lambda x: x[0], how(1, top_k=3))
    assert (np.asarray(_mask(jnp.asarray(logits_V), one))[[1, 3]] == 0).all()
