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


def check_tp(arch: Architecture, tp: int, who: str) -> None:
    """Raises ConfigError unless every split axis of the model divides by `tp`."""
    sizes = {"kv heads": arch.K, "heads": arch.N, "mlp width": arch.F, "vocabulary": arch.V}
    for what, size in sizes.items():
        if size % tp:
            fitting = [n for n in range(1, arch.K + 1) if all(s % n == 0 for s in sizes.values())]
            raise ConfigError(
                f"`{who}` has tp {tp}, which does not divide the {size} {what} of "
                f"{arch.name}: use one of {fitting}"
            )
