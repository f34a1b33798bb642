"""Decode attention for TPU: one loop over the blocks of all rows, pages fetched ahead.

The steps of all rows, one block of pages each, form one list; a core walks its share of it. While
a step computes, the pages of the next ones are on their way to the other places of a ring of
buffers, also across rows, so the only wait is for the first. Rows without keys have no step. With
two cores per device (v5p) the list is cut in the middle, maybe inside a row: each core gives what it
has of each row, and the parts are combined afterwards.

In a step, the queries of `c` heads are packed as one block-diagonal matrix [rows, c * 128] that
meets the heads' keys side by side, so that few rows still fill a register: one matrix product for
the scores [rows, S] with a token per lane, one with the values. For H = 64 keys and values of a
token share the 128 lanes: zeros in q hide the values, and the last 64 lanes are the result.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.ref import MASKED, Partial
from kernels_pallas.pages import Pages

LANES = 128
VMEM_BYTES = 48 * 2**20
LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call. Those of a step count pages or tokens of all heads."""

    B: int
    T: int
    K: int
    G: int
    H: int
    page: int
    run: int
    n: int
    heads: int  # c, those of a pack
    rows: int  # of a pack: c * G * T, filled up to 8
    units: int  # runs of pages of a step
    ring: int  # steps whose pages are in flight or in use
    cores: int
    window: int | None
    softcap: float | None

    @property
    def packs(self) -> int:
        return self.K // self.heads

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.units * self.run * self.page

    @property
    def steps(self) -> int:
        """The most that all rows can have."""
        return self.B * pl.cdiv(self.n, self.units * self.run)

    @property
    def lanes(self) -> int:
        """Of one head's operands and results."""
        return max(self.H, LANES)


class Refs(NamedTuple):
    """Arguments of the kernel, in order."""

    total_1: Any  # steps of all rows
    row_I: Any  # the row of each step
    offset_B: Any  # a row's step less its block
    position_B: Any
    keys_B: Any
    table_X: Any
    q_BCRH: Any
    kv_PKpJ: Any
    scale_P1X: Any  # None if the pages have none
    o_1BCRH: Any
    lse_1BCRH: Any
    ring_bKpJ: Any
    ring_b1X: Any  # None, or the scales of the same pages
    arrived: Any
    q_CRX: Any
    top_CRH: Any
    sum_CRH: Any
    o_CRX: Any
    scale_YS: Any  # None, or a step's scales: a row per head for K and one for V


def partial_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    table_Bn: jax.Array,
    position_B: jax.Array,
    keys_B: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    run: int,
    interpret: bool = False,
) -> Partial:
    """See api.BACKENDS."""
    plan = _plan(q_BTNH, pages, table_Bn, window, softcap, run)
    # Powers of two are cheaper than of e; a softcap takes its factor after the tanh.
    q_BCRH = _pack(q_BTNH * (scale * LOG2E if softcap is None else scale / softcap), plan)
    total_1, row_I, offset_B = _steps(plan, position_B, keys_B)
    o_WBCRH, lse_WBCRH = _call(plan, q_BCRH, pages, interpret)(
        total_1, row_I, offset_B, position_B, keys_B, table_Bn.reshape(-1), q_BCRH, *pages
    )
    o_WBTNH = _unpack(o_WBCRH[..., -plan.H :], plan)
    return Partial(o_WBTNH[0], _unpack(lse_WBCRH[..., :1], plan)[0, ..., 0])


def _plan(q_BTNH, pages, table_Bn, window, softcap, run) -> Plan:
    B, T, N, H = q_BTNH.shape
    _, K, p, J = pages.kv_PKpJ.shape
    G, n = N // K, table_Bn.shape[1]
    heads = max(c for c in range(1, K + 1) if K % c == 0 and (c == 1 or c * G * T <= 8))
    # Blocks of 32 times 128 heads' tokens keep a step's code short and its copies long.
    tokens = min(LANES * max(1, 32 // K), pl.cdiv(n * p, LANES) * LANES)
    return Plan(
        B=B,
        T=T,
        K=K,
        G=G,
        H=H,
        page=p,
        run=run,
        n=n,
        heads=heads,
        rows=pl.cdiv(heads * G * T, 8) * 8,
        units=pl.cdiv(tokens, run * p),
        ring=3,
        cores=1,
        window=window,
        softcap=softcap,
    )


def _pack(q_BTNH: jax.Array, plan: Plan) -> jax.Array:
    """[B, packs, rows, lanes]; a row is (head of the pack, query of its group, token)."""
    q = q_BTNH.reshape(plan.B, plan.T, plan.packs, plan.heads, plan.G, plan.H)
    q_BCRH = q.transpose(0, 2, 3, 4, 1, 5).reshape(plan.B, plan.packs, -1, plan.H)
    rows, lanes = plan.rows - q_BCRH.shape[2], plan.lanes - plan.H
    return jnp.pad(q_BCRH, ((0, 0), (0, 0), (0, rows), (0, lanes)))


def _unpack(x_WBCRH: jax.Array, plan: Plan) -> jax.Array:
    """[W, B, T, N, last]."""
    W, B, C, _, last = x_WBCRH.shape
    x = x_WBCRH[:, :, :, : plan.heads * plan.G * plan.T]
    x = x.reshape(W, B, C, plan.heads, plan.G, plan.T, last)
    return x.transpose(0, 1, 5, 2, 3, 4, 6).reshape(W, B, plan.T, -1, last)


def _steps(plan: Plan, position_B: jax.Array, keys_B: jax.Array) -> tuple[jax.Array, ...]:
    """The list of steps: how many, the row of each, and what to take from a step of a row to have
    its block."""
    first_B = jnp.zeros_like(keys_B)
    if plan.window is not None:
        first_B = jnp.maximum(position_B - plan.window + 1, 0) // plan.tokens
    count_B = jnp.maximum(pl.cdiv(keys_B, plan.tokens) - first_B, 0)
    end_B = jnp.cumsum(count_B)
    row_I = jnp.searchsorted(end_B, jnp.arange(plan.steps, dtype=jnp.int32), side="right")
    return end_B[-1:], jnp.minimum(row_I, plan.B - 1).astype(jnp.int32), end_B - count_B - first_B


def _call(plan: Plan, q_BCRH: jax.Array, pages: Pages, interpret: bool):
    kv_PKpJ = pages.kv_PKpJ
    rows = (plan.packs, plan.rows)
    shape = (plan.cores, plan.B, *rows)
    out = [
        jax.ShapeDtypeStruct((*shape, plan.lanes), jnp.float32),
        jax.ShapeDtypeStruct((*shape, LANES), jnp.float32),
    ]
    fetched = (plan.ring, plan.units * plan.run)
    scaled = pages.scale_P1X is not None
    ring_b1X = scale_YS = None
    if pages.scale_P1X is not None:
        ring_b1X = pltpu.VMEM((*fetched, *pages.scale_P1X.shape[1:]), jnp.float32)
        scale_YS = pltpu.VMEM((2 * plan.K, plan.tokens), jnp.float32)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=6,
        grid=(plan.cores,),
        in_specs=[
            pl.BlockSpec(q_BCRH.shape, lambda w, *_: (0, 0, 0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY) if scaled else None,
        ],
        out_specs=[pl.BlockSpec((1, *x.shape[1:]), lambda w, *_: (w, 0, 0, 0, 0)) for x in out],
        scratch_shapes=[
            pltpu.VMEM((*fetched, *kv_PKpJ.shape[1:]), kv_PKpJ.dtype),
            ring_b1X,
            pltpu.SemaphoreType.DMA((plan.ring,)),
            pltpu.VMEM((*rows, plan.heads * plan.lanes), q_BCRH.dtype),
            pltpu.VMEM((*rows, LANES), jnp.float32),
            pltpu.VMEM((*rows, LANES), jnp.float32),
            pltpu.VMEM((*rows, plan.heads * plan.lanes), jnp.float32),
            scale_YS,
        ],
    )
    return pl.pallas_call(
        lambda *refs: _kernel(plan, Refs(*refs)),
        grid_spec=grid_spec,
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        name="paged_attention",
    )


def _kernel(plan: Plan, refs: Refs) -> None:
    core, total = pl.program_id(0), refs.total_1[0]
    begin, end = total * core // plan.cores, total * (core + 1) // plan.cores
    refs.o_1BCRH[...] = jnp.zeros_like(refs.o_1BCRH)
    refs.lse_1BCRH[...] = jnp.full_like(refs.lse_1BCRH, MASKED)
    # Pages that a row does not have are computed on too, for nothing: they must hold numbers.
    for ring in (refs.ring_bKpJ, refs.ring_b1X):
        if ring is not None:
            ring[...] = jnp.zeros_like(ring)

    for ahead in range(plan.ring - 1):
        pl.when(begin + ahead < end)(
            lambda ahead=ahead: _copies(plan, refs, begin + ahead, "start")
        )

    def step(i, _):
        ahead = i + plan.ring - 1
        pl.when(ahead < end)(lambda: _copies(plan, refs, ahead, "start"))
        _copies(plan, refs, i, "wait")
        row = refs.row_I[i]
        block = i - refs.offset_B[row]
        pl.when((i == begin) | (row != refs.row_I[jnp.maximum(i - 1, 0)]))(
            lambda: _begin_row(plan, refs, row)
        )
        last = (block + 1) * plan.tokens >= refs.keys_B[row]
        pl.when(last)(lambda: _clear_tail(plan, refs, i))
        if refs.scale_P1X is not None:
            _line_up_scales(plan, refs, i)
        for pack in range(plan.packs):
            _attend(plan, refs, row, block, lax.rem(i, plan.ring), pack)
        pl.when(last | (i == end - 1))(lambda: _end_row(plan, refs, row))

    lax.fori_loop(begin, end, step, None)


def _copies(plan: Plan, refs: Refs, i, do: str) -> None:
    """Starts, or waits for, the copies of the pages of step i."""
    row, slot = refs.row_I[i], lax.rem(i, plan.ring)
    first = (i - refs.offset_B[row]) * plan.units  # of the row's runs of pages
    size = plan.run * plan.page
    begin, end = 0, jnp.minimum(pl.cdiv(refs.keys_B[row], size) - first, plan.units)
    if plan.window is not None:
        seen = refs.position_B[row] - plan.window + 1
        begin = jnp.clip(lax.div(seen, size) - first, 0, plan.units)

    pools = [(refs.kv_PKpJ, refs.ring_bKpJ), (refs.scale_P1X, refs.ring_b1X)]
    pools = [(pool, ring.at[slot]) for pool, ring in pools if pool is not None]

    def one(unit):
        page = refs.table_X[row * plan.n + (first + unit) * plan.run]
        for pool, ring in pools:
            source, place = (
                pool.at[pl.ds(page, plan.run)],
                ring.at[pl.ds(unit * plan.run, plan.run)],
            )
            getattr(pltpu.make_async_copy(source, place, refs.arrived.at[slot]), do)()

    def loop():
        lax.fori_loop(begin, end, lambda unit, _: one(unit), None)

    def whole():
        if do == "wait":  # for as many bytes as all copies have
            for _, ring in pools:
                pltpu.make_async_copy(ring, ring, refs.arrived.at[slot]).wait()
        else:
            for unit in range(plan.units):
                one(unit)

    lax.cond(end - begin == plan.units, whole, loop)


def _begin_row(plan: Plan, refs: Refs, row) -> None:
    """Lays out the row's queries block-diagonally and clears its sums."""
    head_CRH = lax.broadcasted_iota(jnp.int32, refs.q_BCRH.shape[1:], 1) // (plan.G * plan.T)
    q_CRH = refs.q_BCRH[row]
    for h in range(plan.heads):
        own_CRH = (
            q_CRH if plan.heads == 1 else jnp.where(head_CRH == h, q_CRH, 0).astype(q_CRH.dtype)
        )
        refs.q_CRX[:, :, h * plan.lanes : (h + 1) * plan.lanes] = own_CRH
    refs.top_CRH[...] = jnp.full_like(refs.top_CRH, MASKED)
    refs.sum_CRH[...] = jnp.zeros_like(refs.sum_CRH)
    refs.o_CRX[...] = jnp.zeros_like(refs.o_CRX)


def _clear_tail(plan: Plan, refs: Refs, i) -> None:
    """Zeroes what lies past the end of the text in the pages of step i: 0 * NaN is NaN."""
    row = refs.row_I[i]
    live = refs.keys_B[row] - (i - refs.offset_B[row]) * plan.tokens
    ring_bKpJ, slot = refs.ring_bKpJ, lax.rem(i, plan.ring)
    per_word = 4 // ring_bKpJ.dtype.itemsize

    def clear(page, _):
        words_KwJ = pltpu.bitcast(ring_bKpJ[slot, page], jnp.int32)
        word_KwJ = lax.broadcasted_iota(jnp.int32, words_KwJ.shape, 1)
        kept_KwJ = jnp.clip(live - page * plan.page - word_KwJ * per_word, 0, per_word)
        mask_KwJ = (1 << (kept_KwJ * (32 // per_word))) - 1
        mask_KwJ = jnp.where(kept_KwJ == per_word, -1, mask_KwJ)
        ring_bKpJ[slot, page] = pltpu.bitcast(words_KwJ & mask_KwJ, ring_bKpJ.dtype)

    size = plan.page * plan.run
    end = jnp.minimum(pl.cdiv(live, size), plan.units) * plan.run
    lax.fori_loop(lax.div(live, plan.page), end, clear, None)


def _line_up_scales(plan: Plan, refs: Refs, i) -> None:
    """From rows of (head, K or V, token) per page to rows of tokens per (head, K or V).

    A register holds u = 128 / p of a page's rows side by side, and is to hold one row of u pages:
    a transpose of u by u segments. Page j is rotated by j segments, so that row a of the result
    finds its segments on a diagonal, and is then rotated back by a.
    """
    slot, p = lax.rem(i, plan.ring), plan.page
    row = refs.row_I[i]
    live = refs.keys_B[row] - (i - refs.offset_B[row]) * plan.tokens
    width = min(LANES, 2 * plan.K * p)
    u, segments = max(1, LANES // p), max(1, width // p)
    lane_aH, a_aH = (lax.broadcasted_iota(jnp.int32, (segments, LANES), axis) for axis in (1, 0))
    for at, chunk in itertools.product(range(plan.tokens // LANES), range(2 * plan.K // segments)):
        scale_aH = jnp.zeros((segments, LANES), jnp.float32)
        for j in range(u):
            lanes = slice(chunk * LANES, chunk * LANES + width)
            page_1H = refs.ring_b1X[slot, at * u + j, :, lanes]
            if width < LANES:
                page_1H = jnp.pad(page_1H, ((0, 0), (0, LANES - width)))
            page_aH = jnp.broadcast_to(page_1H, (segments, LANES))
            mine_aH = (lane_aH // p - a_aH) % u == j
            scale_aH = jnp.where(mine_aH, pltpu.roll(page_aH, j * p, 1), scale_aH)
        if u > 1:
            scale_aH = pltpu.roll(scale_aH, 0, 1, stride=LANES - p, stride_axis=0)
        scale_aH = jnp.where(lane_aH < live - at * LANES, scale_aH, 0.0)
        where = slice(chunk * segments, (chunk + 1) * segments), slice(at * LANES, (at + 1) * LANES)
        refs.scale_YS[where] = scale_aH


def _scales(plan: Plan, refs: Refs, pack: int, which: int):
    """The factors of a pack's scores (which = 0) or probabilities (1), [rows, S]."""
    shape = (plan.rows, plan.tokens)
    head_RS = lax.broadcasted_iota(jnp.int32, shape, 0) // (plan.G * plan.T)
    scale_RS = jnp.zeros(shape, jnp.float32)
    for h in range(plan.heads):
        at = 2 * (pack * plan.heads + h) + which
        scale_RS = jnp.where(head_RS == h, refs.scale_YS[at : at + 1, :], scale_RS)
    return scale_RS


def _attend(plan: Plan, refs: Refs, row, block, slot, pack: int) -> None:
    """One pack of heads over one block of tokens."""
    heads = range(pack * plan.heads, (pack + 1) * plan.heads)
    scaled = refs.scale_P1X is not None
    q_RX = refs.q_CRX[pack]

    def side_by_side(lane):
        parts = [refs.ring_bKpJ[slot, :, h, :, lane : lane + plan.lanes] for h in heads]
        x_SX = jnp.concatenate([x.reshape(plan.tokens, plan.lanes) for x in parts], axis=1)
        return x_SX.astype(jnp.float32).astype(q_RX.dtype) if scaled else x_SX

    precision = lax.Precision.HIGHEST if q_RX.dtype == jnp.float32 else None
    dot = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )
    k_SX, v_SX = side_by_side(0), side_by_side(plan.H if plan.H >= LANES else 0)
    s_RS = dot(q_RX, k_SX, (((1,), (1,)), ((), ())))
    if scaled:
        s_RS *= _scales(plan, refs, pack, 0)
    if plan.softcap is not None:
        s_RS = jnp.tanh(s_RS) * (plan.softcap * LOG2E)
    s_RS = jnp.where(_seen(plan, refs, row, block, s_RS.shape), s_RS, MASKED)

    before_RH = refs.top_CRH[pack]
    top_RH = jnp.maximum(before_RH, s_RS.max(axis=1, keepdims=True))
    fade_RH = jnp.exp2(before_RH - top_RH)
    p_RS = jnp.exp2(s_RS - top_RH[:, :1])
    refs.top_CRH[pack] = top_RH
    # A lane adds up its own tokens; the lanes are added at the end of the row.
    sums_RH = p_RS.reshape(plan.rows, -1, LANES).sum(1)
    refs.sum_CRH[pack] = refs.sum_CRH[pack] * fade_RH + sums_RH
    if scaled:
        p_RS *= _scales(plan, refs, pack, 1)
    o_RX = dot(p_RS.astype(q_RX.dtype), v_SX, (((1,), (0,)), ((), ())))
    refs.o_CRX[pack] = refs.o_CRX[pack] * fade_RH[:, :1] + o_RX


def _seen(plan: Plan, refs: Refs, row, block, shape):
    """Which tokens of the block each query of a pack sees."""
    at_RS = lax.broadcasted_iota(jnp.int32, shape, 1)
    begin = block * plan.tokens
    position, keys = refs.position_B[row] - begin, refs.keys_B[row] - begin
    if plan.T == 1:
        end_RS, first = jnp.minimum(position + 1, keys), position
    else:
        t_RS = lax.broadcasted_iota(jnp.int32, shape, 0) % plan.T
        end_RS, first = jnp.minimum(position + 1 + t_RS, keys), position + t_RS
    seen_RS = at_RS < end_RS
    return seen_RS if plan.window is None else seen_RS & (at_RS > first - plan.window)


def _end_row(plan: Plan, refs: Refs, row) -> None:
    """Gives the row's result, and the logarithm of its sum."""
    shape = refs.q_BCRH.shape[1:]
    head_CRH = lax.broadcasted_iota(jnp.int32, shape, 1) // (plan.G * plan.T)
    o_CRH = jnp.zeros(shape, jnp.float32)
    for h in range(plan.heads):
        own_CRH = refs.o_CRX[:, :, h * plan.lanes : (h + 1) * plan.lanes]
        o_CRH = jnp.where(head_CRH == h, own_CRH, o_CRH)
    seen_CR1 = refs.top_CRH[:, :, :1] > MASKED
    sum_CR1 = jnp.where(seen_CR1, refs.sum_CRH[...].sum(-1, keepdims=True), 1.0)
    refs.o_1BCRH[0, row] = jnp.where(seen_CR1, o_CRH / sum_CR1, 0.0)
    lse_CRH = (refs.top_CRH[...] + jnp.log2(sum_CR1)) / LOG2E
    refs.lse_1BCRH[0, row] = jnp.where(seen_CR1, lse_CRH, MASKED)
