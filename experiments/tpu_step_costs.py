"""What a step costs on a TPU that is not there, row by row of the table of experiments.tpu_costs.

Compiles the engine's own programs for the chip, with our kernels inside, and adds up, per step:
- dense_s: XLA's estimated cycles of its fusions over the clock, or, if that is longer, the time to
  read all weights once (its estimate leaves out prefetches of weights under tp);
- attention_s: per layer, the longer of two times of our kernel: its static schedule's bundles, one
  per cycle, and reading K and V from HBM at full bandwidth;
- collective_s: what all-reduces and all-gathers move, around a ring of both directions of one link.
What it leaves out: the host, stalls of the kernel on the matrix unit's latency, and the overlap of
collectives with compute. Nothing here is measured on a chip.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from kernels_pallas import aot_tpu
from kernels_pallas.specs import Spec
from pdjax import aot
from pdjax.architecture import Architecture


def table_of(model: str, chip: str, tp: int, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What is written as JSON."""
    return {"model": model, "chip": chip, "tp": tp, "rows": list(rows)}


def rows_of(
    arch: Architecture, chip: str, tp: int, phase: str, size: int, contexts: Sequence[int]
) -> Iterator[Mapping[str, Any]]:
    """Compiles the step once: only the size of its tables depends on the context."""
    rows, tokens = (size, 1) if phase == "decode" else (1, size)
    case = aot.Case(
        arch=arch,
        chip=chip,
        tp=tp,
        rows=rows,
        context=max(contexts) + tokens,
        tokens=tokens,
    )
    programs = aot.compile_step(case)
    schedules = aot_tpu.schedules(case.chip, programs["group"])
    # Tables too large for scalar memory take several calls, which differ in their rows alone.
    kernel = next(s for name, s in schedules.items() if name.startswith("attention"))
    dense_s, collective_s = _dense_s(case, programs), _collective_s(case, programs)
    # A prefill may also be the first of its prompt.
    for context in contexts if phase == "decode" else [0, *contexts]:
        attention_s = case.arch.L * _attention_s(case, kernel, context)
        parts = {"dense_s": dense_s, "attention_s": attention_s, "collective_s": collective_s}
        key = {"phase": phase, "size": size, "context": context}
        yield key | {"seconds": sum(parts.values())} | parts


def _dense_s(case: aot.Case, programs: Mapping[str, jax.stages.Compiled]) -> float:
    cycles = _over_step(case, {name: aot_tpu.estimated_cycles(p) for name, p in programs.items()})
    read_s = case.weight_bytes / aot_tpu.hbm_bytes_per_s(case.chip)
    return max(cycles / aot_tpu.CHIPS[case.chip].clock, read_s)


def _collective_s(case: aot.Case, programs: Mapping[str, jax.stages.Compiled]) -> float:
    """A ring sends (tp - 1) / tp of an array to gather it, and twice that to reduce it."""
    sent = _over_step(case, {name: aot_tpu.ring_bytes(p) for name, p in programs.items()})
    return sent * (case.tp - 1) / case.tp / (2 * aot_tpu.CHIPS[case.chip].link)


def _attention_s(case: aot.Case, kernel: Any, context: int) -> float:
    """One layer's, on one chip."""
    arch, chip = case.arch, aot_tpu.CHIPS[case.chip]
    spec = Spec(
        name="step",
        B=case.rows,
        T=case.tokens,
        S=case.context,
        G=arch.N // arch.K,
        K=arch.K // case.tp,
        H=arch.H,
        page=case.page,
        dtype=case.dtype,
        q_dtype=case.dtype,
        window=arch.window,
    )
    if case.tokens == 1:
        work, reads = aot_tpu.decode_work(spec, case.chip), 1
        keys = min(context, arch.window or context)
        units = spec.B * keys * spec.K
    else:
        work = aot_tpu.prefill_work(spec, case.chip)
        # On average a token sees half of its chunk, and a tile of queries reads it all once.
        reads = math.ceil(spec.T / work.queries)
        keys = min(context + spec.T / 2, arch.window or math.inf)
        units = spec.B * spec.T * keys * spec.N
    bundles, _ = aot_tpu.bundles(kernel, work)
    compute_s = bundles * units / (chip.clock * chip.cores)
    read_s = reads * spec.B * keys * spec.token_bytes / aot_tpu.hbm_bytes_per_s(case.chip)
    return max(compute_s, read_s)


def _over_step(case: aot.Case, by_program: Mapping[str, float]) -> float:
    """The sum over a step, in which `group` runs once per layer."""
    return sum(x * (case.arch.L if name == "group" else 1) for name, x in by_program.items())
