"""KV that waits in host memory comes back as it was."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_helpers import COLLOCATED, LAYERS, SPLIT, assert_pools_are_full, config_of, request, run
from msgspec import structs

from pdjax.core.config import Clock, Pool, Transfer
from pdjax.core.events import KVHandle, Landed, Preempt, Send
from pdjax.engine.pools import HostPool, NotHeld, PoolArrays
from pdjax.engine.wires import Wires
from pdjax.programs.kv import KV, Layout, pool_sharding
from pdjax.programs.mesh import make_mesh
from pdjax.programs.transports import device_put

OUT = Send(0, 7, "decode/0", "decode/0.host", 0, 11, 0, 1, "swap_out")
IN = structs.replace(OUT, id=1, source="decode/0.host", target="decode/0", purpose="swap_in")


def random_pool(layout: Layout, tp: int, seed: int = 0) -> PoolArrays:
    pool = PoolArrays(layout, make_mesh(jax.devices()[:tp]), context=32, checksum=True)
    rng = np.random.default_rng(seed)

    def drawn(kv: KV) -> KV:
        arrays = [rng.integers(-8, 8, x.shape).astype(x.dtype) for x in kv]
        return tuple(jax.device_put(x, pool_sharding(kv, pool.mesh)) for x in arrays)

    pool.kvs = [drawn(kv) for kv in pool.kvs]
    return pool


@pytest.mark.parametrize("order", ["token_major", "fused"])
@pytest.mark.parametrize(("dtype", "tp"), [("float32", 2), ("bfloat16", 1), ("int8", 4)])
def test_kv_goes_to_the_host_and_comes_back_into_other_pages(dtype, tp, order):
    layout = Layout("it", 3, 2, 5, dtype, 4, 8, tp, order)
    pool, host = random_pool(layout, tp), HostPool(layout, checksum=True)
    wires = Wires({"decode/0": pool, "decode/0.host": host}, device_put)
    pool.hold(KVHandle(7, "decode/0", (6, 1, 3), (0,) * 3, 12, layout.fingerprint))
    host.hold(KVHandle(7, "decode/0.host", (0, 1, 2), (0,) * 3, 12))
    before = pool.extract(OUT)
    assert wires.deliver(OUT, wires.extract(OUT)).intact()
    pool.release(7)
    pool.kvs = random_pool(layout, tp, seed=1).kvs
    pool.hold(KVHandle(7, "decode/0", (0, 5, 2), (0,) * 3, 12, layout.fingerprint))
    assert wires.deliver(IN, wires.extract(IN)).intact()
    assert (wires.damage(OUT.id), wires.damage(IN.id)) == ("", "")
    for was, now in zip(before.kv, pool.extract(OUT).kv, strict=True):
        np.testing.assert_array_equal(np.asarray(was)[:, :11], np.asarray(now)[:, :11])
    host.release(7)
    with pytest.raises(NotHeld, match="ends at token 11, but the request has host memory for 0"):
        wires.extract(IN)


def test_damage_on_the_way_to_the_host_and_back_is_told():
    layout = Layout("it", 3, 2, 5, "float32", 4, 8, 1)
    pool, host = random_pool(layout, 1), HostPool(layout, checksum=True)
    wires = Wires({"decode/0": pool, "decode/0.host": host}, device_put)
    pool.hold(KVHandle(7, "decode/0", (6, 1, 3), (0,) * 3, 12, layout.fingerprint))
    host.hold(KVHandle(7, "decode/0.host", (0, 1, 2), (0,) * 3, 12))
    for send in (OUT, IN):
        wires.deliver(send, wires.extract(send))
        assert wires.damage(send.id) == ""
        spoiled = structs.replace(send, id=send.id + 10)
        wires.spoil(spoiled.id)
        wires.deliver(spoiled, wires.extract(spoiled))
        assert "checksums differ" in wires.damage(spoiled.id)


@pytest.mark.parametrize("clock", ["modelled", "wall"])
def test_requests_that_waited_in_host_memory_get_the_tokens_of_a_collocated_server(clock):
    requests = [request(i, 9, max_tokens=20, temperature=i % 2, seed=i) for i in range(4)]
    tight = replace(SPLIT["decode"], pool=Pool(tokens=72, page_size=4), growth=4)
    decode = replace(tight, preempt="swap", swap_tokens=256)
    transfer = Transfer(groups=LAYERS, checksum=True)
    config = config_of(SPLIT | {"decode": decode}, clock=Clock(clock), transfer=transfer)
    ran = run(config, requests)
    assert ran.tokens == run(config_of(COLLOCATED), requests).tokens
    assert {p.how for p in ran.all(Preempt)} == {"swap"}
    swapped = {send.purpose: send.id for send in ran.all(Send) if "swap" in send.purpose}
    assert set(swapped) == {"swap_out", "swap_in"}
    assert set(swapped.values()) <= {landed.send for landed in ran.all(Landed)}
    assert_pools_are_full(ran.scheduler)
