"""What cost models see of a step: one Batch per iteration."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pdjax.catalogue import Shape
from pdjax.core.events import Decode, Send, Step
from pdjax.cost import NANOSECONDS, DecodeNs, cached_of


class CostError(ValueError):
    """A cost model that cannot be made, or does not know such a step; one line."""


class Batch(NamedTuple):
    """One iteration. chunks: (start, length) of each chunk of a prompt. decodes: requests that
    decode. context: keys that they see together, each its own newest token too; an array where
    many iterations are timed at once."""

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    context: Any = 0  # a number, or an array of them

    @property
    def prompt_tokens(self) -> int:
        return sum(length for _, length in self.chunks)

    @property
    def cached_tokens(self) -> int:
        """Tokens before the chunks, of the same prompts."""
        return sum(start for start, _ in self.chunks)


Seconds = Callable[[Batch], float]
"""How long a batch takes."""


def batches(step: Step) -> Iterator[Batch]:
    """One per iteration; chunks are computed in the first."""
    chunks = tuple((chunk.start, chunk.length) for chunk in step.chunks)
    decodes = len(step.decodes)
    context = sum(decode.position for decode in step.decodes) + decodes
    if step.steps == 1:
        yield Batch(chunks, decodes, context)
        return
    ends: dict[int, list[Decode]] = defaultdict(list)
    for decode in step.decodes:
        ends[decode.count].append(decode)
    for i in range(step.steps):
        for decode in ends[i]:
            decodes -= 1
            context -= decode.position + 1 + i
        yield Batch(() if i else chunks, decodes, context)
        context += decodes


def step_ns_by(seconds: Seconds) -> Callable[[Step], int]:
    """`Cost.step_ns`: k iterations in one step last exactly as long as k steps."""

    def step_ns(step: Step) -> int:
        return sum(round(seconds(batch) * NANOSECONDS) for batch in batches(step))

    return step_ns


def decode_ns_by(seconds: Seconds) -> DecodeNs:
    """`Cost.decode_ns` of a function that takes any batch."""

    def decode_ns(step: Step) -> list[int]:
        return [round(seconds(batch) * NANOSECONDS) for batch in batches(step)]

    return decode_ns


def decode_ns_at_once(seconds: Callable[[Batch], Any]) -> DecodeNs:
    """The same of one that takes a Batch whose `context` is an array, one for each iteration."""

    def decode_ns(step: Step) -> np.ndarray:
        n, cached = cached_of(step)
        return np.rint(seconds(Batch((), n, cached + n)) * NANOSECONDS).astype(np.int64)

    return decode_ns


def send_bytes_of(shape: Shape, value_bytes: float = 2) -> Callable[[Send], int]:
    """`Cost.send_bytes`: K and V of a piece's tokens in its group of layers. Groups are as even as
    can be, the larger ones first, as the engine's are."""
    layer_bytes = shape.kv_token_bytes(value_bytes) / shape.L

    def send_bytes(send: Send) -> int:
        small, larger = divmod(shape.L, send.groups)
        return round(layer_bytes * (small + (send.group < larger)) * send.length)

    return send_bytes
