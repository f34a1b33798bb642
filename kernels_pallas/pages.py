"""The fused page layout that all kernels share, and its quantisation.

Per layer one array kv_PKpJ holds P pages of p tokens: for each of K kv heads, a token's row of
J = 2 H numbers is its key (lanes [0, H)) and its value (lanes [H, 2 H)). A page of all heads is one
contiguous copy, a head of it too, and H = 64 fills 128 lanes. Position s of a text is in page
table_n[s // p] at s % p. Under `jax.shard_map` K counts the heads of one device.

Quantised pages (int8 or float8_e4m3fn) have a float32 scale per token and head for K and one for
V. They lie apart, as scale_P1X with X = K * 2 * p: page, then head, then K or V, then token. One
row of X numbers per page is dense on every chip; [P, K, 2, p] would be padded to 128 lanes per p.

Float8 pages hold no negative zero, whose code TPU kernels read as NaN; `quantise` makes none.

A larger page class is a run of consecutive pages of the same array: tables stay in units of p.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

QUANTISED = ("int8", "float8_e4m3fn")


class Pages(NamedTuple):
    """One layer's pages on one device."""

    kv_PKpJ: jax.Array
    scale_P1X: jax.Array | None = None

    @property
    def quantised(self) -> bool:
        return self.scale_P1X is not None


def empty(P: int, K: int, p: int, H: int, dtype: str) -> Pages:
    """Zeroed pages, with scales where the dtype asks for them."""
    scale = jnp.zeros((P, 1, K * 2 * p), jnp.float32) if dtype in QUANTISED else None
    return Pages(jnp.zeros((P, K, p, 2 * H), dtype), scale)


def quantise(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """x [..., 2 H] (key and value) as `dtype`, and its scales [..., 2]: the largest magnitude of
    the key, and of the value, becomes the largest number of `dtype`. No zero has a sign."""
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).astype(jnp.float32)
    integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    scale = jnp.abs(halves).max(-1) / limit
    scaled = halves / jnp.where(scale > 0, scale, 1.0)[..., None]
    if integer:
        scaled = jnp.round(scaled)
    else:  # what would become a zero is one of positive sign
        least = float(jnp.finfo(dtype).smallest_subnormal) / 2
        scaled = jnp.where(jnp.abs(scaled) <= least, 0.0, scaled)
    return jnp.clip(scaled, -limit, limit).astype(dtype).reshape(x.shape), scale


def dequantise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The inverse: float32 [..., 2 H] of x [..., 2 H] and its scales [..., 2]."""
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).astype(jnp.float32)
    return (halves * scale[..., None]).reshape(x.shape)


def read(pages: Pages, page_ids_n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of the tokens in these pages, each [K, n p, H]; quantised ones as float32. A page
    that does not exist gives some other page's."""
    kv_nKpJ = pages.kv_PKpJ.at[page_ids_n].get(mode="clip")
    n, K, p, J = kv_nKpJ.shape
    if pages.scale_P1X is not None:
        scale_nX = pages.scale_P1X.at[page_ids_n].get(mode="clip")
        kv_nKpJ = dequantise(kv_nKpJ, scale_nX.reshape(n, K, 2, p).swapaxes(2, 3))
    kv_KSJ = kv_nKpJ.swapaxes(0, 1).reshape(K, n * p, J)
    return kv_KSJ[..., : J // 2], kv_KSJ[..., J // 2 :]


def check(pages: Sequence[Pages]) -> None:
    """Raises ValueError when arrays do not fit together."""
    for kv, scale in pages:
        P, K, p, J = kv.shape
        name = jnp.dtype(kv.dtype).name
        if J % 2:
            raise ValueError(f"pages `kv_PKpJ` of shape {kv.shape} have odd J = {J}; J is 2 H")
        if (name in QUANTISED) != (scale is not None):
            raise ValueError(
                f"pages of {name} {'need' if scale is None else 'have no'} `scale_P1X`: "
                f"only {' and '.join(QUANTISED)} are scaled"
            )
        if scale is not None and scale.shape != (P, 1, K * 2 * p):
            raise ValueError(
                f"`scale_P1X` is {scale.shape}; pages {kv.shape} need {(P, 1, K * 2 * p)}"
            )
