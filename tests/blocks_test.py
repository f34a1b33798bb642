"""Pages go out and come back: anywhere, as slabs, or in blocks of a few sizes."""

import pytest

from pdjax.core.blocks import PageAllocator, SlabAllocator

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
