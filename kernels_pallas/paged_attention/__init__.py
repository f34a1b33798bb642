"""Attention of new tokens to a paged KV cache, for prefill, decode and mixed batches."""

from kernels_pallas.paged_attention.api import fused_paged_attention as fused_paged_attention
from kernels_pallas.paged_attention.api import paged_attention as paged_attention
