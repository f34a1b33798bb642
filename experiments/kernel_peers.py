"""What JAX itself ships for TPU, at the shapes of our kernels, with the block sizes to try.

Paged kernels refuse H = 64: it is padded to 128, as a user of theirs has to. The block sizes are
those near which bundles per token stop falling; larger ones of ragged_paged_attention gain a few
per cent and take minutes to compile.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.paged_attention.quantization_utils import QuantizedTensor
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import get_min_heads_per_blk
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from kernels_pallas.aot_tpu import Work
from kernels_pallas.specs import Spec

LANES = 128
VMEM_BYTES = 100 * 2**20


class Candidate(NamedTuple):
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    work: Work


Maker = Callable[[], Candidate]
"""Fails where the kernel declines the shape."""


def decode_peers(spec: Spec) -> Iterator[Maker]:
    """paged_attention and ragged_paged_attention."""
    if spec.window is None and spec.T == 1:
        for block in (512, 1024, 2048):
            if block <= spec.S:
                yield partial(_paged, spec, block // spec.page)
    yield partial(_ragged, spec, 512 // spec.page, queries=spec.T)


def prefill_peers(spec: Spec) -> Iterator[Maker]:
    """flash_attention and splash_attention over contiguous K and V, and ragged_paged_attention."""
    for block in (512, 1024):
        if block <= spec.T and spec.window is None and spec.softcap is None:
            yield partial(_flash, spec, block)
        if block <= spec.T:
            yield partial(_splash, spec, block)
    yield partial(_ragged, spec, 256 // spec.page, queries=64)


def _paged(spec: Spec, pages: int) -> Candidate:
    H = max(spec.H, LANES)
    q = _array((spec.B, spec.N, H), spec.q_dtype)
    kv: Any = _array((spec.K, spec.P, spec.page, H), spec.dtype)
    if spec.dtype == "int8":
        scales: Any = _array((spec.K, spec.P, spec.page, 1), "float32")
        kv = QuantizedTensor(kv, scales)
    table, _, length = spec.rows()
    function = partial(
        paged_attention, pages_per_compute_block=pages, attn_logits_soft_cap=spec.softcap
    )
    copies = 4 if spec.dtype == "int8" else 2  # of K and V, and of their scales
    work = Work(pages * spec.page, copies * pages)
    name = f"jax paged_attention, {pages} pages"
    return Candidate(name, function, (q, kv, kv, length, table), work)


def _ragged(spec: Spec, pages: int, queries: int) -> Candidate:
    H = max(spec.H, LANES)
    q = _array((spec.B * spec.T, spec.N, H), spec.q_dtype)
    kv = _array((spec.P, spec.page, 2 * spec.K, H), spec.dtype)
    table, _, length = spec.rows()
    ends, count = _array((spec.B + 1,), "int32"), _array((1,), "int32")
    scaled = spec.dtype in ("int8", "float8_e4m3fn")
    scales = {"k_scale": 1.0, "v_scale": 1.0} if scaled else {}
    function = partial(
        ragged_paged_attention,
        sliding_window=spec.window,
        soft_cap=spec.softcap,
        num_kv_pages_per_block=pages,
        num_queries_per_block=queries,
        vmem_limit_bytes=VMEM_BYTES,
        **scales,
    )
    # It takes as many heads at a time as fill a tile of registers.
    q_heads, kv_heads = get_min_heads_per_blk(spec.N, 2 * spec.K, q.dtype, kv.dtype)
    heads = kv_heads // 2 if spec.T <= 8 else queries * q_heads
    work = Work(pages * spec.page * heads, pages)
    name = f"jax ragged_paged_attention, {pages} pages, {queries} queries"
    return Candidate(name, function, (q, kv, length, table, ends, count), work)


def _flash(spec: Spec, block: int) -> Candidate:
    """It knows no groups of heads: K and V are repeated."""
    q, kv = (_array((spec.B, spec.N, size, spec.H), spec.q_dtype) for size in (spec.T, spec.S))
    sizes = flash.BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)
    function = partial(flash.flash_attention, causal=True, block_sizes=sizes)
    return Candidate(f"jax flash_attention, {block}", function, (q, kv, kv), Work(block * block, 0))


def _splash(spec: Spec, block: int) -> Candidate:
    """One group of query heads per kv head, over a mask that is known in advance."""
    shape = (spec.T, spec.S)
    after = spec.S - spec.T
    mask: Any = masks.CausalMask(shape, after)
    if spec.window is not None:
        mask = masks.LocalMask(shape, (spec.window - 1, 0), after)
    sizes = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    kernel = splash.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * spec.G),
        block_sizes=sizes,
        attn_logits_soft_cap=spec.softcap,
    )
    q = _array((spec.B, spec.K, spec.G, spec.T, spec.H), spec.q_dtype)
    kv = _array((spec.B, spec.K, spec.S, spec.H), spec.q_dtype)
    kernels = jax.vmap(jax.vmap(kernel))
    work = Work(block * block, 0)
    return Candidate(f"jax splash_attention, {block}", kernels, (q, kv, kv), work)


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
