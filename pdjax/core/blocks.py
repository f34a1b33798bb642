"""Page accounting of one pool: who holds which pages, and which generation of them.

Conservation: what was held and released is free again. Single writer: a page has one owner,
and a page's generation grows when it is released, so that an old address can be told.
"""

from bisect import bisect_left

from pdjax.core.events import KVHandle


class StaleAddress(RuntimeError):
    """A handle names a page whose owner has changed since; reading it would be wrong."""


class PageAllocator:
    """Pages anywhere in the pool; the last released are the first reused."""

    def __init__(self, pages: int):
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def largest_run(self) -> int:
        """Most pages one request could get now."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        taken = tuple(reversed(self._free[cut:]))
        del self._free[cut:]
        return taken

    def give(self, pages: tuple[int, ...]) -> None:
        self._free.extend(reversed(pages))


class SlabAllocator:
    """One contiguous run of pages per request: first fit, neighbours coalesced on release."""

    def __init__(self, pages: int):
        self._starts = [0]
        self._lengths = [pages]

    @property
    def free(self) -> int:
        return sum(self._lengths)

    @property
    def largest_run(self) -> int:
        return max(self._lengths, default=0)

    def take(self, count: int) -> tuple[int, ...] | None:
        for i, (start, length) in enumerate(zip(self._starts, self._lengths, strict=True)):
            if length < count:
                continue
            if length == count:
                del self._starts[i], self._lengths[i]
            else:
                self._starts[i] += count
                self._lengths[i] -= count
            return tuple(range(start, start + count))
        return None

    def give(self, pages: tuple[int, ...]) -> None:
        start, length = pages[0], len(pages)
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start + length:
            length += self._lengths[i]
            del self._starts[i], self._lengths[i]
        if i > 0 and self._starts[i - 1] + self._lengths[i - 1] == start:
            self._lengths[i - 1] += length
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, length)


class Ledger:
    """The accounting of one pool. Pages go out as KVHandles and come back by them."""

    def __init__(self, name: str, *, pages: int, page_size: int, form: str, layout: str = ""):
        self.name, self.pages, self.page_size, self.layout = name, pages, page_size, layout
        self._allocator = SlabAllocator(pages) if form == "slab" else PageAllocator(pages)
        self._generations = [0] * pages

    @property
    def free(self) -> int:
        return self._allocator.free

    @property
    def largest_run(self) -> int:
        return self._allocator.largest_run

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def could_ever_hold(self, tokens: int) -> bool:
        return self.pages_for(tokens) <= self.pages

    def can_hold(self, tokens: int) -> bool:
        return self.pages_for(tokens) <= self.largest_run

    def hold(self, rid: int, tokens: int) -> KVHandle | None:
        """Pages for `tokens` tokens of request `rid`, or None when there is no room now."""
        count = self.pages_for(tokens)
        pages = self._allocator.take(count)
        if pages is None:
            return None
        generations = tuple(self._generations[page] for page in pages)
        return KVHandle(rid, self.name, pages, generations, count * self.page_size, self.layout)

    def check(self, handle: KVHandle) -> None:
        """Raises StaleAddress unless every page still belongs to the handle's owner."""
        if handle.pool != self.name:
            raise StaleAddress(f"handle of pool `{handle.pool}` used on pool `{self.name}`")
        for page, generation in zip(handle.pages, handle.generations, strict=True):
            if self._generations[page] != generation:
                raise StaleAddress(
                    f"request {handle.rid} holds page {page} of pool `{self.name}` at generation "
                    f"{generation}, but the page is at {self._generations[page]}"
                )

    def release(self, handle: KVHandle) -> None:
        self.check(handle)
        for page in handle.pages:
            self._generations[page] += 1
        self._allocator.give(handle.pages)
