"""With more devices than kv heads every device has the head that its query heads read."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_helpers import COLLOCATED, LAYERS, LINK, SPLIT, Ran, config_of, request, run

from pdjax.architecture import TINY
from pdjax.core.config import Transfer
from pdjax.programs.kv import Layout, make_pool
from pdjax.programs.mesh import make_mesh
from pdjax.programs.model import Params, init_params
from pdjax.programs.weights import Checkpoint, open_checkpoint, save_orbax

K2 = replace(TINY, name="tiny-K2", K=2, qkv_bias=True)


@functools.cache
def params_of(seed: int = 0) -> Params:
    """Random everywhere, also where init_params has ones and zeros."""
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(
        lambda x: (x + 0.1 * draw(size=x.shape)).astype(np.float32), init_params(K2)
    )


def place(abstract: Params) -> Params:
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), params_of(), abstract)


CHECKPOINT = Checkpoint("toy", K2, place)


@pytest.mark.parametrize("source", ["host", "orbax"])
def test_k_and_v_of_a_head_are_placed_once_per_device_that_reads_it(source, tmp_path):
    checkpoint = CHECKPOINT
    if source == "orbax":
        save_orbax(CHECKPOINT, tmp_path / "saved")
        checkpoint = open_checkpoint(str(tmp_path / "saved"))
    mesh = make_mesh(jax.devices()[:4])
    placed, whole = checkpoint.place_on(mesh), params_of()
    ours, theirs = placed["layers"][1]["attention"], whole["layers"][1]["attention"]
    for name, axis in {"k_DKH": 1, "v_DKH": 1, "k_bias_KH": 0, "v_bias_KH": 0}.items():
        expected = np.repeat(theirs[name], 2, axis=axis)  # heads 0, 0, 1, 1
        np.testing.assert_array_equal(ours[name], expected)
        for at, device in enumerate(mesh.devices.flat):
            (shard,) = (s for s in ours[name].addressable_shards if s.device == device)
            np.testing.assert_array_equal(shard.data, np.take(expected, [at], axis))
    for name in ("q_DNH", "o_NHD", "q_bias_NH"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    np.testing.assert_array_equal(placed["embed"]["table_VD"], whole["embed"]["table_VD"])


def test_a_pool_has_a_head_per_device():
    mesh = make_mesh(jax.devices()[:4])
    k_PpKH, _ = make_pool(Layout("it", 1, 2, 16, "float32", 4, 8, 4), mesh)[0]
    assert k_PpKH.shape == (8, 4, 4, 16)
    assert {shard.data.shape for shard in k_PpKH.addressable_shards} == {(8, 4, 1, 16)}


SAMPLING = ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_k": 20, "seed": 2})


def served(placement, transport: str, devices: list[int]) -> Ran:
    requests = [
        request(i, n, at_ms=4 * i, max_tokens=4, **SAMPLING[i % 3])
        for i, n in enumerate((33, 1, 16, 5))
    ]
    transfer = Transfer(transport, groups=LAYERS, checksum=True, link=LINK)
    config = config_of(placement, transfer=transfer)
    return run(config, requests, devices=devices, checkpoint=CHECKPOINT)


@functools.cache
def collocated() -> dict[int, tuple[int, ...]]:
    return served(COLLOCATED, "device_put", [0]).tokens


@pytest.mark.parametrize(
    ("transport", "tp"), [("collective", (4, 2)), ("device_put", (1, 4)), ("host", (4, 4))]
)
def test_copies_of_heads_change_no_token(transport, tp):
    placement = {
        "prefill": replace(SPLIT["prefill"], tp=tp[0]),
        "decode": replace(SPLIT["decode"], tp=tp[1]),
    }
    ran = served(placement, transport, [*range(tp[0]), *range(4, 4 + tp[1])])
    assert ran.tokens == collocated()


def test_copies_of_heads_change_no_token_of_a_collocated_server():
    server = {"server": replace(COLLOCATED["server"], tp=4)}
    assert served(server, "device_put", [0, 1, 2, 3]).tokens == collocated()
