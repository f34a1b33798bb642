"""Who writes and reads the pools of a step: XLA, or the kernels that fit the device.

Every device works on its own heads, so no collective can creep in.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from kernels_pallas.kv_pages import append
from kernels_pallas.paged_attention import fused_paged_attention, paged_attention
from kernels_pallas.pages import Pages
from kernels_pallas.prefill_attention import prefill_attention
from pdjax.programs import kv as pool
from pdjax.programs.mesh import sharding

FEW_TOKENS = 8
"""Rows of up to so many new tokens are decoding; longer ones are chunks of prompts."""


class Attention(NamedTuple):
    """write(kv, k_BTKH, v_BTKH, *rows) -> kv with these tokens in it, in place where kv is donated;
    attend(q_BTNH, kv, *rows) -> o_BTNH, causal. rows: table_Bn, start_B, length_B, as in
    kernels_pallas.paged_attention."""

    write: Callable[..., pool.KV]
    attend: Callable[..., jax.Array]


def order_for(implementation: str) -> pool.Order:
    """How pools lie in memory for an implementation. On CPU `auto` is `xla`, which is faster over
    token-major pools; kernels read fused ones."""
    is_xla = implementation == "xla" or (
        implementation == "auto" and jax.default_backend() == "cpu"
    )
    return "token_major" if is_xla else "fused"


def attention_on(mesh: Mesh, implementation: str, window: int | None) -> Attention:
    """Attention for pools of the order that `implementation` reads."""
    order = order_for(implementation)
    heads, rows = Spec(None, None, "tp"), (Spec(),) * 3
    arrays = (sharding(mesh, pool.POOL_AXES[order]).spec,) * (1 if order == "fused" else 2)
    shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    attend = shard(
        functools.partial(_attend, implementation=implementation, window=window),
        in_specs=(heads, arrays, *rows),
        out_specs=heads,
    )
    write = shard(
        functools.partial(_write, implementation=implementation),
        in_specs=(arrays, heads, heads, *rows),
        out_specs=arrays,
    )
    return Attention(write, attend)


def _write(kv: pool.KV, k_BTKH, v_BTKH, *rows, implementation: str) -> pool.KV:
    if pool.order_of(kv) == "token_major":
        return pool.write(kv, k_BTKH, v_BTKH, *rows)
    pages = append(Pages(kv[0]), k_BTKH, v_BTKH, *rows, implementation=implementation)
    return (pages.kv_PKpJ,)


def _attend(
    q_BTNH: jax.Array, kv: pool.KV, *rows, implementation: str, window: int | None
) -> jax.Array:
    if pool.order_of(kv) == "token_major":
        return paged_attention(q_BTNH, *kv, *rows, window=window)
    few = q_BTNH.shape[1] <= FEW_TOKENS
    kernel = fused_paged_attention if few else prefill_attention
    return kernel(q_BTNH, Pages(kv[0]), *rows, window=window, implementation=implementation)
