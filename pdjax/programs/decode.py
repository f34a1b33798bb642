"""One token for every slot, again and again; or, in a mixed batch, for every slot and a chunk."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pdjax.architecture import Architecture
from pdjax.programs import kv as pool
from pdjax.programs import model
from pdjax.programs.forward import Rows, run_group
from pdjax.programs.mesh import sharding
from pdjax.programs.prefill import PrefillBatch
from pdjax.programs.sampling import Sampling, sample


class Slots(NamedTuple):
    """The slots of an instance in one step (numpy, on the host).

    A slot's newest token is at position_B; it is fresh_B where is_fresh_B (the request just
    joined), else what the step before sampled, which need not be on the host yet. count_B is how
    many tokens the slot wants, 0 for an empty slot.
    """

    table_Bn: np.ndarray
    position_B: np.ndarray
    count_B: np.ndarray
    fresh_B: np.ndarray
    is_fresh_B: np.ndarray
    sampling: Sampling


class DecodePrograms(NamedTuple):
    """decode(params, kvs, tokens_B, slots, steps=k) -> (tokens_kB, tokens_B, kvs);
    mixed(params, kvs, tokens_B, slots, batch) -> (tokens_1B, tokens_B, first_C, kvs), where batch
    holds chunks of C prompts. Both donate kvs and tokens_B."""

    decode: Callable
    mixed: Callable


@functools.cache
def decode_programs(arch: Architecture, mesh: Mesh) -> DecodePrograms:
    """The jitted programs of one mesh; every instance on it shares them."""
    where = sharding(mesh, pool.POOL_AXES)

    def one_step(params, kvs, tokens_B, slots, i):
        active_B = i < slots.count_B
        at_B = slots.position_B + i
        rows = Rows(slots.table_Bn, at_B, active_B.astype(jnp.int32), 1)
        x_BD = model.embed(arch, params, tokens_B)
        x_BD, kvs = run_group(arch, params["layers"], kvs, x_BD, [rows], where)
        new_B = sample(model.logits(arch, params, x_BD), slots.sampling, at_B + 1)
        return jnp.where(active_B, new_B, tokens_B), kvs

    @functools.partial(jax.jit, static_argnames="steps", donate_argnames=("kvs", "tokens_B"))
    def decode(params, kvs, tokens_B, slots, *, steps):
        tokens_B = jnp.where(slots.is_fresh_B, slots.fresh_B, tokens_B)
        if steps == 1:
            tokens_B, kvs = one_step(params, kvs, tokens_B, slots, 0)
            return tokens_B[None], tokens_B, kvs

        def body(carry, i):
            tokens_B, kvs = one_step(params, carry[1], carry[0], slots, i)
            return (tokens_B, kvs), tokens_B

        steps_k = jnp.arange(steps, dtype=jnp.int32)
        (tokens_B, kvs), tokens_kB = jax.lax.scan(body, (tokens_B, kvs), steps_k)
        return tokens_kB, tokens_B, kvs

    @functools.partial(jax.jit, donate_argnames=("kvs", "tokens_B"))
    def mixed(params, kvs, tokens_B, slots, batch: PrefillBatch):
        tokens_B = jnp.where(slots.is_fresh_B, slots.fresh_B, tokens_B)
        active_B = slots.count_B > 0
        C, T = batch.tokens_BT.shape
        blocks = [
            Rows(slots.table_Bn, slots.position_B, active_B.astype(jnp.int32), 1),
            Rows(batch.table_Bn, batch.start_B, batch.length_B, T),
        ]
        tokens_T = jnp.concatenate([tokens_B, batch.tokens_BT.reshape(-1)])
        x_TD = model.embed(arch, params, tokens_T)
        x_TD, kvs = run_group(arch, params["layers"], kvs, x_TD, blocks, where)
        B = tokens_B.shape[0]
        last_C = B + jnp.arange(C, dtype=jnp.int32) * T + jnp.maximum(batch.length_B - 1, 0)
        x_RD = jnp.concatenate([x_TD[:B], x_TD[last_C]])
        position_R = jnp.concatenate([slots.position_B + 1, batch.start_B + batch.length_B])
        how = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), slots.sampling, batch.sampling)
        new_R = sample(model.logits(arch, params, x_RD), how, position_R)
        tokens_B = jnp.where(active_B, new_R[:B], tokens_B)
        return tokens_B[None], tokens_B, new_R[B:], kvs

    return DecodePrograms(decode, mixed)
