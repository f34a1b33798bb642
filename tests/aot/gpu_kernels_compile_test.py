"""The real GPU compiler takes every kernel at every named shape, and spills no register."""

import jax
import pytest

from kernels_pallas import aot_gpu, cases

pytestmark = pytest.mark.skipif(aot_gpu.missing() is not None, reason=str(aot_gpu.missing()))
CASES = list(cases.real("gpu"))


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory):
    aot_gpu.start(tmp_path_factory.mktemp("dumps"))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_kernel_compiles_and_updates_pages_in_place(case: cases.Case):
    for chip in aot_gpu.CHIPS:
        compiled = aot_gpu.compile_on(chip, case.function, case.args, case.donate)
        (kernel,) = aot_gpu.resources(compiled)
        assert kernel.target == "sm_90a"
        assert kernel.spilled == 0, kernel
        if case.donate:
            memory = compiled.memory_analysis()
            pages = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(case.args[0]))
            assert memory.alias_size_in_bytes >= pages
            assert memory.temp_size_in_bytes < pages / 4, "pages are copied"
