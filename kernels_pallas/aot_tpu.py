"""Programs compiled by the real TPU compiler for chips that are not there.

Needs the package libtpu of the version that jax pins (`pip install "jax[tpu]"`), and no TPU. Call
`start` before anything else in the process asks for TPU devices: libtpu reads its settings once.
"""

import contextlib
import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kernels_pallas import llo


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
    )
    if dumps is not None:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_bounds_check=false --xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true "
            f"--xla_jf_dump_llo_pass_label_regex={llo.DUMPED_PASSES}"
        )
        _DUMPS[:] = [dumps]
    jax.config.update("jax_platforms", "cpu")


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
    """The schedules of the Pallas kernels in what was compiled last, by name. Empties the folder
    of dumps that `start` was given."""
    (folder,) = _DUMPS
    found = {name: llo.read(folder, name, CHIPS[chip].branch_delay) for name in kernels(compiled)}
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def kernels(compiled: jax.stages.Compiled) -> list[str]:
    """Names of the Pallas kernels in a program, as its HLO has them."""
    line = re.compile(r"^\s*(?:ROOT )?%(\S+) = .*custom_call_target=\"tpu_custom_call\"", re.M)
    return line.findall(compiled.as_text() or "")
