"""Steps for the tests of cost models, and what such a cost needs beside times."""

from pdjax.core.config import Link
from pdjax.core.events import Chunk, Decode, Send, Step
from pdjax.cost import Cost

LINK = Link(bytes_per_s=1e9)


def no_bytes(send: Send) -> int:
    return 0


def prefill(*chunks: tuple[int, int]) -> Step:
    """(start, length) of each chunk."""
    return Step(0, "p/0", chunks=tuple(Chunk(i, *chunk, True) for i, chunk in enumerate(chunks)))


def decode(*contexts: int, counts: tuple[int, ...] = (), steps: int = 1) -> Step:
    """Keys that each request sees, its newest token too, and how many tokens each makes."""
    counts = counts or (steps,) * len(contexts)
    slots = enumerate(zip(contexts, counts, strict=True))
    decodes = tuple(Decode(i, i, context - 1, count) for i, (context, count) in slots)
    return Step(0, "d/0", decodes=decodes, steps=steps)


def mixed(chunk: tuple[int, int], *contexts: int) -> Step:
    return Step(0, "b/0", chunks=prefill(chunk).chunks, decodes=decode(*contexts).decodes)


def ms(cost: Cost, step: Step) -> float:
    return cost.step_ns(step) / 1e6
