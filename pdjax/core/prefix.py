"""Prefix caching: chained hashes of a text's blocks, and the index of what a pool still has.

A block is a fixed number of tokens. Its hash covers its tokens and the hash of the block before
it, so equal hashes mean that the whole texts up to there are equal (by chance once in 2**64).
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush

from pdjax.core.config import Cache


def hash_blocks(tokens: Sequence[int], block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(hashes of the text's whole blocks of `block` tokens, the tokens after them).

    Tokens are int32, hashes 64 bit. The same text has the same hashes in every process.
    """
    return extend(None, (), tokens, block)


def extend(
    last: int | None, tail: Sequence[int], tokens: Sequence[int], block: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(hashes of the blocks that `tokens` complete, the new tail), as of the text in one piece.

    `last` is the hash of the last whole block so far (None before the first), `tail` the tokens
    after it.
    """
    text = (*tail, *tokens)
    whole = len(text) - len(text) % block
    raw = struct.pack(f"<{whole}i", *text[:whole])
    hashes = []
    before = b"" if last is None else last.to_bytes(8, "little")
    for start in range(0, 4 * whole, 4 * block):
        before = blake2b(before + raw[start : start + 4 * block], digest_size=8).digest()
        hashes.append(int.from_bytes(before, "little"))
    return tuple(hashes), text[whole:]


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block whose KV lies in `pages`. `order`: the lower, the earlier it is evicted."""

    hash: int
    parent: int | None
    pages: tuple[int, ...]
    holders: int
    used_ns: int
    order: int


class PrefixIndex:
    """The blocks that a pool has, by hash; those that nobody holds are idle and can be evicted.

    A text's hit ends at its first block that is missing. So blocks without successors go first:
    among those the one not used for longest (`lru`) or the one published first (`fifo`).
    """

    def __init__(self, cache: Cache):
        self.idle = 0  # blocks
        self._lru = cache.eviction == "lru"
        self._retention_ns = round(cache.retention_s * 1e9)
        self._by_hash: dict[int, CachedBlock] = {}
        self._by_first_page: dict[int, CachedBlock] = {}
        self._successors: dict[int, int] = {}  # how many cached blocks come right after a hash
        # Heap of (order, hash) of idle blocks without successors. What has changed since an item
        # was pushed shows when it is popped.
        self._leaves: list[tuple[int, int]] = []
        self._newest = 0  # the last order given

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def find(self) -> Callable[[int], CachedBlock | None]:
        """hash -> the block, or None where there is none."""
        return self._by_hash.get

    def match(self, hashes: Iterable[int], now_ns: int) -> list[CachedBlock]:
        """The leading blocks of a text that are here. One that nobody has used for the cache's
        retention time counts as gone, though its pages may still be kept."""
        oldest_ns = now_ns - self._retention_ns if self._retention_ns else 0
        found = []
        for hash in hashes:
            block = self._by_hash.get(hash)
            if block is None or (block.used_ns < oldest_ns and not block.holders):
                break
            found.append(block)
        return found

    def blocks_in(self, pages: Sequence[int], step: int) -> list[CachedBlock | None]:
        """For each whole block of `step` pages in `pages`: the cached block that lies there."""
        get = self._by_first_page.get
        return [get(pages[at]) for at in range(0, len(pages) - step + 1, step)]

    def idle_blocks(self) -> Iterator[CachedBlock]:
        return (block for block in self._by_hash.values() if not block.holders)

    def add(self, hash: int, parent: int | None, pages: tuple[int, ...]) -> CachedBlock:
        """A new block, held by the one who published it; `use` is to follow."""
        block = CachedBlock(hash, parent, pages, 1, 0, -1)
        self._by_hash[hash] = self._by_first_page[pages[0]] = block
        if parent is not None:
            self._successors[parent] = self._successors.get(parent, 0) + 1
        return block

    def hold(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            self.idle -= not block.holders
            block.holders += 1

    def release(self, blocks: Iterable[CachedBlock]) -> None:
        """`use` is to follow: it makes them known to eviction."""
        for block in blocks:
            block.holders -= 1
            self.idle += not block.holders

    def use(self, blocks: Iterable[CachedBlock], now_ns: int) -> None:
        """Blocks that come later are evicted later. (What is held needs no mention.)"""
        lru, successors, order = self._lru, self._successors, self._newest
        for block in blocks:
            block.used_ns = now_ns
            if lru or block.order < 0:
                block.order = order = order + 1
            if not block.holders and block.hash not in successors:
                self._offer(block)
        self._newest = order

    def evict(self, count: int) -> list[int]:
        """Forgets `count` idle blocks (there must be so many) and returns their pages."""
        return [page for _ in range(count) for page in self._forget(self._first_to_go())]

    def _first_to_go(self) -> CachedBlock:
        while self._leaves:
            order, hash = heappop(self._leaves)
            block = self._by_hash.get(hash)
            if block is not None and block.order == order and self._is_leaf(block):
                return block
        # Every idle block has successors that are held: their holders computed what comes before
        # them once more, in pages of their own, so they lose nothing but their place in the index.
        return min(self.idle_blocks(), key=lambda block: block.order)

    def _forget(self, block: CachedBlock) -> tuple[int, ...]:
        del self._by_hash[block.hash], self._by_first_page[block.pages[0]]
        self.idle -= 1
        if block.parent is not None:
            self._successors[block.parent] -= 1
            if not self._successors[block.parent]:
                del self._successors[block.parent]
                parent = self._by_hash.get(block.parent)
                if parent is not None and not parent.holders:
                    self._offer(parent)
        return block.pages

    def _is_leaf(self, block: CachedBlock) -> bool:
        return not block.holders and block.hash not in self._successors

    def _offer(self, leaf: CachedBlock) -> None:
        heappush(self._leaves, (leaf.order, leaf.hash))
        if len(self._leaves) > 2 * len(self._by_hash) + 64:  # most are out of date
            self._leaves = [(b.order, b.hash) for b in self._by_hash.values() if self._is_leaf(b)]
            heapify(self._leaves)
