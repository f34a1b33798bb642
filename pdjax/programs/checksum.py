"""A checksum of KV that depends on values and places only: not on how heads are split over devices,
in which order or pages a pool lies, or how far a piece is padded."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Words = Any  # a numpy or a JAX array of uint32: the same operations serve both


def sums(layers_2TKH: Sequence[Any], start: Any, length: Any) -> Any:
    """uint32 [K], one per head, so that no device needs to hear of another: the sum of every
    element's bits mixed with its place. Any change of one element changes it; other changes go
    unseen once in 2**32.

    layers_2TKH: a piece, all numpy or all JAX; its first `length` tokens, from position `start` of
    the text on, count.
    """
    _, T, K, H = layers_2TKH[0].shape
    rows = 2 * len(layers_2TKH)
    row_2 = np.arange(2, dtype=np.uint32)[:, None, None, None]
    t_T = np.arange(T, dtype=np.uint32)[None, :, None, None]
    h_H = np.arange(H, dtype=np.uint32)[None, None, None, :]
    token_T = t_T + start.astype(np.uint32)
    counts_T = (t_T < length.astype(np.uint32)).astype(np.uint32)
    total_K = np.zeros(K, np.uint32)
    for layer, x_2TKH in enumerate(layers_2TKH):
        bits = np.dtype(f"uint{8 * x_2TKH.dtype.itemsize}")
        word_2TKH = x_2TKH.view(bits).astype(np.uint32)
        place_2T1H = (token_T * np.uint32(H) + h_H) * np.uint32(rows)
        place_2T1H = place_2T1H + (row_2 + np.uint32(2 * layer))
        mixed_2TKH = _mix(word_2TKH ^ (place_2T1H * np.uint32(0x9E3779B9))) * counts_T
        total_K = total_K + mixed_2TKH.sum(axis=(0, 1, 3), dtype=np.uint32)
    return total_K


def _mix(word: Words) -> Words:
    """MurmurHash3's finalizer (Appleby 2011, `fmix32`): a bijection that spreads every bit."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))
