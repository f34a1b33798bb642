"""Decode attention for TPU: a walk (tpu_walk) whose rows are slots, heads packed together."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import tpu_walk
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.paged_attention.ref import Partial, scaled
from kernels_pallas.pages import Pages
from kernels_pallas.tpu_step import ARITHMETIC
from kernels_pallas.tpu_walk import LANES, LOG2E, Plan, Rows

# Tokens times kv heads of a step: enough for long copies, and still short code.
STEP = 4096
ROWS = 128  # queries of a kv head: the code has a copy for each pack, not a loop


def partial_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    table_Bn: jax.Array,
    position_B: jax.Array,
    keys_B: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    run: int,
    interpret: bool = False,
) -> Partial:
    """See api.BACKENDS."""
    tpu_walk.check(q_BTNH, pages, table_Bn, run)
    plan = _plan(q_BTNH, pages, table_Bn, window, softcap, run)
    # Powers of 2 are cheaper than of e; a softcap takes its factor after the tanh.
    q_BCRH = _pack(scaled(q_BTNH, scale * LOG2E if softcap is None else scale / softcap), plan)
    # Tables lie in scalar memory; those of too many rows go in several calls, as even as can be.
    calls = pl.cdiv(plan.V, max(1, tpu_walk.TABLE_BYTES // (4 * plan.n)))
    most = pl.cdiv(plan.V, calls)
    parts = []
    for b in range(0, plan.V, most):
        some = dataclasses.replace(plan, V=min(most, plan.V - b))
        part = slice(b, b + some.V)
        rows = Rows(jnp.arange(some.V, dtype=jnp.int32), position_B[part], keys_B[part])
        out = tpu_walk.walk(some, ARITHMETIC, q_BCRH[part], pages, table_Bn[part], rows, interpret)
        parts.append(out)
    o_BCRH, lse_BCR = (jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Partial(_unpack(o_BCRH[..., -plan.H :], plan), _unpack(lse_BCR, plan))


def _plan(q_BTNH, pages: Pages, table_Bn, window, softcap, run: int) -> Plan:
    B, T, N, _ = q_BTNH.shape
    K = pages.kv_PKpJ.shape[1]
    G = N // K
    if G * T > ROWS:
        raise UnsupportedError(
            f"{T} tokens of {G} query heads per kv head make {G * T} rows; the TPU kernel takes up "
            f"to {ROWS}: give fewer tokens, or use prefill_attention"
        )
    heads = max(c for c in range(1, K + 1) if K % c == 0 and (c == 1 or c * G * T <= 8))
    rows = pl.cdiv(heads * G * T, 8) * 8
    return tpu_walk.plan_of(
        q_BTNH,
        pages,
        table_Bn,
        run,
        tokens=max(LANES, STEP // K // LANES * LANES),
        V=B,
        T=T,
        heads=heads,
        rows=rows,
        partial=True,
        window=window,
        softcap=softcap,
        loop=False,
        part=rows,
        o_dtype=jnp.dtype(jnp.float32),
    )


def _pack(q_BTNH: jax.Array, plan: Plan) -> jax.Array:
    """q_BCRH; a row is (head of the pack, query of its group, token)."""
    q = q_BTNH.reshape(plan.V, plan.T, plan.packs, plan.heads, plan.G, plan.H)
    q_BCRH = q.transpose(0, 2, 3, 4, 1, 5).reshape(plan.V, plan.packs, -1, plan.H)
    rows, lanes = plan.rows - q_BCRH.shape[2], plan.lanes - plan.H
    return jnp.pad(q_BCRH, ((0, 0), (0, 0), (0, rows), (0, lanes)))


def _unpack(x_BCR_: jax.Array, plan: Plan) -> jax.Array:
    """[B, T, N, ...] of what _pack gave [B, C, R, ...]."""
    B, C, _, *rest = x_BCR_.shape
    x = x_BCR_[:, :, : plan.heads * plan.G * plan.T]
    x = x.reshape(B, C, plan.heads, plan.G, plan.T, *rest)
    return jnp.moveaxis(x, 4, 1).reshape(B, plan.T, -1, *rest)
