"""TPU implementation: copies from memory to memory, and a merge of new tokens into old pages."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import compat
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.kv_pages import ref
from kernels_pallas.kv_pages.ref import Piece
from kernels_pallas.pages import Pages

IN_FLIGHT = 16  # pages, of all layers, that are on their way at a time
AHEAD = 4  # groups of tokens that are fetched before they are merged
HBM = pl.BlockSpec(memory_space=pltpu.HBM)


def pack(
    layers: Sequence[Pages], table_n: jax.Array, *, parts: int, interpret: bool = False
) -> Piece:
    """See api.pack. Scales, a few hundredths of the bytes, are gathered by XLA."""
    _check(layers)
    P, K, p, J = layers[0].kv_PKpJ.shape
    L, n = len(layers), table_n.shape[0]

    def kernel(table_n, *refs):
        *pools, piece, moved = refs
        _move(table_n, P, pools, piece, moved, lambda page, place: (page, place))

    kv_RLKTJ = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[HBM] * L,
            out_specs=HBM,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=jax.ShapeDtypeStruct((parts, L, K // parts, n * p, J), layers[0].kv_PKpJ.dtype),
        interpret=compat.interpreted(interpret),
        name="pack_pages",
    )(table_n, *(compat.stays_in_hbm(layer.kv_PKpJ, interpret) for layer in layers))
    return Piece(kv_RLKTJ, ref.pack_scales(layers, table_n, parts))


def unpack(
    layers: Sequence[Pages], piece: Piece, table_n: jax.Array, *, interpret: bool = False
) -> list[Pages]:
    """See api.unpack."""
    _check(layers)
    L, pool = len(layers), layers[0].kv_PKpJ

    def kernel(table_n, piece, *refs):
        *_, moved = refs
        pools = refs[L : 2 * L]  # the outputs, which are the inputs
        _move(table_n, pool.shape[0], pools, piece, moved, lambda page, place: (place, page))

    kvs = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[HBM] * (1 + L),
            out_specs=[HBM] * L,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype)] * L,
        input_output_aliases={2 + i: i for i in range(L)},
        interpret=compat.interpreted(interpret),
        name="unpack_pages",
    )(table_n, piece.kv_RLKTJ, *(layer.kv_PKpJ for layer in layers))
    scales = ref.unpack_scales(layers, piece, table_n)
    return [Pages(kv, scale) for kv, scale in zip(kvs, scales, strict=True)]


def _move(table_n, P: int, pools, piece, moved, direction: Callable[..., Any]) -> None:
    """Copies the pages of all pools that table_n names from or to their places in a piece."""
    R, _, heads, T, _ = piece.shape
    n = table_n.shape[0]
    p = T // n

    def copies(i, do):
        @pl.when((table_n[i] >= 0) & (table_n[i] < P))
        def _():
            for layer, pool in enumerate(pools):
                for r in range(R):
                    page = pool.at[table_n[i], r * heads : (r + 1) * heads]
                    place = piece.at[r, layer, :, pl.ds(pl.multiple_of(i * p, p), p)]
                    source, target = direction(page, place)
                    getattr(pltpu.make_async_copy(source, target, moved), do)()

    def step(i, _):
        pl.when(i < n)(lambda: copies(i, "start"))
        pl.when(i >= IN_FLIGHT)(lambda: copies(i - IN_FLIGHT, "wait"))

    lax.fori_loop(0, n + IN_FLIGHT, step, None)


def append(
    pages: Pages,
    kv_BKTJ: jax.Array,
    scale_BK2T: jax.Array | None,
    table_Bn: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    *,
    interpret: bool = False,
) -> Pages:
    """See api.append. What is written at a time is whole tiles of memory, so the old ones are read,
    merged with the new tokens, and written back; and whole pages' scales."""
    _check([pages])
    kv_PKpJ, scale_P1X = pages
    P, K, p, J = kv_PKpJ.shape
    span = Span(table_Bn, start_B, jnp.maximum(length_B, 0), kv_BKTJ.shape[2], p, P)
    per_word = 4 // kv_PKpJ.dtype.itemsize
    g = p if span.T >= p else min(p, 8 * per_word)
    kv_BKGgJ = span.align(kv_BKTJ, 2, g)
    tokens = kv_BKGgJ.shape[3]
    kv_BGKgJ = kv_BKGgJ.transpose(0, 2, 1, 3, 4)
    new_IKwJ = _words(kv_BGKgJ, tokens).reshape(-1, K, max(1, tokens // per_word), J)
    kv_PKpJ = _merge(
        kv_PKpJ,
        new_IKwJ,
        span.groups(g),
        (K, g, J),
        lambda pool, page, at: pool.at[page, :, pl.ds(pl.multiple_of(at, g), g)],
        lambda shape: lax.broadcasted_iota(jnp.int32, shape, 1) * per_word,
        interpret,
    )
    if scale_BK2T is None or scale_P1X is None:
        return Pages(kv_PKpJ)
    scale_BK2Gp = jnp.broadcast_to(x := span.align(scale_BK2T, 3, p), (*x.shape[:-1], p))
    scale_I1X = scale_BK2Gp.transpose(0, 3, 1, 2, 4).reshape(-1, 1, K * 2 * p)
    scale_P1X = _merge(
        scale_P1X,
        lax.bitcast_convert_type(scale_I1X, jnp.int32),
        span.groups(p),
        (1, K * 2 * p),
        lambda pool, page, at: pool.at[page],
        lambda shape: lax.rem(lax.broadcasted_iota(jnp.int32, shape, 1), p),
        interpret,
    )
    return Pages(kv_PKpJ, scale_P1X)


class Groups(NamedTuple):
    """Aligned stretches of rows' texts: the page of each, P where nothing is to be written, where
    in the page it begins, and which of its tokens, from there, are new: [low, high)."""

    page_I: jax.Array
    at_I: jax.Array
    low_I: jax.Array
    high_I: jax.Array


class Span(NamedTuple):
    """Where B rows of up to T new tokens go."""

    table_Bn: jax.Array
    start_B: jax.Array
    length_B: jax.Array
    T: int
    p: int
    P: int

    def count(self, g: int) -> int:
        """Groups of g that T tokens can touch."""
        return pl.cdiv(self.T - 1, g) + 1

    def groups(self, g: int) -> Groups:
        group_1G = jnp.arange(self.count(g), dtype=jnp.int32)[None]
        begin_BG = (self.start_B[:, None] // g + group_1G) * g
        low_BG = self.start_B[:, None] - begin_BG
        high_BG = low_BG + self.length_B[:, None]
        page_BG = jnp.take_along_axis(self.table_Bn, begin_BG // self.p, axis=1, mode="clip")
        live_BG = (high_BG > 0) & (self.length_B[:, None] > 0)
        page_BG = jnp.where(live_BG, ref.existing(page_BG, self.P), self.P)
        return Groups(*(x.reshape(-1) for x in (page_BG, begin_BG % self.p, low_BG, high_BG)))

    def align(self, x: jax.Array, axis: int, g: int) -> jax.Array:
        """x [B, ..., T, ...] with its tokens where they stand in groups: axis becomes [groups, g].
        A lone token is given as it is, [1, 1], for all places of its group."""
        if self.T == 1:
            return jnp.expand_dims(x, axis)
        G = self.count(g)
        shape = [1] * x.ndim
        shape[axis] = G * g
        at_W = jnp.arange(G * g, dtype=jnp.int32)
        at_BW = jnp.clip(at_W[None] - (self.start_B % g)[:, None], 0, self.T - 1)
        shape[0] = x.shape[0]
        x = jnp.take_along_axis(x, at_BW.reshape(shape), axis=axis)
        return x.reshape(*x.shape[:axis], G, g, *x.shape[axis + 1 :])


def _words(x: jax.Array, tokens: int) -> jax.Array:
    """x [..., tokens, J] as words of 32 bits, [..., tokens / per word, J], as memory has them:
    consecutive tokens in one word. A lone token fills its word."""
    size = x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
    per_word = 4 // size
    if tokens > 1:
        bits = bits.reshape(*x.shape[:-2], tokens // per_word, per_word, x.shape[-1])
        parts = [bits[..., i, :] for i in range(per_word)]
    else:
        parts = [bits] * per_word
    word = parts[0]
    for i, part in enumerate(parts[1:], 1):
        word = word | (part << jnp.uint32(8 * size * i))
    return lax.bitcast_convert_type(word, jnp.int32)


def _merge(pool, new_I, groups: Groups, shape, place_of, first_token_of, interpret: bool):
    """The pool with groups of tokens in it. new_I are words; first_token_of says of which token of
    its group a word holds the first bits."""
    count, ring = groups.page_I.shape[0], 2 * AHEAD
    per_word = 4 // pool.dtype.itemsize

    def kernel(page_I, at_I, low_I, high_I, new_I, _, pool_ref, old_r, new_r, fetched, written):
        def fetch(i, do):
            slot = lax.rem(i, ring)
            for source, target in (
                (place_of(pool_ref, page_I[i], at_I[i]), old_r),
                (new_I.at[i], new_r),
            ):
                getattr(pltpu.make_async_copy(source, target.at[slot], fetched.at[slot]), do)()

        def write(i, do):
            slot = lax.rem(i, ring)
            target = place_of(pool_ref, page_I[i], at_I[i])
            getattr(pltpu.make_async_copy(old_r.at[slot], target, written.at[slot]), do)()

        def merge(i):
            slot = lax.rem(i, ring)
            fetch(i, "wait")
            words = pltpu.bitcast(old_r[slot], jnp.int32)
            first = first_token_of(words.shape)
            mask = _first_tokens(high_I[i] - first, per_word)
            mask &= ~_first_tokens(low_I[i] - first, per_word)
            words = (words & ~mask) | (new_r[slot] & mask)
            old_r[slot] = pltpu.bitcast(words, pool.dtype)
            write(i, "start")

        def step(i, _):
            for j, act in (
                (i - ring, lambda j: write(j, "wait")),
                (i, lambda j: fetch(j, "start")),
                (i - AHEAD, merge),
            ):
                here = jnp.clip(j, 0, count - 1)
                live = (j >= 0) & (j < count) & (page_I[here] < P)
                pl.when(live)(lambda act=act, here=here: act(here))

        lax.fori_loop(0, count + ring, step, None)

    P = pool.shape[0]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(),
            in_specs=[HBM, HBM],
            out_specs=HBM,
            scratch_shapes=[
                pltpu.VMEM((ring, *shape), pool.dtype),
                pltpu.VMEM((ring, *new_I.shape[1:]), jnp.int32),
                pltpu.SemaphoreType.DMA((ring,)),
                pltpu.SemaphoreType.DMA((ring,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={5: 0},
        interpret=compat.interpreted(interpret),
        name="append_to_pages",
    )(*groups, new_I, pool)


def _first_tokens(count, per_word: int):
    """The bits of a word's first `count` tokens."""
    count = jnp.clip(count, 0, per_word)
    some = (1 << (count * (32 // per_word))) - 1
    return jnp.where(count == per_word, -1, some)


def _check(layers: Sequence[Pages]) -> None:
    _, _, p, J = layers[0].kv_PKpJ.shape
    if J % 128 or p % 8:
        raise UnsupportedError(
            f"pages of {p} tokens and J = {J}: the TPU kernels take multiples of 8 and of 128; "
            f"pad the heads or take larger pages, or use `xla`"
        )
