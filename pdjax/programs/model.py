"""The decoder-only transformer: one forward for prefill, decode and mixed batches.

The forward sees flat tokens: x_TD holds every token of a step, whichever requests they belong
to, and positions_T their places in their texts. Only attention needs to know which token belongs
to whom and where the cache lies, so the program that knows it passes an `Attend` per layer.

Parameters are plain nested dicts of arrays, so that a layer group is `params["layers"][a:b]` and
every group of one size has the same tree: one compiled program serves all of them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from pdjax.architecture import Architecture, rope_frequencies

Params = Mapping[str, Any]
Axes = tuple[str | None, ...]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q_TNH, k_TKH, v_TKH) -> o_TNH. Rotary embedding and QK norm are applied; q is not yet scaled by
H ** -0.5. A token attends to itself and to the tokens of its own text before it."""


# --- Rotary embedding --------------------------------------------------------------------


def rotate(arch: Architecture, x_TNH: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864), pairing dimension h with h + H / 2."""
    frequency_h = rope_frequencies(arch.rope_theta, arch.H)
    if arch.rope_scaling:
        frequency_h = frequency_h / np.asarray(arch.rope_scaling)
    angle_Th = positions_T.astype(jnp.float32)[:, None] * frequency_h.astype(np.float32)[None, :]
    cos_T1h, sin_T1h = jnp.cos(angle_Th)[:, None, :], jnp.sin(angle_Th)[:, None, :]
    a_TNh, b_TNh = jnp.split(x_TNH.astype(jnp.float32), 2, axis=-1)
    turned = (a_TNh * cos_T1h - b_TNh * sin_T1h, b_TNh * cos_T1h + a_TNh * sin_T1h)
    return jnp.concatenate(turned, axis=-1).astype(x_TNH.dtype)


# --- Modules: each array is declared once, with its shape, logical axes and initial values ---


@dataclass(frozen=True)
class _New:
    """Declares arrays of one dtype; without a generator only their shapes, without memory.

    `dims` are (logical axis, size) pairs. Drawn by numpy in float32: the same weights on every
    backend, and a bfloat16 model is the rounded float32 model.
    """

    generator: np.random.Generator | None
    dtype: DTypeLike

    def weight(self, fan_in: int, *dims: tuple[str, int]) -> nnx.Param:
        scale = np.float32(fan_in**-0.5)
        return self._param(lambda g, shape: scale * g.standard_normal(shape, np.float32), dims)

    def constant(self, value: float, *dims: tuple[str, int]) -> nnx.Param:
        return self._param(lambda _, shape: np.full(shape, value, np.float32), dims)

    def _param(
        self,
        draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray],
        dims: tuple[tuple[str, int], ...],
    ) -> nnx.Param:
        axes, shape = zip(*dims, strict=True)
        if self.generator is None:
            value = jax.ShapeDtypeStruct(shape, self.dtype)
        else:
            value = draw(self.generator, shape).astype(self.dtype)
        return nnx.Param(value, logical_axes=axes)


class Norm(nnx.Module):
    """RMS norm over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467), in float32."""

    def __init__(self, new: _New, eps: float, axis: str, size: int):
        self.eps = eps
        self.scale = new.constant(1, (axis, size))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].astype(jnp.float32)[(None,) * (x.ndim - 1)]
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention around the program's `Attend`."""

    def __init__(self, arch: Architecture, new: _New):
        D, N, K, H = arch.D, arch.N, arch.K, arch.H
        self.arch = arch
        self.q_DNH = new.weight(D, ("embed", D), ("heads", N), ("head_dim", H))
        self.k_DKH = new.weight(D, ("embed", D), ("kv_heads", K), ("head_dim", H))
        self.v_DKH = new.weight(D, ("embed", D), ("kv_heads", K), ("head_dim", H))
        self.o_NHD = new.weight(N * H, ("heads", N), ("head_dim", H), ("embed", D))
        if arch.qkv_bias:
            self.q_bias_NH = new.constant(0, ("heads", N), ("head_dim", H))
            self.k_bias_KH = new.constant(0, ("kv_heads", K), ("head_dim", H))
            self.v_bias_KH = new.constant(0, ("kv_heads", K), ("head_dim", H))
        if arch.qk_norm:
            self.q_norm = Norm(new, arch.norm_eps, "head_dim", H)
            self.k_norm = Norm(new, arch.norm_eps, "head_dim", H)

    def __call__(self, x_TD: jax.Array, positions_T: jax.Array, attend: Attend) -> jax.Array:
        q_TNH = jnp.einsum("TD,DNH->TNH", x_TD, self.q_DNH[...])
        k_TKH = jnp.einsum("TD,DKH->TKH", x_TD, self.k_DKH[...])
        v_TKH = jnp.einsum("TD,DKH->TKH", x_TD, self.v_DKH[...])
        if self.arch.qkv_bias:
            q_TNH = q_TNH + self.q_bias_NH[...][None]
            k_TKH = k_TKH + self.k_bias_KH[...][None]
            v_TKH = v_TKH + self.v_bias_KH[...][None]
        if self.arch.qk_norm:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH = rotate(self.arch, q_TNH, positions_T)
        k_TKH = rotate(self.arch, k_TKH, positions_T)
        return jnp.einsum("TNH,NHD->TD", attend(q_TNH, k_TKH, v_TKH), self.o_NHD[...])


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202, eq. 6)."""

    def __init__(self, arch: Architecture, new: _New):
        D, F = arch.D, arch.F
        self.gate_DF = new.weight(D, ("embed", D), ("mlp", F))
        self.up_DF = new.weight(D, ("embed", D), ("mlp", F))
        self.down_FD = new.weight(F, ("mlp", F), ("embed", D))

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        gate_TF = jnp.einsum("TD,DF->TF", x_TD, self.gate_DF[...])
        up_TF = jnp.einsum("TD,DF->TF", x_TD, self.up_DF[...])
        return jnp.einsum("TF,FD->TD", jax.nn.silu(gate_TF) * up_TF, self.down_FD[...])


class Layer(nnx.Module):
    """Attention, then MLP, each with a norm before it and a residual around it."""

    def __init__(self, arch: Architecture, new: _New):
        self.attention_norm = Norm(new, arch.norm_eps, "embed", arch.D)
        self.attention = Attention(arch, new)
        self.mlp_norm = Norm(new, arch.norm_eps, "embed", arch.D)
        self.mlp = MLP(arch, new)

    def __call__(self, x_TD: jax.Array, positions_T: jax.Array, attend: Attend) -> jax.Array:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), positions_T, attend)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class Embed(nnx.Module):
    """Token embedding; with tied embeddings also the head."""

    def __init__(self, arch: Architecture, new: _New):
        self.table_VD = new.weight(arch.D, ("vocab", arch.V), ("embed", arch.D))

    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        return self.table_VD[...][tokens_T]


class Head(nnx.Module):
    def __init__(self, arch: Architecture, new: _New):
        self.kernel_DV = new.weight(arch.D, ("embed", arch.D), ("vocab", arch.V))


# --- Pure functions over params ----------------------------------------------------------


def _modules(arch: Architecture, new: _New) -> dict[str, Any]:
    """The modules in the shape of the params."""
    modules: dict[str, Any] = {
        "embed": Embed(arch, new),
        "layers": tuple(Layer(arch, new) for _ in range(arch.L)),
        "final_norm": Norm(new, arch.norm_eps, "embed", arch.D),
    }
    return modules if arch.tied else modules | {"head": Head(arch, new)}


def _map_modules(function: Callable[[nnx.Module], Any], modules: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(function, modules, is_leaf=lambda x: isinstance(x, nnx.Module))


@functools.cache
def _abstract_modules(arch: Architecture, dtype: DTypeLike) -> dict[str, Any]:
    return _modules(arch, _New(None, dtype))


@functools.cache
def _graphs(arch: Architecture) -> dict[str, Any]:
    return _map_modules(nnx.graphdef, _abstract_modules(arch, jnp.float32))


def abstract_params(arch: Architecture, dtype: DTypeLike = jnp.float32) -> Params:
    """The tree of params with a ShapeDtypeStruct per array."""
    return _map_modules(lambda m: nnx.to_pure_dict(nnx.state(m)), _abstract_modules(arch, dtype))


def logical_axes(arch: Architecture) -> Params:
    """The tree of params with a tuple of logical axis names per array.

    Names: `embed` (D), `heads` (N), `kv_heads` (K), `head_dim` (H), `mlp` (F), `vocab` (V).
    """

    def axes_of(module: nnx.Module) -> Any:
        return jax.tree.map(
            lambda v: v.get_metadata("logical_axes"),
            nnx.to_pure_dict(nnx.state(module), lambda v: v),
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )

    return _map_modules(axes_of, _abstract_modules(arch, jnp.float32))


def init_params(arch: Architecture, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Params:
    """Random params on the host (numpy): variance 1 / fan-in, norms one, biases zero."""
    modules = _modules(arch, _New(np.random.default_rng(seed), dtype))
    return _map_modules(lambda m: nnx.to_pure_dict(nnx.state(m)), modules)


def embed(arch: Architecture, params: Params, tokens_T: jax.Array) -> jax.Array:
    """Token ids (int32) -> x_TD in the dtype of the params."""
    return nnx.merge(_graphs(arch)["embed"], params["embed"])(tokens_T)


def run_layers(
    arch: Architecture,
    layers: Sequence[Params],
    x_TD: jax.Array,
    positions_T: jax.Array,
    attends: Sequence[Attend],
) -> jax.Array:
    """x_TD after `layers`, a slice of `params["layers"]`; one `Attend` per layer.

    positions_T: each token's place in its text, int32.
    """
    graph = _graphs(arch)["layers"][0]
    for layer, attend in zip(layers, attends, strict=True):
        x_TD = nnx.merge(graph, layer)(x_TD, positions_T, attend)
    return x_TD


def logits(arch: Architecture, params: Params, x_TD: jax.Array) -> jax.Array:
    """Final norm and head: x_TD after the last layer -> float32 logits_TV."""
    x_TD = nnx.merge(_graphs(arch)["final_norm"], params["final_norm"])(x_TD)
    if arch.tied:
        table_VD = params["embed"]["table_VD"]
        return jnp.einsum("TD,VD->TV", x_TD, table_VD, preferred_element_type=jnp.float32)
    kernel_DV = params["head"]["kernel_DV"]
    return jnp.einsum("TD,DV->TV", x_TD, kernel_DV, preferred_element_type=jnp.float32)
