"""The real TPU compiler takes every kernel at every named shape, for chips that are not there."""

import jax
import pytest

from kernels_pallas import aot_tpu, cases

pytestmark = pytest.mark.skipif(aot_tpu.missing() is not None, reason=str(aot_tpu.missing()))
CASES = list(cases.real("tpu"))


@pytest.fixture(scope="module", autouse=True)
def compiler():
    aot_tpu.start()


@pytest.mark.parametrize("chip", aot_tpu.CHIPS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_kernel_compiles_and_updates_pages_in_place(case: cases.Case, chip: str):
    compiled = aot_tpu.compile_on(chip, case.function, case.args, case.donate)
    assert aot_tpu.kernels(compiled), "no Pallas kernel is in the program"
    if case.donate:
        memory = compiled.memory_analysis()
        pages = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(case.args[0]))
        assert memory.alias_size_in_bytes >= pages
        assert memory.temp_size_in_bytes < pages / 4, "pages are copied"
