"""From logits to a token. The random key is a function of (seed, request, position) alone, so
which side of a hand-off samples, and in which batch, changes nothing."""

from collections.abc import Callable
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
    tokens whose probability reaches top_p (Holtzman et al. 2020, arXiv 1904.09751). Of tokens that
    are equally likely all are kept or none.

    No sort: compilers take a minute for one of 128,256 logits, and devices are slow at it. A token
    is kept if fewer than k are likelier, and if those have less than p of what the first k have.
    """
    V = logits_V.shape[0]
    key_V = _ordered(logits_V)
    k = jnp.where(how.top_k_B > 0, jnp.minimum(how.top_k_B, V), V)
    weight_V = jnp.exp(logits_V - logits_V.max())

    def likelier(key):
        return jnp.sum(key_V > key)

    def weight_of_likelier(key):
        return jnp.sum(jnp.where(key_V > key, weight_V, 0.0))

    kth = _least(lambda key: likelier(key) < k)
    # Of those as likely as the k-th, top-k has only as many as make k.
    equal = jnp.max(jnp.where(key_V == kth, weight_V, 0.0))
    in_k = weight_of_likelier(kth) + (k - likelier(kth)).astype(jnp.float32) * equal
    pth = _least(lambda key: weight_of_likelier(key) < how.top_p_B * in_k)
    least = jnp.where(how.top_p_B >= 1, kth, jnp.maximum(kth, pth))
    return jnp.where(key_V >= least, 0.0, -jnp.inf)


def _ordered(x_V: jax.Array) -> jax.Array:
    """int32 that are in the order of these float32."""
    bits_V = jax.lax.bitcast_convert_type(x_V.astype(jnp.float32), jnp.int32)
    return jnp.where(bits_V < 0, bits_V ^ 0x7FFFFFFF, bits_V)


def _least(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The least int32 for which it holds; it holds for all from there on, the largest included."""
    low, high = jnp.int32(-(2**31)), jnp.int32(2**31 - 1)

    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down, without overflow
        found = holds(middle)
        return jnp.where(found, low, middle + 1), jnp.where(found, middle, high)

    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]
