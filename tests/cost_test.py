"""How long the modelled clock says things last, computed by hand."""

import dataclasses

import pytest

from pdjax.core.config import Clock, Link
from pdjax.core.events import Chunk, Decode, Send, Step
from pdjax.cost import affine
from pdjax.virtual import VirtualBackend

# Every constant its own power of ten, so that a term shows by its digit.
CLOCK = Clock(
    kind="modelled",
    step_s=1.0,
    prefill_token_s=1e-2,
    decode_token_s=1e-4,
    context_token_s=1e-6,
)
LINK = Link(bytes_per_s=1e6, latency_s=1e-3)
COST = affine(CLOCK, LINK, send_bytes=lambda send: 100 * send.length)


def decodes(*rows: tuple[int, int]) -> tuple[Decode, ...]:
    """(position, count) of each slot."""
    return tuple(Decode(slot, slot, *row) for slot, row in enumerate(rows))


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        (Step(0, "i", chunks=(Chunk(0, 0, 5, True),)), 1.05),  # nothing before it to read
        (Step(0, "i", chunks=(Chunk(0, 3, 5, True),)), 1.050003),
        (Step(0, "i", chunks=(Chunk(0, 3, 5, True), Chunk(1, 0, 2, True))), 1.070003),
        (Step(0, "i", decodes=decodes((7, 1))), 1.000107),
        (Step(0, "i", decodes=decodes((7, 1), (2, 1))), 1.000209),
        (Step(0, "i", chunks=(Chunk(2, 3, 5, False),), decodes=decodes((7, 1))), 1.050110),
        # Two iterations: two of everything, and the second reads one token more.
        (Step(0, "i", decodes=decodes((7, 2)), steps=2), 2.000215),
        # Slot 1 takes part in the first of them only.
        (Step(0, "i", decodes=decodes((7, 2), (4, 1)), steps=2), 2.000319),
    ],
)
def test_a_step_is_affine_in_its_tokens_and_their_context(step, seconds):
    assert COST.step_ns(step) == round(seconds * 1e9)


def test_k_iterations_in_one_dispatch_last_as_long_as_k_steps():
    at_once = COST.step_ns(Step(0, "i", decodes=decodes((7, 4), (2, 4)), steps=4))
    singly = [COST.step_ns(Step(0, "i", decodes=decodes((7 + k, 1), (2 + k, 1)))) for k in range(4)]
    assert at_once == sum(singly)


def test_a_piece_takes_the_latency_and_its_bytes():
    send = Send(0, 0, "p", "d", start=3, length=5, group=0, groups=1)
    assert COST.send_bytes(send) == 500
    it = VirtualBackend(COST, lambda action: (), lambda event: None)
    it.start(send)
    assert it.next_event()[0] == 1_000_000 + 500_000


def test_times_are_whole_nanoseconds():
    clock = dataclasses.replace(CLOCK, prefill_token_s=1e-10 / 3)
    step_ns = affine(clock, LINK, lambda send: 0).step_ns(
        Step(0, "i", chunks=(Chunk(0, 0, 1, True),))
    )
    assert isinstance(step_ns, int) and step_ns == 1_000_000_000
