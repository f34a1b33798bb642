"""A group of layers over the tokens of one step, whichever requests they belong to."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kernels_pallas.paged_attention import paged_attention
from pdjax.architecture import Architecture
from pdjax.programs import kv as pool
from pdjax.programs import model


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
    where: NamedSharding,
) -> tuple[jax.Array, list[pool.KV]]:
    """x_TD holds the tokens of all `blocks`, one block after the other (a prefill step has one
    block, a decode step one with T = 1, a mixed batch both). Returns x_TD after the layers and
    the pools with these tokens' K and V in them."""
    kvs = list(kvs)

    def attend_in(layer: int) -> model.Attend:
        def attend(q_TNH, k_TKH, v_TKH):
            outputs, at = [], 0
            for rows in blocks:
                B = rows.start_B.shape[0]
                piece = slice(at, at + B * rows.T)
                at = piece.stop
                q_BTNH, k_BTKH, v_BTKH = (
                    a[piece].reshape(B, rows.T, *a.shape[1:]) for a in (q_TNH, k_TKH, v_TKH)
                )
                row = (rows.table_Bn, rows.start_B, rows.length_B)
                kvs[layer] = pool.write(kvs[layer], k_BTKH, v_BTKH, *row, where)
                o_BTNH = paged_attention(q_BTNH, *kvs[layer], *row, window=arch.window)
                outputs.append(o_BTNH.reshape(B * rows.T, *o_BTNH.shape[2:]))
            return jnp.concatenate(outputs) if len(outputs) > 1 else outputs[0]

        return attend

    positions_T = jnp.concatenate([rows.positions_T for rows in blocks])
    attends = [attend_in(i) for i in range(len(layers))]
    return model.run_layers(arch, layers, x_TD, positions_T, attends), kvs
