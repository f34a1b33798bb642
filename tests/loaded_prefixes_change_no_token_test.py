"""A prompt whose beginning comes from another pool gets the tokens of one computed in full."""

from dataclasses import replace

import pytest
from engine_helpers import COLLOCATED, SPLIT, assert_pools_are_full, config_of, request, run
from msgspec import structs

from pdjax.core.config import Cache, Clock, Routing, Transfer
from pdjax.core.events import Reuse
from pdjax.core.prefix import hash_blocks
from pdjax.core.request import Request

BLOCK = 16
SHARED = tuple(range(40))  # two whole blocks and a half
TWO_PREFILLS = {"p": replace(SPLIT["prefill"], instances=2, tp=2), "d": SPLIT["decode"]}


def asked(rid: int, prompt: tuple[int, ...], **sampling: float) -> Request:
    blocks, tail = hash_blocks(prompt, BLOCK)
    bare = request(rid, prompt, at_ms=200 * rid, max_tokens=4, **sampling)
    return structs.replace(bare, blocks=blocks, tail=tail)


REQUESTS = [
    asked(0, SHARED),
    asked(1, (*SHARED, 7, 8), temperature=1.0),
    asked(2, (*SHARED, 9)),
    asked(3, (*SHARED[:35], 9)),
]


@pytest.mark.parametrize(
    ("transport", "clock"),
    [("device_put", "modelled"), ("collective", "modelled"), ("host", "wall")],
)
def test_tokens_are_those_of_a_server_that_computes_all_of_them(transport, clock):
    config = config_of(
        TWO_PREFILLS,
        clock=Clock(clock),
        cache=Cache(prefix=True, block=BLOCK),
        routing=Routing(prefill="round_robin"),
        transfer=Transfer(transport, groups=2, checksum=True),
    )
    ran = run(config, REQUESTS)
    assert ran.tokens == run(config_of(COLLOCATED), REQUESTS).tokens
    reused = [(reuse.rid, reuse.how, reuse.instance, reuse.tokens) for reuse in ran.all(Reuse)]
    assert reused == [
        (1, "remote", "p/1", 32),  # p/0 has it
        (1, "target", "d/0", 32),
        (2, "local", "p/0", 32),
        (2, "target", "d/0", 32),
        (3, "local", "p/1", 32),  # what was loaded stays
        (3, "target", "d/0", 32),
    ]
    assert_pools_are_full(ran.scheduler)
