"""What differs between jax 0.10.2 and 0.12, and what a kernel asks about its chip."""

import jax
from jax.experimental.pallas import tpu as pltpu


def tensor_cores() -> int:
    """TensorCores of one TPU device: 2 for v5p (megacore), 1 where it is not known. A program that
    is compiled ahead finds its chip in the abstract mesh it is traced under."""
    try:
        return pltpu.get_tpu_info().num_cores
    except (ValueError, NotImplementedError):
        return 1


def stays_in_hbm(x: jax.Array, interpret: bool) -> jax.Array:
    """x, which XLA must not copy to vector memory for a kernel that reads a part of it. Interpreted
    kernels run where there is only one memory."""
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)
