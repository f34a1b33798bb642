"""XLA implementation: gathers and scatters."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.pages import Pages


class Piece(NamedTuple):
    """T consecutive tokens of one request, of L layers, on their way between pools: R parts of
    K heads each. Scales as in pages.py, but with one row per head for K and one for V."""

    kv_RLKTJ: jax.Array
    scale_RLK2T: jax.Array | None = None


def pack(layers: Sequence[Pages], table_n: jax.Array, *, parts: int) -> Piece:
    """See api.pack."""
    kv_nKpJ = [layer.kv_PKpJ.at[table_n].get(mode="clip") for layer in layers]
    n, K, p, J = kv_nKpJ[0].shape
    kv_LKTJ = jnp.stack([kv.swapaxes(0, 1).reshape(K, n * p, J) for kv in kv_nKpJ])
    kv_RLKTJ = kv_LKTJ.reshape(len(layers), parts, K // parts, n * p, J).swapaxes(0, 1)
    return Piece(kv_RLKTJ, pack_scales(layers, table_n, parts))


def unpack(layers: Sequence[Pages], piece: Piece, table_n: jax.Array) -> list[Pages]:
    """See api.unpack."""
    kv_LKTJ = merge(piece.kv_RLKTJ)
    scales = unpack_scales(layers, piece, table_n)
    unpacked = []
    for layer, scale_P1X, kv_KTJ in zip(layers, scales, kv_LKTJ, strict=True):
        P, K, p, J = layer.kv_PKpJ.shape
        kv_nKpJ = kv_KTJ.reshape(K, -1, p, J).swapaxes(0, 1)
        kv_PKpJ = layer.kv_PKpJ.at[existing(table_n, P)].set(kv_nKpJ, mode="drop")
        unpacked.append(Pages(kv_PKpJ, scale_P1X))
    return unpacked


def append(
    pages: Pages,
    kv_BKTJ: jax.Array,
    scale_BK2T: jax.Array | None,
    table_Bn: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
) -> Pages:
    """See api.append."""
    P, K, p, _ = pages.kv_PKpJ.shape
    T = kv_BKTJ.shape[2]
    t_1T = jnp.arange(T, dtype=jnp.int32)[None, :]
    at_BT = start_B[:, None] + t_1T
    page_BT = jnp.take_along_axis(table_Bn, at_BT // p, axis=1, mode="clip")
    page_BT = jnp.where(t_1T < length_B[:, None], existing(page_BT, P), P)
    kv_BTKJ = kv_BKTJ.swapaxes(1, 2)
    kv_PKpJ = pages.kv_PKpJ.at[page_BT, :, at_BT % p].set(kv_BTKJ, mode="drop")
    if scale_BK2T is None or pages.scale_P1X is None:
        return Pages(kv_PKpJ)
    scale_PK2p = pages.scale_P1X.reshape(P, K, 2, p)
    scale_BTK2 = scale_BK2T.transpose(0, 3, 1, 2)
    scale_PK2p = scale_PK2p.at[page_BT, :, :, at_BT % p].set(scale_BTK2, mode="drop")
    return Pages(kv_PKpJ, scale_PK2p.reshape(P, 1, K * 2 * p))


def pack_scales(layers: Sequence[Pages], table_n: jax.Array, parts: int) -> jax.Array | None:
    """scale_RLK2T of these pages, if they have scales."""
    scale_nX = [
        scale_P1X.at[table_n, 0].get(mode="clip")
        for _, scale_P1X in layers
        if scale_P1X is not None
    ]
    if not scale_nX:
        return None
    _, K, p, _ = layers[0].kv_PKpJ.shape
    scale_LnK2p = jnp.stack(scale_nX).reshape(len(layers), -1, K, 2, p)
    scale_LK2T = scale_LnK2p.transpose(0, 2, 3, 1, 4).reshape(len(layers), K, 2, -1)
    return scale_LK2T.reshape(len(layers), parts, K // parts, 2, -1).swapaxes(0, 1)


def unpack_scales(
    layers: Sequence[Pages], piece: Piece, table_n: jax.Array
) -> list[jax.Array | None]:
    """Each layer's scale_P1X with the piece's in it, if there are scales."""
    if piece.scale_RLK2T is None:
        return [None] * len(layers)
    P, K, p, _ = layers[0].kv_PKpJ.shape
    scale_LK2T = merge(piece.scale_RLK2T)
    scale_LnK2p = scale_LK2T.reshape(len(layers), K, 2, -1, p).transpose(0, 3, 1, 2, 4)
    scale_Ln1X = scale_LnK2p.reshape(len(layers), -1, 1, K * 2 * p)
    return [
        layer.scale_P1X.at[existing(table_n, P)].set(scale_n1X, mode="drop")
        for layer, scale_n1X in zip(layers, scale_Ln1X, strict=True)
        if layer.scale_P1X is not None
    ]


def merge(x_RLK__: jax.Array) -> jax.Array:
    """[R, L, K / R, ...] as [L, K, ...]."""
    R, L, heads, *rest = x_RLK__.shape
    return x_RLK__.swapaxes(0, 1).reshape(L, R * heads, *rest)


def existing(page_ids: jax.Array, P: int) -> jax.Array:
    """The page ids, with P, which is dropped, for all that do not exist (-1 would wrap around)."""
    return jnp.where((page_ids >= 0) & (page_ids < P), page_ids, P)
