"""What a step has to do, per chip, from the model's shape: FLOPs, bytes read, bytes sent."""

from collections.abc import Callable
from typing import NamedTuple

from pdjax.catalogue import Shape
from pdjax.costs.batch import Batch


class Work(NamedTuple):
    """Of one chip, except where it says otherwise.

    flops: of matrices; attention_flops: of scores and values. weight_bytes, kv_bytes: read.
    comm_bytes: sent in all-reduces. requests, layers, allreduces: numbers, of the whole step.
    """

    requests: float
    layers: int
    flops: float
    weight_bytes: float
    attention_flops: float
    kv_bytes: float
    comm_bytes: float
    allreduces: int


class Rows(NamedTuple):
    """Rows that matrices are multiplied with: in the layers, and in the head."""

    layers: float
    head: float


def exact_rows(batch: Batch) -> Rows:
    """No padding; the head sees one row per request."""
    return Rows(batch.prompt_tokens + batch.decodes, len(batch.chunks) + batch.decodes)


def work_of(
    shape: Shape,
    batch: Batch,
    *,
    tp: int = 1,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    rows_of: Callable[[Batch], Rows] = exact_rows,
) -> Work:
    """weight_bytes, kv_bytes: per value. FLOPs count a multiplication and an addition.

    The cache is divided among chips as far as its kv heads go, and is whole on each beyond. A
    layer ends two all-reduces (after attention and after the MLP), in which a chip sends
    2 (tp - 1) / tp of the activations, in bf16 (ring; Patarasuk and Yuan 2009).
    """
    rows, attention = rows_of(batch), shape.attention
    chunk_flops = sum(attention.chunk_flops(start, length) for start, length in batch.chunks)
    read = batch.cached_tokens + batch.context
    return Work(
        requests=len(batch.chunks) + batch.decodes,
        layers=shape.L,
        flops=2 * (shape.active_weights * rows.layers + shape.head_weights * rows.head) / tp,
        weight_bytes=shape.read_weights(rows.layers) * weight_bytes / tp,
        attention_flops=shape.L * (chunk_flops + attention.decode_flops(batch.context)) / tp,
        kv_bytes=shape.kv_token_bytes(kv_bytes) * read / min(tp, attention.kv_shares),
        comm_bytes=2 * shape.L * 2 * (tp - 1) / tp * rows.layers * shape.D * 2,
        allreduces=2 * shape.L * (tp > 1),
    )
