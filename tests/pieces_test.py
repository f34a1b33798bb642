"""A piece arrives token for token whatever the two pools look like, and says so when it did not."""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.programs import kv as pool
from pdjax.programs.mesh import make_mesh
from pdjax.programs.transfer import Piece, corrupt, transfer_programs
from pdjax.programs.transports import TRANSPORTS

LAYERS, TOKENS, H = 2, 48, 3
PIECE = 16  # padded length
PIECES = [(0, 1), (3, 14), (16, 16), (44, 4)]  # (start, length) inside the request's 48 tokens


class Case(NamedTuple):
    """What can differ between pools, as (source, target) where it does."""

    transport: str
    heads_and_tp: tuple[int, int, int]
    orders: tuple[pool.Order, pool.Order]
    pages: tuple[int, int]
    dtype: str

    def __str__(self) -> str:
        K, *tp = self.heads_and_tp
        orders = "-".join(order.split("_")[0] for order in self.orders)
        return f"{self.transport}-K{K}-tp{tp[0]}to{tp[1]}-{orders}-p{self.pages[0]}-{self.dtype}"


COLUMNS = (
    tuple(TRANSPORTS),
    ((4, 1, 1), (4, 1, 4), (4, 4, 2), (4, 2, 4), (2, 4, 1), (2, 1, 4), (2, 4, 4)),
    tuple(itertools.product(("token_major", "fused"), repeat=2)),
    ((16, 4), (4, 16)),
    ("float32", "bfloat16", "float8_e4m3fn", "int8"),
)


def every_pair() -> list[Case]:
    """Few cases in which every two choices of different columns meet."""
    wanted = {
        frozenset({(i, a), (j, b)})
        for i, j in itertools.combinations(range(len(COLUMNS)), 2)
        for a, b in itertools.product(COLUMNS[i], COLUMNS[j])
    }

    def met_by(case: tuple) -> set:
        return {frozenset(pair) for pair in itertools.combinations(enumerate(case), 2)} & wanted

    cases = []
    while wanted:
        best = max(itertools.product(*COLUMNS), key=lambda case: len(met_by(case)))
        wanted -= met_by(best)
        cases.append(Case(*best))
    return cases


CASES = every_pair()


@functools.cache
def tokens(K: int, dtype: str, seed: int) -> np.ndarray:
    """Any numbers but NaN, whose payload XLA may change: [layer, k or v, token, K, H]."""
    shape = (LAYERS, 2, TOKENS, K, H)
    drawn = np.random.default_rng(seed).bytes(math.prod(shape) * jnp.dtype(dtype).itemsize)
    array = np.frombuffer(drawn, jnp.dtype(dtype)).reshape(shape)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(array), np.ones((), array.dtype), array)


class Side:
    """A pool on a mesh, filled from tokens by the docstrings of pool orders and copies of heads."""

    def __init__(self, case: Case, side: int, seed: int):
        K, *tp = case.heads_and_tp
        self.page, self.order, self.K = case.pages[side], case.orders[side], K
        self.copies = max(tp[side] // K, 1)
        self.mesh = make_mesh(jax.devices()[4 * side : 4 * side + tp[side]])
        self.pages_n = np.random.default_rng(seed).permutation(TOKENS // self.page).astype(np.int32)
        self.tokens = tokens(K, case.dtype, seed).copy()
        self.kvs = self.arrays()
        self.programs = transfer_programs(self.mesh, K, True)

    def host_arrays(self) -> list[list[np.ndarray]]:
        """What the pool's arrays hold if its tokens are self.tokens."""
        paged = np.empty_like(self.tokens)
        at = np.arange(TOKENS)
        paged[:, :, self.pages_n[at // self.page] * self.page + at % self.page] = self.tokens
        paged = np.repeat(paged, self.copies, axis=3)
        paged = paged.reshape(LAYERS, 2, -1, self.page, *paged.shape[3:])
        if self.order == "token_major":
            return [list(layer) for layer in paged]
        return [[np.concatenate(layer.swapaxes(2, 3), axis=-1)] for layer in paged]

    def arrays(self) -> list[pool.KV]:
        def place(kv: list[np.ndarray]) -> pool.KV:
            return tuple(jax.device_put(x, pool.pool_sharding(kv, self.mesh)) for x in kv)

        return [place(kv) for kv in self.host_arrays()]

    def assert_holds_its_tokens(self) -> None:
        for kv, expected in zip(self.kvs, self.host_arrays(), strict=True):
            for got, want in zip(kv, expected, strict=True):
                assert got.sharding == pool.pool_sharding(kv, self.mesh)
                np.testing.assert_array_equal(
                    np.asarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8)
                )

    def extract(self, start: int, length: int) -> Piece:
        span = np.int32(start), np.int32(length)
        return self.programs.extract(self.kvs, self.pages_n, *span, T=PIECE)

    def insert(self, piece: Piece, start: int, length: int) -> bool:
        span = np.int32(start), np.int32(length)
        self.kvs, landing = self.programs.insert(self.kvs, piece, self.pages_n, *span)
        return landing.intact()


def carried(case: Case, piece: Piece, target: Side) -> Piece:
    return piece._replace(kv=TRANSPORTS[case.transport](piece.kv, target.mesh))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_piece_arrives_byte_for_byte_and_touches_nothing_else(case: Case):
    source, target = Side(case, 0, seed=1), Side(case, 1, seed=2)
    for start, length in PIECES:
        piece = carried(case, source.extract(start, length), target)
        assert target.insert(piece, start, length)
        span = slice(start, start + length)
        target.tokens[:, :, span] = source.tokens[:, :, span]
        target.assert_holds_its_tokens()
    source.assert_holds_its_tokens()


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_a_damaged_piece_is_told(case: Case):
    source, target = Side(case, 0, seed=1), Side(case, 1, seed=2)
    sound = carried(case, source.extract(3, 14), target)
    assert not target.insert(corrupt(sound), 3, 14)
    assert not target.insert(sound, 4, 13)  # sound, in the wrong place
    assert target.insert(sound, 3, 14)


def test_one_damaged_copy_of_a_head_is_told():
    """With more devices than heads every copy is looked at."""
    case = Case("device_put", (2, 1, 4), ("token_major",) * 2, (16, 16), "float32")
    source, target = Side(case, 0, seed=1), Side(case, 1, seed=2)
    piece = carried(case, source.extract(0, 8), target)
    shards = {shard.device: np.array(shard.data) for shard in piece.kv[1].addressable_shards}
    shards[list(target.mesh.devices.flat)[3]][1, 2, 0, 1] *= -1
    parts = [jax.device_put(data, device) for device, data in shards.items()]
    like = piece.kv[1]
    wrong = jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)
    assert not target.insert(piece._replace(kv=[piece.kv[0], wrong]), 0, 8)
    assert target.insert(piece, 0, 8)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pool_given_to_the_next_program_takes_nothing_from_a_piece_on_its_way(transport):
    """The source pool is donated, and overwritten in place, right after each extraction, and all
    pieces are moved and inserted only later."""
    case = Case(transport, (4, 2, 2), ("token_major",) * 2, (16, 4), "float32")
    source, target = Side(case, 0, seed=1), Side(case, 1, seed=2)

    @functools.partial(jax.jit, donate_argnums=0)
    def overwrite(kvs):
        return [tuple(x * 0 - 1 for x in kv) for kv in kvs]

    pieces = []
    for start, length in PIECES:
        pieces.append(source.extract(start, length))
        before = source.kvs[0][0].addressable_shards[0].data.unsafe_buffer_pointer()
        source.kvs = overwrite(source.kvs)
        assert source.kvs[0][0].addressable_shards[0].data.unsafe_buffer_pointer() == before
        source.kvs = [
            tuple(x.at[:].set(y) for x, y in zip(kv, fresh, strict=True))
            for kv, fresh in zip(source.kvs, source.arrays(), strict=True)
        ]
    source.kvs = overwrite(source.kvs)
    for piece, (start, length) in zip(pieces, PIECES, strict=True):
        assert target.insert(carried(case, piece, target), start, length)
        span = slice(start, start + length)
        target.tokens[:, :, span] = source.tokens[:, :, span]
    target.assert_holds_its_tokens()
