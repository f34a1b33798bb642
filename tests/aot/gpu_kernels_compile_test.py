"""The real GPU compiler takes every kernel at every named shape, and spills no register.

Hopper chips run the same machine code (sm_90a) on the same multiprocessors, so every shape is
compiled once and held against the memory of each chip; that the others get the same code is seen at
a few shapes.
"""

import jax
import pytest

from kernels_pallas import aot_gpu, cases

pytestmark = pytest.mark.skipif(aot_gpu.missing() is not None, reason=str(aot_gpu.missing()))
CASES = list(cases.real("gpu"))
COMPILED = "h200"
FEW = list({case.name.split("_")[0]: case for case in CASES}.values())  # one of every kernel


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory):
    aot_gpu.start(tmp_path_factory.mktemp("dumps"))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_kernel_compiles_and_updates_pages_in_place(case: cases.Case):
    compiled = aot_gpu.compile_on(COMPILED, case.function, case.args, case.donate)
    (kernel,) = aot_gpu.resources(compiled)
    assert kernel.target == "sm_90a"
    assert kernel.spilled == 0, kernel
    assert kernel.shared <= aot_gpu.SHARED_BYTES
    memory = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
    for chip in aot_gpu.CHIPS.values():
        assert needed <= chip.memory
    if case.donate:
        pages = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(case.args[0]))
        assert memory.alias_size_in_bytes >= pages
        assert memory.temp_size_in_bytes < pages / 4, "pages are copied"


@pytest.mark.parametrize("chip", aot_gpu.CHIPS)
@pytest.mark.parametrize("case", FEW, ids=[case.name for case in FEW])
def test_a_gpu_of_its_kind_gets_the_same_code(case: cases.Case, chip: str):
    usual, there = (
        aot_gpu.compile_on(name, case.function, case.args, case.donate) for name in (COMPILED, chip)
    )
    assert aot_gpu.kernels(there) == aot_gpu.kernels(usual)
