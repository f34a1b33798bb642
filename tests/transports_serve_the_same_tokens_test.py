"""A live server gives the tokens of a collocated one whichever transport carries its KV."""

import functools
from dataclasses import replace

import pytest
from engine_helpers import COLLOCATED, LAYERS, SPLIT, config_of, request, run

from pdjax.core.config import Clock, Transfer
from pdjax.core.events import Landed, SendFailed
from pdjax.core.request import Request

SAMPLING = ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_k": 20, "seed": 2})
P, D = SPLIT["prefill"], SPLIT["decode"]
# Both sides of every wire run programs of their own over several devices meanwhile.
BUSY = {"p": replace(P, tp=2, instances=2, chunk=16), "d": replace(D, tp=2)}


def workload() -> list[Request]:
    lengths = (33, 1, 16, 5, 49, 13, 9, 20, 31, 2)
    return [
        request(i, n, at_ms=i, max_tokens=2 + i % 5, **SAMPLING[i % 3])
        for i, n in enumerate(lengths)
    ]


@functools.cache
def collocated() -> dict[int, tuple[int, ...]]:
    return run(config_of(COLLOCATED), workload(), devices=[0]).tokens


@pytest.mark.parametrize(
    ("transport", "schedule"),
    [
        ("device_put", "layerwise"),
        ("collective", "layerwise"),
        ("collective", "streaming"),
        ("host", "chunkwise"),
    ],
)
def test_tokens_are_those_of_a_collocated_server(transport, schedule):
    transfer = Transfer(transport, schedule=schedule, groups=LAYERS, checksum=True)
    ran = run(config_of(BUSY, clock=Clock("wall"), transfer=transfer), workload())
    assert ran.tokens == collocated()
    assert ran.all(Landed) and not ran.all(SendFailed)
