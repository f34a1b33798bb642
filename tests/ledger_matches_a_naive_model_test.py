"""Whatever is held, grown, published and released in whatever order: the ledger agrees with sets.

The model knows texts by their tokens, not by hashes, and pages by sets; it says what must be
shared, what must be evicted, which pages may be taken, and which addresses are stale.
"""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdjax.core.config import Cache
from pdjax.core.events import KVHandle
from pdjax.core.ledger import Ledger, StaleAddress
from pdjax.core.prefix import hash_blocks

PAGES, PAGE = 12, 2
RETENTION_NS = 6
FORMS = {"pages": (), "slab": (), "classes": (PAGE, 2 * PAGE, 4 * PAGE)}
Text = tuple[int, ...]
LENGTHS = st.integers(1, PAGES * PAGE)
# Texts that part from each other at some place: most share a beginning with most others.
TEXTS = st.builds(lambda n, parts: (0,) * min(n, parts) + (1,) * (n - parts), LENGTHS, LENGTHS)


@dataclass
class Cached:
    pages: tuple[int, ...]
    used_ns: int
    order: int  # of the operation that counts for eviction


class LedgerAndModel(RuleBasedStateMachine):
    @initialize(
        form=st.sampled_from(sorted(FORMS)),
        block=st.sampled_from([PAGE, 2 * PAGE, 4 * PAGE]),
        eviction=st.sampled_from(["lru", "fifo"]),
        retained=st.booleans(),
    )
    def start(self, form: str, block: int, eviction: str, retained: bool):
        self.form, self.block, self.lru = form, block, eviction == "lru"
        self.retention_ns = RETENTION_NS if retained else 1 << 60
        cache = Cache(True, block, eviction, retention_s=RETENTION_NS * 1e-9 if retained else 0)
        self.ledger = Ledger(
            "pool/0",
            pages=PAGES,
            page_size=PAGE,
            form="slab" if form == "slab" else "pages",
            classes=FORMS[form],
            cache=cache,
        )
        self.free = set(range(PAGES))
        self.held: dict[int, KVHandle] = {}
        self.texts: dict[int, Text] = {}
        self.cached: dict[Text, Cached] = {}  # by the whole text up to the end of the block
        self.generations = [0] * PAGES
        self.seen: list[KVHandle] = []
        self.now_ns = self.operations = self.rids = 0

    # --- the model -----------------------------------------------------------------------

    def prefixes(self, text: Text) -> list[Text]:
        return [text[:end] for end in range(self.block, len(text) + 1, self.block)]

    def taken(self) -> set[int]:
        return {page for handle in self.held.values() for page in handle.pages}

    def is_idle(self, entry: Cached) -> bool:
        return not set(entry.pages) & self.taken()

    def hits(self, text: Text) -> list[Cached]:
        found = []
        for prefix in self.prefixes(text):
            entry = self.cached.get(prefix)
            if entry is None:
                break
            if self.is_idle(entry) and self.now_ns - entry.used_ns > self.retention_ns:
                break
            found.append(entry)
        return found

    def use(self, entries: list[Cached]):
        for entry in entries:
            entry.used_ns = max(entry.used_ns, self.now_ns)
            if self.lru:
                entry.order = self.operations

    def longest(self, pages: set[int]) -> int:
        if self.form != "slab":
            return len(pages)
        runs = [n for n in range(PAGES + 1) if self.runs(pages, n)]
        return max(runs)

    def runs(self, pages: set[int], count: int) -> list[set[int]]:
        starts = range(PAGES - count + 1)
        return [r for r in (set(range(s, s + count)) for s in starts) if r <= pages]

    def drop(self, pages: tuple[int, ...]):
        for page in pages:
            self.generations[page] += 1
        self.free |= set(pages)

    def evict(self):
        idle = {text: entry for text, entry in self.cached.items() if self.is_idle(entry)}
        ends = {
            text: entry
            for text, entry in idle.items()
            if not any(
                t[: len(text)] == text for t in self.cached if len(t) == len(text) + self.block
            )
        }
        among = ends or idle
        text = min(among, key=lambda text: (among[text].order, -len(text)))
        self.drop(self.cached.pop(text).pages)

    def take(self, pages: tuple[int, ...], generations: tuple[int, ...]):
        """The ledger took `pages`: after the evictions that were due they must be free."""
        while self.longest(self.free) < len(pages):
            self.evict()
        assert len(set(pages)) == len(pages) and set(pages) <= self.free
        assert generations == tuple(self.generations[page] for page in pages)
        self.free -= set(pages)

    # --- what can happen -----------------------------------------------------------------

    @rule(text=TEXTS, room=st.integers(0, 6), shared=st.integers(0, PAGES))
    def hold(self, text: Text, room: int, shared: int):
        self.operations += 1
        self.rids += 1
        rid, tokens = self.rids, len(text) + room
        blocks = hash_blocks(text, self.block)[0][:shared]
        hits = self.hits(text)[:shared]
        shared_pages = tuple(page for entry in hits for page in entry.pages)
        need = max(0, -(-tokens // PAGE) - len(shared_pages))
        spare = set(range(PAGES)) - self.taken() - set(shared_pages)
        fits = self.longest(spare) >= need
        assert self.ledger.can_hold(tokens, blocks, self.now_ns) == fits
        handle = self.ledger.hold(rid, tokens, blocks=blocks, now_ns=self.now_ns)
        assert (handle is not None) == fits
        if handle is None:
            return
        assert handle.pages[: handle.shared] == shared_pages
        own = handle.pages[handle.shared :]
        assert len(own) == need and handle.capacity == len(handle.pages) * PAGE
        if self.form == "slab" and own:
            assert own == tuple(range(own[0], own[0] + need))
        self.texts[rid] = text
        self.held[rid] = KVHandle(rid, "pool/0", shared_pages, (), 0)  # what `take` must not evict
        self.take(own, handle.generations[handle.shared :])
        self.held[rid] = handle
        self.seen.append(handle)

    @rule(text=TEXTS)
    def serve(self, text: Text):
        self.hold(text, 0, PAGES)
        if self.rids in self.held:
            self.publish_text(self.rids, len(text))
            self.let_go(self.rids)

    @rule(text=TEXTS)
    def pin(self, text: Text):
        self.operations += 1
        self.rids += 1
        hits = self.hits(text)
        handle = self.ledger.pin(self.rids, hash_blocks(text, self.block)[0], self.now_ns)
        assert handle.pages == tuple(page for entry in hits for page in entry.pages)
        assert handle.shared == len(handle.pages)
        self.held[self.rids], self.texts[self.rids] = handle, text
        self.seen.append(handle)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), more=st.integers(0, 8))
    def grow(self, which: int, more: int):
        self.operations += 1
        rid = sorted(self.held)[which % len(self.held)]
        old = self.held[rid]
        need = -(-more // PAGE)
        fits = self.longest(set(range(PAGES)) - self.taken()) >= need
        grown = self.ledger.grow(old, old.capacity + more, self.now_ns)
        assert (grown is not None) == fits
        if grown is None:
            return
        whole, new = grown
        assert whole.pages == old.pages + new.pages and whole.shared == old.shared
        assert whole.generations == old.generations + new.generations
        assert whole.capacity == new.capacity == len(whole.pages) * PAGE
        assert len(new.pages) == need
        after = tuple(range(old.pages[-1] + 1, old.pages[-1] + 1 + need)) if old.pages else ()
        if self.form == "slab" and need:
            assert new.pages == tuple(range(new.pages[0], new.pages[0] + need))
            assert new.pages == after or not (old.pages and set(after) <= self.free)
        self.take(new.pages, new.generations)
        self.held[rid] = whole
        self.seen.append(whole)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), said=TEXTS, end=st.integers(0, PAGES * PAGE))
    def publish(self, which: int, said: Text, end: int):
        """A request's text goes on with what was said after its prompt."""
        rid = sorted(self.held)[which % len(self.held)]
        handle = self.held[rid]
        if handle.capacity > len(self.texts[rid]):
            self.texts[rid] = (self.texts[rid] + said)[: handle.capacity]
        self.publish_text(rid, end)

    def publish_text(self, rid: int, end: int):
        self.operations += 1
        handle = self.held[rid]
        prefixes = self.prefixes(self.texts[rid][: min(end, handle.capacity)])
        blocks = hash_blocks(self.texts[rid], self.block)[0][: len(prefixes)]
        self.ledger.publish(handle, blocks, self.now_ns)
        each = self.block // PAGE
        for i, prefix in enumerate(prefixes):
            if prefix not in self.cached:
                pages = handle.pages[i * each : (i + 1) * each]
                self.cached[prefix] = Cached(pages, self.now_ns, self.operations)
        self.use([self.cached[prefix] for prefix in prefixes])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def release(self, which: int):
        self.let_go(sorted(self.held)[which % len(self.held)])

    def let_go(self, rid: int):
        self.operations += 1
        handle = self.held.pop(rid)
        self.ledger.release(handle)
        kept = [entry for entry in self.cached.values() if set(entry.pages) <= set(handle.pages)]
        self.use(kept)
        cached = {page for entry in kept for page in entry.pages}
        self.drop(tuple(page for page in handle.pages if page not in cached))
        with pytest.raises(StaleAddress):
            self.ledger.release(handle)

    @rule(ns=st.integers(1, RETENTION_NS))
    def time_passes(self, ns: int):
        self.now_ns += ns
        # The ledger learns of time by what it is told.
        self.rids += 1
        self.ledger.release(self.ledger.pin(self.rids, (), self.now_ns))

    @rule(often=st.integers(0, 9))
    def die(self, often: int):
        if often:
            return
        self.ledger.reset()
        self.free, self.held, self.cached = set(range(PAGES)), {}, {}
        self.generations = [generation + 1 for generation in self.generations]

    # --- what always holds ---------------------------------------------------------------

    @invariant()
    def counts_agree(self):
        taken = self.taken()
        assert self.free.isdisjoint(taken)
        usage = self.ledger.usage()
        assert usage.held == len(taken)
        assert usage.free == PAGES - len(taken) == self.ledger.free
        assert usage.cached == usage.free - len(self.free)
        assert usage.largest_run == self.longest(set(range(PAGES)) - taken)

    @invariant()
    def a_page_has_one_writer(self):
        own = [page for handle in self.held.values() for page in handle.pages[handle.shared :]]
        assert len(own) == len(set(own))

    @invariant()
    def hits_agree(self):
        for text in (*self.cached, *self.texts.values()):
            hashes = hash_blocks(text, self.block)[0]
            assert self.ledger.cached(hashes, self.now_ns) == len(self.hits(text))

    @invariant()
    def stale_addresses_are_told_and_no_others(self):
        for handle in self.seen:
            valid = handle.generations == tuple(self.generations[page] for page in handle.pages)
            try:
                self.ledger.check(handle)
            except StaleAddress:
                assert not valid
            else:
                assert valid


LedgerAndModel.TestCase.settings = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=40
)
TestAnyOrderOfHoldsAndReleasesAgreesWithSets = LedgerAndModel.TestCase
