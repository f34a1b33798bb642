"""What goes into an instance's next step."""

from collections.abc import Sequence
from typing import NamedTuple

from pdjax.core.events import Chunk


class Prompt(NamedTuple):
    """A prompt in progress: `done` of its `length` tokens have been dispatched."""

    rid: int
    done: int
    length: int


def plan_chunks(prompts: Sequence[Prompt], *, budget: int, page_size: int) -> tuple[Chunk, ...]:
    """Fills a budget of prompt tokens, first come first served (Sarathi-Serve's stall-free batches
    use the same budget). A chunk that does not end its prompt is whole pages, so that the next
    one starts on a page of its own."""
    chunks = []
    for prompt in prompts:
        length = min(prompt.length - prompt.done, budget)
        last = prompt.done + length == prompt.length
        if not last:
            length -= length % page_size
        if length == 0:
            break
        chunks.append(Chunk(prompt.rid, prompt.done, length, last))
        budget -= length
    return tuple(chunks)
