"""Programs compiled by the real XLA:GPU and ptxas for chips that are not there.

Needs the packages jax-cuda12-plugin and jax-cuda12-pjrt of jax's version (`--no-deps` will do) and
nvidia-cuda-nvcc-cu12 for ptxas; no GPU and no driver. Call `start` before anything else in the
process asks for devices.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Chip:
    """What two Hopper chips differ in. bandwidth: bytes per second; memory: bytes."""

    kind: str
    bandwidth: float
    memory: int


# NVIDIA's datasheets: H100 SXM5 80 GB with HBM3, H200 SXM 141 GB with HBM3e. The memory of the H200
# is what its driver reports.
CHIPS = {
    "h100": Chip("NVIDIA H100 80GB HBM3", 3.35e12, 85_520_809_984),
    "h200": Chip("NVIDIA H200", 4.8e12, 150_754_820_096),
}

SHARED_BYTES = 232_448  # that one block of threads can have

# What both have: a GpuTargetConfigProto in text form. Shared memory, registers and threads are
# those of compute capability 9.0 (CUDA C++ programming guide, table of technical specifications).
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: {shared}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: {l2}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA" device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
"""
_L2 = {"h100": 52_428_800, "h200": 62_914_560}

_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<target>\S+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.S,
)
_KERNEL = re.compile(r'custom_call_target="mosaic_gpu_v2".*?kernel_hash = "((?:[^"\\]|\\.)*)"')
_KNOWN: dict[str, re.Match[str]] = {}  # by a kernel's hash
_DUMPS: list[Path] = []


@dataclasses.dataclass(frozen=True)
class Resources:
    """Of one kernel. registers: per thread. spilled: bytes stored to local memory, per thread.
    shared: bytes of shared memory per block of threads."""

    name: str
    target: str
    registers: int
    spilled: int
    shared: int


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    if jax.__version_info__ < (0, 11):
        return f"the GPU kernels need jax 0.11, not {jax.__version__}: `make aot PYTHON=python3.12`"
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        return "no GPU compiler: run `make aot`, or install jax-cuda12-plugin and jax-cuda12-pjrt"
    return None


def start(dumps: Path | None = None) -> None:
    """Settings for this process. With a folder, ptxas' report of each kernel is dumped there."""
    jax.config.update("jax_platforms", "cpu")
    # A program for a chip that is not there can be written to the cache, but not read.
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # there is no driver, and need not be
    if dumps is not None:
        os.environ.update(
            MOSAIC_GPU_DUMP_TO=str(dumps),
            MOSAIC_GPU_DUMP_PTXAS="1",
            MOSAIC_GPU_DUMP_RESOURCES="1",
        )
        _DUMPS[:] = [dumps]


@functools.cache
def device(chip: str) -> Any:
    """One such chip."""
    target = _TARGET.format(l2=_L2[chip], shared=SHARED_BYTES, **dataclasses.asdict(CHIPS[chip]))
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target)
    return topology.devices[0]


@contextlib.contextmanager
def on(chip: str) -> Iterator[None]:
    """Lowering inside sees this chip where it asks for its device."""
    there = AbstractDevice(device_kind=CHIPS[chip].kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=there)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def compile_on(
    chip: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    donate: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """`function` compiled for one device; `args` are trees of ShapeDtypeStructs, `options` XLA's
    flags."""
    mesh = Mesh(np.array([device(chip)]), ("x",))
    where = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
    for dumped in (path for folder in _DUMPS for path in folder.iterdir()):
        dumped.unlink()
    with on(chip):
        lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*args)
    return lowered.compile(compiler_options=dict(options or {}))


def kernels(compiled: jax.stages.Compiled) -> list[str]:
    """Hashes of the Mosaic GPU kernels in a program, each once. Mosaic makes machine code once for
    every hash."""
    return list(dict.fromkeys(_KERNEL.findall(compiled.as_text() or "")))


def resources(compiled: jax.stages.Compiled) -> list[Resources]:
    """Of the Mosaic GPU kernels in the program that was compiled last."""
    (folder,) = _DUMPS
    here = kernels(compiled)
    new = [kernel for kernel in here if kernel not in _KNOWN]  # others are not compiled again
    reports, plans = (_in_order(folder, kind) for kind in (".ptxas", ".resources.txt"))
    for kernel, report in zip(new, reports, strict=True):
        match = _PTXAS.search(report.read_text())
        if match is None:
            raise ValueError(f"ptxas' report `{report}` has another form than expected")
        _KNOWN[kernel] = match
    found = []
    for kernel, plan in zip(here, plans, strict=True):
        match = _KNOWN[kernel]
        shared = plan.read_text().partition("smem_scratch_bytes=")[2].partition(",")[0]
        name = match["name"].removesuffix("_mosaic_gpu_kernel")
        numbers = (int(match["registers"]), int(match["stores"]), int(shared))
        found.append(Resources(name, match["target"], *numbers))
    return found


def _in_order(folder: Path, kind: str) -> list[Path]:
    """The dumps of one kind, by their number."""
    return sorted(
        folder.glob("*" + kind), key=lambda path: int(path.name.split(".")[0].split("_")[-1])
    )
