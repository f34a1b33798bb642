"""Ways from one mesh to another. Nothing else in pdjax copies between meshes: with JAX's guard
`jax_transfer_guard_device_to_device = "disallow_explicit"` any other copy raises.

A transport is given the arrays [2, T, K, H] of a piece on their mesh and gives them on the target
mesh, split over its heads (kv.piece_sharding), whatever tp is on the two sides. Each target device
reads one copy of each head; every device that stores a head gets it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from pdjax.core.config import ConfigError
from pdjax.programs.kv import piece_sharding

Transport = Callable[[Sequence[jax.Array], Mesh], list[jax.Array]]


def check_transport(name: str, source: Mesh, target: Mesh, ends: tuple[str, str]) -> None:
    """Raises ConfigError, naming both ends, where a transport cannot connect two meshes."""
    shared = sorted(d.id for d in set(source.devices.flat) & set(target.devices.flat))
    if name == "collective" and shared:
        raise ConfigError(
            f"`transfer.transport` is `collective`, which needs devices of their own for "
            f"`{ends[0]}` and `{ends[1]}`, but they share {shared}: use `device_put` or `host`"
        )


# --- device_put --------------------------------------------------------------------------


def device_put(arrays_2TKH: Sequence[jax.Array], target: Mesh) -> list[jax.Array]:
    """The runtime moves each head's part from a device that has it to those that want it."""
    place = piece_sharding(target, arrays_2TKH[0].shape[2])
    with jax.transfer_guard_device_to_device("allow"):
        return jax.device_put(list(arrays_2TKH), place)


# --- host --------------------------------------------------------------------------------


def host(arrays_2TKH: Sequence[jax.Array], target: Mesh) -> list[jax.Array]:
    """Through host memory, byte for byte."""
    return from_host(to_host(arrays_2TKH), target)


def to_host(arrays_2TKH: Sequence[jax.Array]) -> list[np.ndarray]:
    return jax.device_get(list(arrays_2TKH))


def from_host(arrays_2TKH: Sequence[np.ndarray], target: Mesh) -> list[jax.Array]:
    return jax.device_put(list(arrays_2TKH), piece_sharding(target, arrays_2TKH[0].shape[2]))


# --- collective --------------------------------------------------------------------------


class _Hop(NamedTuple):
    """`unit` neighbouring heads go from device `source` to `target` (places in the union mesh),
    from and to these units of the heads that each stores."""

    source: int
    target: int
    source_unit: int
    target_unit: int


def collective(arrays_2TKH: Sequence[jax.Array], target: Mesh) -> list[jax.Array]:
    """Permutes inside one jitted program over the devices of both meshes, which must be distinct.

    In one round every device sends to at most one other and hears from at most one; tp 2 to tp 4
    takes two rounds, tp 4 to tp 2 as well, equal ones a single one.
    """
    K, where = arrays_2TKH[0].shape[2], arrays_2TKH[0].sharding
    assert isinstance(where, NamedSharding)
    sources, targets = tuple(where.mesh.devices.flat), tuple(target.devices.flat)
    union, exchange = _exchange(sources, targets, K)
    place = NamedSharding(union, Spec("device"))
    return [
        _on_target(array, target, K)
        for array in exchange([_on_union(array, sources, targets, place) for array in arrays_2TKH])
    ]


def _on_union(
    x_2TKH: jax.Array,
    sources: Sequence[jax.Device],
    targets: Sequence[jax.Device],
    place: NamedSharding,
) -> jax.Array:
    """The parts of `x_2TKH` as rows of one array, with blanks on the devices that will receive."""
    held = _parts(x_2TKH)
    parts = [held[device] for device in sources]
    parts += [_blank(parts[0].shape, parts[0].dtype, device) for device in targets]
    shape = (2 * len(parts), *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, place, parts)


def _on_target(x: jax.Array, target: Mesh, K: int) -> jax.Array:
    held, shape = _parts(x), (2, x.shape[1], K, x.shape[3])
    parts = [held[device] for device in target.devices.flat]
    return jax.make_array_from_single_device_arrays(shape, piece_sharding(target, K), parts)


def _parts(x: jax.Array) -> dict[jax.Device, jax.Array]:
    return {shard.device: shard.data for shard in x.addressable_shards}


@functools.cache
def _blank(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype), device)


@functools.cache
def _exchange(
    sources: tuple[jax.Device, ...], targets: tuple[jax.Device, ...], K: int
) -> tuple[Mesh, Callable]:
    """The union mesh and the program: parts of K heads, one row pair per device, to parts."""
    devices = np.asarray([*sources, *targets])
    union = Mesh(devices, ("device",), axis_types=(AxisType.Auto,))
    rounds, unit, per_target = _rounds(len(sources), len(targets), K)

    def local(x_2TKH: jax.Array) -> jax.Array:
        me = jax.lax.axis_index("device")
        shape = (*x_2TKH.shape[:2], per_target, x_2TKH.shape[3])
        out_2TKH = jnp.zeros(shape, x_2TKH.dtype)
        for hops in rounds:
            taken, put = np.zeros((2, len(devices)), np.int32)
            for hop in hops:
                taken[hop.source], put[hop.target] = hop.source_unit, hop.target_unit
            sent = jax.lax.dynamic_slice_in_dim(x_2TKH, jnp.asarray(taken)[me] * unit, unit, 2)
            heard = jax.lax.ppermute(sent, "device", [(hop.source, hop.target) for hop in hops])
            hears = np.isin(np.arange(len(devices)), [hop.target for hop in hops])
            at = jnp.asarray(put)[me] * unit
            new_2TKH = jax.lax.dynamic_update_slice_in_dim(out_2TKH, heard, at, 2)
            out_2TKH = jnp.where(jnp.asarray(hears)[me], new_2TKH, out_2TKH)
        return out_2TKH

    @jax.jit
    def exchange(arrays: list[jax.Array]) -> list[jax.Array]:
        spec = Spec("device")
        on_each = jax.shard_map(local, mesh=union, in_specs=spec, out_specs=spec, check_vma=False)
        # As bits: XLA widens bfloat16 on its way over some backends, and changes a NaN by it.
        bits = jnp.dtype(f"uint{8 * arrays[0].dtype.itemsize}")
        return [on_each(x.view(bits)).view(x.dtype) for x in arrays]

    return union, exchange


def _rounds(sources: int, targets: int, K: int) -> tuple[list[list[_Hop]], int, int]:
    """Rounds of hops from tp `sources` to tp `targets`, heads per hop, and heads per target.

    Each hop goes into the first round in which its two devices are free, which takes as many
    rounds as the busiest device has hops.
    """
    per_source, per_target = max(K // sources, 1), max(K // targets, 1)
    unit = int(np.gcd(per_source, per_target))
    source_copies, target_copies = max(sources // K, 1), max(targets // K, 1)
    rounds: list[list[_Hop]] = []
    for target in range(targets):
        first = target // target_copies * per_target
        for target_unit in range(per_target // unit):
            owner, within = divmod(first + target_unit * unit, per_source)
            source = owner * source_copies + target % target_copies % source_copies
            hop = _Hop(source, sources + target, within // unit, target_unit)
            _into_first_free(rounds, hop)
    return rounds, unit, per_target


def _into_first_free(rounds: list[list[_Hop]], hop: _Hop) -> None:
    for hops in rounds:
        if all(hop.source != other.source and hop.target != other.target for other in hops):
            hops.append(hop)
            return
    rounds.append([hop])


TRANSPORTS: Mapping[str, Transport] = {
    "device_put": device_put,
    "collective": collective,
    "host": host,
}
"""The values of `transfer.transport`."""
