"""Our TPU kernels beside those of JAX, by the code that the TPU compiler makes of them.

Decode: bundles per KV token and kv head. Prefill: bundles per 128 query tokens times 128 KV tokens
and query head. kernels_pallas.llo says what a bundle is, and what it does not see.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from experiments.bench_common import Row
from experiments.kernel_peers import Maker, decode_peers, prefill_peers
from kernels_pallas import aot_tpu, cases
from kernels_pallas.aot_tpu import Work
from kernels_pallas.specs import Spec

PREFILL_UNIT = 128 * 128
FEWEST_BYTES = 1.05  # goal: of the least that a decode step has to read and write
MIB = 2**20


class Measured(NamedTuple):
    """bundles: per unit of work. matrix, filled: see llo.Way. small_bytes: see aot_tpu."""

    name: str
    bundles: float
    matrix: float
    filled: float
    vmem_bytes: int
    spills: int
    small_bytes: float


def decode_rows(chip: str, spec: Spec) -> Iterator[Row]:
    """Ours, with goals, and every peer that compiles."""
    what = f"{chip} {spec.name}"
    ours = _ours(chip, cases.decode(spec, "tpu"), aot_tpu.decode_work(spec, chip))
    yield from _compare(what, ours, _peers(chip, decode_peers(spec)), 1, "<= 1")
    least = spec.B * spec.S * spec.token_bytes + 2 * _bytes(spec.new(spec.N))
    pages = spec.B * spec.n * spec.page * spec.token_bytes
    # With a window the texts' ends decide, which are not known here.
    goal = f"<= {FEWEST_BYTES}" if spec.window is None else ""
    yield Row(f"{what}: HBM bytes over the least", (pages + ours.small_bytes) / least, "x", goal)


def prefill_rows(chip: str, spec: Spec) -> Iterator[Row]:
    """As `decode_rows`, without goals."""
    ours = _ours(chip, cases.prefill(spec, "tpu"), aot_tpu.prefill_work(spec, chip))
    peers = _peers(chip, prefill_peers(spec))
    yield from _compare(f"{chip} {spec.name}", ours, peers, PREFILL_UNIT, "")


def _compare(
    what: str, ours: Measured, peers: Sequence[Measured], unit: int, goal: str
) -> Iterator[Row]:
    if peers:
        best = min(peers, key=lambda peer: peer.bundles)
        ratio = ours.bundles / best.bundles
        yield Row(f"{what}: bundles, ours over best of JAX's ({best.name})", ratio, "x", goal)
    for it in (ours, *peers):
        yield Row(f"{what}, {it.name}: bundles per unit of work", it.bundles * unit, "")
        yield Row(f"{what}, {it.name}: slots filled of the busiest unit", it.filled, "")
        yield Row(f"{what}, {it.name}: matrix unit's slots filled", it.matrix, "")
        yield Row(f"{what}, {it.name}: VMEM", it.vmem_bytes / MIB, "MiB")
        yield Row(f"{what}, {it.name}: bundles with spilled registers", it.spills, "")


def _ours(chip: str, case: cases.Case, work: Work) -> Measured:
    return _measure(chip, "ours", case.function, case.args, work)


def _peers(chip: str, makers: Iterator[Maker]) -> list[Measured]:
    """Those that compile: the others decline the shape, the chip or the memory it would take."""
    measured = []
    for make in makers:
        try:
            peer = make()
            measured.append(_measure(chip, peer.name, peer.function, peer.args, peer.work))
        except (ValueError, NotImplementedError, AssertionError, jax.errors.JaxRuntimeError):
            continue
    return measured


def _measure(
    chip: str, name: str, function: Callable[..., Any], args: Sequence[Any], work: Work
) -> Measured:
    compiled = aot_tpu.compile_on(chip, function, args)
    # Tables too large for scalar memory take several calls, which differ in their rows alone.
    schedule = next(iter(aot_tpu.schedules(chip, compiled).values()))
    per_unit, way = aot_tpu.bundles(schedule, work)
    pages = [x for x in jax.tree.leaves(args) if _bytes(x) > MIB and x.ndim > 2]
    return Measured(
        name,
        per_unit,
        way.matrix,
        way.filled,
        schedule.vmem_bytes,
        schedule.spills,
        aot_tpu.small_bytes(compiled, pages),
    )


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize
