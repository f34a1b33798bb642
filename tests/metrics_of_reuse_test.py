"""Prefix reuse: found, loaded, computed or left out of the hand-off; each prompt counts once."""

import pytest
from metrics_test import measured
from record_builders import arrived, at, done, placements, prefill, served

from pdjax.core.config import Cache, Pool, Role, Routing
from pdjax.core.events import Finish, Preempt, Reuse
from pdjax.core.prefix import hash_blocks
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics import summary

BOTH, D = "both/0", "decode/0"


def test_hit_rate_counts_every_prompt_once_and_only_its_first_pass():
    log = [
        arrived(0, 0, prompt_len=12, max_tokens=2),
        at(0, Reuse(0, BOTH, 4, "local")),
        at(0, Reuse(0, BOTH, 4, "remote")),
        prefill(0, 0, 0, BOTH, 8, 4),
        done(10, 0, 0, BOTH, {0: 1}),
        at(10, Preempt(0, BOTH, "recompute")),
        at(11, Reuse(0, BOTH, 12, "local")),
        prefill(11, 1, 0, BOTH, 12, 1),
        done(15, 1, 11, BOTH, {0: 1}),
        at(15, Finish(0, "length", 2)),
        arrived(15, 1, prompt_len=8, max_tokens=1),
        prefill(15, 2, 1, BOTH),
        done(20, 2, 15, BOTH, {1: 1}),
        at(20, Reuse(1, D, 4, "target")),
        at(20, Finish(1, "length", 1)),
        arrived(20, 2, prompt_len=100),  # never begun: not in the rate
    ]
    numbers = summary(measured(log))
    assert numbers["reused_local_tokens"] == 4
    assert numbers["reused_remote_tokens"] == 4
    assert numbers["reused_target_tokens"] == 4
    assert numbers["computed_tokens"] == 4 + 8
    assert numbers["redone_tokens"] == 1
    assert numbers["prefix_hit_rate"] == pytest.approx(8 / 20)


def in_turn(count: int) -> list[Request]:
    """Requests one after the other: 64 tokens in common, then 16 of their own."""
    prompts = [(*range(64), *range(1000 * i, 1000 * i + 16)) for i in range(1, count + 1)]
    hashed = [hash_blocks(prompt, 16) for prompt in prompts]
    return [
        Request(i, i * 10**9, 80, SamplingParams(max_tokens=4), blocks=blocks, tail=tail)
        for i, (blocks, tail) in enumerate(hashed)
    ]


POOL = Pool(tokens=4096, page_size=16)
CACHED = {  # placement, and tokens found local, loaded, and left out of the hand-off
    "collocated": (placements()["collocated"], (320, 0, 0)),
    "disaggregated": (placements()["disaggregated"], (320, 0, 320)),
    "2P1D": (
        {
            "prefill": Role("prefill", instances=2, pool=POOL, chunk=512),
            "decode": Role("decode", pool=POOL),
        },
        (256, 64, 320),  # the second prefill instance loads what the first has computed
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_hit_rate_is_the_same_wherever_the_prefix_lies(name):
    placement, expected = CACHED[name]
    log = served(placement, in_turn(6), cache=Cache(prefix=True, block=16),
                 routing=Routing(prefill="round_robin"))  # fmt: skip
    numbers = summary(measured(log, placement))
    reused = tuple(numbers[f"reused_{how}_tokens"] for how in ("local", "remote", "target"))
    assert reused == expected
    assert numbers["computed_tokens"] == 6 * 80 - 320
    assert numbers["prefix_hit_rate"] == pytest.approx(320 / 480)
