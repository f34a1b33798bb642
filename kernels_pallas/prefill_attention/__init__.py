"""Causal attention of chunks of new tokens to themselves and their cached prefixes, in pages."""

from kernels_pallas.prefill_attention.api import prefill_attention as prefill_attention
