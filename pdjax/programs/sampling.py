"""From logits to a token. The random key is a function of (seed, request, position) alone, so
which side of a hand-off samples, and in which batch, changes nothing."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Given = Any  # numpy where a step is made, a traced array inside its programs


class Sampling(NamedTuple):
    """Per-row choices. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature_B: Given  # float32
    top_p_B: Given  # float32
    top_k_B: Given  # int32
    seed_B: Given  # uint32
    rid_B: Given  # int32


def sample(logits_BV: jax.Array, how: Sampling, position_B: jax.Array) -> jax.Array:
    """Tokens int32 [B]; position_B is the place in its text that each token takes."""
    greedy_B = _first_best(logits_BV)

    def draw():
        drawn_B = jax.vmap(_draw)(logits_BV, how, position_B)
        return jnp.where(how.temperature_B > 0, drawn_B, greedy_B)

    return jax.lax.cond(jnp.any(how.temperature_B > 0), draw, lambda: greedy_B)


def _first_best(x_V: jax.Array) -> jax.Array:
    """jnp.argmax over the last axis, as two plain reductions: XLA's CPU backend vectorises those,
    and not argmax's (five times slower at B = 8, V = 49152)."""
    V = x_V.shape[-1]
    place_V = jnp.arange(V, dtype=jnp.int32)[(None,) * (x_V.ndim - 1)]
    best_V = jnp.where(x_V == x_V.max(-1, keepdims=True), place_V, V)
    return jnp.minimum(best_V.min(-1), V - 1)  # a row of NaN has no best, and gets the last


def _draw(logits_V: jax.Array, how: Sampling, position: jax.Array) -> jax.Array:
    """One row: temperature, then top-k, then top-p of what is left, then Gumbel-max."""
    logits_V = logits_V / jnp.maximum(how.temperature_B, 1e-6)
    key = jax.random.key(how.seed_B)
    key = jax.random.fold_in(jax.random.fold_in(key, how.rid_B), position)
    noise_V = jax.random.gumbel(key, logits_V.shape, jnp.float32)
    return _first_best(logits_V + noise_V + _mask(logits_V, how))


def _mask(logits_V: jax.Array, how: Sampling) -> jax.Array:
    """0 where a token may be drawn, -inf elsewhere. Top-p keeps the smallest set of the likeliest
    tokens whose probability reaches top_p (Holtzman et al. 2020, arXiv 1904.09751)."""
    V = logits_V.shape[0]
    sorted_V = jnp.sort(logits_V, descending=True)
    kept_k = jnp.where(how.top_k_B > 0, jnp.minimum(how.top_k_B, V), V)
    in_k_V = jnp.arange(V) < kept_k
    p_V = jax.nn.softmax(jnp.where(in_k_V, sorted_V, -jnp.inf))
    before_V = jnp.cumsum(p_V) - p_V
    kept = jnp.sum(in_k_V & ((before_V < how.top_p_B) | (how.top_p_B >= 1)))
    return jnp.where(logits_V >= sorted_V[kept - 1], 0.0, -jnp.inf)
