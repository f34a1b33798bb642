"""The entry points; the implementations stand beside them."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import dispatch
from kernels_pallas.paged_attention import ref
from kernels_pallas.pages import Pages, check


def paged_attention(
    q_BTNH: jax.Array,
    k_PpKH: jax.Array,
    v_PpKH: jax.Array,
    table_Bn: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    *,
    window: int | None = None,
) -> jax.Array:
    """Causal attention of B rows of T new tokens to the pages that hold their texts.

    Row b's tokens stand at positions start_B[b] + [0, length_B[b]); their own K and V are in the
    pages already. Position s of its text is in page table_Bn[b, s // p] at s % p. Tokens past
    length_B[b] give finite values without meaning; a row of length 0 gives zeros. `window` is how
    many tokens, itself included, a token sees. Softmax and sums are float32. Returns o_BTNH.

    This is the XLA path over token-major pages, K and V apart; `fused_paged_attention` has kernels.
    """
    return ref.paged_attention(q_BTNH, k_PpKH, v_PpKH, table_Bn, start_B, length_B, window=window)


def fused_paged_attention(
    q_BTNH: jax.Array,
    pages: Pages | Sequence[Pages],
    table_Bn: jax.Array | Sequence[jax.Array],
    start_B: jax.Array,
    length_B: jax.Array,
    *,
    split_B: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    run: int | Sequence[int] = 1,
    implementation: str = "auto",
) -> jax.Array:
    """As `paged_attention`, for one or a few tokens a row, over fused pages (kernels_pallas.pages).

    table_Bn's entries past a row's end are never read through and may be anything. A text may lie
    in two pools (a prompt in the prefill slab, the output in decode pages): `pages` and `table_Bn`
    are then pairs and `split_B` says at which position each row goes over to the second pool, whose
    table counts from there; page sizes may differ. `run` (of each pool) promises that every `run`
    entries of a table, from its beginning, are consecutive pages; those move in one copy.
    `softcap` c makes a score s into c tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2);
    `scale`, H**-0.5 if not given, multiplies q. Quantised pages are dequantised on the fly.
    Returns o_BTNH of q's dtype. Raises UnsupportedError when a named implementation cannot do it.
    """
    pools, tables, runs = _pools(pages, table_Bn, split_B, run)
    end_B = jnp.where(length_B > 0, start_B + length_B, 0)
    if split_B is None:
        split_B = end_B
    spans = [(start_B, jnp.minimum(end_B, split_B))]
    if len(pools) == 2:
        spans.append((start_B - split_B, jnp.maximum(end_B - split_B, 0)))
    partials = [
        dispatch.run(
            implementation,
            BACKENDS,
            q_BTNH,
            pool,
            table,
            position_B,
            keys_B,
            window=window,
            softcap=softcap,
            scale=q_BTNH.shape[-1] ** -0.5 if scale is None else scale,
            run=run_,
        )
        for pool, table, run_, (position_B, keys_B) in zip(pools, tables, runs, spans, strict=True)
    ]
    return ref.combine(partials).o_BTNH.astype(q_BTNH.dtype)


def _xla() -> Callable[..., ref.Partial]:
    return ref.partial_attention


def _tpu() -> Callable[..., ref.Partial]:
    from kernels_pallas.paged_attention import tpu

    return tpu.partial_attention


def _gpu() -> Callable[..., ref.Partial]:
    from kernels_pallas.paged_attention import gpu

    return gpu.partial_attention


BACKENDS = {"xla": _xla, "tpu": _tpu, "gpu": _gpu}
"""Each: (q_BTNH, pages, table_Bn, position_B, keys_B, *, window, softcap, scale, run) -> Partial:
attention to keys [0, keys_B[b]) of one pool, by queries at position_B[b] + t on the same axis."""


def _pools(
    pages: Pages | Sequence[Pages],
    table_Bn: jax.Array | Sequence[jax.Array],
    split_B: jax.Array | None,
    run: int | Sequence[int],
) -> tuple[list[Pages], list[jax.Array], list[int]]:
    pools = [pages] if isinstance(pages, Pages) else list(pages)
    tables = [table_Bn] if isinstance(table_Bn, jax.Array | np.ndarray) else list(table_Bn)
    runs = [run] * len(pools) if isinstance(run, int) else list(run)
    check(pools)
    if not (1 <= len(pools) <= 2 and len(pools) == len(tables) == len(runs)):
        raise ValueError(
            f"got {len(pools)} pools, {len(tables)} tables and {len(runs)} runs; "
            f"give one of each, or two of each"
        )
    if (len(pools) == 2) != (split_B is not None):
        raise ValueError(
            f"{len(pools)} pool(s) with `split_B` {'' if split_B is not None else 'not '}given; "
            f"it is what joins two pools"
        )
    return pools, tables, runs
