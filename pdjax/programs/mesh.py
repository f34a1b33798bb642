"""Devices carved into meshes, and one table from logical axes to mesh axes."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pdjax.architecture import Architecture
from pdjax.core.config import ConfigError, Placement

MESH_AXES: Mapping[str, str | None] = {
    "embed": None,
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "mlp": "tp",
    "vocab": "tp",
    "pages": None,
    "page": None,
    "tokens": None,
}
"""Logical axis of an array -> mesh axis that it is split over. The only place that says so."""


def carve(placement: Placement, devices: Sequence[jax.Device] | None = None) -> dict[str, Mesh]:
    """One mesh per instance (`role/i`), on devices of its own unless its role is beside another.

    Raises ConfigError with the count when there are too few devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    own = {name: role for name, role in placement.items() if not role.beside}
    wanted = sum(role.tp * role.instances for role in own.values())
    if wanted > len(devices):
        parts = " + ".join(f"{n} {r.instances}x tp {r.tp}" for n, r in own.items())
        raise ConfigError(
            f"the placement asks for {wanted} devices ({parts}), but there are {len(devices)}: "
            "lower `instances` or `tp`, put a role `beside` another, or on CPU ask for more "
            "virtual devices with --devices"
        )
    meshes, taken = {}, 0
    for name, role in own.items():
        for i in range(role.instances):
            meshes[f"{name}/{i}"] = make_mesh(devices[taken : taken + role.tp])
            taken += role.tp
    for name, role in placement.items():
        for i in range(role.instances if role.beside else 0):
            meshes[f"{name}/{i}"] = meshes[f"{role.beside}/{i}"]
    return meshes


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of one axis, `tp`."""
    return Mesh(np.asarray(devices), ("tp",), axis_types=(AxisType.Auto,))


def sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """Where an array with these logical axes lies. Raises on unknown axes and on two logical
    axes of one array that want the same mesh axis."""
    spec: list[str | None] = []
    for axis in axes:
        if axis is not None and axis not in MESH_AXES:
            raise ValueError(f"unknown logical axis `{axis}`; the table has {sorted(MESH_AXES)}")
        mesh_axis = MESH_AXES[axis] if axis is not None else None
        if mesh_axis is not None and mesh_axis in spec:
            other = axes[spec.index(mesh_axis)]
            raise ValueError(
                f"logical axes `{other}` and `{axis}` of one array both map to mesh axis "
                f"`{mesh_axis}`: change MESH_AXES"
            )
        spec.append(mesh_axis)
    return NamedSharding(mesh, PartitionSpec(*spec))


def tree_sharding(mesh: Mesh, axes_tree: object) -> object:
    """`sharding` for a tree whose leaves are tuples of logical axes."""
    return jax.tree.map(
        lambda axes: sharding(mesh, axes),
        axes_tree,
        is_leaf=lambda x: isinstance(x, tuple) and all(a is None or isinstance(a, str) for a in x),
    )


# --- more devices than kv heads ------------------------------------------------------------


def stored_heads(kv_heads: int, tp: int) -> int:
    """How many kv heads a pool has on `tp` devices: with more devices than heads each device has
    the one that its query heads read, so heads are stored several times, copies side by side."""
    return max(kv_heads, tp)


def by_head(mesh: Mesh, kv_heads: int) -> Mesh:
    """`mesh`, or where it has more devices than kv heads, the same devices as [tp, copy]: an array
    that is split over `tp` only then has each head once per copy."""
    copies = stored_heads(kv_heads, mesh.size) // kv_heads
    if copies == 1:
        return mesh
    devices = mesh.devices.reshape(-1, copies)
    return Mesh(devices, ("tp", "copy"), axis_types=(AxisType.Auto,) * 2)


def check_tp(arch: Architecture, tp: int, who: str) -> None:
    """Raises ConfigError unless `tp` divides every split axis of the model; there may be several
    devices per kv head."""

    def misfit(n: int) -> str:
        sizes = {"heads": arch.N, "mlp width": arch.F, "vocabulary": arch.V}
        wrong = [f"does not divide the {size} {what}" for what, size in sizes.items() if size % n]
        if arch.K % n and n % arch.K:
            wrong.insert(0, f"neither divides nor is a multiple of the {arch.K} kv heads")
        return wrong[0] if wrong else ""

    if misfit(tp):
        fitting = [n for n in range(1, arch.N + 1) if not misfit(n)]
        raise ConfigError(
            f"`{who}` has tp {tp}, which {misfit(tp)} of {arch.name}: use one of {fitting}"
        )
