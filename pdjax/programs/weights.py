"""Reads a model's weights and places them on meshes.

Every source comes down to params on the host (GGUF, safetensors, random), which are cast and put
on each mesh, or to an orbax folder, whose shards are read straight onto each mesh.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from pdjax.architecture import Architecture, ModelError
from pdjax.programs.mesh import by_head, tree_sharding
from pdjax.programs.model import Params, abstract_params, init_params, logical_axes
from pdjax.sources import Gguf, find, read_architecture, read_json, write_architecture

Read = Callable[[str], np.ndarray]
"""Stored name of a tensor -> the tensor as stored. Raises ModelError where it is missing."""

_PARAMS_FOLDER = "params"
_HUGGINGFACE, _GGUF = 0, 1
_TOP_NAMES = {
    "embed/table_VD": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm/scale": ("model.norm.weight", "output_norm.weight"),
    "head/kernel_DV": ("lm_head.weight", "output.weight"),
}
_LAYER_NAMES = {
    "attention_norm/scale": ("input_layernorm.weight", "attn_norm.weight"),
    "attention/q_DNH": ("self_attn.q_proj.weight", "attn_q.weight"),
    "attention/k_DKH": ("self_attn.k_proj.weight", "attn_k.weight"),
    "attention/v_DKH": ("self_attn.v_proj.weight", "attn_v.weight"),
    "attention/o_NHD": ("self_attn.o_proj.weight", "attn_output.weight"),
    "attention/q_bias_NH": ("self_attn.q_proj.bias", "attn_q.bias"),
    "attention/k_bias_KH": ("self_attn.k_proj.bias", "attn_k.bias"),
    "attention/v_bias_KH": ("self_attn.v_proj.bias", "attn_v.bias"),
    "attention/q_norm/scale": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "attention/k_norm/scale": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp_norm/scale": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "mlp/gate_DF": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "mlp/up_DF": ("mlp.up_proj.weight", "ffn_up.weight"),
    "mlp/down_FD": ("mlp.down_proj.weight", "ffn_down.weight"),
}


@dataclass(frozen=True)
class Checkpoint:
    """A model that was opened. `load` gives params like the abstract ones (dtypes, shardings)."""

    source: str
    arch: Architecture
    load: Callable[[Params], Params]

    def place(self, shardings: Any = None, dtype: DTypeLike = jnp.float32) -> Params:
        """Params in `dtype`, on the default device or as `shardings` (a Sharding per array) say.

        The file is read once, however many meshes it is placed on (an orbax folder: once per
        mesh, each device its shard).
        """
        abstract = abstract_params(self.arch, dtype)
        if shardings is None:
            here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            shardings = jax.tree.map(lambda _: here, abstract)
        return self.load(
            jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
            )
        )

    def place_on(self, mesh: Mesh, dtype: DTypeLike = jnp.float32) -> Params:
        """Params split over `mesh`. Where it has more devices than there are kv heads, each device
        gets the head that its query heads read, so that k and v have one head per device."""
        axes = logical_axes(self.arch)
        ours = tree_sharding(mesh, axes)
        once = tree_sharding(by_head(mesh, self.arch.K), axes)
        wanted = jax.tree.map(lambda a, b, ax: b if "kv_heads" in ax else a, ours, once, axes)
        return jax.tree.map(_as_stored, self.place(wanted, dtype), ours)


def open_checkpoint(source: str) -> Checkpoint:
    """Opens `source` (see pdjax.sources); the weights are read at the first `place`.

    Raises ModelError: nothing there, a cut or foreign file, a model we do not compute; `place`
    raises it for a tensor or shard that is missing or has another shape than the architecture's.
    """
    found, arch = find(source), read_architecture(source)
    if found.kind == "orbax":
        return Checkpoint(source, arch, functools.partial(_restore_orbax, found.path))
    if found.kind == "random":
        read_host = functools.partial(init_params, arch)
    elif found.kind == "gguf":
        read_host = functools.partial(_gguf_host, arch, found.path)
    else:
        read_host = functools.partial(_huggingface_host, arch, found.path)
    return Checkpoint(source, arch, functools.partial(_place_host, functools.cache(read_host)))


def _as_stored(x: jax.Array, place: NamedSharding) -> jax.Array:
    """The same memory as an array that lies as `place` says: copies of a head, which `x` has once,
    count as heads of their own."""
    if x.sharding == place:
        return x
    parts = {shard.device: shard.data for shard in x.addressable_shards}
    local = x.sharding.shard_shape(x.shape)
    spec = (*place.spec, *(None,) * (x.ndim - len(place.spec)))
    shape = [
        size * (place.mesh.size if axis else 1) for size, axis in zip(local, spec, strict=True)
    ]
    ordered = [parts[device] for device in place.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(tuple(shape), place, ordered)


def _place_host(read_host: Callable[[], Params], abstract: Params) -> Params:
    return jax.tree.map(
        lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding), read_host(), abstract
    )


# --- Stored tensors -> params ------------------------------------------------------------


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _stored_name(leaf: str, style: int) -> str:
    """`layers/3/mlp/up_DF` -> `model.layers.3.mlp.up_proj.weight` or `blk.3.ffn_up.weight`."""
    if leaf in _TOP_NAMES:
        return _TOP_NAMES[leaf][style]
    _, index, rest = leaf.split("/", 2)
    return (f"model.layers.{index}.", f"blk.{index}.")[style] + _LAYER_NAMES[rest][style]


def _assemble(arch: Architecture, read: Read, style: int) -> Params:
    def leaf(path: Any, like: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> np.ndarray:
        stored = _stored_name(_name(path), style)
        return _arrange(stored, read(stored), like.shape, axes)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(arch), logical_axes(arch))


def _arrange(
    name: str, stored: np.ndarray, shape: tuple[int, ...], axes: tuple[str, ...]
) -> np.ndarray:
    """A stored matrix is [out, in] with heads and head size in one axis; ours is [in, out]."""
    if "embed" not in axes or len(axes) == 1:
        expected = (math.prod(shape),)
    elif axes[0] == "embed":
        expected = (math.prod(shape[1:]), shape[0])
    else:
        expected = (shape[-1], math.prod(shape[:-1]))
    if axes[0] == "vocab":  # the embedding is a table, not a matrix: [V, D] in both
        expected = shape
    if stored.shape != expected:
        raise ModelError(f"tensor `{name}` has shape {stored.shape}; this model needs {expected}")
    return (stored if axes[0] == "vocab" else stored.T).reshape(shape)


# --- GGUF --------------------------------------------------------------------------------


def _gguf_host(arch: Architecture, path: Path) -> Params:
    file = Gguf(path)
    interleaved = file.need("general.architecture") == "llama"
    heads = {"attn_q": arch.N, "attn_k": arch.K}

    def read(name: str) -> np.ndarray:
        array, part = file.array(name), name.split(".")[-2]
        return _pair_halves(array, heads[part]) if interleaved and part in heads else array

    return _assemble(arch, read, _GGUF)


def _pair_halves(stored: np.ndarray, heads: int) -> np.ndarray:
    """Undoes a reordering: llama.cpp's rotary embedding turns rows 2h and 2h + 1 together, ours
    h and h + H / 2."""
    rows, *rest = stored.shape
    if rows % (2 * heads):
        return stored  # of a wrong shape, which is reported with its name
    split = stored.reshape(heads, rows // heads // 2, 2, *rest)
    return split.swapaxes(1, 2).reshape(stored.shape)


# --- Hugging Face ------------------------------------------------------------------------


def _huggingface_host(arch: Architecture, folder: Path) -> Params:
    shard_of = _shards(folder)

    @functools.cache
    def opened(shard: str) -> Any:
        if not (folder / shard).exists():
            raise ModelError(f"`{folder}` lacks its shard `{shard}`; copy the whole model")
        try:
            return safetensors.safe_open(folder / shard, framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"`{folder / shard}` is cut short or damaged: {error}") from None

    def read(name: str) -> np.ndarray:
        if name not in shard_of:
            raise ModelError(f"`{folder}` has no tensor `{name}`")
        return opened(shard_of[name]).get_tensor(name)

    return _assemble(arch, read, _HUGGINGFACE)


def _shards(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = read_json(folder / "model.safetensors.index.json")
    if index:
        return index["weight_map"]
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelError(f"`{folder}` has no `model.safetensors` and no index of shards")
    try:
        with safetensors.safe_open(single, framework="numpy") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"`{single}` is cut short or damaged: {error}") from None


# --- Orbax -------------------------------------------------------------------------------


def save_orbax(checkpoint: Checkpoint, folder: str | Path, dtype: DTypeLike = jnp.float32) -> None:
    """Writes the weights in `dtype` and the architecture into a new folder.

    `open_checkpoint(folder)` restores each shard straight onto its device.
    """
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"`{folder}` is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / _PARAMS_FOLDER, checkpoint.place(dtype=dtype))
    write_architecture(checkpoint.arch, folder)


def _restore_orbax(folder: Path, abstract: Params) -> Params:
    path = folder.resolve() / _PARAMS_FOLDER
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(path).item_metadata.tree
        except (AttributeError, ValueError, OSError) as error:
            raise ModelError(
                f"`{path}` is not a whole orbax checkpoint; convert it anew"
            ) from error
        stored, needed = _shapes(saved), _shapes(abstract)
        if stored != needed:
            name = min(n for n in {*stored, *needed} if stored.get(n) != needed.get(n))
            raise ModelError(
                f"`{path}`: weights `{name}` have shape {stored.get(name)}; "
                f"`{folder.name}/architecture.json` needs {needed.get(name)}"
            )
        return checkpointer.restore(path, abstract)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    return {_name(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params)}
