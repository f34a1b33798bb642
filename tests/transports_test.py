"""Every transport carries KV byte for byte, whatever tp the two sides have, and says what it
cannot connect."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import PAGES, SPLIT, config_of, tiny

from pdjax.core.config import Cache, ConfigError, Role, Transfer
from pdjax.engine import Engine
from pdjax.programs.kv import piece_sharding
from pdjax.programs.mesh import make_mesh
from pdjax.programs.transports import TRANSPORTS, _rounds

T, H = 5, 3  # odd on purpose
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
# (kv heads, tp of the source, tp of the target): fewer devices than heads, as many, more.
SPLITS = [
    *((4, source, target) for source in (1, 2, 4) for target in (1, 2, 4)),
    *((2, *tp) for tp in [(4, 1), (1, 4), (4, 2), (2, 4), (4, 4)]),
    *((6, *tp) for tp in [(2, 3), (3, 2)]),
    (1, 2, 4),
]


def any_bytes(seed: int, K: int, dtype: str) -> np.ndarray:
    shape = (2, T, K, H)
    drawn = np.random.default_rng(seed).bytes(math.prod(shape) * jnp.dtype(dtype).itemsize)
    return np.frombuffer(drawn, jnp.dtype(dtype)).reshape(shape)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_transport_is_equal_byte_for_byte_on_every_device(name, split):
    K, *tp = split
    source = make_mesh(jax.devices()[: tp[0]])
    target = make_mesh(jax.devices()[7 : 7 - tp[1] : -1])
    for dtype in DTYPES:
        sent = [any_bytes(layer, K, dtype) for layer in range(2)]
        piece = [jax.device_put(x, piece_sharding(source, K)) for x in sent]
        for expected, got in zip(sent, TRANSPORTS[name](piece, target), strict=True):
            assert got.sharding == piece_sharding(target, K) and got.dtype == expected.dtype
            assert {shard.device for shard in got.addressable_shards} == set(target.devices.flat)
            for shard in got.addressable_shards:  # copies of a head too
                ours = np.asarray(shard.data)
                np.testing.assert_array_equal(
                    ours.view(np.uint8), np.ascontiguousarray(expected[shard.index]).view(np.uint8)
                )


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_no_device_sends_or_hears_twice_in_a_round_and_no_round_is_wasted(split):
    K, sources, targets = split
    rounds, unit, _ = _rounds(sources, targets, K)
    busiest = 0
    for part in ("source", "target"):
        for hops in rounds:
            assert len({getattr(hop, part) for hop in hops}) == len(hops)
        every = [getattr(hop, part) for hops in rounds for hop in hops]
        busiest = max(busiest, *(every.count(device) for device in every))
    assert len(rounds) == busiest
    # Each target hears each unit of what it stores once.
    heard = [(hop.target, hop.target_unit) for hops in rounds for hop in hops]
    assert len(set(heard)) == len(heard) == targets * max(K // targets, 1) // unit


BESIDE = {"p": SPLIT["prefill"], "d": replace(SPLIT["decode"], beside="p")}


def test_a_collective_between_meshes_that_share_devices_is_refused_when_the_engine_is_built():
    said = (
        r"`transfer.transport` is `collective`, which needs devices of their own for `p/0` and "
        r"`d/0`, but they share \[0\]: use `device_put` or `host`"
    )
    with pytest.raises(ConfigError, match=said):
        Engine(config_of(BESIDE, transfer=Transfer("collective")), "it", tiny())
    for fitting in ("device_put", "host"):
        Engine(config_of(BESIDE, transfer=Transfer(fitting)), "it", tiny())


def test_ways_that_only_a_cache_takes_are_checked_too():
    """Nothing is handed off from `server/0` to `server/1`, but a prefix may be loaded."""
    server = Role(instances=2, pool=PAGES)
    placement = {"server": server, "more": replace(server, beside="server")}
    Engine(config_of(placement, transfer=Transfer("collective")), "it", tiny())
    with pytest.raises(ConfigError, match=r"`server/0` and `more/0`, but they share \[0\]"):
        cache = Cache(prefix=True)
        Engine(config_of(placement, transfer=Transfer("collective"), cache=cache), "it", tiny())
