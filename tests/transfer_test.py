"""KV crosses between meshes byte for byte, by programs.transports and by nothing else."""

import functools
import math
from collections.abc import Sequence
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import SPLIT, config_of, tiny
from jax.sharding import Mesh
from msgspec import structs

from pdjax.core.events import Hold, KVHandle, Send
from pdjax.engine import Engine
from pdjax.engine.pools import NotHeld, PoolArrays
from pdjax.programs.kv import POOL_AXES, Layout, make_pool
from pdjax.programs.mesh import make_mesh, sharding
from pdjax.programs.transfer import LayoutMismatch, check_compatible, transfer_programs
from pdjax.programs.transports import device_put

ARCH = tiny().arch
LAYERS, TOKENS = 2, 128  # of these pools
PIECE = 32  # padded length of a piece


def layout(page_size: int, tp: int, dtype: str = "float32") -> Layout:
    pages = TOKENS // page_size
    return Layout("tiny", LAYERS, ARCH.K, ARCH.H, dtype, page_size, pages, tp)


def mesh_at(first: int, tp: int) -> Mesh:
    return make_mesh(jax.devices()[first : first + tp])


@functools.cache
def random_pool(page_size: int, dtype: str, seed: int) -> list[np.ndarray]:
    """Any numbers, huge, tiny, infinite: per layer [k or v, P, p, K, H]. No NaN: XLA keeps no
    payload of those in bfloat16."""
    shape = (2, TOKENS // page_size, page_size, ARCH.K, ARCH.H)
    rng, itemsize = np.random.default_rng(seed), jnp.dtype(dtype).itemsize
    pool = []
    for _ in range(LAYERS):
        array = np.frombuffer(rng.bytes(math.prod(shape) * itemsize), jnp.dtype(dtype)).reshape(
            shape
        )
        with np.errstate(invalid="ignore"):
            pool.append(np.where(np.isnan(array), np.ones((), array.dtype), array))
    return pool


def on_mesh(pool: Sequence[np.ndarray], mesh: Mesh) -> list[tuple[jax.Array, ...]]:
    place = sharding(mesh, POOL_AXES["token_major"])
    return [tuple(jax.device_put(array, place) for array in kv) for kv in pool]


def assert_same_bytes(kvs: Sequence[tuple[jax.Array, ...]], expected: Sequence[np.ndarray]):
    for kv, want in zip(kvs, expected, strict=True):
        got = np.stack([np.asarray(array) for array in kv])
        bits = f"u{want.itemsize}"
        np.testing.assert_array_equal(got.view(bits), want.view(bits))


def table(page_size: int, pages: Sequence[int]) -> np.ndarray:
    full = np.full(TOKENS // page_size, TOKENS // page_size, np.int32)
    full[: len(pages)] = pages
    return full


def places(table_n: np.ndarray, page_size: int, start: int, length: int):
    """(page, place in it) of tokens [start, start + length), worked out on the host."""
    at = np.arange(start, start + length)
    return table_n[at // page_size], at % page_size


# (start, length): one token, across pages, full pages, inside a page, at the end.
PIECES = [(0, 1), (0, 17), (16, 32), (4, 3), (47, 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_sizes", [(16, 4), (4, 16)])
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)])
def test_a_moved_piece_is_equal_byte_for_byte(tp, page_sizes, dtype):
    source, target = mesh_at(0, tp[0]), mesh_at(4, tp[1])
    extract = transfer_programs(source, ARCH.K, False).extract
    insert = transfer_programs(target, ARCH.K, False).insert
    sent, expected = random_pool(page_sizes[0], dtype, 1), random_pool(page_sizes[1], dtype, 2)
    theirs, ours = on_mesh(sent, source), on_mesh(expected, target)
    expected = [array.copy() for array in expected]
    # Pages in no order; the request has 48 tokens' worth of them on both sides.
    from_n = table(page_sizes[0], [5, 2, 7, 0, 1, 4, 3, 6, 9, 8, 11, 10][: 48 // page_sizes[0]])
    to_n = table(page_sizes[1], [6, 3, 0, 9, 8, 4, 7, 1, 2, 5, 11, 10][: 48 // page_sizes[1]])
    for start, length in PIECES:
        span = np.int32(start), np.int32(length)
        piece = extract(theirs, from_n, *span, T=PIECE)
        piece = piece._replace(kv=device_put(piece.kv, target))
        ours, landing = insert(ours, piece, to_n, *span)
        assert landing.intact()  # as far as anyone looked
        here = places(from_n, page_sizes[0], start, length)
        there = places(to_n, page_sizes[1], start, length)
        for layer in range(LAYERS):
            expected[layer][:, *there] = sent[layer][:, *here]
        # Whole pools: what is past `length` and the pages of others are as they were.
        assert_same_bytes(ours, expected)
    assert_same_bytes(theirs, sent)


def test_a_moved_piece_is_split_over_the_heads_of_the_target():
    source, target = mesh_at(0, 2), mesh_at(4, 4)
    kvs = make_pool(layout(16, 2), source)
    extract = transfer_programs(source, ARCH.K, False).extract
    piece = extract(kvs, table(16, [0]), np.int32(0), np.int32(PIECE), T=PIECE)
    for array in device_put(piece.kv, target):
        assert array.sharding.device_set == set(target.devices.flat)
        assert {shard.data.shape for shard in array.addressable_shards} == {
            (2, PIECE, ARCH.K // 4, ARCH.H)
        }


def test_nothing_but_a_transport_crosses_meshes():
    """The guard that the tests run under makes any other copy an error."""
    source, target = mesh_at(0, 2), mesh_at(2, 2)
    pool = make_pool(layout(16, 2), source)
    with pytest.raises(Exception, match="Disallowed device-to-device transfer"):
        jax.device_put(pool[0][0], sharding(target, POOL_AXES["token_major"]))
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda a, b: a + b)(pool[0][0], make_pool(layout(16, 2), target)[0][0])
    piece = [jnp.stack(kv) for kv in pool]
    jax.block_until_ready(device_put(piece, target))
    with pytest.raises(Exception, match="Disallowed device-to-device transfer"):
        jax.device_put(piece[0], sharding(target, (None, *POOL_AXES["token_major"])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is float32 there and bfloat16 here"),
        ({"layers": 3}, "layers is 2 there and 3 here"),
        ({"kv_heads": 2}, "kv_heads is 4 there and 2 here"),
        ({"head_dim": 8}, "head_dim is 16 there and 8 here"),
        ({"model": "other"}, "model is tiny there and other here"),
        ({"scale": "token"}, "scale is none there and token here"),
        ({"format": 2}, "format is 1 there and 2 here"),
        (
            {"dtype": "int8", "layers": 3},
            "layers is 2 there and 3 here; dtype is float32 there and int8 here; serve one model",
        ),
    ],
)
def test_pools_of_other_contents_are_refused_naming_both_sides(change, message):
    names = ("prefill/0", "decode/1")
    with pytest.raises(LayoutMismatch, match=f"from `prefill/0` to `decode/1`: {message}"):
        check_compatible(layout(16, 1), replace(layout(16, 1), **change), names)


def test_what_is_converted_on_the_way_may_differ():
    fused = replace(layout(4, 4), order="fused", pages=7)
    check_compatible(layout(16, 1), fused, ("prefill/0", "decode/0"))


def test_a_fingerprint_tells_every_field_of_a_layout():
    one = layout(16, 1)
    others = [
        replace(one, **{f.name: "fused" if f.name == "order" else f"{getattr(one, f.name)}0"})
        for f in fields(one)
    ]
    assert len({other.fingerprint for other in [one, *others]}) == 1 + len(others)


def test_a_handle_for_another_layout_is_refused_with_both_fingerprints():
    ours, other = layout(16, 1), layout(4, 1)
    pool = PoolArrays(ours, mesh_at(0, 1), context=64)
    handle = KVHandle(7, "decode/0", (0, 1), (0, 0), 32, other.fingerprint)
    with pytest.raises(ValueError) as caught:
        pool.hold(handle)
    assert other.fingerprint in str(caught.value) and ours.fingerprint in str(caught.value)
    assert "request 7" in str(caught.value)
    with pytest.raises(NotHeld, match="request 7 has no pages here"):
        pool.table(7)
    pool.hold(KVHandle(7, "decode/0", (3, 1), (0, 0), 32, ours.fingerprint))
    assert pool.table(7).tolist() == [3, 1, ours.pages, ours.pages]


def test_a_piece_beyond_what_its_request_holds_is_refused_with_both_numbers():
    """A length that one side got wrong must not end up in another request's pages."""
    ours = layout(4, 1)
    pool = PoolArrays(ours, mesh_at(0, 1), context=64)
    pool.hold(KVHandle(7, "decode/0", (3, 1), (0, 0), 8, ours.fingerprint))
    nine = Send(5, 7, "prefill/0", "decode/0", 0, 9, 0, 1)
    said = (
        "piece 5 of request 7, from `prefill/0` to `decode/0`, ends at token 9, but the request "
        "has pages for 8"
    )
    with pytest.raises(NotHeld, match=said):
        pool.extract(nine)
    piece = pool.extract(structs.replace(nine, length=8))
    with pytest.raises(NotHeld, match=said):
        pool.insert(nine, piece)
    pool.release(7)
    with pytest.raises(NotHeld, match="request 7 has no pages here"):
        pool.insert(structs.replace(nine, length=8), piece)


def test_pages_that_a_request_gets_later_follow_those_it_has():
    ours = layout(4, 1)
    pool = PoolArrays(ours, mesh_at(0, 1), context=20)
    pool.hold(KVHandle(7, "decode/0", (3, 1), (0, 0), 8, ours.fingerprint))
    before = pool.table(7)
    pool.grow(KVHandle(7, "decode/0", (9,), (2,), 12, ours.fingerprint))
    # A block of a page class may hold more than the longest text.
    pool.grow(KVHandle(7, "decode/0", (4, 5, 6, 7), (0,) * 4, 28, ours.fingerprint))
    assert pool.table(7).tolist() == [3, 1, 9, 4, 5]
    assert before.tolist() == [3, 1, 32, 32, 32]  # a program may still be reading it


def test_an_engine_refuses_the_pages_of_another_engines_scheduler():
    """Two engines whose decode pools differ in page size only."""
    coarse = SPLIT | {"decode": replace(SPLIT["decode"], pool=SPLIT["prefill"].pool)}
    engine, other = (Engine(config_of(p), "it", tiny()) for p in (SPLIT, coarse))
    handle = other.scheduler().instances["decode/0"].pool.hold(0, 20)
    with pytest.raises(ValueError, match=r"p16/P32/tp1`, pool `decode/0` has `.*p4/P128/tp1`"):
        engine.note(Hold(handle))
