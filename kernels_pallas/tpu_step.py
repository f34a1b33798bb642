"""What a step of tpu_walk computes.

The queries of a pack of c heads are one block-diagonal matrix [rows, c * 128] that meets the heads'
keys side by side, so that few rows still fill a register: one matrix product for the scores
[rows, S], a token per lane, and one with the values. For H = 64 the key and the value of a token
share 128 lanes: zeros in q hide the value, and the last 64 lanes are the result.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu_walk import LANES, LOG2E, MASKED, Arithmetic, Plan, Refs


def begin_row(plan: Plan, refs: Refs, slot) -> None:
    """Lays out the row's queries and clears its sums."""

    def one(pack, _):
        q_RH = refs.ring_bCRH[slot, pack]
        for h in range(plan.heads):
            own_RH = _head(plan, q_RH.shape) == h
            own_RH = q_RH if plan.heads == 1 else jnp.where(own_RH, q_RH, jnp.zeros_like(q_RH))
            refs.q_CRX[pack, :, _lanes(plan, h)] = own_RH
        for sums, value in ((refs.top_CRH, MASKED), (refs.sum_CRH, 0.0), (refs.o_CRX, 0.0)):
            sums[pack] = jnp.full(sums.shape[1:], value, sums.dtype)

    lax.fori_loop(0, plan.packs, one, None, unroll=not plan.loop)


def compute(plan: Plan, refs: Refs, row, block, slot) -> None:
    """Adds what the row's queries find in one block."""
    begin = block * plan.tokens
    position, keys = refs.position_V[row] - begin, refs.keys_V[row] - begin
    if refs.scale_P1X is not None:
        _line_up_scales(plan, refs, keys, slot)
    if not plan.loop:
        parts = [Part(pack, 0, position, keys, slot, True) for pack in range(plan.packs)]
        _attend(plan, refs, parts)
        return

    def all_packs(masked):
        @functools.partial(lax.fori_loop, 0, plan.packs, init_val=None)
        def _(pack, _):
            if refs.kv_2SX is not None:
                for which in range(2):
                    refs.kv_2SX[which] = _side_by_side(plan, refs, slot, pack, which)

            @functools.partial(lax.fori_loop, 0, plan.rows // plan.part, init_val=None)
            def _(part, _):
                first = part * plan.part
                _attend(plan, refs, [Part(pack, first, position, keys, slot, masked)])

    # Large tiles are worth a second copy of the code, for blocks that every query sees.
    clear = plan.tokens <= jnp.minimum(position + 1, keys)
    if plan.window is not None:
        clear &= position + plan.T - plan.window <= 0
    lax.cond(clear, lambda: all_packs(False), lambda: all_packs(True))


def end_row(plan: Plan, refs: Refs) -> None:
    """The row's result, and the logarithm of its sum."""

    def one(pack, _):
        top_RH = refs.top_CRH[pack]
        seen_R1 = top_RH[:, :1] > MASKED
        sum_R1 = jnp.where(seen_R1, refs.sum_CRH[pack].sum(-1, keepdims=True), 1.0)
        o_RH = refs.o_CRX[pack, :, _lanes(plan, 0)]
        for h in range(1, plan.heads):
            own_RH = _head(plan, o_RH.shape) == h
            o_RH = jnp.where(own_RH, refs.o_CRX[pack, :, _lanes(plan, h)], o_RH)
        o_RH = jnp.where(seen_R1, o_RH * (1.0 / sum_R1), 0.0)
        refs.out_CRH[pack] = o_RH.astype(plan.o_dtype)
        if refs.out_lse_CRH is not None:
            lse_RH = (top_RH + jnp.log2(sum_R1)) / LOG2E
            refs.out_lse_CRH[pack] = jnp.where(seen_R1, lse_RH, MASKED)

    lax.fori_loop(0, plan.packs, one, None, unroll=not plan.loop)


ARITHMETIC: Arithmetic = (begin_row, compute, end_row)


def _lanes(plan: Plan, h: int) -> slice:
    return slice(h * plan.lanes, (h + 1) * plan.lanes)


def _head(plan: Plan, shape: tuple[int, ...]):
    """Which head of its pack each row belongs to."""
    return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2) // (plan.G * plan.T)


class Part(NamedTuple):
    """Rows of a pack's queries that meet a block together. Positions count from its beginning."""

    pack: Any
    first: Any  # row
    position: Any
    keys: Any
    slot: Any
    masked: bool

    def rows(self, plan: Plan):
        """Index of these rows in what is kept per row."""
        return self.pack, (pl.ds(self.first, plan.part) if plan.loop else slice(None))


def _attend(plan: Plan, refs: Refs, parts: Sequence[Part]) -> None:
    """Some parts, in stages: while one waits for the matrix unit, the others have work."""
    scores = [_scores(plan, refs, part) for part in parts]
    weights = [_weights(plan, refs, part, s_RS) for part, s_RS in zip(parts, scores, strict=True)]
    for part, (p_RS, fade_RH) in zip(parts, weights, strict=True):
        o_RX = _dot(p_RS, _operand(plan, refs, part, 1), 0)
        rows = part.rows(plan)
        refs.o_CRX[rows] = refs.o_CRX[rows] * _wide(fade_RH, o_RX.shape[1]) + o_RX


def _scores(plan: Plan, refs: Refs, part: Part):
    """In powers of 2, MASKED where a query sees no token."""
    s_RS = _dot(refs.q_CRX[part.rows(plan)], _operand(plan, refs, part, 0), 1)
    if refs.scale_P1X is not None:
        s_RS *= _scales(plan, refs, part.pack, 0)
    if plan.softcap is not None:
        s_RS = jnp.tanh(s_RS) * (plan.softcap * LOG2E)
    return jnp.where(_seen(plan, part, s_RS.shape), s_RS, MASKED) if part.masked else s_RS


def _weights(plan: Plan, refs: Refs, part: Part, s_RS):
    """What the values are to be multiplied with, and by what earlier results shrink."""
    rows = part.rows(plan)
    before_RH = refs.top_CRH[rows]
    top_RH = jnp.maximum(before_RH, s_RS.max(axis=1, keepdims=True))
    fade_RH = jnp.exp2(before_RH - top_RH)
    p_RS = jnp.exp2(s_RS - _wide(top_RH, plan.tokens))
    refs.top_CRH[rows] = top_RH
    sums_RH = sum(p_RS[:, at : at + LANES] for at in range(0, plan.tokens, LANES))
    refs.sum_CRH[rows] = refs.sum_CRH[rows] * fade_RH + sums_RH
    if refs.scale_P1X is not None:
        p_RS *= _scales(plan, refs, part.pack, 1)
    return p_RS.astype(refs.q_CRX.dtype), fade_RH


def _dot(x_RY, y, axis: int):
    precision = lax.Precision.HIGHEST if x_RY.dtype == jnp.float32 else None
    return lax.dot_general(
        x_RY,
        y,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _operand(plan: Plan, refs: Refs, part: Part, which: int):
    """The keys (0) or values (1) of a pack."""
    if refs.kv_2SX is not None:
        return refs.kv_2SX[which]
    return _side_by_side(plan, refs, part.slot, part.pack, which)


def _side_by_side(plan: Plan, refs: Refs, slot, pack, which: int):
    """Keys or values of a pack's heads, [S, heads * lanes], as numbers of q's dtype."""
    lane = plan.value_lane if which else 0
    heads = [pack * plan.heads + h for h in range(plan.heads)]
    parts = [refs.ring_bKpJ[slot, :, h, :, lane : lane + plan.lanes] for h in heads]
    x_SX = jnp.concatenate([x.reshape(plan.tokens, plan.lanes) for x in parts], axis=1)
    if refs.scale_P1X is None:
        return x_SX
    if plan.biased:
        x_SX = pltpu.bitcast(x_SX, jnp.float8_e4m3b11fnuz)
    return x_SX.astype(jnp.float32).astype(refs.q_CRX.dtype)


def _wide(x_RH, width: int):
    """x, all lanes of which are equal, with more of them."""
    return jnp.concatenate([x_RH] * (width // LANES), axis=1)


def _seen(plan: Plan, part: Part, shape):
    """Which tokens of the block each query of a pack sees."""
    at_RS, position = lax.broadcasted_iota(jnp.int32, shape, 1), part.position
    if plan.T > 1:
        row_R1 = lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0) + part.first
        position += lax.rem(row_R1, plan.T)
    seen_RS = at_RS < jnp.minimum(position + 1, part.keys)
    return seen_RS if plan.window is None else seen_RS & (at_RS > position - plan.window)


def _scales(plan: Plan, refs: Refs, pack, which: int):
    """The factors of a pack's scores (which = 0) or probabilities (1), [rows, S]."""
    shape = (plan.part, plan.tokens)
    scale_RS = jnp.zeros(shape, jnp.float32)
    for h in range(plan.heads):
        row = 2 * (pack * plan.heads + h) + which
        row = pl.ds(row, 1) if plan.loop else slice(row, row + 1)
        scale_1S = refs.scale_YS[row, :]
        own_RS = _head(plan, shape) == h
        scale_RS = scale_1S if plan.heads == 1 else jnp.where(own_RS, scale_1S, scale_RS)
    return scale_RS


def _line_up_scales(plan: Plan, refs: Refs, keys, slot) -> None:
    """From rows of (head, K or V, token) per page to rows of tokens per (head, K or V).

    A register holds u = 128 / p pieces of a page's row side by side, and is to hold one piece of
    each of u pages: a transpose of u by u pieces. Page j is rotated by j pieces, so that row a of
    the result finds its pieces on a diagonal, and is then rotated back by a, bit by bit.
    """
    p = plan.page
    width = min(LANES, 2 * plan.K * p)
    u, pieces = max(1, LANES // p), max(1, width // p)
    shape = pieces, LANES
    lane_aH, a_aH = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 0))
    tiles = range(plan.tokens // LANES), range(2 * plan.K // pieces)
    for at, chunk in itertools.product(*tiles):
        scale_aH = jnp.zeros(shape, jnp.float32)
        for j in range(u):
            page_1H = _page_scales(plan, refs, slot, at * LANES + j * p, chunk, width)
            page_aH = pltpu.roll(jnp.broadcast_to(page_1H, shape), j * p, 1) if j else page_1H
            mine_aH = (lane_aH // p - a_aH) % u == j
            scale_aH = jnp.where(mine_aH, page_aH, scale_aH)
        for bit in (b for b in (1, 2, 4) if b < u):  # of a, for pages of 16 and more
            back_aH = pltpu.roll(scale_aH, LANES - bit * p, 1)
            scale_aH = jnp.where((a_aH & bit) > 0, back_aH, scale_aH)
        scale_aH = jnp.where(
            lane_aH < keys - at * LANES, scale_aH * (16.0 if plan.biased else 1.0), 0.0
        )
        rows = slice(chunk * pieces, (chunk + 1) * pieces)
        refs.scale_YS[rows, at * LANES : (at + 1) * LANES] = scale_aH


def _page_scales(plan: Plan, refs: Refs, slot, token: int, chunk: int, width: int):
    """A register's width of the scales of the page that holds a token of the block."""
    page, within = divmod(token, plan.page)
    # A page of more than a register's width has a piece for every 128 of its tokens.
    lane = chunk * max(LANES, plan.page) + within
    page_1H = refs.ring_b1X[slot, page, :, lane : lane + width]
    return page_1H if width == LANES else jnp.pad(page_1H, ((0, 0), (0, LANES - width)))
