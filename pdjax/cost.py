"""How long actions last, for clocks that are not the wall's."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pdjax.core.config import Clock, Link
from pdjax.core.events import Send, Step
from pdjax.processors import Sharing

NANOSECONDS = 1e9


DecodeNs = Callable[[Step], Sequence[int] | np.ndarray]
"""(an open step: only decodes, all of them in all its iterations) -> ns of each iteration."""


class Cost(NamedTuple):
    """Nanoseconds of a step alone on its processor, the bytes of a piece, and the links that pieces
    cross. decode_ns says of many decode steps at once what step_ns says of each. sharing: how steps
    on one processor slow each other down."""

    step_ns: Callable[[Step], int]
    send_bytes: Callable[[Send], int]
    link: Link = Link()
    decode_ns: DecodeNs | None = None
    sharing: Sharing = Sharing()

    def ends_ns(self, step: Step) -> np.ndarray:
        """When each iteration of an open step ends: what as many single steps would last."""
        return np.cumsum(self.iterations_ns(step))

    def iterations_ns(self, step: Step) -> Sequence[int] | np.ndarray:
        """What each iteration of an open step lasts."""
        if self.decode_ns is not None:
            return self.decode_ns(step)
        replace = msgspec.structs.replace
        singles = (
            replace(
                step,
                steps=1,
                decodes=tuple(replace(d, position=d.position + i, count=1) for d in step.decodes),
            )
            for i in range(step.steps)
        )
        return [self.step_ns(single) for single in singles]


def cached_of(step: Step) -> tuple[int, np.ndarray]:
    """Of an open step: how many requests, and the tokens cached for them before each iteration."""
    n, cached = len(step.decodes), sum(d.position for d in step.decodes)
    return n, np.arange(cached, cached + n * step.steps, n)


def affine(clock: Clock, link: Link, send_bytes: Callable[[Send], int]) -> Cost:
    """Steps affine in prompt tokens, decode tokens and context tokens. The form is DistServe's
    (OSDI 2024, section 4), without its term in the square of the prompt."""

    def step_ns(step: Step) -> int:
        prompt = sum(chunk.length for chunk in step.chunks)
        output = sum(decode.count for decode in step.decodes)
        context = sum(chunk.start for chunk in step.chunks)
        context += sum(sum(range(d.position, d.position + d.count)) for d in step.decodes)
        seconds = (
            clock.step_s * (step.steps if step.decodes else 1)
            + clock.prefill_token_s * prompt
            + clock.decode_token_s * output
            + clock.context_token_s * context
        )
        return round(seconds * NANOSECONDS)

    def decode_ns(step: Step) -> np.ndarray:
        n, cached = cached_of(step)
        seconds = clock.step_s + clock.decode_token_s * n + clock.context_token_s * cached
        return np.rint(seconds * NANOSECONDS).astype(np.int64)

    return Cost(step_ns, send_bytes, link, decode_ns)
