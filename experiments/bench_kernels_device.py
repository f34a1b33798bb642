"""Our kernels on the accelerator that is here: right first, then bytes per second beside those of
a copy, and FLOPs beside those of a matrix product, both measured here. Medians, on random data.

A step is timed as one of many in a program, each of which waits for the one before: what surrounds
the kernel counts, the host's way to the device does not. Texts are full, and their pages lie in
random order. Under 4 minutes on an H200; what would not fit in them is left out, and said.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench_common import Row
from kernels_pallas import kv_pages
from kernels_pallas.paged_attention import fused_paged_attention
from kernels_pallas.pages import Pages
from kernels_pallas.prefill_attention import prefill_attention
from kernels_pallas.specs import Spec

SECONDS = 180.0  # no case is begun after them
REPEATS, STEPS_BYTES, STEPS_FLOPS = 7, 4e10, 1e13  # each repeat moves or computes about so much

DECODE = (
    Spec(name="B32 S4k", B=32, S=4096),
    Spec(name="B8 S4k G8", B=8, S=4096, G=8),
    Spec(name="B128 S4k p128", B=128, S=4096, page=128),
    Spec(name="B8 S32k", B=8, S=32768),
    Spec(name="B32 S4k H64", B=32, S=4096, H=64),
    Spec(name="B32 S4k int8", B=32, S=4096, page=64, dtype="int8"),
    Spec(name="B32 S4k fp8", B=32, S=4096, page=64, dtype="float8_e4m3fn"),
    Spec(name="B32 S1k", B=32, S=1024),
)
PREFILL = (
    Spec(name="T2k S4k", B=1, T=2048, S=4096),
    Spec(name="T2k S32k p128", B=1, T=2048, S=32768, page=128),
    Spec(name="B8 T512 S4k", B=8, T=512, S=4096),
    Spec(name="T8k S8k", B=1, T=8192, S=8192),
    Spec(name="T2k S4k H64", B=1, T=2048, S=4096, H=64),
    Spec(name="T2k S4k int8", B=1, T=2048, S=4096, page=64, dtype="int8"),
)
MOVE = Spec(name="S32k, 8 layers", B=1, S=32768)
MOVE_LAYERS = 8
SIZES = {"int8": 20.0, "float8_e4m3fn": 50.0}  # of quantised numbers: none overflows
GOAL_BANDWIDTH, GOAL_RATE, WRONG = ">= 0.85", ">= 0.6", "<= 0.02"


class Case(NamedTuple):
    """step(q, *arrays) -> o of q's shape and dtype. work: bytes it must move, or FLOPs."""

    spec: Spec
    step: Callable[..., jax.Array]
    arrays: tuple[Any, ...]
    work: float


def rows(
    implementation: str = "gpu",
    decode: Sequence[Spec] = DECODE,
    prefill: Sequence[Spec] = PREFILL,
    move: Spec = MOVE,
) -> Iterator[Row]:
    """All of it, on the first device."""
    began = time.perf_counter()
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    yield Row("copy, bytes read and written", bandwidth / 1e12, "TB/s")
    yield Row("matrix product of bfloat16", rate / 1e12, "TFLOP/s")
    cases = [(decode_case, spec, bandwidth, STEPS_BYTES) for spec in decode]
    cases += [(prefill_case, spec, rate, STEPS_FLOPS) for spec in prefill]
    left_out = 0
    for make, spec, ceiling, enough in cases:
        if time.perf_counter() - began > SECONDS:
            left_out += 1
            continue
        yield from attention_rows(make, spec, ceiling, enough, implementation)
    yield from move_rows(move, bandwidth, implementation)
    yield Row("cases left out for lack of time", left_out, "", "<= 0")
    yield Row("the whole benchmark", time.perf_counter() - began, "s", "<= 240")


def attention_rows(
    make: Callable[[Spec, str], Case],
    spec: Spec,
    ceiling: float,
    enough: float,
    implementation: str,
) -> Iterator[Row]:
    """Ours, with goals, beside the reference in XLA."""
    kind = make.__name__.removesuffix("_case")
    case, reference = make(spec, implementation), make(spec, "xla")
    q_BTNH = fresh((spec.B, spec.T, spec.N, spec.H), spec.q_dtype, 0)
    got, want = (jax.jit(it.step)(q_BTNH, *case.arrays) for it in (case, reference))
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    wrong = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    yield Row(f"{kind} {spec.name}: error over norm of the reference", wrong, "", WRONG)
    steps = max(2, round(enough / case.work))
    took = step_seconds(case, q_BTNH, steps)
    goal = GOAL_RATE if kind == "prefill" else GOAL_BANDWIDTH if spec.S >= 4096 else ""
    unit = {"decode": "TB/s", "prefill": "TFLOP/s"}[kind]
    yield Row(f"{kind} {spec.name}: time of a step", took * 1e6, "us")
    yield Row(f"{kind} {spec.name}: achieved", case.work / took / 1e12, unit)
    yield Row(f"{kind} {spec.name}: of the ceiling", case.work / took / ceiling, "", goal)


def decode_case(spec: Spec, implementation: str) -> Case:
    """One new token per row, at the end of a full text."""
    attend = functools.partial(
        fused_paged_attention, implementation=implementation, **spec.options()
    )
    arrays = (pages_of(spec), *rows_of(spec))
    moved = spec.B * spec.S * spec.token_bytes + 2 * spec.B * spec.N * spec.H * 2
    return Case(spec, attend, arrays, moved)


def prefill_case(spec: Spec, implementation: str) -> Case:
    """The last T tokens of a text; 4 H FLOPs per pair of query and key that it sees, per head."""
    attend = functools.partial(prefill_attention, implementation=implementation, **spec.options())
    arrays = (pages_of(spec), *rows_of(spec))
    seen = spec.T * (spec.S - spec.T) + spec.T * (spec.T + 1) / 2
    return Case(spec, attend, arrays, 4 * spec.H * spec.N * spec.B * seen)


def move_rows(spec: Spec, bandwidth: float, implementation: str) -> Iterator[Row]:
    """pack and unpack of one text. The host's way to the device counts."""
    layers = [pages_of(spec, seed) for seed in range(MOVE_LAYERS)]
    table_n = rows_of(spec)[0][0]
    moved = 2 * MOVE_LAYERS * spec.S * spec.token_bytes
    pack = jax.jit(functools.partial(kv_pages.pack, implementation=implementation))
    unpack = jax.jit(
        functools.partial(kv_pages.unpack, implementation=implementation), donate_argnums=0
    )
    piece = pack(layers, table_n)
    same = jnp.all(piece.kv_RLKTJ == kv_pages.pack(layers, table_n, implementation="xla").kv_RLKTJ)
    yield Row("pack: tokens that differ from XLA's", 1 - float(same), "", "<= 0")
    took = call_seconds(lambda: pack(layers, table_n))
    yield Row("pack: of the copy's bandwidth", moved / took / bandwidth, "")

    def refill() -> list[Pages]:
        layers[:] = unpack(layers, piece, table_n)
        return layers

    took = call_seconds(refill)
    yield Row("unpack: of the copy's bandwidth", moved / took / bandwidth, "")


def step_seconds(case: Case, q_BTNH: jax.Array, steps: int) -> float:
    """Median time of one of `steps` steps, each of which waits for the one before."""

    @jax.jit
    def run(q_BTNH: jax.Array, arrays: tuple[Any, ...]) -> jax.Array:
        # Part of the output comes back as query, and enough fresh query that it stays random.
        def step(_: int, q: jax.Array) -> jax.Array:
            return q_BTNH + case.step(q, *arrays)

        return lax.fori_loop(0, steps, step, q_BTNH)

    return call_seconds(lambda: run(q_BTNH, case.arrays)) / steps


def call_seconds(call: Callable[[], Any]) -> float:
    """Median time until a call's results are there, after two that do not count."""
    taken = []
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - began)
    return median(taken[2:])


def copy_bandwidth() -> float:
    """Bytes read and written per second by a program that flips a bit of each of 2**28 numbers."""
    numbers = jax.random.bits(jax.random.key(1), (2**28,), jnp.uint32)
    steps = 16

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, steps, lambda i, x: x ^ jnp.uint32(i), x)

    return 2 * numbers.nbytes * steps / call_seconds(lambda: run(numbers))


def matmul_rate() -> float:
    """FLOPs per second of products of 8192 x 8192 matrices."""
    size, steps = 8192, 8
    a, b = (fresh((size, size), "bfloat16", seed) * size**-0.5 for seed in (2, 3))

    @jax.jit
    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.fori_loop(0, steps, lambda _, a: jnp.dot(a, b), a)

    return 2 * size**3 * steps / call_seconds(lambda: run(a, b))


def pages_of(spec: Spec, seed: int = 0) -> Pages:
    """Random pages. Quantised ones have numbers and scales of the sizes that quantising makes."""
    kv, scale = spec.pages()
    kv_PKpJ = fresh(kv.shape, spec.dtype, seed, SIZES.get(spec.dtype, 1.0))
    if scale is None:
        return Pages(kv_PKpJ)
    size = jax.random.uniform(jax.random.key(seed + 1), scale.shape, minval=0.5, maxval=1.5)
    return Pages(kv_PKpJ, size / SIZES[spec.dtype])


def rows_of(spec: Spec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """table_Bn, start_B, length_B of full texts; pages in random order, shared if there are too
    few (their reuse is far more than the cache apart)."""
    table_n = jnp.tile(
        jax.random.permutation(jax.random.key(4), spec.P), -(-spec.B * spec.n // spec.P)
    )
    table_Bn = table_n[: spec.B * spec.n].reshape(spec.B, spec.n).astype(jnp.int32)
    length_B = jnp.full(spec.B, spec.T, jnp.int32)
    return table_Bn, jnp.full(spec.B, spec.S, jnp.int32) - length_B, length_B


@functools.partial(jax.jit, static_argnums=(0, 1))
def fresh(shape: tuple[int, ...], dtype: str, seed: int, size: float = 1.0) -> jax.Array:
    """Normally distributed numbers."""
    return (size * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)).astype(dtype)
