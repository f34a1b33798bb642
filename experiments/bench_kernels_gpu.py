"""Our GPU kernels beside those of JAX, by what ptxas and XLA say of their code.

Of ours and other Mosaic GPU kernels, ptxas' report: registers, bytes spilled, shared memory. XLA
hides the report of kernels that it compiles itself, those of the Triton backend: of these, whether
any register is spilled, and the shared memory that it launches them with.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from experiments.bench_common import Row
from experiments.kernel_peers_gpu import Peer, decode_peers, prefill_peers
from kernels_pallas import aot_gpu, cases
from kernels_pallas.specs import Spec

KIB = 2**10


def rows(chip: str, spec: Spec, kind: str) -> Iterator[Row]:
    """kind: `decode` or `prefill`. Ours, with goals, and every peer that compiles."""
    case = (cases.decode if kind == "decode" else cases.prefill)(spec, "gpu")
    what = f"{chip} {case.name}"
    (ours,) = aot_gpu.resources(aot_gpu.compile_on(chip, case.function, case.args))
    yield from _reported(f"{what}, ours", ours, "<= 0")
    for peer in (decode_peers if kind == "decode" else prefill_peers)(spec):
        yield from _peer_rows(chip, f"{what}, {peer.name}", peer)


def move_rows(chip: str, spec: Spec) -> Iterator[Row]:
    """append, pack and unpack; JAX has nothing to set beside them."""
    for case in cases.moves(spec, "gpu"):
        (ours,) = aot_gpu.resources(aot_gpu.compile_on(chip, case.function, case.args, case.donate))
        yield from _reported(f"{chip} {case.name}, ours", ours, "<= 0")


def _reported(what: str, kernel: aot_gpu.Resources, goal: str) -> Iterator[Row]:
    yield Row(f"{what}: registers per thread", kernel.registers, "")
    yield Row(f"{what}: bytes spilled per thread", kernel.spilled, "B", goal)
    yield Row(f"{what}: shared memory", kernel.shared / KIB, "KiB")


def _peer_rows(chip: str, what: str, peer: Peer) -> Iterator[Row]:
    """None for a peer that declines the shape, or the chip."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            compiled = aot_gpu.compile_on(
                chip, peer.function, peer.args, options={"xla_dump_to": folder}
            )
            launched = _shared_memory(Path(folder))
        reported = aot_gpu.resources(compiled)
        if reported:
            yield from _reported(what, reported[0], "")
            return
        spills = _spills(chip, peer)
    except (ValueError, NotImplementedError, RuntimeError, AssertionError):
        return
    yield Row(f"{what}: spills (1: yes)", spills, "")
    yield Row(f"{what}: shared memory", launched / KIB, "KiB")


def _spills(chip: str, peer: Peer) -> bool:
    """Whether XLA refuses the program when told to refuse what spills."""
    strict = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    try:
        aot_gpu.compile_on(chip, peer.function, peer.args, options=strict)
    except jax.errors.JaxRuntimeError as error:
        if "spill" not in str(error):
            raise
        return True
    return False


def _shared_memory(folder: Path) -> int:
    """The most that a kernel of the dumped program is launched with."""
    (thunks,) = folder.glob("*.thunk_sequence.txt")
    found = re.findall(r"shared_memory: (\d+) bytes", thunks.read_text())
    return max(map(int, found), default=0)
