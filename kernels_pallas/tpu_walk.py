"""Attention over pages on TPU: one loop over the steps of all rows, pages fetched ahead.

A row is a tile of queries of one text: a slot's new tokens in decode, a stretch of a chunk in
prefill. A step is a row's meeting with one block of its text's pages, all heads of them. The steps
of all rows form one list, which a core walks; rows without keys have none. While a step computes,
the pages of the next ones, and the queries of the next row, are on their way to the other places of
a ring of buffers, so only the first step waits for the memory's latency.

With two cores per device (v5p) each walks half of the list. Where rows are few the cut may fall
inside a row: the second core then gives its part of that row as a row of its own, and the two are
combined afterwards.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import compat
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.paged_attention.ref import Partial, combine
from kernels_pallas.pages import Pages

LANES = 128
VMEM_BYTES = 56 * 2**20
TABLE_BYTES = 2**19  # of a core's 1 MiB of scalar memory
MASKED = -1e30  # finite, so that a row with nothing to see has no NaN
LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call. A step's count all heads of one device."""

    V: int  # rows
    T: int  # query tokens of a row
    K: int
    G: int
    H: int
    page: int
    run: int
    n: int  # entries of a text's table
    heads: int  # of a pack: their queries make one matrix
    rows: int  # of it: (head, query head of its group, token), filled up to a tile of 8
    units: int  # runs of pages of a step
    ring: int  # steps whose pages are in flight or in use
    cores: int
    partial: bool  # give lse; then two cores may share a row
    biased: bool  # read float8_e4m3fn as the kind with a bias of 11: 1/16 of its value
    window: int | None
    softcap: float | None
    loop: bool  # over packs and parts, rather than a copy of the code for each
    part: int  # of a pack's rows that go through the matrix unit together
    o_dtype: Any

    @property
    def packs(self) -> int:
        return self.K // self.heads

    @property
    def tokens(self) -> int:
        return self.units * self.run * self.page

    @property
    def steps(self) -> int:
        """The most that all rows can have."""
        return self.V * pl.cdiv(self.n, self.units * self.run)

    @property
    def lanes(self) -> int:
        """Of one head's operands and results."""
        return max(self.H, LANES)

    @property
    def value_lane(self) -> int:
        """Where a token's value begins. Below 128 lanes key and value are one operand."""
        return self.H if self.H >= LANES else 0


class Rows(NamedTuple):
    """Queries v of row r stand at position_V[r] + t among keys [0, keys_V[r]) of text text_V[r]."""

    text_V: jax.Array
    position_V: jax.Array
    keys_V: jax.Array


class Refs(NamedTuple):
    """Arguments of the kernel, in order. None where pages have no scales, or no lse is given."""

    bound_X: Any  # where in the list each core begins, and the last ends
    row_I: Any  # the row of each step
    offset_V: Any  # a row's step less its block
    text_V: Any
    position_V: Any
    keys_V: Any
    table_X: Any
    q_VCRH: Any
    kv_PKpJ: Any
    scale_P1X: Any
    o_XCRH: Any  # rows, then what each core but the first has of the row that it begins inside
    lse_XCRH: Any
    ring_bKpJ: Any
    ring_b1X: Any
    ring_bCRH: Any
    arrived: Any
    left: Any
    out_CRH: Any
    out_lse_CRH: Any
    q_CRX: Any
    top_CRH: Any  # the largest score so far, in every lane
    sum_CRH: Any  # a lane adds up its own tokens; lanes are added at the end
    o_CRX: Any
    scale_YS: Any  # a row per head for K and one for V
    kv_2SX: Any  # keys and values of a pack, where dequantised ones serve several parts


Arithmetic = tuple[Callable[..., None], Callable[..., None], Callable[..., None]]
"""begin_row(plan, refs, slot); step(plan, refs, row, block, slot); end_row(plan, refs)."""


def check(q: jax.Array, pages: Pages, table: jax.Array, run: int) -> None:
    """Raises UnsupportedError for what the kernel cannot do."""
    H, (_, K, p, J), N = q.shape[-1], pages.kv_PKpJ.shape, q.shape[-2]
    if J != 2 * H or (H != 64 and H % LANES):
        raise UnsupportedError(
            f"H = {H} with pages of J = {J}: the TPU kernel takes H of 64 or multiples of 128; "
            f"pad the heads, or use `xla`"
        )
    if N % K:
        raise UnsupportedError(f"{N} query heads are no multiple of {K} kv heads")
    if p < 16 or (LANES % p and p % LANES):
        raise UnsupportedError(
            f"page size {p}: the TPU kernel takes 16 and more, dividing {LANES} or divided by it"
        )
    if table.shape[1] % run:
        raise UnsupportedError(f"a table of {table.shape[1]} entries is no multiple of run = {run}")


def plan_of(
    q_BTNH: jax.Array, pages: Pages, table_Bn: jax.Array, run: int, tokens: int, **sizes: Any
) -> Plan:
    """The plan of a call whose steps have about `tokens` tokens: whole runs of pages and whole
    registers. sizes: the fields of Plan that do not follow from the arguments."""
    _, K, p, _ = pages.kv_PKpJ.shape
    N, H = q_BTNH.shape[2:]
    n = table_Bn.shape[1]
    unit = max(run * p, LANES)
    return Plan(
        K=K,
        G=N // K,
        H=H,
        page=p,
        run=run,
        n=n,
        units=pl.cdiv(min(tokens, pl.cdiv(n * p, LANES) * LANES), unit) * unit // (run * p),
        ring=3,
        cores=compat.tensor_cores(),
        biased=compat.reads_biased_fp8(pages.kv_PKpJ.dtype),
        **sizes,
    )


def walk(
    plan: Plan,
    arithmetic: Arithmetic,
    q_VCRH: jax.Array,
    pages: Pages,
    table_Bn: jax.Array,
    rows: Rows,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """o_VCRH and, if partial, lse_VCR. Rows without keys give zeros and MASKED."""
    bound_X, row_I, offset_V, seen_V = _list(plan, rows)
    pages = jax.tree.map(lambda x: compat.stays_in_hbm(x, interpret), pages)
    operands = (bound_X, row_I, offset_V, *rows, table_Bn.reshape(-1), q_VCRH, *pages)
    o_XCRH, lse_XCRH = _call(plan, arithmetic, q_VCRH, pages, interpret)(*operands)
    seen_V111 = seen_V[:, None, None, None]
    if lse_XCRH is None:
        return jnp.where(seen_V111, o_XCRH, jnp.zeros((), plan.o_dtype)), None
    o_VCRH, lse_VCR = _join(plan, bound_X, row_I, Partial(o_XCRH, lse_XCRH[..., 0]))
    return jnp.where(seen_V111, o_VCRH, 0.0), jnp.where(seen_V111[..., 0], lse_VCR, MASKED)


def _join(plan: Plan, bound_X: jax.Array, row_I: jax.Array, parts_X: Partial) -> Partial:
    """All rows, those whole that two cores share."""
    o_VCRH, lse_VCR = (x[: plan.V] for x in parts_X)
    for core in range(1, plan.cores):
        at, last = bound_X[core], plan.steps - 1
        row = row_I[jnp.minimum(at, last)]
        is_cut = (at < bound_X[core + 1]) & (at > 0) & (row_I[jnp.clip(at - 1, 0, last)] == row)
        ends = [Partial(*(x[None, i] for x in parts_X)) for i in (row, plan.V + core - 1)]
        o_1CRH, lse_1CR = combine(ends)
        is_it_V11 = (is_cut & (jnp.arange(plan.V) == row))[:, None, None]
        o_VCRH = jnp.where(is_it_V11[..., None], o_1CRH, o_VCRH)
        lse_VCR = jnp.where(is_it_V11, lse_1CR, lse_VCR)
    return Partial(o_VCRH, lse_VCR)


def _list(plan: Plan, rows: Rows) -> tuple[jax.Array, ...]:
    """bound_X, row_I, offset_V as in Refs, and which rows have steps."""
    first_V = jnp.zeros_like(rows.keys_V)
    if plan.window is not None:
        first_V = jnp.maximum(rows.position_V - plan.window + 1, 0) // plan.tokens
    count_V = jnp.maximum(pl.cdiv(rows.keys_V, plan.tokens) - first_V, 0)
    end_V = jnp.cumsum(count_V)
    bound_X = end_V[-1] * jnp.arange(plan.cores + 1, dtype=jnp.int32) // plan.cores
    if not plan.partial:
        whole_XV = end_V[None] <= bound_X[:, None]
        bound_X = jnp.where(whole_XV, end_V[None], 0).max(1)
    row_I = jnp.searchsorted(end_V, jnp.arange(plan.steps, dtype=jnp.int32), side="right")
    row_I = jnp.minimum(row_I, plan.V - 1).astype(jnp.int32)
    return bound_X, row_I, end_V - count_V - first_V, count_V > 0


def _call(plan: Plan, arithmetic: Arithmetic, q_VCRH, pages: Pages, interpret: bool):
    shape = plan.packs, plan.rows
    lse = pltpu.VMEM((*shape, LANES), jnp.float32) if plan.partial else None
    fetched = plan.ring, plan.units * plan.run
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    ring_b1X = scale_YS = kv_2SX = None
    if pages.scale_P1X is not None:
        ring_b1X = pltpu.VMEM((*fetched, *pages.scale_P1X.shape[1:]), jnp.float32)
        scale_YS = pltpu.VMEM((2 * plan.K, plan.tokens), jnp.float32)
        if plan.loop:
            kv_2SX = pltpu.VMEM((2, plan.tokens, plan.heads * plan.lanes), q_VCRH.dtype)
    out = (plan.V + (plan.cores - 1 if plan.partial else 0), *shape)
    return pl.pallas_call(
        lambda *refs: _kernel(plan, arithmetic, Refs(*refs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(plan.cores,),
            in_specs=[hbm, hbm, None if ring_b1X is None else hbm],
            out_specs=[hbm, None if lse is None else hbm],
            scratch_shapes=[
                pltpu.VMEM((*fetched, *pages.kv_PKpJ.shape[1:]), pages.kv_PKpJ.dtype),
                ring_b1X,
                pltpu.VMEM((plan.ring, *q_VCRH.shape[1:]), q_VCRH.dtype),
                pltpu.SemaphoreType.DMA((plan.ring,)),
                pltpu.SemaphoreType.DMA(()),
                pltpu.VMEM((*shape, plan.lanes), plan.o_dtype),
                lse,
                pltpu.VMEM((*shape, plan.heads * plan.lanes), q_VCRH.dtype),
                pltpu.VMEM((*shape, LANES), jnp.float32),
                pltpu.VMEM((*shape, LANES), jnp.float32),
                pltpu.VMEM((*shape, plan.heads * plan.lanes), jnp.float32),
                scale_YS,
                kv_2SX,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*out, plan.lanes), plan.o_dtype),
            None if lse is None else jax.ShapeDtypeStruct((*out, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=compat.interpreted(interpret),
        name="attention_over_pages",
    )


def _kernel(plan: Plan, arithmetic: Arithmetic, refs: Refs) -> None:
    begin_row, compute, end_row = arithmetic
    core = pl.program_id(0)
    begin, end = refs.bound_X[core], refs.bound_X[core + 1]

    # Pages that a row does not have are computed on too, for nothing: they must hold numbers.
    @functools.partial(lax.fori_loop, 0, plan.ring * plan.units * plan.run, init_val=None)
    def _(page, _):
        for ring in (refs.ring_bKpJ, refs.ring_b1X):
            if ring is not None:
                place = page // ring.shape[1], page % ring.shape[1]
                ring[place] = jnp.zeros(ring.shape[2:], ring.dtype)

    for ahead in range(plan.ring - 1):
        pl.when(begin + ahead < end)(lambda i=begin + ahead: _fetch(plan, refs, i, begin, "start"))

    def step(i, written):
        ahead = i + plan.ring - 1
        pl.when(ahead < end)(lambda: _fetch(plan, refs, ahead, begin, "start"))
        _fetch(plan, refs, i, begin, "wait")
        row, slot = refs.row_I[i], lax.rem(i, plan.ring)
        block = i - refs.offset_V[row]
        pl.when(_enters(refs, i, begin))(lambda: begin_row(plan, refs, slot))
        last = (block + 1) * plan.tokens >= refs.keys_V[row]
        pl.when(last)(lambda: _clear_tail(plan, refs, row, block, slot))
        compute(plan, refs, row, block, slot)
        done = last | (i == end - 1)

        @pl.when(done)
        def _():
            pl.when(written > 0)(lambda: _write(plan, refs, row, "wait"))
            end_row(plan, refs)
            _write(plan, refs, _place(plan, refs, row, begin), "start")

        return written + done.astype(jnp.int32)

    written = lax.fori_loop(begin, end, step, jnp.int32(0))
    pl.when(written > 0)(lambda: _write(plan, refs, 0, "wait"))


def _enters(refs: Refs, i, begin):
    """Whether step i is a core's first of a row."""
    return (i == begin) | (refs.row_I[i] != refs.row_I[jnp.maximum(i - 1, 0)])


def _fetch(plan: Plan, refs: Refs, i, begin, do: str) -> None:
    """Starts, or waits for, the copies that step i needs."""
    row, slot = refs.row_I[i], lax.rem(i, plan.ring)
    first = (i - refs.offset_V[row]) * plan.units  # of the text's runs of pages
    size = plan.run * plan.page
    low, high = 0, jnp.minimum(pl.cdiv(refs.keys_V[row], size) - first, plan.units)
    if plan.window is not None:
        seen = refs.position_V[row] - plan.window + 1
        low = jnp.clip(lax.div(seen, size) - first, 0, plan.units)
    entry = refs.text_V[row] * plan.n + first * plan.run
    pools = [(refs.kv_PKpJ, refs.ring_bKpJ), (refs.scale_P1X, refs.ring_b1X)]
    pools = [(pool, ring.at[slot]) for pool, ring in pools if pool is not None]

    def copy(source, place):
        getattr(pltpu.make_async_copy(source, place, refs.arrived.at[slot]), do)()

    def one(unit):
        page = refs.table_X[entry + unit * plan.run]
        for pool, ring in pools:
            copy(pool.at[pl.ds(page, plan.run)], ring.at[pl.ds(unit * plan.run, plan.run)])

    def whole():
        if do == "wait":  # for as many bytes as all copies have
            for _, ring in pools:
                copy(ring, ring)
        else:
            for unit in range(plan.units):
                one(unit)

    def part():
        lax.fori_loop(low, high, lambda unit, _: one(unit), None)

    lax.cond(high - low == plan.units, whole, part)
    pl.when(_enters(refs, i, begin))(lambda: copy(refs.q_VCRH.at[row], refs.ring_bCRH.at[slot]))


def _write(plan: Plan, refs: Refs, row, do: str) -> None:
    """Starts, or waits for, the copies of a row's results."""
    for place, out in ((refs.out_CRH, refs.o_XCRH), (refs.out_lse_CRH, refs.lse_XCRH)):
        if out is not None:
            getattr(pltpu.make_async_copy(place, out.at[row], refs.left), do)()


def _place(plan: Plan, refs: Refs, row, begin):
    """Where a row's results go."""
    if not plan.partial or plan.cores == 1:
        return row
    is_cut = (begin > 0) & (refs.row_I[jnp.maximum(begin - 1, 0)] == row)
    return jnp.where(is_cut, plan.V + pl.program_id(0) - 1, row)


def _clear_tail(plan: Plan, refs: Refs, row, block, slot) -> None:
    """Zeroes what lies past the end of the text in the pages of its last block: 0 * NaN is NaN."""
    ring_bKpJ = refs.ring_bKpJ
    live = refs.keys_V[row] - block * plan.tokens
    per_word = 4 // ring_bKpJ.dtype.itemsize

    def clear(page, _):
        words_KwJ = pltpu.bitcast(ring_bKpJ[slot, page], jnp.int32)
        word_KwJ = lax.broadcasted_iota(jnp.int32, words_KwJ.shape, 1)
        kept_KwJ = jnp.clip(live - page * plan.page - word_KwJ * per_word, 0, per_word)
        mask_KwJ = (1 << (kept_KwJ * (32 // per_word))) - 1
        mask_KwJ = jnp.where(kept_KwJ == per_word, -1, mask_KwJ)
        ring_bKpJ[slot, page] = pltpu.bitcast(words_KwJ & mask_KwJ, ring_bKpJ.dtype)

    end = jnp.minimum(pl.cdiv(live, plan.page * plan.run), plan.units) * plan.run
    lax.fori_loop(lax.div(live, plan.page), end, clear, None)
