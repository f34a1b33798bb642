"""What users of disaggregated servers reported as wrong tokens, on the tiny model: whatever happens
to a request's KV, its tokens are those of a collocated server without a cache and with memory for
all, which serves it alone.

Elsewhere: splits that differ, also with more devices than heads (transports_..., more_devices_...);
donated pools, odd head sizes and dtypes staged in host memory (pieces_test, kv_in_host_memory_...);
other layouts, more tokens than a handle holds (transfer_test); corrupt, late and lost pieces, and
deaths (faults_change_no_tokens_test); stops, one token, aborts (awkward_requests_test); seeded
sampling (disaggregated_matches_collocated_test).
Does not apply: quantised KV and its scales, latent attention, hybrid states (the models have none);
pipeline stages; pages that are moved for compaction.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from engine_helpers import (
    COLLOCATED,
    LAYERS,
    LINK,
    PAGES,
    SPLIT,
    Ran,
    assert_pools_are_full,
    config_of,
    request,
    run,
)

from pdjax.core.config import Cache, Link, Placement, Pool, Transfer
from pdjax.core.events import Landed, Preempt, Reuse, Send, Step
from pdjax.core.prefix import hash_blocks
from pdjax.core.request import Request

BLOCK = 4
CACHE = Cache(prefix=True, block=BLOCK)
PAGED = {"prefill": replace(SPLIT["prefill"], pool=PAGES), "decode": SPLIT["decode"]}


def alone(asked: Request) -> tuple[int, ...]:
    return run(config_of(COLLOCATED), [msgspec.structs.replace(asked, arrival_ns=0)]).tokens[
        asked.id
    ]


def served(placement: Placement, requests: Sequence[Request], **how) -> Ran:
    """A run whose every request got its tokens."""
    aborts = how.pop("aborts", {})
    ran = run(config_of(placement, **how), requests, aborts=aborts)
    assert_pools_are_full(ran.scheduler)
    tokens = {asked.id: alone(asked) for asked in requests if asked.id not in aborts}
    assert {rid: ran.tokens[rid] for rid in tokens} == tokens
    return ran


def hashed(asked: Request) -> Request:
    blocks, tail = hash_blocks(asked.prompt, BLOCK)
    return msgspec.structs.replace(asked, blocks=blocks, tail=tail)


# --- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [COLLOCATED, PAGED], ids=["collocated", "split"])
@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_a_prompt_that_is_all_in_the_cache_gets_the_same_first_token(placement, length):
    """The last position is computed in any case, once: one token less than all is reused."""
    prompt = request(7, length).prompt
    twice = [hashed(request(rid, prompt, at_ms=200 * rid, max_tokens=4)) for rid in range(2)]
    ran = served(placement, twice, cache=CACHE)
    local = [r.tokens for r in ran.all(Reuse) if r.how == "local"]
    assert local == [BLOCK * ((length - 1) // BLOCK)] * bool((length - 1) // BLOCK)


@pytest.mark.parametrize("remote", [False, True])
def test_a_second_turn_reuses_what_the_first_one_generated(remote):
    """With and without loading what only the decode pool has."""
    first = hashed(request(0, 10, max_tokens=8))
    prompt = (*first.prompt, *alone(first), 1, 2, 3)
    second = hashed(request(1, prompt, at_ms=300, max_tokens=4))
    ran = served(PAGED, [first, second], cache=replace(CACHE, remote=remote))
    reused = {reuse.how: reuse.tokens for reuse in ran.all(Reuse)}
    assert reused == {"local": 8, "target": 16} | ({"remote": 8} if remote else {})


# --- pages that change hands ---------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["whole", "layerwise", "streaming"])
def test_kv_of_an_aborted_request_that_lands_late_hurts_nobody(schedule):
    """It is given up while half its pieces fly over a slow link; the next one wants its pages."""
    tight = PAGED | {"decode": replace(SPLIT["decode"], pool=Pool(tokens=48, page_size=4))}
    ran = served(
        tight,
        [request(0, 33, max_tokens=12), request(1, 30, at_ms=1, max_tokens=12)],
        aborts={0: 30},
        transfer=Transfer(schedule=schedule, groups=LAYERS, link=Link(latency_s=5e-3)),
    )
    assert ran.ends == {0: "abort", 1: "length"}


def test_more_hand_offs_than_slots_through_pages_that_lie_anywhere():
    """Requests of all lengths come and go until pages are in no order; each first token is its
    own."""
    tight = PAGED | {"decode": replace(SPLIT["decode"], pool=Pool(tokens=96, page_size=4), slots=4)}
    lengths = np.random.default_rng(0).integers(1, 40, 24).tolist()
    many = [request(i, n, at_ms=3 * i, max_tokens=1 + i % 9) for i, n in enumerate(lengths)]
    ran = served(tight, many, transfer=Transfer(groups=LAYERS, link=replace(LINK, latency_s=0.02)))
    tables = [step.decodes for step in ran.all(Step) if len(step.decodes) == 4]
    assert tables  # all slots were in use at once


@pytest.mark.parametrize("how", ["recompute", "return", "swap"])
def test_who_had_to_give_up_its_pages_gets_the_same_tokens(how):
    role = replace(
        SPLIT["decode"],
        pool=Pool(tokens=64, page_size=4),
        growth=1,
        preempt=how,
        swap_tokens=128,
    )
    sampled = {"temperature": 1.0, "seed": 5}
    both = [request(i, 16, at_ms=i, max_tokens=30, **(sampled if i else {})) for i in range(3)]
    ran = served(PAGED | {"decode": role}, both)
    assert {preempt.how for preempt in ran.all(Preempt)} == {how}


# --- bytes ---------------------------------------------------------------------------------------


def test_bytes_are_those_of_all_devices_and_each_is_counted_once():
    """With tp 2 as with tp 1: tokens x layers x (K and V) x heads x head size x 4."""
    placement = {name: replace(role, tp=2) for name, role in PAGED.items()}
    ran = run(config_of(placement), [request(0, 16, max_tokens=3)], devices=[2, 3, 4, 5])
    arch = ran.engine.arch
    sends = [s for step in ran.all(Step) for s in step.sends] + ran.all(Send)
    assert {landed.send for landed in ran.all(Landed)} == {send.id for send in sends}
    assert sum(landed.nbytes for landed in ran.all(Landed)) == 16 * arch.L * 2 * arch.K * arch.H * 4
