"""Programs compiled by the real TPU compiler for chips that are not there.

Needs the package libtpu of the version that jax pins (`pip install "jax[tpu]"`), and no TPU. Call
`start` before anything else in the process asks for TPU devices: libtpu reads its settings once.
"""

import contextlib
import functools
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kernels_pallas import llo
from kernels_pallas.specs import Spec


@dataclass(frozen=True)
class Chip:
    """A TPU as JAX sees it: one device.

    topology: a name that get_topology_desc takes, of at least eight devices. clock: cycles per
    second. branch_delay: bundles executed after a branch, as seen in dumped code. link: bytes per
    second in one direction over one link to a neighbour.
    """

    topology: str
    kind: str
    cores: int
    clock: float
    branch_delay: int
    link: float


# Clocks: the peak bf16 rate of `info` over what the matrix units do in a cycle: 2 * 128 * 128 FLOPs
# in each of 4 (v5e), of 8 (v5p), 2 * 256 * 256 in each of 4 (v6e, and per core of tpu7x).
# Links: "How to Scale Your Model", part 2 (jax-ml.github.io/scaling-book/tpus).
CHIPS = {
    "v5e": Chip("v5e:2x4", "TPU v5 lite", 1, 1.5e9, 4, 4.5e10),
    "v5p": Chip("v5p:2x2x2", "TPU v5", 2, 1.75e9, 4, 9e10),
    "v6e": Chip("v6e:2x4", "TPU v6 lite", 1, 1.75e9, 4, 9e10),
    "tpu7x": Chip("tpu7x:2x2x1", "TPU7x", 1, 2.2e9, 1, 9e10),
}

_KERNEL = re.compile(r"^\s*(?:ROOT )?%(\S+) = .*custom_call_target=\"tpu_custom_call\".*", re.M)
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"= (\S+|\(.*?\)) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
)
# How often a ring sends the arrays that the HLO names there; a permute names each one twice.
_ROUNDS = {"all-gather": 1, "all-reduce": 2, "all-to-all": 1, "collective-permute": 0.5}
_DUMPS: list[Path] = []


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    if importlib.util.find_spec("libtpu") is None:
        return "no TPU compiler: run `make aot`, or install the libtpu that `jax[tpu]` pins"
    return None


def start(dumps: Path | None = None) -> None:
    """Settings of libtpu for this process. With a folder, kernels' schedules are dumped there.

    Bounds checks are left out of the code of all kernels alike: they are a debugging aid that
    would hide what a loop is made of.
    """
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-8",
        TPU_WORKER_HOSTNAMES="localhost",
        # There is no TPU for two processes to fight over.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    if dumps is not None:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_bounds_check=false --xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true "
            f"--xla_jf_dump_llo_pass_label_regex={llo.DUMPED_PASSES}"
        )
        _DUMPS[:] = [dumps]
    jax.config.update("jax_platforms", "cpu")
    # A program for a chip that is not there can be written to the cache, but not read.
    jax.config.update("jax_enable_compilation_cache", False)


@functools.cache
def devices(chip: str) -> tuple[Any, ...]:
    """Devices of a topology of such chips."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology)
    return tuple(topology.devices)


@functools.cache
def info(chip: str) -> Any:
    """JAX's own table: capacities, bandwidth and peak rates, per core."""
    with on(chip):
        return pltpu.get_tpu_info()


def hbm_bytes(chip: str) -> int:
    """Of one device, however many cores it has."""
    return info(chip).hbm_capacity_bytes * info(chip).num_cores


def hbm_bytes_per_s(chip: str) -> float:
    """Of one device."""
    return info(chip).mem_bw_bytes_per_second * info(chip).num_cores


@contextlib.contextmanager
def on(chip: str) -> Iterator[None]:
    """Lowering inside sees this chip where it asks for its device."""
    device = AbstractDevice(CHIPS[chip].kind, CHIPS[chip].cores, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def compile_on(
    chip: str, function: Callable[..., Any], args: Sequence[Any], donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """`function` compiled for one device; `args` are trees of ShapeDtypeStructs."""
    mesh = Mesh(np.array(devices(chip)[:1]), ("x",))
    where = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
    with on(chip):
        return jax.jit(function, donate_argnums=tuple(donate)).lower(*args).compile()


def schedules(chip: str, compiled: jax.stages.Compiled) -> dict[str, llo.Schedule]:
    """The schedules of the Pallas kernels in what was compiled last, by name; of kernels that are
    the same only one, since the compiler makes it once. Empties the folder of dumps that `start`
    was given."""
    (folder,) = _DUMPS
    names = kernels(compiled)
    dumped = [name for name in names if any(folder.glob(f"*-{name}-*"))]
    found = {name: llo.read(folder, name, CHIPS[chip].branch_delay) for name in dumped or names}
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def kernels(compiled: jax.stages.Compiled) -> list[str]:
    """Names of the Pallas kernels in a program, as its HLO has them."""
    return [name for name, _ in _kernel_lines(compiled)]


class Work(NamedTuple):
    """What one pass through the innermost loop with matrix products does.

    units: KV tokens times kv heads in decode, query tokens times KV tokens times query heads in
    prefill. copies: that are started per block of pages. passes: of that loop per pass of the one
    around it, which then starts the copies; 0 where it is the loop over blocks itself. queries:
    tokens that read a block of pages together.
    """

    units: float
    copies: int
    passes: int = 0
    queries: int = 1


def decode_work(spec: Spec, chip: str) -> Work:
    """Of our paged_attention."""
    from kernels_pallas.paged_attention import tpu

    plan = _plan(tpu._plan, spec, chip)
    return Work(plan.tokens * plan.K, plan.units)


def prefill_work(spec: Spec, chip: str) -> Work:
    """Of our prefill_attention, which loops over the kv heads of a block."""
    from kernels_pallas.prefill_attention import tpu

    plan = _plan(tpu._plan, spec, chip)
    return Work(plan.tokens * plan.rows, plan.units, plan.packs, plan.T)


def _plan(make: Callable[..., Any], spec: Spec, chip: str) -> Any:
    with on(chip):
        table, _, _ = spec.rows()
        q, pages = spec.new(spec.N), spec.pages()
        return make(q, pages, table, spec.window, spec.softcap, spec.run)


def bundles(schedule: llo.Schedule, work: Work) -> tuple[float, llo.Way]:
    """Bundles per unit of work, and the way through the innermost loop."""
    *around, innermost = schedule.matrix_loops()
    if not work.passes:
        way = schedule.path(innermost, work.copies)
        return way.bundles / work.units, way
    way, outside = schedule.path(innermost), schedule.path(around[-1], work.copies)
    return (way.bundles + outside.bundles / work.passes) / work.units, way


def small_bytes(compiled: jax.stages.Compiled, pages: Sequence[Any]) -> float:
    """At most so many bytes of HBM does a program read and write beside the arrays `pages`: XLA's
    count for its own operations, and what its kernels take and give."""
    big = {(8 * x.dtype.itemsize, x.shape) for x in pages}
    total = compiled.cost_analysis()["bytes accessed"]  # pyright: ignore[reportOptionalSubscript]
    for _, line in _kernel_lines(compiled):
        for array in _ARRAY.findall(line.partition("frontend_attributes")[0]):
            bits, shape = _bits_and_shape(array)
            total += 0 if (bits, shape) in big else math.prod(shape) * bits // 8
    return total


def estimated_cycles(compiled: jax.stages.Compiled) -> int:
    """XLA's estimate for all of its own operations; it has none for Pallas kernels."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text() or "")))


def ring_bytes(compiled: jax.stages.Compiled) -> float:
    """What a program's collectives gather or exchange, plus twice what they reduce."""
    text = compiled.as_text() or ""
    return sum(_ROUNDS[kind] * _array_bytes(types) for types, kind in _COLLECTIVE.findall(text))


def _array_bytes(types: str) -> int:
    return sum(
        math.prod(shape) * bits // 8 for bits, shape in map(_bits_and_shape, _ARRAY.findall(types))
    )


def _bits_and_shape(array: tuple[str, str]) -> tuple[int, tuple[int, ...]]:
    """Of an array type in HLO, such as ("bf16", "8,128")."""
    dtype, dims = array
    bits = int(re.findall(r"\d+", dtype)[0]) if dtype != "pred" else 8
    return bits, tuple(int(d) for d in dims.split(",") if d)


def _kernel_lines(compiled: jax.stages.Compiled) -> list[tuple[str, str]]:
    """Name and text of each Pallas call in a program's HLO."""
    return [(match[1], match[0]) for match in _KERNEL.finditer(compiled.as_text() or "")]
