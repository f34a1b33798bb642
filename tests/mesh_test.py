"""A placement becomes meshes on devices of their own; what does not fit is refused in one line."""

import re

import jax
import numpy as np
import pytest

from pdjax.architecture import TINY
from pdjax.core.config import ConfigError, Placement, Role
from pdjax.programs import mesh
from pdjax.programs.mesh import by_head, carve, check_tp, make_mesh, sharding, tree_sharding

P, D = Role("prefill", tp=2), Role("decode")


def places(placement: Placement, devices=None) -> dict[str, list[int]]:
    return {n: [d.id for d in m.devices.flat] for n, m in carve(placement, devices).items()}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"server": Role()}, {"server/0": [0]}),
        ({"p": P, "d": D}, {"p/0": [0, 1], "d/0": [2]}),
        (  # 2P1D
            {"p": Role("prefill", tp=2, instances=2), "d": Role("decode", tp=4)},
            {"p/0": [0, 1], "p/1": [2, 3], "d/0": [4, 5, 6, 7]},
        ),
        (  # 1P3D
            {"p": P, "d": Role("decode", instances=3)},
            {"p/0": [0, 1], "d/0": [2], "d/1": [3], "d/2": [4]},
        ),
        (  # instance i is beside instance i, though the role beside comes first
            {
                "d": Role("decode", tp=2, instances=2, beside="p"),
                "p": Role("prefill", tp=2, instances=2),
                "e": D,
            },
            {"p/0": [0, 1], "p/1": [2, 3], "e/0": [4], "d/0": [0, 1], "d/1": [2, 3]},
        ),
    ],
)
def test_instances_get_devices_of_their_own_unless_they_are_beside(placement, expected):
    assert places(placement) == expected


def test_meshes_are_carved_from_the_devices_given():
    assert places({"p": P, "d": D}, jax.devices()[:3:-1]) == {"p/0": [7, 6], "d/0": [5]}


def test_too_few_devices_are_told_with_the_counts_and_what_to_do():
    placement = {"p": Role("prefill", tp=4, instances=2), "d": Role("decode", tp=2)}
    with pytest.raises(ConfigError) as caught:
        carve(placement)
    message = str(caught.value)
    assert "asks for 10 devices (p 2x tp 4 + d 1x tp 2), but there are 8" in message
    assert "--devices" in message and "\n" not in message


def test_a_role_beside_another_needs_no_devices():
    beside = Role("decode", tp=4, instances=2, beside="p")
    assert len(carve({"p": Role("prefill", tp=4, instances=2), "d": beside})) == 4


@pytest.mark.parametrize(
    ("tp", "why"),
    [
        (3, "neither divides nor is a multiple of the 4 kv heads of tiny"),
        (6, "neither divides nor is a multiple of the 4 kv heads of tiny"),
        (16, "does not divide the 8 heads of tiny"),
    ],
)
def test_a_tp_that_does_not_fit_the_model_is_refused_with_those_that_do(tp, why):
    said = f"`placements.it.decode` has tp {tp}, which {why}: use one of [1, 2, 4, 8]"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        check_tp(TINY, tp, "placements.it.decode")
    for fitting in (1, 2, 4, 8):
        check_tp(TINY, fitting, "")


def test_devices_beyond_the_kv_heads_hold_copies_side_by_side():
    m = make_mesh(jax.devices())
    view = by_head(m, 2)
    assert view.shape == {"tp": 2, "copy": 4}
    x_K = jax.device_put(np.asarray([10, 20]), jax.NamedSharding(view, jax.P("tp")))
    on = {shard.device: int(shard.data[0]) for shard in x_K.addressable_shards}
    assert [on[d] for d in m.devices.flat] == [10] * 4 + [20] * 4
    assert by_head(m, 8) is m and by_head(m, 16) is m


def test_logical_axes_lie_where_the_table_says():
    m = make_mesh(jax.devices()[:2])
    x_PpKH = jax.device_put(
        np.zeros((3, 2, 4, 8)), sharding(m, ("pages", "page", "kv_heads", None))
    )
    assert {shard.data.shape for shard in x_PpKH.addressable_shards} == {(3, 2, 2, 8)}
    tree = tree_sharding(m, {"a": ("embed", "mlp"), "b": [("vocab",), (None,)]})
    assert tree["a"].spec == jax.P(None, "tp")
    assert [s.spec for s in tree["b"]] == [jax.P("tp"), jax.P(None)]


def test_an_unknown_axis_is_told_with_those_there_are():
    with pytest.raises(ValueError, match=r"unknown logical axis `hads`; the table has \['embed'"):
        sharding(make_mesh(jax.devices()[:1]), ("embed", "hads"))


def test_two_axes_of_one_array_on_one_mesh_axis_are_told_by_name(monkeypatch):
    m = make_mesh(jax.devices()[:1])
    said = "`heads` and `mlp` of one array both map to mesh axis `tp`"
    with pytest.raises(ValueError, match=re.escape(said)):
        sharding(m, ("heads", None, "mlp"))
    monkeypatch.setattr(mesh, "MESH_AXES", {**mesh.MESH_AXES, "mlp": None})
    assert sharding(m, ("heads", None, "mlp")).spec == jax.P("tp", None, None)
