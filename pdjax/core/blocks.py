"""Allocators: which pages of a pool go to whom. Each tells what is `free`, takes and gives back.

`take(count)` returns so many pages, or None (and takes nothing) when it cannot. `give(pages)`
takes back any pages that are out, in any order and grouping. `largest_run` is the most pages
that one request could get now.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable


class PageAllocator:
    """Pages anywhere in the pool; the last released are the first reused, then come new ones."""

    def __init__(self, pages: int):
        self.free = pages
        self._released: list[int] = []
        self._new = 0  # no page from this one on has ever been out

    @property
    def largest_run(self) -> int:
        return self.free

    def take(self, count: int) -> tuple[int, ...] | None:
        if count > self.free:
            return None
        self.free -= count
        cut = max(0, len(self._released) - count)
        again = self._released[cut:][::-1]
        del self._released[cut:]
        begin, self._new = self._new, self._new + count - len(again)
        return (*again, *range(begin, self._new))

    def give(self, pages: Collection[int]) -> None:
        self.free += len(pages)
        self._released.extend(reversed(tuple(pages)))


class SlabAllocator:
    """One contiguous run of pages per request: first fit, neighbours coalesced on release."""

    def __init__(self, pages: int):
        self.free = pages
        self._starts = [0]
        self._lengths = [pages]

    @property
    def largest_run(self) -> int:
        return max(self._lengths, default=0)

    def largest_run_with(self, extra: Iterable[int]) -> int:
        """`largest_run` as it would be if the pages `extra` came back."""
        longest = run = end = 0
        runs = zip(self._starts, self._lengths, strict=True)
        for start, length in sorted((*runs, *((page, 1) for page in extra))):
            run = run + length if start == end else length
            end = start + length
            longest = max(longest, run)
        return longest

    def take(self, count: int) -> tuple[int, ...] | None:
        for i, length in enumerate(self._lengths):
            if length >= count:
                return self._cut(i, count)
        return None

    def take_at(self, start: int, count: int) -> tuple[int, ...] | None:
        """The pages from `start` on, which a neighbour grows into, or None when they are not free.

        Free runs never touch, so pages after one that is out are the beginning of a free run.
        """
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start and self._lengths[i] >= count:
            return self._cut(i, count)
        return None

    def give(self, pages: Collection[int]) -> None:
        self.free += len(pages)
        for start, length in _runs(pages):
            self._give_run(start, length)

    def _cut(self, i: int, count: int) -> tuple[int, ...]:
        start = self._starts[i]
        if self._lengths[i] == count:
            del self._starts[i], self._lengths[i]
        else:
            self._starts[i] += count
            self._lengths[i] -= count
        self.free -= count
        return tuple(range(start, start + count))

    def _give_run(self, start: int, length: int) -> None:
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start + length:
            length += self._lengths[i]
            del self._starts[i], self._lengths[i]
        if i > 0 and self._starts[i - 1] + self._lengths[i - 1] == start:
            self._lengths[i - 1] += length
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, length)


class ClassAllocator:
    """Blocks of a few sizes: runs of so many pages, aligned to their size.

    A request gets the largest blocks that fit into what it needs, then smaller ones; the
    smallest is one page, so nothing is refused while pages are free. A larger block is split
    when smaller ones run out, and made whole again when all its parts are back.
    """

    def __init__(self, pages: int, sizes: tuple[int, ...]):
        """sizes: of blocks, in pages; the first is 1, and each divides the next."""
        self.free = 0
        self._sizes = sizes
        # Starts of free blocks by size, as dicts: the last put in is the first taken out.
        self._blocks: list[dict[int, None]] = [{} for _ in sizes]
        self.give(range(pages))

    @property
    def largest_run(self) -> int:
        return self.free

    def take(self, count: int) -> tuple[int, ...] | None:
        if count > self.free:
            return None
        taken: list[int] = []
        for i in range(len(self._sizes) - 1, -1, -1):
            size = self._sizes[i]
            while count - len(taken) >= size and (start := self._pop(i)) is not None:
                taken.extend(range(start, start + size))
        self.free -= count
        return tuple(taken)

    def give(self, pages: Collection[int]) -> None:
        self.free += len(pages)
        ordered = sorted(pages)
        blocks, at = [], 0
        while at < len(ordered):
            i = self._largest_block(ordered, at)
            blocks.append((i, ordered[at]))
            at += self._sizes[i]
        for i, start in reversed(blocks):
            self._put(i, start)

    def _largest_block(self, ordered: list[int], at: int) -> int:
        """Index of the largest size of which a whole block begins at `ordered[at]`."""
        start = ordered[at]
        for i in range(len(self._sizes) - 1, 0, -1):
            end = at + self._sizes[i] - 1
            aligned = start % self._sizes[i] == 0
            if aligned and end < len(ordered) and ordered[end] == start + self._sizes[i] - 1:
                return i
        return 0

    def _pop(self, i: int) -> int | None:
        """A free block of size `i`, if need be split off a larger one."""
        if self._blocks[i]:
            return self._blocks[i].popitem()[0]
        if i + 1 == len(self._sizes) or (start := self._pop(i + 1)) is None:
            return None
        rest = range(start + self._sizes[i], start + self._sizes[i + 1], self._sizes[i])
        self._blocks[i].update(dict.fromkeys(reversed(rest)))
        return start

    def _put(self, i: int, start: int) -> None:
        """Puts a block of size `i` back, together with its siblings if they are all free."""
        blocks = self._blocks[i]
        blocks[start] = None
        if i + 1 == len(self._sizes):
            return
        whole = start - start % self._sizes[i + 1]
        siblings = range(whole, whole + self._sizes[i + 1], self._sizes[i])
        if all(sibling in blocks for sibling in siblings):
            for sibling in siblings:
                del blocks[sibling]
            self._put(i + 1, whole)


Allocator = PageAllocator | SlabAllocator | ClassAllocator


def _runs(pages: Collection[int]) -> Iterable[tuple[int, int]]:
    """(start, length) of each run of neighbours in `pages`."""
    ordered = sorted(pages)
    start = 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
            yield ordered[start], i - start
            start = i
