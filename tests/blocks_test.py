"""Pages go out and come back: anywhere, as slabs, or in blocks of a few sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.blocks import ClassAllocator, PageAllocator, SlabAllocator

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


def test_any_part_of_a_slab_may_come_back():
    slab = SlabAllocator(8)
    slab.take(8)
    slab.give((5, 1, 2, 7))
    assert (slab.free, slab.largest_run) == (4, 2)
    assert slab.largest_run_with((0, 6)) == 3
    assert slab.largest_run_with((3, 4)) == 5
    slab.give((6, 0))
    assert slab.take(3) == (0, 1, 2) and slab.take(3) == (5, 6, 7)


def test_a_slab_can_be_asked_for_the_pages_that_follow():
    slab = SlabAllocator(6)
    assert slab.take(2) == (0, 1)
    assert slab.take_at(2, 5) is None
    assert slab.take_at(2, 3) == (2, 3, 4)
    slab.give((0,))
    assert slab.take_at(1, 1) is None
    assert slab.free == 2


# --- classes -----------------------------------------------------------------------------


def test_a_request_gets_its_largest_blocks_first_and_its_tail_in_small_ones():
    blocks = ClassAllocator(32, (1, 4, 16))
    assert blocks.take(23) == (*range(16), *range(16, 20), 20, 21, 22)


def test_small_blocks_run_out_before_a_large_one_is_split():
    blocks = ClassAllocator(16, (1, 4))
    assert blocks.take(1) == (0,)  # splits the block 0 to 3
    assert blocks.take(4) == (4, 5, 6, 7)
    assert blocks.take(3) == (1, 2, 3)
    assert blocks.take(1) == (8,)


def test_a_request_is_served_in_pieces_where_no_large_block_is_left():
    blocks = ClassAllocator(8, (1, 4))
    blocks.take(8)
    blocks.give((1, 2, 3, 4, 7))
    assert sorted(blocks.take(5)) == [1, 2, 3, 4, 7]


def test_a_block_is_whole_again_once_its_last_part_is_back():
    blocks = ClassAllocator(8, (1, 2, 8))
    assert blocks.take(8) == tuple(range(8))
    for page in (3, 0, 6, 1, 7, 5, 4):
        blocks.give((page,))
    assert blocks.free == 7
    blocks.give((2,))
    assert blocks.take(8) == tuple(range(8))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    pages=st.integers(1, 40),
    sizes=st.sampled_from([(1,), (1, 2), (1, 4, 8), (1, 3, 12)]),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.randoms()), max_size=30),
)
def test_whatever_comes_back_a_request_gets_aligned_blocks_where_there_are_any(pages, sizes, moves):
    blocks, free, out = ClassAllocator(pages, sizes), set(range(pages)), []
    for take, count, random in moves:
        if not take:
            random.shuffle(out)
            given, out = out[:count], out[count:]
            blocks.give(given)
            free |= set(given)
            continue
        taken = blocks.take(count)
        assert (taken is not None) == (count <= len(free))
        at = 0
        for size in reversed(sizes if taken is not None else ()):
            runs = [set(range(s, s + size)) for s in range(0, pages - size + 1, size)]
            while at + size <= count and any(run <= free for run in runs):
                block = taken[at : at + size]
                assert block[0] % size == 0 and block == tuple(range(block[0], block[0] + size))
                assert set(block) <= free
                free -= set(block)
                at += size
        assert taken is None or at == count
        out.extend(taken or ())
        assert blocks.free == blocks.largest_run == len(free)
    blocks.give(out)
    assert sorted(blocks.take(pages)) == list(range(pages))
