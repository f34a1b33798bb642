"""Prompt tokens in; KV in the pool, and the first token of prompts that end, out.

A step is one compiled program per layer group, so that a group's KV can leave while the next
group computes. Shapes are buckets: rows padded to a power of two, tokens to `token_bucket`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pdjax.architecture import Architecture
from pdjax.programs import kv as pool
from pdjax.programs import model
from pdjax.programs.forward import Rows, run_group
from pdjax.programs.mesh import sharding
from pdjax.programs.sampling import Sampling, sample

SMALLEST_BUCKET = 16


class PrefillBatch(NamedTuple):
    """Chunks of B prompts, padded to T tokens (numpy, on the host)."""

    tokens_BT: np.ndarray
    table_Bn: np.ndarray
    start_B: np.ndarray
    length_B: np.ndarray
    sampling: Sampling


class PrefillPrograms(NamedTuple):
    """embed(params, tokens_BT) -> x_TD; group(layers, kvs, x_TD, table, start, length, T=T) ->
    (x_TD, kvs), donating kvs and x_TD; first(params, x_TD, length_B, position_B, sampling) ->
    tokens_B of the rows' last tokens."""

    embed: Callable
    group: Callable
    first: Callable


@functools.cache
def prefill_programs(arch: Architecture, mesh: Mesh) -> PrefillPrograms:
    """The jitted programs of one mesh; every instance on it shares them."""
    where = sharding(mesh, pool.POOL_AXES)

    @jax.jit
    def embed(params, tokens_BT):
        return model.embed(arch, params, tokens_BT.reshape(-1))

    @functools.partial(jax.jit, static_argnames="T", donate_argnames=("kvs", "x_TD"))
    def group(layers, kvs, x_TD, table_Bn, start_B, length_B, *, T):
        rows = Rows(table_Bn, start_B, length_B, T)
        return run_group(arch, layers, kvs, x_TD, [rows], where)

    @jax.jit
    def first(params, x_TD, length_B, position_B, sampling):
        B = length_B.shape[0]
        x_BTD = x_TD.reshape(B, -1, x_TD.shape[-1])
        last_B1 = jnp.maximum(length_B - 1, 0)[:, None, None]
        x_BD = jnp.take_along_axis(x_BTD, last_B1, axis=1)[:, 0]
        return sample(model.logits(arch, params, x_BD), sampling, position_B)

    return PrefillPrograms(embed, group, first)


def prefill(
    programs: PrefillPrograms,
    params: model.Params,
    kvs: list[pool.KV],
    bounds: Sequence[tuple[int, int]],
    batch: PrefillBatch,
    after_group: Callable[[int], None],
) -> jax.Array:
    """Dispatches one step: layer groups `bounds`, one after the other; `kvs` is updated in place,
    and after_group(g) is called as soon as group g is on its way. Returns the rows' next tokens
    [B], which mean something for rows that end their prompt."""
    head = {name: part for name, part in params.items() if name != "layers"}
    x_TD = programs.embed(head, batch.tokens_BT)
    T = batch.tokens_BT.shape[1]
    for group, (begin, end) in enumerate(bounds):
        layers = params["layers"][begin:end]
        row = (batch.table_Bn, batch.start_B, batch.length_B)
        x_TD, kvs[begin:end] = programs.group(layers, kvs[begin:end], x_TD, *row, T=T)
        after_group(group)
    position_B = batch.start_B + batch.length_B
    return programs.first(head, x_TD, batch.length_B, position_B, batch.sampling)


def group_bounds(layers: int, groups: int) -> list[tuple[int, int]]:
    """Layers [begin, end) of each group: as even as can be, the larger ones first."""
    if groups > layers:
        raise ValueError(
            f"`transfer.groups` is {groups}, but the model has {layers} layers: use at most that"
        )
    small, larger = divmod(layers, groups)
    ends = np.cumsum([small + (g < larger) for g in range(groups)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def token_bucket(tokens: int) -> int:
    """The padded length of a chunk: a power of two, or one and a half times one from 96 on, so
    that padding costs at most a third of a chunk."""
    bucket = SMALLEST_BUCKET
    while bucket < tokens:
        if bucket >= 64 and bucket * 3 // 2 >= tokens:
            return bucket * 3 // 2
        bucket *= 2
    return bucket


def row_bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def chunk_buckets(prompt_lens: Sequence[int], chunk: int, prefills: int) -> list[int]:
    """Every token bucket that a chunk of such prompts can need. Where prompts share a step's
    budget of `chunk` tokens a chunk can have any length up to it."""
    longest = min(max(prompt_lens, default=1), chunk)
    if prefills > 1:
        lengths = set(range(1, longest + 1))
    else:
        lengths = {min(n, chunk) for n in prompt_lens} | {n % chunk for n in prompt_lens} - {0}
    return sorted({token_bucket(n) for n in lengths})
