"""The entry points; the implementations stand beside them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.kv_pages import ref
from kernels_pallas.kv_pages.ref import Piece as Piece
from kernels_pallas.pages import QUANTISED, Pages, check, dequantise, quantise


def pack(
    layers: Sequence[Pages],
    table_n: jax.Array,
    *,
    parts: int = 1,
    dtype: str | None = None,
    implementation: str = "auto",
) -> Piece:
    """The n pages that table_n names, of each of these layers, in one contiguous buffer of
    T = n p tokens.

    `parts` splits the heads for a receiver of a larger tp: each part is contiguous, and the leading
    axis of a sharded piece goes to the receiver's devices. `dtype` quantises, dequantises or
    rounds on the way; the pages' own if not given. A page that does not exist gives any numbers.
    """
    check(layers)
    K = layers[0].kv_PKpJ.shape[1]
    if K % parts:
        raise ValueError(f"cannot split {K} kv heads into `parts` = {parts}; take a divisor")
    piece = dispatch.run(implementation, _backends("pack"), layers, table_n, parts=parts)
    return convert(piece, dtype or piece.kv_RLKTJ.dtype.name)


def unpack(
    layers: Sequence[Pages],
    piece: Piece,
    table_n: jax.Array,
    *,
    implementation: str = "auto",
) -> list[Pages]:
    """The other end of `pack`: the piece's tokens fill the pages that table_n names, in place when
    `layers` are donated.

    Pages of another size p than the sender's will do if p divides T; table_n then has T / p
    entries. Numbers are converted to the pages' dtype. All parts of a piece are merged. Pages that
    do not exist (table_n >= P) are dropped.
    """
    check(layers)
    _, K, p, J = layers[0].kv_PKpJ.shape
    R, L, heads, T, _ = piece.kv_RLKTJ.shape
    if (L, R * heads, T, piece.kv_RLKTJ.shape[-1]) != (len(layers), K, table_n.shape[0] * p, J):
        raise ValueError(
            f"piece {piece.kv_RLKTJ.shape} (parts, layers, heads, tokens, 2 H) does not fill "
            f"{table_n.shape[0]} pages of {len(layers)} layers of {(K, p, J)}"
        )
    piece = convert(piece, layers[0].kv_PKpJ.dtype.name)
    return dispatch.run(implementation, _backends("unpack"), layers, piece, table_n)


def append(
    pages: Pages,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    table_Bn: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    *,
    implementation: str = "auto",
) -> Pages:
    """The pages with new K and V in them, in place when `pages` are donated.

    Row b's tokens go to positions start_B[b] + [0, length_B[b]) of its text; the rest is dropped.
    Rows never share a page they write to. Numbers are quantised if the pages are.
    """
    check([pages])
    kv_BKTJ = jnp.concatenate([k_BTKH, v_BTKH], axis=-1).swapaxes(1, 2)
    scale_BK2T = None
    if pages.quantised:
        kv_BKTJ, scale_BKT2 = quantise(kv_BKTJ, pages.kv_PKpJ.dtype)
        scale_BK2T = scale_BKT2.swapaxes(2, 3)
    kv_BKTJ = kv_BKTJ.astype(pages.kv_PKpJ.dtype)
    return dispatch.run(
        implementation,
        _backends("append"),
        pages,
        kv_BKTJ,
        scale_BK2T,
        table_Bn,
        start_B,
        length_B,
    )


def convert(piece: Piece, dtype: str) -> Piece:
    """The piece in another dtype."""
    kv_RLKTJ, scale_RLK2T = piece
    if kv_RLKTJ.dtype.name == dtype:
        return piece
    if scale_RLK2T is not None:
        kv_RLKTJ, scale_RLK2T = dequantise(kv_RLKTJ, scale_RLK2T.swapaxes(3, 4)), None
    if dtype in QUANTISED:
        kv_RLKTJ, scale_RLKT2 = quantise(kv_RLKTJ, jnp.dtype(dtype))
        scale_RLK2T = scale_RLKT2.swapaxes(3, 4)
    return Piece(kv_RLKTJ.astype(dtype), scale_RLK2T)


def _backends(function: str) -> dict[str, Callable[[], Callable[..., Any]]]:
    """Each module has pack(layers, table_n, *, parts) -> Piece, unpack(layers, piece, table_n) ->
    list[Pages] and append(pages, kv_BKTJ, scale_BK2T, table_Bn, start_B, length_B) -> Pages, all
    of one dtype."""
    return {name: partial(_load, name, function) for name in ("xla", "tpu", "gpu")}


def _load(name: str, function: str) -> Callable[..., Any]:
    if name == "tpu":
        from kernels_pallas.kv_pages import tpu as module
    elif name == "gpu":
        from kernels_pallas.kv_pages import gpu as module
    else:
        module = ref
    return getattr(module, function)
