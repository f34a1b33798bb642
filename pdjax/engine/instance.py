"""One instance: its mesh, weights, pool and slots, and the steps it dispatches."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import jax
import numpy as np
from jax.sharding import Mesh

from pdjax.architecture import Architecture
from pdjax.core.config import Role
from pdjax.core.events import Chunk, Emitted, Send, Step
from pdjax.core.request import Request
from pdjax.engine.pools import PoolArrays
from pdjax.engine.texts import Texts
from pdjax.programs.batch import (
    Chunks,
    Slots,
    chunk_buckets,
    no_chunks,
    no_slots,
    row_bucket,
    token_bucket,
)
from pdjax.programs.mesh import sharding
from pdjax.programs.model import Params
from pdjax.programs.sampling import Sampling
from pdjax.programs.step import Sampled, run_step, step_programs


@dataclass
class Dispatched:
    """A step on its way: device arrays that will hold its tokens. decoded_kB is [B] where the step
    is one iteration."""

    step: Step
    firsts: list[tuple[Sequence[Chunk], jax.Array]]
    decoded_kB: jax.Array | None


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
        attention: str,
    ):
        self.name, self.role, self.mesh, self.pool = name, role, mesh, pool
        self._params, self._bounds, self._texts = params, bounds, texts
        self._programs = step_programs(arch, mesh, attention)
        self._B = role.slots if role.decodes_here else 0
        # One that does nothing but prefill for a while should not pay for empty slots.
        self._always_mixes = role.mixed and not role.switches
        self._tokens_B = jax.device_put(np.zeros(self._B, np.int32), sharding(mesh, (None,)))

    # --- steps -------------------------------------------------------------------------

    def dispatch(
        self,
        step: Step,
        leave: Callable[[Send], None] = lambda send: None,
        join: Callable[[int], None] = lambda group: None,
    ) -> Dispatched:
        """Starts a step. join(group) is called before a layer group is dispatched, and may wait;
        leave(send) once the layer group that the piece carries has been."""
        if step.steps > 1:
            for group in range(len(self._bounds)):
                join(group)
            return Dispatched(step, [], self._decode_many(self._slots(step), step.steps))
        slots = self._slots(step) if step.decodes or self._always_mixes else None
        if slots is not None or not step.chunks:
            groups = [step.chunks]
        else:
            groups = list(_same_bucket(step.chunks))
        firsts, tokens_B = [], None
        for chunks in groups:
            batch = self._chunks(chunks) if chunks else None
            join(0)
            with self.pool.lock:
                after_group = self._after_group(step, chunks, leave, join)
                tokens_B, first_C = self._run(slots, batch, after_group)
            if chunks:
                firsts.append((chunks, first_C))
        return Dispatched(step, firsts, tokens_B)

    def collect(self, dispatched: Dispatched) -> tuple[Emitted, ...]:
        """Waits for a step and takes its tokens."""
        emitted = []
        for chunks, first_C in dispatched.firsts:
            tokens_C = np.asarray(first_C).tolist()
            for c, token in zip(chunks, tokens_C[: len(chunks)], strict=True):
                if c.last:
                    emitted.append(self._extend(c.rid, c.start + c.length, [token]))
        if dispatched.decoded_kB is not None:
            tokens_kB = np.atleast_2d(np.asarray(dispatched.decoded_kB))
            for d in dispatched.step.decodes:
                tokens = tokens_kB[: d.count, d.slot].tolist()
                emitted.append(self._extend(d.rid, d.position + 1, tokens))
        return tuple(emitted)

    def _extend(self, rid: int, position: int, tokens: Sequence[int]) -> Emitted:
        """Takes tokens from `position` of the request's text on."""
        at = position - self._texts[rid].request.prompt_len
        return self._texts.extend(rid, at, tokens)

    def run(self, slots: Slots | None, chunks: Chunks | None) -> Sampled:
        """Dispatches a step of this batch, whoever made it."""
        with self.pool.lock:
            return self._run(slots, chunks, lambda group: None)

    def _run(
        self, slots: Slots | None, chunks: Chunks | None, after_group: Callable[[int], None]
    ) -> Sampled:
        sampled = run_step(
            self._programs,
            self._params,
            self.pool.kvs,
            self._bounds,
            None if slots is None else self._tokens_B,
            slots,
            chunks,
            after_group,
        )
        if sampled.tokens_B is not None:
            self._tokens_B = sampled.tokens_B
        return sampled

    def _decode_many(self, slots: Slots, steps: int) -> jax.Array:
        with self.pool.lock:
            tokens_kB, self._tokens_B, self.pool.kvs[:] = self._programs.decode_many(
                self._params, self.pool.kvs, self._tokens_B, slots, steps=steps
            )
        return tokens_kB

    def _after_group(
        self,
        step: Step,
        chunks: Sequence[Chunk],
        leave: Callable[[Send], None],
        join: Callable[[int], None],
    ) -> Callable[[int], None]:
        """What a group's end sets off: the pieces of these chunks that leave with it, and the
        beginning of the next group. Others may use the pool while that waits for its pieces."""
        rids = {chunk.rid for chunk in chunks}

        def after_group(group: int) -> None:
            for send in step.sends:
                if send.group == group and send.rid in rids:
                    leave(send)
            if step.awaits and group + 1 < len(self._bounds):
                self.pool.lock.release()
                try:
                    join(group + 1)
                finally:
                    self.pool.lock.acquire()

        return after_group

    def _chunks(self, chunks: Sequence[Chunk]) -> Chunks:
        T = token_bucket(max(chunk.length for chunk in chunks))
        batch = no_chunks(row_bucket(len(chunks)), T, self.pool.empty_table)
        for row, chunk in enumerate(chunks):
            text, end = self._texts[chunk.rid], chunk.start + chunk.length
            request = text.request
            if chunk.last:
                self._texts.known(chunk.rid, end - request.prompt_len)
            words = (*request.prompt, *text.tokens)
            batch.tokens_CT[row, : chunk.length] = words[chunk.start : end]
            batch.table_Cn[row] = self.pool.table(chunk.rid)
            batch.start_C[row], batch.length_C[row] = chunk.start, chunk.length
            _set_sampling(batch.sampling, row, request)
        return batch

    def _slots(self, step: Step) -> Slots:
        slots = no_slots(self._B, self.pool.empty_table)
        for d in step.decodes:
            slots.table_Bn[d.slot] = self.pool.table(d.rid)
            slots.position_B[d.slot], slots.count_B[d.slot] = d.position, d.count
            text = self._texts[d.rid]
            _set_sampling(slots.sampling, d.slot, text.request)
            if d.joined:
                newest = text.tokens[d.position - text.request.prompt_len]
                slots.fresh_B[d.slot], slots.is_fresh_B[d.slot] = newest, True
        return slots

    # --- warm-up -----------------------------------------------------------------------

    def warm_ups(self, prompt_lens: Sequence[int]) -> Iterator[Callable[[], object]]:
        """One call per program shape that steps of such prompts can need; each compiles it and
        runs it on rows of no tokens, which changes nothing."""
        role, empty = self.role, self.pool.empty_table
        slots = no_slots(self._B, empty) if role.decodes_here else None
        if role.prefills_here or role.growth:  # which may have to compute KV again
            for T in chunk_buckets(prompt_lens, role.chunk, role.prefills):
                for C in sorted({row_bucket(n) for n in range(1, role.prefills + 1)}):
                    chunks = no_chunks(C, T, empty)
                    if role.mixed:
                        yield functools.partial(self._warm, slots, chunks)
                    if not self._always_mixes:
                        yield functools.partial(self._warm, None, chunks)
        if slots is not None:
            yield functools.partial(self._warm, slots, None)
            for steps in range(2, role.steps + 1):
                yield functools.partial(self._decode_many, slots, steps)

    def _warm(self, slots: Slots | None, chunks: Chunks | None) -> None:
        jax.block_until_ready(self.run(slots, chunks))


def _same_bucket(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks that share a padded length, so that short ones are not padded to long ones."""

    def bucket(chunk: Chunk) -> int:
        return token_bucket(chunk.length)

    for _, group in groupby(sorted(chunks, key=bucket), key=bucket):
        yield list(group)


def _set_sampling(how: Sampling, row: int, request: Request) -> None:
    params = request.sampling
    how.temperature_B[row], how.top_p_B[row] = params.temperature, params.top_p
    how.top_k_B[row], how.seed_B[row], how.rid_B[row] = params.top_k, params.seed, request.id
