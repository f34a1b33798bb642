"""Whole steps and transfers compiled for chips that are not there: shapes only, no weights.

The programs are the engine's own, of programs.step and programs.transfer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import aot_tpu
from pdjax.architecture import Architecture
from pdjax.programs import kv as pool
from pdjax.programs import model
from pdjax.programs.batch import Chunks, Slots, no_chunks, no_slots
from pdjax.programs.mesh import check_tp, make_mesh, tree_sharding
from pdjax.programs.step import Ends, head_of, step_programs
from pdjax.programs.transfer import transfer_programs


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one model on `tp` chips: `rows` requests with `context` tokens each, of which
    `tokens` are new: 1 is a decode step, more are chunks of prompts."""

    arch: Architecture
    chip: str
    tp: int
    rows: int
    context: int
    tokens: int = 1
    page: int = 16
    dtype: str = "bfloat16"
    attention: str = "tpu"

    def __post_init__(self):
        check_tp(self.arch, self.tp, f"{self.chip}, {self.arch.name}")

    @property
    def layout(self) -> pool.Layout:
        """A pool with just the pages of these requests."""
        arch, pages = self.arch, self.rows * -(-self.context // self.page)
        shape = (arch.name, arch.L, arch.K, arch.H, self.dtype, self.page, pages, self.tp)
        return pool.Layout(*shape, order="token_major" if self.attention == "xla" else "fused")

    @property
    def weight_bytes(self) -> int:
        """Of all weights that a step reads, on one chip. The embedding table, where it is not
        also the head, is read one row per token."""
        arch = self.arch
        read = arch.parameters - (0 if arch.tied else arch.V * arch.D)
        return read * jnp.dtype(self.dtype).itemsize // self.tp

    @property
    def kv_bytes(self) -> int:
        """Of all K and V that a step reads, on one chip, at full context."""
        tokens = self.rows * self.context
        return tokens * self.layout.token_bytes * self.arch.L // self.tp


def compile_step(case: Case) -> dict[str, jax.stages.Compiled]:
    """The programs of such a step, by their names in programs.step.StepPrograms, with every layer
    a group of its own (`transfer.groups` of L): `group` runs once per layer, on different arrays.
    Raises what the TPU compiler raises.
    """
    mesh = make_mesh(aot_tpu.devices(case.chip)[: case.tp])
    programs = step_programs(case.arch, mesh, case.attention)
    params, kvs = _params(case, mesh), _pool(case, mesh)
    head, (tokens_B, slots, chunks) = head_of(params), _batch(case, mesh)
    begin, (x_TD, _) = _compile(programs.begin, head, tokens_B, slots, chunks)
    compiled = {"begin": begin}
    layers = params["layers"][:1], kvs[:1]
    compiled["group"], (x_TD, _) = _compile(programs.group, *layers, x_TD, slots, chunks)
    ends = None
    if chunks is not None:
        compiled["pick"], x_TD = _compile(programs.pick, x_TD, chunks.length_C, slots=0)
        ends = Ends(chunks.length_C, chunks.sampling)
    compiled["finish"], _ = _compile(programs.finish, head, x_TD, tokens_B, slots, ends)
    return compiled


def compile_moves(case: Case, layers: int, tokens: int) -> dict[str, jax.stages.Compiled]:
    """`extract` and `insert` of a piece of so many layers and tokens, with checksums."""
    mesh = make_mesh(aot_tpu.devices(case.chip)[: case.tp])
    programs = transfer_programs(mesh, case.arch.K, True, case.attention)
    kvs = _pool(case, mesh)[:layers]
    everywhere = NamedSharding(mesh, PartitionSpec())
    table_n = np.zeros(-(-case.context // case.page), np.int32)
    span = (table_n, np.int32(0), np.int32(0))
    span = jax.tree.map(lambda x: _placed(x, everywhere), span)
    extract, piece = _compile(programs.extract, kvs, *span, T=tokens)
    insert, _ = _compile(jax.jit(programs.insert, donate_argnums=0), kvs, piece, *span)
    return {"extract": extract, "insert": insert}


def memory_bytes(case: Case, compiled: Mapping[str, jax.stages.Compiled]) -> int:
    """What a step needs of one chip's HBM: all weights, the pool, and what the hungriest program
    allocates meanwhile."""
    sizes = {name: program.memory_analysis() for name, program in compiled.items()}
    head = max(sizes[name].argument_size_in_bytes for name in ("begin", "finish"))
    layers = sizes["group"].argument_size_in_bytes * case.arch.L
    scratch = [
        size.temp_size_in_bytes + size.output_size_in_bytes - size.alias_size_in_bytes
        for size in sizes.values()
    ]
    return head + layers + max(scratch)


def _compile(program: Any, *args: Any, **static: Any) -> tuple[jax.stages.Compiled, Any]:
    """The program and its results: their shapes, and where they lie."""
    lowered = program.lower(*args, **static)
    compiled = lowered.compile()
    return compiled, jax.tree.map(_placed, lowered.out_info, compiled.output_shardings)


def _params(case: Case, mesh: Mesh) -> model.Params:
    return jax.tree.map(
        _placed,
        model.abstract_params(case.arch, case.dtype),
        tree_sharding(mesh, model.logical_axes(case.arch)),
    )


def _pool(case: Case, mesh: Mesh) -> list[pool.KV]:
    kvs = jax.eval_shape(lambda: pool.make_pool(case.layout, mesh))
    return [jax.tree.map(lambda x: _placed(x, pool.pool_sharding(kvs[0], mesh)), kv) for kv in kvs]


def _batch(case: Case, mesh: Mesh) -> tuple[Any, Slots | None, Chunks | None]:
    """tokens_B, slots and chunks: of these, what a step of this kind has."""
    table_n = np.full(-(-case.context // case.page), case.layout.pages, np.int32)
    tokens_B = slots = chunks = None
    if case.tokens == 1:
        slots = no_slots(case.rows, table_n)
        tokens_B = slots.position_B
    else:
        chunks = no_chunks(case.rows, case.tokens, table_n)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: _placed(x, everywhere), (tokens_B, slots, chunks))


def _placed(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
