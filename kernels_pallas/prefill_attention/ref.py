"""XLA implementation: the same walk over pages as paged_attention's, whose tiles suit chunks."""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import ref
from kernels_pallas.pages import Pages


def prefill_attention(
    q_CTNH: jax.Array,
    pages: Pages,
    table_Cn: jax.Array,
    start_C: jax.Array,
    length_C: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    run: int,
) -> jax.Array:
    """See api.prefill_attention."""
    keys_C = jnp.where(length_C > 0, start_C + length_C, 0)
    partial = ref.partial_attention(
        q_CTNH,
        pages,
        table_Cn,
        start_C,
        keys_C,
        length_C,
        window=window,
        softcap=softcap,
        scale=scale,
        run=run,
    )
    return partial.o_BTNH.astype(q_CTNH.dtype)
