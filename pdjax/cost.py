"""How long actions last, for clocks that are not the wall's."""

from collections.abc import Callable
from typing import NamedTuple

from pdjax.core.config import Clock, Link
from pdjax.core.events import Send, Step

NANOSECONDS = 1e9


class Cost(NamedTuple):
    """Nanoseconds of a step, the bytes of a piece, and the links that pieces cross."""

    step_ns: Callable[[Step], int]
    send_bytes: Callable[[Send], int]
    link: Link = Link()


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

    return Cost(step_ns, send_bytes, link)
