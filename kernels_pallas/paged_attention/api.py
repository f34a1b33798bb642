"""The one entry point; the implementations stand beside it."""

import jax

from kernels_pallas.paged_attention import ref


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
    """
    return ref.paged_attention(q_BTNH, k_PpKH, v_PpKH, table_Bn, start_B, length_B, window=window)
