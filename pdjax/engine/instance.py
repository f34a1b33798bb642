"""One instance: its mesh, weights, pool and slots, and the steps it dispatches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import jax
import numpy as np
from jax.sharding import Mesh

from pdjax.architecture import Architecture
from pdjax.core.config import Role
from pdjax.core.events import Chunk, Emitted, KVHandle, Send, Step
from pdjax.core.request import Request
from pdjax.engine.texts import Texts
from pdjax.programs import kv as kv_pool
from pdjax.programs.decode import Slots, decode_programs
from pdjax.programs.mesh import sharding
from pdjax.programs.model import Params
from pdjax.programs.prefill import (
    PrefillBatch,
    chunk_buckets,
    prefill,
    prefill_programs,
    row_bucket,
    token_bucket,
)
from pdjax.programs.sampling import Sampling
from pdjax.programs.transfer import transfer_programs

Piece = list[jax.Array]
NOBODY = -1  # the request that warm-up runs for; all its pages are the one that does not exist


class PoolArrays:
    """The arrays of one pool and who has which of its pages. Every program that updates the
    arrays is given them (donation), so they are taken and put back under `lock`."""

    def __init__(self, layout: kv_pool.Layout, mesh: Mesh, context: int):
        self.layout, self.lock = layout, threading.Lock()
        self.kvs = kv_pool.make_pool(layout, mesh)
        self._width = -(-context // layout.page_size)
        self.empty_table = np.full(self._width, layout.pages, np.int32)
        self._tables = {NOBODY: self.empty_table}

    def hold(self, handle: KVHandle) -> None:
        if handle.layout != self.layout.fingerprint:
            raise ValueError(
                f"a handle of request {handle.rid} is for the layout `{handle.layout}`, pool "
                f"`{handle.pool}` has `{self.layout.fingerprint}`"
            )
        table = self.empty_table.copy()
        table[: len(handle.pages)] = handle.pages
        self._tables[handle.rid] = table

    def release(self, rid: int) -> None:
        del self._tables[rid]

    def table(self, rid: int) -> np.ndarray:
        return self._tables[rid]


@dataclass
class Dispatched:
    """A step on its way: device arrays that will hold its tokens. `done` is ready with it."""

    step: Step
    firsts: list[tuple[Sequence[Chunk], jax.Array]]
    decoded_kB: jax.Array | None
    done: jax.Array


class Instance:
    """Runs what the scheduler decided for one instance; decides nothing itself."""

    def __init__(
        self,
        name: str,
        role: Role,
        arch: Architecture,
        mesh: Mesh,
        params: Params,
        pool: PoolArrays,
        bounds: list[tuple[int, int]],
        texts: Texts,
    ):
        self.name, self.role, self.mesh, self.pool = name, role, mesh, pool
        self._params, self._bounds, self._texts = params, bounds, texts
        self._prefill = prefill_programs(arch, mesh)
        self._decode = decode_programs(arch, mesh)
        self._transfer = transfer_programs(arch, mesh)
        B = role.slots if role.decodes_here else 0
        self._seated: list[int | None] = [None] * B
        zeros = np.zeros(B, np.int32)
        self._tokens_B = jax.device_put(zeros, sharding(mesh, (None,)))

    # --- steps -------------------------------------------------------------------------

    def dispatch(self, step: Step, leave: Callable[[Send, Piece], None]) -> Dispatched:
        """Starts a step; leave(send, piece) is called as soon as a piece is on its way."""
        if step.chunks and step.decodes:
            return self._dispatch_mixed(step)
        if step.chunks:
            return self._dispatch_prefill(step, leave)
        return self._dispatch_decode(step)

    def collect(self, dispatched: Dispatched) -> tuple[Emitted, ...]:
        """Waits for a step and takes its tokens."""
        emitted = []
        for chunks, first_C in dispatched.firsts:
            tokens_C = np.asarray(first_C).tolist()
            ends = [(c.rid, tokens_C[row]) for row, c in enumerate(chunks) if c.last]
            emitted += [self._texts.extend(rid, [token]) for rid, token in ends]
        if dispatched.decoded_kB is not None:
            tokens_kB = np.asarray(dispatched.decoded_kB)
            for d in dispatched.step.decodes:
                tokens = tokens_kB[: d.count, d.slot].tolist()
                emitted.append(self._texts.extend(d.rid, tokens))
        jax.block_until_ready(dispatched.done)
        return tuple(emitted)

    def _dispatch_prefill(self, step: Step, leave: Callable[[Send, Piece], None]) -> Dispatched:
        firsts = []
        for chunks in _same_bucket(step.chunks):
            rids = {chunk.rid for chunk in chunks}
            batch = self._batch(chunks, token_bucket(chunks[0].length))

            def after_group(group: int, rids: set[int] = rids) -> None:
                for send in step.sends:
                    if send.group == group and send.rid in rids:
                        leave(send, self._extract_locked(send))

            with self.pool.lock:
                first_C = prefill(
                    self._prefill, self._params, self.pool.kvs, self._bounds, batch, after_group
                )
            firsts.append((chunks, first_C))
        return Dispatched(step, firsts, None, firsts[-1][1])

    def _dispatch_decode(self, step: Step) -> Dispatched:
        slots = self._slots(step)
        with self.pool.lock:
            tokens_kB, self._tokens_B, self.pool.kvs = self._decode.decode(
                self._params, self.pool.kvs, self._tokens_B, slots, steps=step.steps
            )
        return Dispatched(step, [], tokens_kB, tokens_kB)

    def _dispatch_mixed(self, step: Step) -> Dispatched:
        slots = self._slots(step)
        bucket = token_bucket(max(chunk.length for chunk in step.chunks))
        batch = self._batch(step.chunks, bucket)
        with self.pool.lock:
            tokens_1B, self._tokens_B, first_C, self.pool.kvs = self._decode.mixed(
                self._params, self.pool.kvs, self._tokens_B, slots, batch
            )
        return Dispatched(step, [(step.chunks, first_C)], tokens_1B, tokens_1B)

    def _batch(self, chunks: Sequence[Chunk], T: int) -> PrefillBatch:
        C = row_bucket(len(chunks))
        batch = self._empty_batch(C, T)
        for row, chunk in enumerate(chunks):
            request = self._texts[chunk.rid].request
            batch.tokens_BT[row, : chunk.length] = request.prompt[
                chunk.start : chunk.start + chunk.length
            ]
            batch.table_Bn[row] = self.pool.table(chunk.rid)
            batch.start_B[row], batch.length_B[row] = chunk.start, chunk.length
            _set_sampling(batch.sampling, row, request)
        return batch

    def _empty_batch(self, C: int, T: int) -> PrefillBatch:
        table_Cn = np.tile(self.pool.empty_table, (C, 1))
        zeros_C = np.zeros(C, np.int32)
        return PrefillBatch(
            np.zeros((C, T), np.int32), table_Cn, zeros_C, zeros_C.copy(), _no_sampling(C)
        )

    def _slots(self, step: Step) -> Slots:
        slots = self._empty_slots()
        for d in step.decodes:
            slots.table_Bn[d.slot] = self.pool.table(d.rid)
            slots.position_B[d.slot], slots.count_B[d.slot] = d.position, d.count
            text = self._texts[d.rid]
            _set_sampling(slots.sampling, d.slot, text.request)
            if self._seated[d.slot] != d.rid:
                self._seated[d.slot] = d.rid
                slots.fresh_B[d.slot], slots.is_fresh_B[d.slot] = text.tokens[-1], True
        return slots

    def _empty_slots(self) -> Slots:
        B = len(self._seated)
        table_Bn = np.tile(self.pool.empty_table, (B, 1))
        zeros_B = [np.zeros(B, np.int32) for _ in range(3)]
        return Slots(table_Bn, *zeros_B, np.zeros(B, bool), _no_sampling(B))

    # --- pieces ------------------------------------------------------------------------

    def extract(self, send: Send) -> Piece:
        with self.pool.lock:
            return self._extract_locked(send)

    def insert(self, send: Send, piece: Piece) -> jax.Array:
        """Puts a piece that is on this mesh into its pages; the result is ready when it is in."""
        begin, end = self._bounds[send.group]
        table_n = self.pool.table(send.rid)
        start, length = np.int32(send.start), np.int32(send.length)
        with self.pool.lock:
            self.pool.kvs[begin:end], landed = self._transfer.insert(
                self.pool.kvs[begin:end], piece, table_n, start, length
            )
        return landed

    def _extract_locked(self, send: Send) -> Piece:
        begin, end = self._bounds[send.group]
        return self._transfer.extract(
            self.pool.kvs[begin:end],
            self.pool.table(send.rid),
            np.int32(send.start),
            T=token_bucket(send.length),
        )

    # --- warm-up -----------------------------------------------------------------------

    def warm_ups(self, prompt_lens: Sequence[int]) -> Iterator[Callable[[], object]]:
        """One call per program shape that steps of such prompts can need; each compiles it and
        runs it on rows of no tokens, which changes nothing."""
        if self.role.prefills_here:
            for T in chunk_buckets(prompt_lens, self.role.chunk, self.role.prefills):
                for C in sorted({row_bucket(n) for n in range(1, self.role.prefills + 1)}):
                    yield lambda C=C, T=T: self._warm_prefill(C, T)
        if self.role.decodes_here:
            for steps in range(1, self.role.steps + 1):
                yield lambda steps=steps: self._warm_decode(steps)

    def _warm_prefill(self, C: int, T: int) -> None:
        batch = self._empty_batch(C, T)
        with self.pool.lock:
            done = prefill(
                self._prefill, self._params, self.pool.kvs, self._bounds, batch, lambda g: None
            )
            if self.role.mixed:
                done, self._tokens_B, _, self.pool.kvs = self._decode.mixed(
                    self._params, self.pool.kvs, self._tokens_B, self._empty_slots(), batch
                )
        jax.block_until_ready(done)

    def _warm_decode(self, steps: int) -> None:
        with self.pool.lock:
            done, self._tokens_B, self.pool.kvs = self._decode.decode(
                self._params, self.pool.kvs, self._tokens_B, self._empty_slots(), steps=steps
            )
        jax.block_until_ready(done)


def _same_bucket(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks that share a padded length, so that short ones are not padded to long ones."""

    def bucket(chunk: Chunk) -> int:
        return token_bucket(chunk.length)

    for _, group in groupby(sorted(chunks, key=bucket), key=bucket):
        yield list(group)


def _no_sampling(B: int) -> Sampling:
    return Sampling(
        np.zeros(B, np.float32),
        np.ones(B, np.float32),
        np.zeros(B, np.int32),
        np.zeros(B, np.uint32),
        np.zeros(B, np.int32),
    )


def _set_sampling(how: Sampling, row: int, request: Request) -> None:
    params = request.sampling
    how.temperature_B[row], how.top_p_B[row] = params.temperature, params.top_p
    how.top_k_B[row], how.seed_B[row], how.rid_B[row] = params.top_k, params.seed, request.id
