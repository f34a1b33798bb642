"""A kernel of a few bundles, written by hand in the form that the TPU compiler dumps."""

import pytest

from kernels_pallas import llo

# A loop of bundles 2 to 14 (one delay bundle after each branch). In it: a conditional part that
# starts copies and is long, one that starts copies and is short, one that only stores, and the
# products, with a loop of bundle 11 inside.
CODE = """= control target key start
LB: loop body
= control target key end

     0   :  { %s0 = smov 0 /* entry */ }
   0x1   :  { %s1 = smov 0 } /* End region 1 */
   0x2 LB: > { %10 = sbr.rel (%p0) target = $region5 } /* Start region 2 :: Start region 3 */
   0x3   :  {}
   0x4   : > { %11 = dma.hbm_to_vmem [thread:$0]  %s1, 128, %s2, %s3 }
   0x5   : > { %s5 = smov 0 } /* End region 4 */
   0x6 PF: > { %12 = sbr.rel (%p1) target = $region7 } /* Start/End empty region 5 */
   0x7   : > { %13 = dma.hbm_to_vmem [thread:$0]  (%p1), %s1, 128, %s2, %s3 }
   0x8   : > { %14 = sbr.rel (!%p2) target = $region8 } /* Start region 7 */
   0x9   :  {}
   0xa   : > { %15 = vst [vmem:[%s1] sm:$0x1] %v0 }
   0xb LB: >> { %16 = sbr.rel (!%p3) target = $region9 } /* Start region 8 :: Start region 9 */
   0xc   :  {}
   0xd   : > { %17 = sbr.rel (!%p4) target = $region2 }
   0xe   :  {}
   0xf   :  { %18 = shalt.err (%p5) }
"""
MATRIX = {0xA: 1, 0xB: 1, 0xE: 3}  # bundle -> slots of the matrix unit, of 4
SLOTS = "\n".join(
    [
        "== CAPACTIY:",
        "MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU",
        "    4     3     4     2     1     3     3     1     1     2",
        "== UTILIZATION:",
        *(f"{MATRIX.get(i, 0)} 0 2 0 0 0 {int(i == 15)} 0 0 1" for i in range(16)),
        "0 0 0 0 0 0 0 0 0 0",
    ]
)
MEMORY = """
  #allocation1 [shape = 'f32[8,128]', space=vmem, size = 0x1000, offset = 0, scoped, tag = 'a']
  #allocation2 [shape = 'f32[8,128]', space=vmem, size = 0x1000, offset = 0x2000, scoped, tag = 'b']
  #allocation3 [shape = 'f32[8,128]', space=smem, size = 0x1000, offset = 0x9000, scoped, tag = 'c']
"""


@pytest.fixture
def schedule() -> llo.Schedule:
    return llo.parse(CODE, SLOTS, MEMORY, delay=1)


def test_loops_nest_as_written(schedule):
    assert schedule.loops == (llo.Loop(2, 15, (llo.Loop(11, 13, ()),)),)


def test_the_steady_path_takes_the_products_and_the_cheapest_copies(schedule):
    # Of bundles 2 to 14: without 4 and 5 (the dearer copies) and the loop inside, with bundle 10,
    # whose part is taken because it has a product.
    path = schedule.path(schedule.loops[0])
    assert path.bundles == len([2, 3, 6, 7, 8, 9, 10, 13, 14])
    assert path.copies == 1
    assert path.used["MXU"] == 4
    assert path.matrix == pytest.approx(4 / (4 * 9))
    assert path.filled == pytest.approx(2 / 4)  # VALU


def test_a_path_with_as_many_copies_as_asked_for_is_taken(schedule):
    path = schedule.path(schedule.loops[0], copies=2)
    assert path.bundles == len([2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 14])
    assert path.copies == 2
    assert schedule.path(schedule.loops[0], copies=9) == path


def test_the_matrix_loop_is_found_through_its_parents(schedule):
    outer = schedule.loops[0]
    assert schedule.matrix_loops() == (outer, outer.inner[0])


def test_memory_and_spills_are_counted(schedule):
    assert schedule.vmem_bytes == 0x3000
    assert schedule.spills == 1


def test_a_kernel_that_was_not_dumped_is_named(tmp_path):
    (tmp_path / "17-other.1-03-final_bundles.txt").write_text(CODE)
    with pytest.raises(FileNotFoundError, match=r"no `final_bundles` of `mine\.1`.*other\.1"):
        llo.read(tmp_path, "mine.1", 1)
