"""When the pieces of a request's KV leave its prefill instance."""

import pytest

from pdjax.core.config import Transfer
from pdjax.core.events import Chunk
from pdjax.core.policies.transfer import SCHEDULES, Leaving, Piece, layerwise, whole

FIRST, MIDDLE, LAST = (
    Chunk(0, 0, 6, last=False),
    Chunk(0, 6, 3, last=False),
    Chunk(0, 9, 2, last=True),
)


@pytest.mark.parametrize("chunk", [FIRST, MIDDLE, LAST])
def test_during_prefill_every_layer_group_of_every_chunk_leaves_from_inside_its_step(chunk):
    pieces = tuple(Piece(chunk.start, chunk.length, group) for group in (0, 1, 2))
    assert layerwise(chunk, 3) == Leaving(inside=pieces)


def test_after_prefill_nothing_leaves_before_the_last_chunk():
    assert whole(FIRST, 2) == whole(MIDDLE, 2) == Leaving()


def test_after_prefill_the_whole_prompt_leaves_when_the_last_chunk_is_done():
    assert whole(LAST, 2) == Leaving(done=(Piece(0, 11, 0), Piece(0, 11, 1)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("groups", [1, 4])
def test_every_schedule_sends_every_token_of_every_group_once(name, groups):
    sent = []
    for chunk in (FIRST, MIDDLE, LAST):
        inside, done = SCHEDULES[name](chunk, groups)
        for piece in inside + done:
            sent += [(piece.start + i, piece.group) for i in range(piece.length)]
    assert sorted(sent) == [(token, group) for token in range(11) for group in range(groups)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_a_name_that_configs_accept(name):
    assert name in Transfer.__annotations__["schedule"].__args__
