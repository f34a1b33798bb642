"""A group of layers over the tokens of one step, whichever requests they belong to."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.architecture import Architecture
from pdjax.programs import kv as pool
from pdjax.programs import model
from pdjax.programs.attention import Attention


class Rows(NamedTuple):
    """B requests, T places each, of which length_B hold tokens; they follow start_B cached ones."""

    table_Bn: jax.Array
    start_B: jax.Array
    length_B: jax.Array
    T: int

    @property
    def positions_T(self) -> jax.Array:
        """Flat, row after row."""
        return (self.start_B[:, None] + jnp.arange(self.T, dtype=jnp.int32)[None, :]).reshape(-1)


def run_group(
    arch: Architecture,
    layers: Sequence[model.Params],
    kvs: Sequence[pool.KV],
    x_TD: jax.Array,
    blocks: Sequence[Rows],
    attention: Attention,
) -> tuple[jax.Array, list[pool.KV]]:
    """x_TD holds the tokens of all `blocks`, one block after the other (a prefill step has one
    block, a decode step one with T = 1, a mixed batch both). Returns x_TD after the layers and
    the pools with these tokens' K and V in them."""
    kvs = list(kvs)
    sizes = [rows.start_B.shape[0] * rows.T for rows in blocks]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def split(x_T: jax.Array) -> list[jax.Array]:
        """Each block's part of a flat array, as [B, T, ...]."""
        return [
            x_T[end - size : end].reshape(-1, rows.T, *x_T.shape[1:])
            for rows, size, end in zip(blocks, sizes, ends, strict=True)
        ]

    def attend_in(layer: int) -> model.Attend:
        def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array) -> jax.Array:
            # All writes before the first read: a pool that is read in between would be copied.
            for rows, k_BTKH, v_BTKH in zip(blocks, split(k_TKH), split(v_TKH), strict=True):
                kvs[layer] = attention.write(kvs[layer], k_BTKH, v_BTKH, *rows[:3])
            outputs = [
                attention.attend(q_BTNH, kvs[layer], *rows[:3])
                for rows, q_BTNH in zip(blocks, split(q_TNH), strict=True)
            ]
            return jnp.concatenate([o_BTNH.reshape(-1, *q_TNH.shape[1:]) for o_BTNH in outputs])

        return attend

    positions_T = jnp.concatenate([rows.positions_T for rows in blocks])
    attends = [attend_in(i) for i in range(len(layers))]
    return model.run_layers(arch, layers, x_TD, positions_T, attends), kvs
