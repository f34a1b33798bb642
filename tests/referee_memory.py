"""What the pages of every pool hold, told from the log alone: whose they are, and which token of
which text each place in them has, layer group by layer group."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pdjax.core.config import Placement, instances_of, pool_owner, role_of
from pdjax.core.events import KVHandle

HOST = ".host"
Writer = tuple[str, int]  # ("step" or "send", its id)


class Place(NamedTuple):
    """Where K and V of one token in one layer group lie."""

    pool: str
    page: int
    offset: int
    group: int


class Token(NamedTuple):
    """The token at `position` of a request's text."""

    rid: int
    position: int


class Memory:
    """Pages with their owners, readers, generations and content.

    same(token, rid): whether the token is that of request `rid` at the same position, and so is
    all that came before it. An AssertionError names the law that was broken.
    """

    def __init__(self, placement: Placement, groups: int, same: Callable[[Token, int], bool]):
        self._placement, self._groups, self._same = placement, groups, same
        self._held: dict[tuple[int, str], KVHandle] = {}
        self._holders: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._generations: dict[tuple[str, int], int] = {}
        self._content: dict[Place, Token] = {}
        self._writing: dict[Place, Writer] = {}
        self._places_of: defaultdict[Writer, list[Place]] = defaultdict(list)
        self._slabs: set[str] = set()
        self._pages: Counter[str] = Counter()
        self._page_size: dict[str, int] = {}
        for name in instances_of(placement):
            role, owner = placement[role_of(name)], pool_owner(name, placement)
            pool = placement[role_of(owner)].pool
            self._pages[owner], self._page_size[owner] = pool.pages, pool.page_size
            self._slabs |= {owner} if pool.form == "slab" else set()
            self._pages[name + HOST] = role.swap_tokens // pool.page_size
            self._page_size[name + HOST] = pool.page_size

    def pool(self, instance: str) -> str:
        """The pool that an end of a Send, or an instance of a Step, works on."""
        return instance if instance.endswith(HOST) else pool_owner(instance, self._placement)

    def handle(self, rid: int, instance: str) -> KVHandle:
        handle = self._held.get((rid, self.pool(instance)))
        assert handle is not None, f"request {rid} works on pages of {instance} that it has not"
        return handle

    def holders(self, pool: str) -> list[int]:
        return [rid for rid, where in self._held if where == pool]

    def tables(self, rid: int) -> int:
        """In how many pools it holds pages."""
        return sum(owner == rid for owner, _ in self._held)

    @property
    def empty(self) -> bool:
        return not self._held and not self._writing

    # --- pages come and go -----------------------------------------------------------------

    def hold(self, handle: KVHandle) -> None:
        assert (handle.rid, handle.pool) not in self._held, "one table per request and pool"
        self._check_shared(handle)
        own = handle.pages[handle.shared :]
        self._take(handle, own, handle.generations[handle.shared :])
        if own and handle.pool in self._slabs:
            assert own == tuple(range(own[0], own[0] + len(own))), "a slab is contiguous"
        assert handle.capacity == len(handle.pages) * self._page_size[handle.pool]
        self._held[handle.rid, handle.pool] = handle

    def _check_shared(self, handle: KVHandle) -> None:
        size = self._page_size[handle.pool]
        for index in range(handle.shared):
            page, generation = handle.pages[index], handle.generations[index]
            assert self._generations.get((handle.pool, page)) == generation, "shared, but changed"
            for offset in range(size):
                for group in range(self._groups):
                    place = Place(handle.pool, page, offset, group)
                    assert place not in self._writing, "shared before it was written"
                    self._expect(place, handle.rid, index * size + offset)
            self._holders[handle.pool, page].add(handle.rid)

    def _take(self, handle: KVHandle, own: tuple[int, ...], generations: tuple[int, ...]) -> None:
        assert len(set(handle.pages)) == len(handle.pages) == len(handle.generations)
        for page, generation in zip(own, generations, strict=True):
            key = handle.pool, page
            assert 0 <= page < self._pages[handle.pool], "no such page"
            assert not self._holders[key], "a page has one owner"
            assert generation > self._generations.get(key, -1), "a new owner, a new generation"
            self._generations[key] = generation
            self._holders[key].add(handle.rid)
            for offset in range(self._page_size[handle.pool]):
                for group in range(self._groups):
                    self._content.pop(Place(handle.pool, page, offset, group), None)

    def grow(self, new: KVHandle) -> None:
        old = self._held[new.rid, new.pool]
        self._take(new, new.pages, new.generations)
        pages = old.pages + new.pages
        assert len(set(pages)) == len(pages)
        assert new.capacity == len(pages) * self._page_size[new.pool]
        generations = old.generations + new.generations
        self._held[new.rid, new.pool] = KVHandle(
            new.rid, new.pool, pages, generations, new.capacity, old.layout, old.shared
        )

    def release(self, rid: int, pool: str) -> None:
        assert (rid, pool) in self._held, "released what was not held"
        for page in self._held.pop((rid, pool)).pages:
            self._holders[pool, page].discard(rid)

    def lose(self, instance: str) -> None:
        """The instance died: nothing in its pool or its swap space can be read again."""
        lost = {self.pool(instance), instance + HOST}
        self._content = {p: token for p, token in self._content.items() if p.pool not in lost}
        self._writing = {p: writer for p, writer in self._writing.items() if p.pool not in lost}

    # --- content ---------------------------------------------------------------------------

    def _places(
        self, handle: KVHandle, start: int, end: int, groups: Iterable[int]
    ) -> list[tuple[int, Place]]:
        assert end <= handle.capacity, "past the end of its pages"
        size, groups = self._page_size[handle.pool], list(groups)
        return [
            (i, Place(handle.pool, handle.pages[i // size], i % size, group))
            for i in range(start, end)
            for group in groups
        ]

    def write(
        self, handle: KVHandle, start: int, end: int, writer: Writer, groups: Iterable[int]
    ) -> None:
        """From now until `settle`, `writer` may write tokens [start, end) of the request."""
        shared = handle.shared * self._page_size[handle.pool]
        assert start >= shared or start >= end, "shared pages are read, never written"
        for position, place in self._places(handle, start, end, groups):
            assert self._holders[place.pool, place.page] == {handle.rid}, "a reader is still there"
            assert place not in self._writing, "a place has one writer"
            self._writing[place] = writer
            self._places_of[writer].append(place)
            self._content[place] = Token(handle.rid, position)

    def settle(self, writer: Writer, arrived: bool = True) -> None:
        """The writer is done; what did not arrive is not there."""
        for place in self._places_of.pop(writer, ()):
            if self._writing.get(place) == writer:
                del self._writing[place]
                if not arrived:
                    self._content.pop(place, None)

    def read(
        self,
        handle: KVHandle,
        start: int,
        end: int,
        *,
        groups: Iterable[int],
        after: Callable[[Writer], bool],
    ) -> None:
        """Tokens [start, end) of the request are there, or are written by what is done before:
        after(writer) says so."""
        for position, place in self._places(handle, start, end, groups):
            writer = self._writing.get(place)
            assert writer is None or after(writer), "read before it is written"
            self._expect(place, handle.rid, position)

    def has(self, handle: KVHandle, start: int, end: int, groups: Iterable[int]) -> bool:
        """Whether all of that is there, and nobody has yet to write it."""
        return all(
            place not in self._writing and self._content.get(place) == Token(handle.rid, position)
            for position, place in self._places(handle, start, end, groups)
        )

    def _expect(self, place: Place, rid: int, position: int) -> None:
        token = self._content.get(place)
        assert token is not None, f"token {position} of request {rid} is not in {place}"
        assert token.position == position and self._same(token, rid), "the KV of another text"
