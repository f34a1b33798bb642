"""What JAX itself ships for GPU, at the shapes of our kernels.

paged_attention, decode_attention and attention are for the Triton backend, which is deprecated;
attention_mgpu is for Mosaic GPU. Only the first reads pages, none has a window, and
attention_mgpu reads contiguous float16 (bfloat16 does not compile) whose length its blocks divide.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.pages import QUANTISED
from kernels_pallas.specs import Spec

warnings.filterwarnings("ignore", category=DeprecationWarning, module="jax")


class Peer(NamedTuple):
    """function(*args); args are ShapeDtypeStructs, int32 ones a table [B, n] or lengths [B]."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def decode_peers(spec: Spec) -> Iterator[Peer]:
    """Those that do what the spec asks."""
    from jax.experimental.pallas.ops.gpu import decode_attention, paged_attention

    if spec.T > 1 or spec.window is not None:
        return
    q = _array((spec.B, spec.N, spec.H), spec.q_dtype)
    table, _, length = spec.rows()
    kv = _array((spec.K, spec.P, spec.page, spec.H), spec.dtype)
    scale = (_array(kv.shape[:3], "float32"),) * 2 if spec.dtype in QUANTISED else ()
    paged = functools.partial(paged_attention.paged_attention, attn_logits_soft_cap=spec.softcap)
    yield Peer("jax paged_attention (Triton)", paged, (q, kv, kv, table, length, *scale))
    if spec.softcap is None and spec.dtype not in QUANTISED:
        kv = _array((spec.B, spec.S, spec.K, spec.H), spec.dtype)

        def contiguous(q, k, v, length):
            return decode_attention.gqa(q, k, v, kv_seq_len=length)

        yield Peer("jax decode_attention (Triton), no pages", contiguous, (q, kv, kv, length))


def prefill_peers(spec: Spec) -> Iterator[Peer]:
    """Those that do what the spec asks of a chunk without a cached prefix."""
    if spec.window is not None or spec.softcap is not None or spec.dtype in QUANTISED:
        return
    q, kv = spec.new(spec.N), spec.new(spec.K)
    half = [jax.ShapeDtypeStruct(x.shape, jnp.float16) for x in (q, kv, kv)]
    yield Peer("jax attention_mgpu, float16, no prefix, no pages", _mgpu, tuple(half))
    if spec.G == 1:
        yield Peer("jax attention (Triton), no prefix, no pages", _triton, (q, kv, kv))


def _mgpu(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as mgpu

    config = mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    return mgpu.attention(q, k, v, config)


def _triton(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention

    return attention.mha(q, k, v, segment_ids=None, causal=True)


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
