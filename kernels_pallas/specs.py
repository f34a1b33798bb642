"""What the named shapes of all kernels are made of."""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.pages import QUANTISED, Pages, empty

POOL_BYTES = 2**30  # the most that a spec's pool takes; longer texts share pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """B rows of T new tokens; texts of up to S tokens, these included. K heads of one device."""

    name: str
    B: int = 32
    T: int = 1
    S: int = 4096
    G: int = 4
    K: int = 8
    H: int = 128
    page: int = 16
    dtype: str = "bfloat16"
    q_dtype: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    run: int = 1

    @property
    def N(self) -> int:
        return self.G * self.K

    @property
    def n(self) -> int:
        """Entries per row of the table, a multiple of run."""
        return -(-self.S // (self.page * self.run)) * self.run

    @property
    def token_bytes(self) -> int:
        """K, V and scales of one token, all heads."""
        scales = 8 if self.dtype in QUANTISED else 0
        return self.K * (2 * self.H * jnp.dtype(self.dtype).itemsize + scales)

    @property
    def P(self) -> int:
        most = POOL_BYTES // (self.page * self.token_bytes)
        return max(min(self.B * self.n, most // self.run * self.run), self.n)

    def pages(self) -> Pages:
        """Abstract: shapes and dtypes."""
        return jax.eval_shape(lambda: empty(self.P, self.K, self.page, self.H, self.dtype))

    def rows(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Abstract table_Bn, start_B, length_B."""
        shapes = ((self.B, self.n), (self.B,), (self.B,))
        table, start, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
        return table, start, length

    def new(self, heads: int) -> jax.ShapeDtypeStruct:
        """Abstract [B, T, heads, H] of the model's dtype."""
        shape = (self.B, self.T, heads, self.H)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.q_dtype))

    def options(self) -> dict[str, object]:
        """The static arguments of an attention kernel."""
        return {"window": self.window, "softcap": self.softcap, "run": self.run}
