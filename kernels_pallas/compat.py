"""What differs between jax 0.10.2 and 0.12, and what a kernel asks about its chip."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu


def tensor_cores() -> int:
    """TensorCores of one TPU device: 2 for v5p (megacore), 1 where it is not known. A program that
    is compiled ahead finds its chip in the abstract mesh it is traced under."""
    try:
        return pltpu.get_tpu_info().num_cores
    except (ValueError, NotImplementedError):
        return 1


def interpreted(interpret: bool) -> pltpu.InterpretParams | bool:
    """What pallas_call takes as `interpret`: copies are simulated, and races looked for. Each copy
    has a clock of its own only where there are more clocks than copies in flight."""
    return pltpu.InterpretParams(detect_races=True, vector_clock_size=64) if interpret else False


def stays_in_hbm(x: jax.Array, interpret: bool) -> jax.Array:
    """x, which XLA must not copy to vector memory for a kernel that reads a part of it. Interpreted
    kernels run where there is only one memory."""
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def reads_biased_fp8(dtype: jnp.dtype) -> bool:
    """Whether float8_e4m3fn is best read as float8_e4m3b11fnuz, which v5e, v5p and v6e unpack by an
    instruction; the number is then 16 times too small, and of the 256 codes two differ: -0, which
    pages do not hold, and NaN, which only stands where nothing is read. tpu7x unpacks the former.
    """
    try:
        return dtype == jnp.float8_e4m3fn and pltpu.get_tpu_info().generation < 7
    except (ValueError, NotImplementedError):
        return dtype == jnp.float8_e4m3fn
