"""A page has one owner that writes it, what is cached is shared, and old addresses are told."""

import pytest

from pdjax.core.config import Cache
from pdjax.core.events import KVHandle
from pdjax.core.ledger import Ledger, StaleAddress, Usage


def ledger(form: str = "pages", pages: int = 6, name: str = "pool/0") -> Ledger:
    return Ledger(name, pages=pages, page_size=3, form=form, layout="a layout")


def caching(pages: int = 6, form: str = "pages", **cache) -> Ledger:
    """Pages of 3 tokens, cached in blocks of 6."""
    cache = Cache(prefix=True, block=6, **cache)
    return Ledger("pool/0", pages=pages, page_size=3, form=form, cache=cache)


def test_a_handle_says_whose_where_and_how_much():
    books = ledger()
    assert books.hold(7, tokens=4) == KVHandle(7, "pool/0", (0, 1), (0, 0), 6, "a layout")
    assert books.free == 4


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (3, 1), (4, 2), (18, 6)])
def test_a_begun_page_counts_whole(tokens, pages):
    assert ledger().pages_for(tokens) == pages == len(ledger().hold(0, tokens).pages)


@pytest.mark.parametrize("form", ["pages", "slab"])
def test_room_now_and_room_ever_differ(form):
    books = ledger(form)
    books.hold(0, tokens=13)  # 5 of 6 pages
    assert books.can_hold(3) and not books.can_hold(4)
    assert books.could_ever_hold(18) and not books.could_ever_hold(19)
    assert books.hold(1, tokens=4) is None
    assert books.free == 1


def test_a_fragmented_slab_says_what_it_can_hold():
    books = ledger("slab")
    handles = [books.hold(rid, tokens=6) for rid in range(3)]
    books.release(handles[0])
    books.release(handles[2])
    assert books.free == 4
    assert books.can_hold(6) and not books.can_hold(7)


def test_a_generation_grows_each_time_its_page_is_released():
    books = ledger(pages=1)
    for generation in range(3):
        handle = books.hold(0, tokens=3)
        assert handle.generations == (generation,)
        books.release(handle)


def test_a_stale_address_is_told_with_page_and_generations():
    books = ledger()
    old = books.hold(7, tokens=6)
    books.check(old)
    books.release(old)
    books.hold(8, tokens=3)  # page 0 has a new owner
    message = r"request 7 holds page 0 of pool `pool/0` at generation 0, but the page is at 1"
    with pytest.raises(StaleAddress, match=message):
        books.check(old)


@pytest.mark.parametrize("form", ["pages", "slab"])
def test_a_second_release_raises_and_changes_nothing(form):
    books = ledger(form)
    handle = books.hold(0, tokens=6)
    books.release(handle)
    with pytest.raises(StaleAddress):
        books.release(handle)
    assert books.free == books.largest_run == 6


def test_a_handle_of_another_pool_is_told():
    handle = ledger(name="prefill/0").hold(0, tokens=3)
    with pytest.raises(StaleAddress, match="of pool `prefill/0` used on pool `decode/0`"):
        ledger(name="decode/0").release(handle)


def test_a_request_has_one_handle_per_pool():
    books = ledger()
    books.hold(7, tokens=3)
    with pytest.raises(ValueError, match="request 7 holds pages of pool `pool/0` already"):
        books.hold(7, tokens=3)
    assert books.free == 5


# --- growing -----------------------------------------------------------------------------


def test_growth_names_the_new_pages_and_the_new_capacity():
    books = ledger()
    first = books.hold(7, tokens=4)
    whole, new = books.grow(first, tokens=10)
    assert new == KVHandle(7, "pool/0", (2, 3), (0, 0), 12, "a layout")
    assert whole == KVHandle(7, "pool/0", (0, 1, 2, 3), (0, 0, 0, 0), 12, "a layout")
    books.check(first)  # what it names is still the request's
    with pytest.raises(StaleAddress, match="names 2 pages of pool `pool/0` but holds 4"):
        books.release(first)
    books.release(whole)
    assert books.free == 6


def test_growth_within_the_capacity_takes_nothing():
    books = ledger()
    handle = books.hold(7, tokens=4)
    assert books.grow(handle, tokens=6) == (handle, KVHandle(7, "pool/0", (), (), 6, "a layout"))
    assert books.free == 4


def test_growth_without_room_changes_nothing():
    books = ledger()
    handle = books.hold(7, tokens=12)
    assert books.grow(handle, tokens=21) is None
    assert books.free == 2
    books.release(handle)


def test_a_slab_grows_in_place_where_it_can_and_by_another_run_where_not():
    books = ledger("slab")
    before, handle, after = books.hold(1, 3), books.hold(2, 3), books.hold(3, 3)  # 0, 1, 2
    books.release(before)
    whole, _ = books.grow(handle, tokens=6)
    assert whole.pages == (1, 0)  # 2 is taken; 0 fits first
    books.release(after)
    whole, _ = books.grow(whole, tokens=7)
    assert whole.pages == (1, 0, 2)
    last = books.hold(4, 3)  # 3
    books.release(whole)
    assert books.grow(last, tokens=6)[0].pages == (3, 4)  # though 0 fits first


# --- sharing -----------------------------------------------------------------------------


def test_a_cached_prefix_is_shared_and_the_rest_is_ones_own():
    books = caching(pages=8)
    first = books.hold(1, tokens=14)  # pages 0 to 4
    books.publish(first, [10, 11], now_ns=0)
    second = books.hold(2, tokens=14, blocks=[10, 11, 12])
    assert (second.pages, second.shared) == ((0, 1, 2, 3, 5), 4)
    assert books.usage() == Usage(held=6, cached=0, free=2, largest_run=2)
    books.release(first)
    books.check(second)
    assert books.usage() == Usage(held=5, cached=0, free=3, largest_run=3)
    books.release(second)
    assert books.usage() == Usage(held=0, cached=4, free=8, largest_run=8)
    assert books.cached([10, 11, 12], now_ns=0) == 2


def test_a_prompt_that_is_cached_whole_or_shorter_than_a_block_holds_what_it_needs():
    books = caching()
    handle = books.hold(1, tokens=12)
    books.publish(handle, [10, 11], now_ns=0)
    books.release(handle)
    whole = books.hold(2, tokens=12, blocks=[10, 11])
    assert (whole.pages, whole.shared, whole.capacity) == ((0, 1, 2, 3), 4, 12)
    short = books.hold(3, tokens=2)
    assert (len(short.pages), short.shared) == (1, 0)


def test_how_many_blocks_are_shared_is_the_callers_to_say():
    books = caching()
    handle = books.hold(1, tokens=12)
    books.publish(handle, [10, 11], now_ns=0)
    books.release(handle)
    again = books.hold(2, tokens=12, blocks=[10])  # its last block is computed again
    assert (again.pages[:2], again.shared) == ((0, 1), 2)
    assert not {2, 3} & set(again.pages)


def test_a_reader_shares_and_owns_nothing():
    books = caching()
    handle = books.hold(1, tokens=12)
    books.publish(handle, [10, 11], now_ns=0)
    books.release(handle)
    reader = books.pin(2, [10, 11, 12], now_ns=0)
    assert (reader.pages, reader.shared, reader.capacity) == ((0, 1, 2, 3), 4, 12)
    assert books.hold(3, tokens=7) is None  # what is read is not evicted
    books.release(reader)
    assert books.hold(3, tokens=18) is not None
    assert books.pin(4, [10], now_ns=0).pages == ()


def test_a_second_release_takes_nothing_from_those_who_share():
    books = caching()
    first = books.hold(1, tokens=6)
    books.publish(first, [10], now_ns=0)
    second = books.hold(2, tokens=6, blocks=[10])
    books.release(first)
    with pytest.raises(StaleAddress, match="request 1 names 2 pages of pool `pool/0` but holds 0"):
        books.release(first)
    assert books.hold(3, tokens=15) is None
    books.check(second)


def test_what_the_index_has_already_stays_private_and_is_freed():
    books = caching()
    one, two = books.hold(1, tokens=6), books.hold(2, tokens=12)
    books.publish(one, [10], now_ns=0)
    books.publish(two, [10, 11], now_ns=0)  # its own copy of 10 stays its own
    books.release(one)
    books.release(two)
    assert books.usage().cached == 4
    assert books.pin(3, [10, 11], now_ns=0).pages == (0, 1, 4, 5)


def test_an_address_is_stale_once_its_page_was_evicted_and_not_before():
    books = caching()
    handle = books.hold(1, tokens=6)
    books.publish(handle, [10], now_ns=0)
    books.release(handle)
    books.check(handle)  # still the same KV
    books.hold(2, tokens=18)
    with pytest.raises(StaleAddress):
        books.check(handle)


def test_an_unused_prefix_counts_as_gone_after_the_retention_time_and_is_there_when_used():
    books = caching(retention_s=1e-9)
    handle = books.hold(1, tokens=6)
    books.publish(handle, [10], now_ns=5)
    assert books.cached([10], now_ns=9) == 1  # held
    books.release(handle)
    assert (books.cached([10], now_ns=6), books.cached([10], now_ns=7)) == (1, 0)
    books.release(books.pin(2, [10], now_ns=6))
    assert (books.cached([10], now_ns=7), books.cached([10], now_ns=8)) == (1, 0)
    assert books.usage().cached == 2


def test_without_a_cache_nothing_is_shared():
    books = ledger()
    handle = books.hold(1, tokens=3)
    books.publish(handle, [10], now_ns=0)
    books.release(handle)
    assert books.cached([10], now_ns=0) == 0
    assert books.hold(2, tokens=3, blocks=[10]).shared == 0


def test_a_page_cannot_be_published_as_two_texts_nor_one_that_is_not_there():
    books = caching()
    handle = books.hold(1, tokens=6)
    books.publish(handle, [10], now_ns=0)
    with pytest.raises(ValueError, match="page 0 of pool `pool/0` is cached as block 10"):
        books.publish(handle, [77], now_ns=0)
    with pytest.raises(ValueError, match="publishes 2 blocks of 2 pages but holds 2 pages"):
        books.publish(handle, [10, 11], now_ns=0)


def test_a_pool_that_died_is_empty_and_every_handle_of_before_is_told():
    books = caching()
    held, gone = books.hold(1, tokens=6), books.hold(2, tokens=6)
    books.publish(gone, [10], now_ns=0)
    books.release(gone)
    books.reset()
    assert books.usage() == Usage(held=0, cached=0, free=6, largest_run=6)
    assert books.cached([10], now_ns=0) == 0
    for handle in (held, gone):
        with pytest.raises(StaleAddress):
            books.check(handle)
    assert books.hold(1, tokens=18) is not None


# --- eviction ----------------------------------------------------------------------------


CHAINS = ([10], [20, 21], [30, 31])


@pytest.mark.parametrize(
    ("eviction", "left"),
    [
        ("lru", [1, 0, 2]),  # 21, then 20: 10 was used since
        ("fifo", [0, 1, 2]),  # 10, then 21, which ends the next chain
    ],
)
def test_each_eviction_takes_ends_of_chains_in_its_own_order(eviction, left):
    books = caching(pages=10, eviction=eviction)
    for rid, chain in enumerate(CHAINS):
        handle = books.hold(rid, tokens=6 * len(chain))
        books.publish(handle, chain, now_ns=rid)
        books.release(handle)
    books.release(books.pin(7, [10], now_ns=9))
    books.hold(8, tokens=12)  # two blocks go
    assert [books.cached(chain, now_ns=9) for chain in CHAINS] == left


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_what_comes_before_a_held_block_goes_last(eviction):
    books = caching(pages=10, eviction=eviction)
    one, two = books.hold(1, tokens=12), books.hold(2, tokens=18)
    books.publish(one, [10, 11], now_ns=0)
    books.release(one)
    books.publish(two, [10, 11, 12], now_ns=0)  # 12 is held by one with a 10 and 11 of its own
    third = books.hold(3, tokens=0, blocks=[10])
    books.release(third)
    assert books.free == 4
    books.release(books.hold(4, tokens=6))  # takes 11's pages
    assert (books.cached([10, 11], 1), books.free) == (1, 4)
    books.hold(5, tokens=12)
    assert books.cached([10, 11, 12], 1) == 0  # the chain is broken, though 12 is still there
    books.check(two)
    books.release(two)
    books.release(books.hold(6, tokens=18))  # 12 can go as well
    assert books.free == 6


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_a_block_that_got_a_successor_while_idle_outlives_it(eviction):
    books = caching(pages=8, eviction=eviction)
    one, two = books.hold(1, tokens=6), books.hold(2, tokens=12)
    books.publish(one, [10], now_ns=0)
    books.release(one)
    books.publish(two, [10, 11], now_ns=0)
    books.release(two)
    books.hold(3, tokens=18)  # 4 free pages and 11's
    assert books.cached([10, 11], now_ns=0) == 1


def test_a_slab_evicts_until_its_run_is_there():
    books = caching(pages=6, form="slab")
    handles = [books.hold(rid, tokens=6) for rid in range(3)]
    for rid, handle in enumerate(handles):
        books.publish(handle, [rid], now_ns=rid)
    for rid in (0, 2):
        books.release(handles[rid])
    assert books.usage() == Usage(held=2, cached=4, free=4, largest_run=2)
    assert books.usage().fragmentation == 0.5
    assert not books.can_hold(7) and books.hold(8, tokens=7) is None
    assert [books.cached([rid], now_ns=3) for rid in range(3)] == [1, 1, 1]
    assert books.hold(8, tokens=6).pages == (0, 1)
    assert [books.cached([rid], now_ns=3) for rid in range(3)] == [0, 1, 1]
