"""Pages go out and come back; a page has one owner, and old addresses are told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.blocks import Ledger, PageAllocator, SlabAllocator, StaleAddress
from pdjax.core.events import KVHandle


def ledger(form: str = "pages", pages: int = 6, name: str = "pool/0") -> Ledger:
    return Ledger(name, pages=pages, page_size=3, form=form, layout="a layout")


# --- pages -------------------------------------------------------------------------------


def test_pages_released_last_are_reused_first():
    pages = PageAllocator(6)
    assert pages.take(2) == (0, 1)
    assert pages.take(3) == (2, 3, 4)
    pages.give((0, 1))
    assert pages.take(1) == (0,)
    assert set(pages.take(2)) == {1, 5}


def test_pages_need_not_be_neighbours():
    pages = PageAllocator(4)
    first, second, third = pages.take(1), pages.take(2), pages.take(1)
    pages.give(first)
    pages.give(third)
    assert pages.largest_run == pages.free == 2
    assert sorted(pages.take(2)) == [0, 3] and second == (1, 2)


# --- slabs -------------------------------------------------------------------------------


def test_a_slab_goes_where_it_fits_first():
    slab = SlabAllocator(10)
    a, _, c, _ = slab.take(3), slab.take(1), slab.take(2), slab.take(4)
    slab.give(c)
    slab.give(a)  # free: 0-2 and 4-5
    assert slab.take(2) == (0, 1)  # though 4-5 would fit exactly
    assert slab.take(2) == (4, 5)
    assert slab.take(1) == (2,)


def test_an_exact_fit_leaves_nothing_behind():
    slab = SlabAllocator(6)
    assert slab.take(6) == (0, 1, 2, 3, 4, 5)
    assert (slab.free, slab.largest_run) == (0, 0)
    assert slab.take(1) is None


@pytest.mark.parametrize(
    ("first", "then", "runs"),
    [
        ((), (1,), [1]),  # no free neighbour
        ((0,), (1,), [2]),  # the left one
        ((2,), (1,), [2]),  # the right one
        ((0, 2), (1,), [3]),  # both
        ((0,), (2,), [1, 1]),  # not neighbours
        ((0, 2, 4), (1, 3), [5]),  # all together again
    ],
)
def test_a_released_slab_coalesces_with_its_free_neighbours(first, then, runs):
    slab = SlabAllocator(5)
    for _ in range(5):
        slab.take(1)
    for page in (*first, *then):
        slab.give((page,))
    assert slab.free == sum(runs)
    assert slab.largest_run == max(runs)
    assert [len(slab.take(n)) for n in sorted(runs, reverse=True)] == sorted(runs, reverse=True)


@pytest.mark.parametrize("allocator", [PageAllocator, SlabAllocator])
def test_what_is_not_there_is_not_given_and_takes_nothing(allocator):
    pages = allocator(6)
    pages.take(4)
    assert pages.take(3) is None
    assert pages.free == 2
    assert len(pages.take(2)) == 2


def test_a_slab_in_pieces_refuses_what_its_sum_would_hold():
    slab = SlabAllocator(5)
    a, _, c = slab.take(2), slab.take(1), slab.take(2)
    slab.give(a)
    slab.give(c)
    assert (slab.free, slab.largest_run) == (4, 2)
    assert slab.take(3) is None


# --- the ledger ----------------------------------------------------------------------------


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


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    form=st.sampled_from(["pages", "slab"]),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 21)), max_size=40),
)
def test_any_holds_and_releases_agree_with_a_set_of_pages(form, moves):
    books, free, held, releases = ledger(form), set(range(6)), [], [0] * 6
    for release, number in moves:
        if release and held:
            handle = held.pop(number % len(held))
            books.release(handle)
            free |= set(handle.pages)
            for page in handle.pages:
                releases[page] += 1
        else:
            need = -(-number // 3)
            starts = range(6 - need + 1)
            runs = [s for s in starts if set(range(s, s + need)) <= free]
            fits = bool(runs) if form == "slab" else len(free) >= need
            assert books.can_hold(number) == fits
            handle = books.hold(0, number)
            if not fits:
                assert handle is None
                continue
            assert set(handle.pages) <= free and len(set(handle.pages)) == need
            assert form == "pages" or handle.pages == tuple(range(runs[0], runs[0] + need))
            assert handle.generations == tuple(releases[page] for page in handle.pages)
            free -= set(handle.pages)
            held.append(handle)
        assert books.free == len(free)
    for handle in held:
        books.release(handle)
    assert books.free == books.largest_run == 6
