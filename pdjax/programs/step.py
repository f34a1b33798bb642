"""One step of an instance: prefill chunks, decode slots, or both in a mixed batch.

A step is begin, then one program per layer group, then pick and finish. Groups of one size share
their compiled program, a group's KV can leave while the next group computes, and while the device
runs one program the host dispatches the next. `decode_many` is the same step k times over, as one
program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pdjax.architecture import Architecture
from pdjax.core.config import ConfigError
from pdjax.programs import kv as pool
from pdjax.programs import model
from pdjax.programs.attention import attention_on
from pdjax.programs.batch import Chunks, Slots
from pdjax.programs.forward import Rows, run_group
from pdjax.programs.sampling import Given, Sampling, sample


class Sampled(NamedTuple):
    """tokens_B: newest token of every slot, whether this step made it or not; first_C: the token
    after each chunk, which means something for chunks that end their prompt. None where the step
    has no slots, or no chunks."""

    tokens_B: jax.Array | None
    first_C: jax.Array | None


class Ends(NamedTuple):
    """Where the token after each chunk stands, and how it is chosen."""

    position_C: Given
    sampling: Sampling


class StepPrograms(NamedTuple):
    """begin(head, tokens_B, slots, chunks) -> (x_TD, tokens_B), with fresh tokens put in;
    group(layers, kvs, x_TD, slots, chunks) -> (x_TD, kvs), donating x_TD and kvs;
    pick(x_TD, length_C, slots=B) -> x_RD, the rows that are sampled: every slot, and the last
    token of every chunk; finish(head, x_RD, tokens_B, slots, ends) -> Sampled, which does not
    depend on T, so that the costly program of head and sampling is compiled once;
    decode_many(params, kvs, tokens_B, slots, steps=k) -> (tokens_kB, tokens_B, kvs), donating
    kvs. `slots` or `chunks` may be None; head is the params without their layers."""

    begin: Callable
    group: Callable
    pick: Callable
    finish: Callable
    decode_many: Callable


@functools.cache
def step_programs(arch: Architecture, mesh: Mesh, implementation: str) -> StepPrograms:
    """The jitted programs of one mesh; every instance on it shares them. `implementation` is that
    of attention, one of kernels_pallas.dispatch.IMPLEMENTATIONS."""
    attention = attention_on(mesh, implementation, arch.window)

    def begin(head, tokens_B, slots: Slots | None, chunks: Chunks | None):
        tokens = []
        if slots is not None:
            tokens_B = jnp.where(slots.is_fresh_B, slots.fresh_B, tokens_B)
            tokens.append(tokens_B)
        if chunks is not None:
            tokens.append(jnp.reshape(chunks.tokens_CT, -1))
        return model.embed(arch, head, jnp.concatenate(tokens)), tokens_B

    def group(layers, kvs, x_TD, slots: Slots | None, chunks: Chunks | None):
        return run_group(arch, layers, kvs, x_TD, _blocks(slots, chunks), attention)

    def pick(x_TD, length_C, *, slots: int):
        C = length_C.shape[0]
        T = (x_TD.shape[0] - slots) // C
        ends_C = jnp.arange(C, dtype=jnp.int32) * T + jnp.maximum(length_C - 1, 0)
        return jnp.concatenate([x_TD[:slots], x_TD[slots + ends_C]])

    def finish(head, x_RD, tokens_B, slots: Slots | None, ends: Ends | None) -> Sampled:
        places, hows = [], []
        if slots is not None:
            places.append(slots.position_B + 1)
            hows.append(slots.sampling)
        if ends is not None:
            places.append(ends.position_C)
            hows.append(ends.sampling)
        how = jax.tree.map(lambda *parts: jnp.concatenate(parts), *hows)
        new_R = sample(model.logits(arch, head, x_RD), how, jnp.concatenate(places))
        B = 0 if slots is None else len(slots.count_B)
        new_B = None if slots is None else jnp.where(slots.count_B > 0, new_R[:B], tokens_B)
        return Sampled(new_B, None if ends is None else new_R[B:])

    def decode_many(params, kvs, tokens_B, slots: Slots, *, steps: int):
        head = head_of(params)

        def body(carry, i):
            tokens_B, kvs = carry
            now = slots._replace(
                position_B=slots.position_B + i,
                count_B=(i < slots.count_B).astype(jnp.int32),
                is_fresh_B=slots.is_fresh_B & (i == 0),
            )
            x_BD, tokens_B = begin(head, tokens_B, now, None)
            x_BD, kvs = group(params["layers"], kvs, x_BD, now, None)
            tokens_B = finish(head, x_BD, tokens_B, now, None).tokens_B
            return (tokens_B, kvs), tokens_B

        steps_k = jnp.arange(steps, dtype=jnp.int32)
        (tokens_B, kvs), tokens_kB = jax.lax.scan(body, (tokens_B, kvs), steps_k)
        return tokens_kB, tokens_B, kvs

    return StepPrograms(
        jax.jit(begin),
        jax.jit(group, donate_argnames=("kvs", "x_TD")),
        jax.jit(pick, static_argnames="slots"),
        jax.jit(finish),
        jax.jit(decode_many, donate_argnames="kvs", static_argnames="steps"),
    )


def _blocks(slots: Slots | None, chunks: Chunks | None) -> list[Rows]:
    blocks = []
    if slots is not None:
        active_B = (slots.count_B > 0).astype(jnp.int32)
        blocks.append(Rows(slots.table_Bn, slots.position_B, active_B, 1))
    if chunks is not None:
        T = chunks.tokens_CT.shape[1]
        blocks.append(Rows(chunks.table_Cn, chunks.start_C, chunks.length_C, T))
    return blocks


def head_of(params: model.Params) -> model.Params:
    """Embedding, final norm and head: what begin and finish need."""
    return {name: part for name, part in params.items() if name != "layers"}


def run_step(
    programs: StepPrograms,
    params: model.Params,
    kvs: list[pool.KV],
    bounds: Sequence[tuple[int, int]],
    tokens_B: jax.Array | None,
    slots: Slots | None,
    chunks: Chunks | None,
    after_group: Callable[[int], None] = lambda group: None,
) -> Sampled:
    """Dispatches one step; `kvs` is updated in place. `bounds` are the layers [begin, end) of each
    group; after_group(g) is called as soon as group g is on its way."""
    head = head_of(params)
    x_TD, tokens_B = programs.begin(head, tokens_B, slots, chunks)
    for group, (begin, end) in enumerate(bounds):
        layers = params["layers"][begin:end]
        x_TD, kvs[begin:end] = programs.group(layers, kvs[begin:end], x_TD, slots, chunks)
        after_group(group)
    ends = None
    if chunks is not None:
        B = 0 if slots is None else len(slots.count_B)
        x_TD = programs.pick(x_TD, chunks.length_C, slots=B)
        ends = Ends(chunks.start_C + chunks.length_C, chunks.sampling)
    return programs.finish(head, x_TD, tokens_B, slots, ends)


def group_bounds(layers: int, groups: int) -> list[tuple[int, int]]:
    """Layers [begin, end) of each group: as even as can be, the larger ones first."""
    if groups > layers:
        raise ConfigError(
            f"`transfer.groups` is {groups}, but the model has {layers} layers: use at most that"
        )
    small, larger = divmod(layers, groups)
    ends = np.cumsum([small + (g < larger) for g in range(groups)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
