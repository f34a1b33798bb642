"""The one entry point; the implementations stand beside it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.pages import Pages, check
from kernels_pallas.prefill_attention import ref


def prefill_attention(
    q_CTNH: jax.Array,
    pages: Pages,
    table_Cn: jax.Array,
    start_C: jax.Array,
    length_C: jax.Array,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    run: int = 1,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention of C chunks of up to T new tokens to themselves and their cached prefixes.

    Chunk c's tokens stand at positions start_C[c] + [0, length_C[c]); their own K and V are in the
    fused pages (kernels_pallas.pages) already. A slab is pages that follow one another: say so
    with `run`, the number of consecutive pages that table_Cn's entries name at a time. Entries past
    a text's end may be anything. Tokens past length_C[c] give finite values without meaning, a
    chunk of length 0 gives zeros. Other parameters as in fused_paged_attention. No array of T times
    S numbers is written. Returns o_CTNH of q's dtype. Raises UnsupportedError when a named
    implementation cannot do it.
    """
    check([pages])
    return dispatch.run(
        implementation,
        BACKENDS,
        q_CTNH,
        pages,
        table_Cn,
        start_C,
        jnp.where(length_C > 0, length_C, 0),
        window=window,
        softcap=softcap,
        scale=q_CTNH.shape[-1] ** -0.5 if scale is None else scale,
        run=run,
    )


def _xla() -> Callable[..., jax.Array]:
    return ref.prefill_attention


def _tpu() -> Callable[..., jax.Array]:
    from kernels_pallas.prefill_attention import tpu

    return tpu.prefill_attention


def _gpu() -> Callable[..., jax.Array]:
    from kernels_pallas.prefill_attention import gpu

    return gpu.prefill_attention


BACKENDS = {"xla": _xla, "tpu": _tpu, "gpu": _gpu}
"""Each: (q_CTNH, pages, table_Cn, start_C, length_C, *, window, softcap, scale, run) -> o_CTNH."""
