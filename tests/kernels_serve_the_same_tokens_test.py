"""A whole engine on interpreted kernels gives the tokens that it gives on XLA's attention."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest
from engine_helpers import assert_pools_are_full, config_of, request, run

from kernels_pallas import dispatch
from kernels_pallas.dispatch import IMPLEMENTATIONS
from pdjax.architecture import Architecture
from pdjax.core.config import Model, Pool, Role, Transfer
from pdjax.core.events import Landed
from pdjax.programs.attention import order_for
from pdjax.programs.model import init_params
from pdjax.programs.weights import Checkpoint

# The smallest heads that the kernels take.
ARCH = Architecture("heads of 64", V=256, D=32, F=64, L=1, N=4, K=2, H=64, context=64)
PAGE = 16
PREFILL = Role("prefill", chunk=32, pool=Pool("slab", 128, PAGE))
DECODE = Role("decode", slots=2, pool=Pool("pages", 128, PAGE))


def place(abstract):
    params = init_params(ARCH)
    return jax.tree.map(
        lambda x, like: jax.device_put(np.asarray(x, like.dtype), like.sharding), params, abstract
    )


@functools.cache
def tokens_with(attention: str, tp: int) -> dict[int, tuple[int, ...]]:
    """Two requests, one of which needs two chunks and ends in another page than its prompt."""
    config = config_of(
        {"prefill": PREFILL, "decode": dataclasses.replace(DECODE, tp=tp)},
        model=Model("random:tiny", context=64, attention=attention),
        transfer=Transfer(),
    )
    requests = [request(0, 45, max_tokens=5), request(1, 9, at_ms=1, max_tokens=3)]
    ran = run(config, requests, checkpoint=Checkpoint("test", ARCH, place))
    assert_pools_are_full(ran.scheduler)
    assert {landed.rid for landed in ran.all(Landed)} == {0, 1}
    return ran.tokens


@pytest.fixture
def kernels_called(monkeypatch) -> set[tuple[str, str]]:
    """(implementation, function) of every kernel that is traced."""
    called, run_ = set(), dispatch.run

    def noted(implementation: str, backends: Mapping[str, Callable[[], Callable]], *args, **kwargs):
        called.add((implementation, backends["xla"]().__name__))
        return run_(implementation, backends, *args, **kwargs)

    monkeypatch.setattr(dispatch, "run", noted)
    return called


@pytest.mark.parametrize("device", ["tpu", "gpu"])
def test_interpreted_kernels_serve_the_tokens_of_xla(device: str, kernels_called):
    if device == "gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("jax interprets Mosaic GPU kernels from 0.11 on")
    tp = 2 if device == "tpu" else 1  # two devices confuse the interpreter's barriers of Mosaic GPU
    tokens = tokens_with("xla", tp)
    assert [len(t) for t in tokens.values()] == [5, 3]
    assert not kernels_called
    assert tokens_with(f"{device}_interpret", tp) == tokens
    every = ("append", "pack", "partial_attention", "prefill_attention", "unpack")
    assert kernels_called == {(f"{device}_interpret", name) for name in every}


def test_kernels_read_fused_pools_and_the_cpu_token_major_ones():
    assert {order_for(name) for name in ("auto", "xla")} == {"token_major"}
    assert {order_for(name) for name in IMPLEMENTATIONS if "_" in name} == {"fused"}


def test_a_config_names_every_implementation():
    assert get_args(get_type_hints(Model)["attention"]) == IMPLEMENTATIONS
