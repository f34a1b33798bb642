"""When KV leaves: the pieces in which a request's KV crosses from prefill to decode."""

from collections.abc import Callable
from typing import NamedTuple

from pdjax.core.events import Chunk


class Piece(NamedTuple):
    """Tokens [start, start + length) of layer group `group`."""

    start: int
    length: int
    group: int


class Leaving(NamedTuple):
    """Pieces that leave from `inside` a prefill step, each as soon as its layer group has been
    computed, and those that leave once the step is `done`."""

    inside: tuple[Piece, ...] = ()
    done: tuple[Piece, ...] = ()


Schedule = Callable[[Chunk, int], Leaving]
"""(chunk being dispatched, layer groups) -> what leaves because of it."""


def whole(chunk: Chunk, groups: int) -> Leaving:
    """Nothing leaves before the last chunk is computed; then the whole prompt does."""
    if not chunk.last:
        return Leaving()
    return Leaving(done=_pieces(0, chunk.start + chunk.length, groups))


def chunkwise(chunk: Chunk, groups: int) -> Leaving:
    """Every chunk leaves once its step is done, while the next chunk computes."""
    return Leaving(done=_pieces(chunk.start, chunk.length, groups))


def layerwise(chunk: Chunk, groups: int) -> Leaving:
    """Every chunk leaves by itself, layer group by layer group, while the next group computes."""
    return Leaving(inside=_pieces(chunk.start, chunk.length, groups))


def _pieces(start: int, length: int, groups: int) -> tuple[Piece, ...]:
    return tuple(Piece(start, length, group) for group in range(groups))


SCHEDULES: dict[str, Schedule] = {
    "whole": whole,
    "chunkwise": chunkwise,
    "layerwise": layerwise,
    "streaming": layerwise,  # differs on the decode side, which need not wait for all of it
}
