"""Block hashes say which texts begin alike, in every process, and the index stays small."""

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.config import Cache
from pdjax.core.prefix import PrefixIndex, extend, hash_blocks

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)


def test_a_hash_covers_the_tokens_and_the_hash_before_them():
    def blake(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=8).digest()

    first = blake(bytes([1, 0, 0, 0, 2, 0, 0, 0]))
    second = blake(first + bytes([3, 0, 0, 0, 0, 1, 0, 0]))
    expected = int.from_bytes(first, "little"), int.from_bytes(second, "little")
    assert hash_blocks([1, 2, 3, 256, 5], block=2) == (expected, (5,))


@pytest.mark.parametrize(
    ("length", "blocks", "tail"), [(0, 0, 0), (3, 0, 3), (4, 1, 0), (7, 1, 3), (8, 2, 0), (9, 2, 1)]
)
def test_only_whole_blocks_are_hashed_and_the_rest_is_the_tail(length, blocks, tail):
    hashes, rest = hash_blocks(range(length), block=4)
    assert (len(hashes), rest) == (blocks, tuple(range(length - tail, length)))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=5), block=st.integers(1, 9))
def test_a_text_that_comes_in_pieces_has_the_hashes_of_the_whole(tokens, cuts, block):
    hashes, tail, at = (), (), 0
    for cut in (*sorted(cuts), len(tokens)):
        new, tail = extend(hashes[-1] if hashes else None, tail, tokens[at:cut], block)
        hashes, at = hashes + new, max(at, cut)
    assert (hashes, tail) == hash_blocks(tokens, block)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    one=st.lists(st.integers(0, 1), max_size=12),
    two=st.lists(st.integers(0, 1), max_size=12),
    block=st.integers(1, 3),
)
def test_blocks_are_equal_as_far_as_the_texts_are(one, two, block):
    pairs = zip(hash_blocks(one, block)[0], hash_blocks(two, block)[0], strict=False)
    for i, (a, b) in enumerate(pairs, 1):
        assert (a == b) == (one[: i * block] == two[: i * block])


def test_every_process_hashes_alike_whatever_its_hash_seed():
    program = "from pdjax.core.prefix import hash_blocks; print(hash_blocks(range(50), 8))"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert said == {str(hash_blocks(range(50), 8))}


def test_hits_end_at_the_first_block_that_is_missing():
    index = PrefixIndex(Cache(prefix=True))
    for i, hash in enumerate((1, 2, 4)):
        index.add(hash, parent=hash - 1 or None, pages=(i,))
    assert [block.hash for block in index.match([1, 2, 3, 4], now_ns=0)] == [1, 2]
    assert index.match([3, 4], now_ns=0) == []


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_an_index_used_for_ever_stays_small(eviction):
    index = PrefixIndex(Cache(prefix=True, eviction=eviction))
    block = index.add(1, None, (0,))
    index.release([block])
    index.use([block], 0)
    for now_ns in range(5000):
        index.hold([block])
        index.release([block])
        index.use([block], now_ns)
    assert len(index._leaves) < 100
    assert index.evict(1) == [0] and len(index) == index.idle == 0
