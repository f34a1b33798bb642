"""Page accounting of one pool: who holds which pages, which are cached, which are free.

Conservation: what was held and released is free again. Single writer: a page has one owner
that writes it; what several requests hold are cached blocks, which are only read. A page's
generation grows when it stops meaning what it meant (freed, or evicted from the cache), so an
address from before is told.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pdjax.core.blocks import Allocator, ClassAllocator, PageAllocator, SlabAllocator
from pdjax.core.config import Cache
from pdjax.core.events import KVHandle
from pdjax.core.prefix import CachedBlock, PrefixIndex


class StaleAddress(RuntimeError):
    """A handle names a page that means something else by now; reading it would be wrong."""


class Usage(NamedTuple):
    """A pool's pages: held + free = all. `cached` of the free ones keep a prefix until they are
    needed; `largest_run` is the most that one request could get."""

    held: int
    cached: int
    free: int
    largest_run: int

    @property
    def fragmentation(self) -> float:
        """External fragmentation: the share of the free pages that one request cannot get."""
        return 1 - self.largest_run / self.free if self.free else 0.0


class Ledger:
    """The accounting of one pool. Pages go out as KVHandles and come back by them.

    A request holds at most one handle. `blocks` are chained hashes as core.prefix makes them.
    `now_ns` counts for the cache's retention; the latest that any call named is what a release
    takes for now.
    """

    def __init__(
        self,
        name: str,
        *,
        pages: int,
        page_size: int,
        form: str,
        classes: tuple[int, ...] = (),
        layout: str = "",
        cache: Cache | None = None,
    ):
        self.name, self.pages, self.page_size, self.layout = name, pages, page_size, layout
        self._form, self._classes = form, tuple(size // page_size for size in classes)
        self._cache = cache or Cache()
        self._block_pages = max(1, self._cache.block // page_size)
        self._generations: dict[int, int] = defaultdict(int)  # of each page
        self._now_ns = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self._allocator = _allocator(self._form, self.pages, self._classes)
        self._index = PrefixIndex(self._cache)
        self._held: dict[int, KVHandle] = {}
        # Hashes of the leading blocks that lie in a request's own pages. There they stay until it
        # lets go, and only then does it matter when they were used: no need to publish them again.
        self._published: dict[int, list[int]] = {}

    # --- what there is -------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Pages that nobody holds; cached ones are among them."""
        return self._allocator.free + self._index.idle * self._block_pages

    @property
    def largest_run(self) -> int:
        """Most pages that one request could get now, evicting what is cached if need be."""
        return self._room([])

    def usage(self) -> Usage:
        free, cached = self.free, self._index.idle * self._block_pages
        return Usage(self.pages - free, cached, free, self.largest_run)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def could_ever_hold(self, tokens: int) -> bool:
        return self.pages_for(tokens) <= self.pages

    def can_hold(self, tokens: int, blocks: Sequence[int] = (), now_ns: int = 0) -> bool:
        """Whether `hold` would find room now."""
        shared = self._index.match(blocks, now_ns)
        return self._fits(self._own_pages(tokens, shared), shared)

    def cached(self, blocks: Sequence[int], now_ns: int) -> int:
        """How many leading blocks of these hashes the pool has."""
        return len(self._index.match(blocks, now_ns))

    def check(self, handle: KVHandle) -> None:
        """Raises StaleAddress unless every page still means what it did when it was held."""
        if handle.pool != self.name:
            raise StaleAddress(f"handle of pool `{handle.pool}` used on pool `{self.name}`")
        if self._generations_of(handle.pages) == handle.generations:
            return
        for page, generation in zip(handle.pages, handle.generations, strict=True):
            if self._generations[page] != generation:
                raise StaleAddress(
                    f"request {handle.rid} holds page {page} of pool `{self.name}` at generation "
                    f"{generation}, but the page is at {self._generations[page]}"
                )

    # --- what changes --------------------------------------------------------------------

    def hold(
        self, rid: int, tokens: int, *, blocks: Sequence[int] = (), now_ns: int = 0
    ) -> KVHandle | None:
        """Pages for `tokens` tokens of request `rid`, or None when there is no room now.

        The leading cached blocks of `blocks` are shared (how many may be is the caller's to say,
        by how many hashes it passes), the pages after them are the request's own. Cached pages
        that nobody holds are evicted as needed.
        """
        if rid in self._held:
            raise ValueError(f"request {rid} holds pages of pool `{self.name}` already")
        shared = self._index.match(blocks, now_ns)
        own = self._own_pages(tokens, shared)
        if not self._fits(own, shared):
            return None
        self._now_ns = max(self._now_ns, now_ns)
        self._index.hold(shared)
        pages = tuple(page for block in shared for page in block.pages)
        handle = self._handle(rid, pages + self._take(own), shared=len(pages))
        self._held[rid] = handle
        return handle

    def pin(self, rid: int, blocks: Sequence[int], now_ns: int) -> KVHandle:
        """The leading cached blocks of `blocks`, for a reader; it has no pages of its own."""
        handle = self.hold(rid, 0, blocks=blocks, now_ns=now_ns)
        assert handle is not None  # takes no pages
        return handle

    def grow(
        self, handle: KVHandle, tokens: int, now_ns: int = 0
    ) -> tuple[KVHandle, KVHandle] | None:
        """Room for `tokens` tokens in all: (the whole handle now, one that names just the new
        pages and the new capacity), or None when there is no room now.

        A slab grows into the pages right after it where they are free, otherwise by another run.
        """
        self._check_held(handle)
        count = max(0, self.pages_for(tokens) - len(handle.pages))
        pages = None
        if isinstance(self._allocator, SlabAllocator) and handle.pages:
            pages = self._allocator.take_at(handle.pages[-1] + 1, count)
        if pages is None:
            if not self._fits(count, []):
                return None
            pages = self._take(count)
        self._now_ns = max(self._now_ns, now_ns)
        whole = self._handle(handle.rid, handle.pages + pages, shared=handle.shared)
        self._held[handle.rid] = whole
        new = KVHandle(
            handle.rid, self.name, pages, self._generations_of(pages), whole.capacity, self.layout
        )
        return whole, new

    def publish(self, handle: KVHandle, blocks: Sequence[int], now_ns: int) -> None:
        """From now on the handle's first len(blocks) blocks hold the KV of these hashes.

        Blocks that the index has elsewhere already stay private. Does nothing without a cache.
        """
        self._check_held(handle)
        if not self._cache.prefix:
            return
        self._now_ns = max(self._now_ns, now_ns)
        step = self._block_pages
        if len(blocks) * step > len(handle.pages):
            raise ValueError(
                f"request {handle.rid} publishes {len(blocks)} blocks of {step} pages but holds "
                f"{len(handle.pages)} pages of pool `{self.name}`"
            )
        known = self._published.setdefault(handle.rid, [])
        begin = len(known) if list(blocks[: len(known)]) == known else 0
        lying = self._index.blocks_in(handle.pages[begin * step : len(blocks) * step], step)
        used, parent, find = [], blocks[begin - 1] if begin else None, self._index.find
        for i, (hash, here) in enumerate(zip(blocks[begin:], lying, strict=True), begin):
            if here is not None and here.hash != hash:
                raise ValueError(
                    f"page {here.pages[0]} of pool `{self.name}` is cached as block {here.hash}; "
                    f"request {handle.rid} publishes it as {hash}"
                )
            block = here or find(hash)
            if block is None:
                pages = handle.pages[i * step : (i + 1) * step]
                block = self._index.add(hash, parent, pages)
            if i == len(known) and block.pages[0] == handle.pages[i * step]:
                known.append(hash)
            used.append(block)
            parent = hash
        self._index.use(reversed(used), self._now_ns)

    def release(self, handle: KVHandle) -> None:
        """The request gives back all it holds; cached blocks stay until they are evicted."""
        self._check_held(handle)
        del self._held[handle.rid]
        self._published.pop(handle.rid, None)
        if not len(self._index):
            self._free(handle.pages)
            return
        step = self._block_pages
        lying = self._index.blocks_in(handle.pages, step)
        cached = [block for block in reversed(lying) if block is not None]
        self._index.release(cached)
        self._index.use(cached, self._now_ns)
        private = [i * step for i, block in enumerate(lying) if block is None]
        pages = [page for start in private for page in handle.pages[start : start + step]]
        self._free((*pages, *handle.pages[len(lying) * step :]))

    def reset(self) -> None:
        """The instance died: all is free, the cache empty, and every handle stale."""
        for page in range(self.pages):
            self._generations[page] += 1
        self._start_empty()

    # --- inside --------------------------------------------------------------------------

    def _own_pages(self, tokens: int, shared: list[CachedBlock]) -> int:
        return max(0, self.pages_for(tokens) - len(shared) * self._block_pages)

    def _fits(self, count: int, shared: list[CachedBlock]) -> bool:
        return count <= self._allocator.largest_run or count <= self._room(shared)

    def _room(self, shared: list[CachedBlock]) -> int:
        """Most pages that one request could get beside `shared` blocks, by evicting the others."""
        kept = {block.hash for block in shared if not block.holders}
        idle = self._index.idle - len(kept)
        if not idle or not isinstance(self._allocator, SlabAllocator):
            return self._allocator.largest_run + idle * self._block_pages
        return self._allocator.largest_run_with(
            page
            for block in self._index.idle_blocks()
            if block.hash not in kept
            for page in block.pages
        )

    def _take(self, count: int) -> tuple[int, ...]:
        """So many pages; there must be room (`_fits`). Evicts until they are found."""
        if not count:
            return ()
        while (pages := self._allocator.take(count)) is None:
            missing = max(1, count - self._allocator.free)
            self._free(self._index.evict(-(-missing // self._block_pages)))
        return pages

    def _free(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._generations[page] += 1
        self._allocator.give(pages)

    def _handle(self, rid: int, pages: tuple[int, ...], shared: int) -> KVHandle:
        generations, capacity = self._generations_of(pages), len(pages) * self.page_size
        return KVHandle(rid, self.name, pages, generations, capacity, self.layout, shared)

    def _generations_of(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(self._generations.__getitem__, pages))

    def _check_held(self, handle: KVHandle) -> None:
        """Raises StaleAddress unless this is all that its request holds now."""
        self.check(handle)
        held = self._held.get(handle.rid)
        if held is None or held.pages != handle.pages:
            raise StaleAddress(
                f"request {handle.rid} names {len(handle.pages)} pages of pool `{self.name}` but "
                f"holds {len(held.pages) if held else 0}: use the handle of its last hold or grow"
            )


def _allocator(form: str, pages: int, classes: tuple[int, ...]) -> Allocator:
    if form == "slab":
        return SlabAllocator(pages)
    return ClassAllocator(pages, classes) if classes else PageAllocator(pages)
