"""A page has one owner that writes it, what is cached is shared, and old addresses are told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.events import KVHandle
from pdjax.core.ledger import Ledger, StaleAddress


def ledger(form: str = "pages", pages: int = 6, name: str = "pool/0") -> Ledger:
    return Ledger(name, pages=pages, page_size=3, form=form, layout="a layout")


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
