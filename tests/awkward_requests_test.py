"""Requests that sit at an edge are served exactly, and those that cannot be are told why."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest
from engine_helpers import (
    COLLOCATED,
    CONTEXT,
    LAYERS,
    SLOTS,
    SPLIT,
    Ran,
    assert_pools_are_full,
    config_of,
    request,
    run,
    tiny,
)

from pdjax.architecture import ModelError
from pdjax.core.config import ConfigError, Link, Model, Placement, Pool, Role, Transfer
from pdjax.core.events import AbortAsked, Finish, Hold, Landed, Release, Step, StepDone
from pdjax.core.request import Request
from pdjax.engine import Engine
from pdjax.experiment import serve as serve_config
from pdjax.sources import find

BOTH = pytest.mark.parametrize("placement", [COLLOCATED, SPLIT], ids=["collocated", "split"])
STREAMED = {"prefill": replace(SPLIT["prefill"], chunk=16), "decode": SPLIT["decode"]}


def served(placement: Placement, *requests: Request, **how) -> Ran:
    ran = run(config_of(placement), requests, **how)
    assert set(ran.ends) == {r.id for r in requests}
    assert_pools_are_full(ran.scheduler)
    return ran


def greedy(prompt: int, count: int) -> tuple[int, ...]:
    """What request 0 with this prompt length gets when nothing stops it."""
    return served(COLLOCATED, request(0, prompt, max_tokens=count)).tokens[0]


# --- Refused at submit -------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request(1, []), "the prompt is empty: send at least one token"),
        (request(1, 5, max_tokens=0), "`max_tokens` is 0: ask for at least 1"),
        (
            request(1, 60, max_tokens=5),
            "prompt 60 + max_tokens 5 = 65 tokens exceed the context of 64",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_and_disturbs_nobody(placement, bad, why):
    good = request(0, 16, max_tokens=4)
    ran = served(placement, good, bad)
    assert ran.ends == {0: "length", 1: why}
    assert ran.tokens == {0: greedy(16, 4)}


def test_a_request_that_no_pool_could_hold_is_refused_with_the_numbers():
    small = {
        "prefill": SPLIT["prefill"],
        "decode": replace(SPLIT["decode"], pool=Pool("pages", 24, 4)),
    }
    ran = served(small, request(0, 16, max_tokens=10), request(1, 16, max_tokens=9))
    assert ran.ends == {
        0: "the request needs KV memory for 25 tokens (7 pages of 4), but pool `decode/0` has 6 "
        "pages in all",
        1: "length",
    }


@BOTH
def test_a_request_that_fills_the_context_is_served(placement):
    ran = served(placement, request(0, CONTEXT - 4, max_tokens=4))
    assert ran.tokens == {0: greedy(CONTEXT - 4, 4)} and len(ran.tokens[0]) == 4


# --- Short ends --------------------------------------------------------------------------


@BOTH
def test_one_token_is_exactly_one_and_nothing_is_decoded_or_sent(placement):
    ran = served(placement, request(0, 16, max_tokens=1))
    assert ran.tokens == {0: greedy(16, 4)[:1]} and ran.ends == {0: "length"}
    assert not ran.all(Landed) and len(ran.all(StepDone)) == 1
    holds = [hold.handle.pool for hold in ran.all(Hold)]
    assert holds == [next(iter(placement)) + "/0"]


@pytest.mark.parametrize("placement", [COLLOCATED, SPLIT, STREAMED])
def test_a_first_token_that_stops_is_the_only_one(placement):
    """Also where KV was already on its way: pages come back once it has landed."""
    first, *_ = greedy(33, 6)
    ran = served(placement, request(0, 33, max_tokens=6, stop_tokens=(first,)))
    assert ran.tokens == {0: (first,)} and ran.ends == {0: "stop"}
    assert all(not done.emitted for done in ran.all(StepDone) if "decode" in done.instance)


def letters(tokens: Sequence[int]) -> str:
    """A tokenizer for random tokens: each is a word."""
    return "".join(f"<{token}>" for token in tokens)


@BOTH
@pytest.mark.parametrize("steps", [1, 4])
def test_a_stop_string_that_straddles_the_hand_over_stops(placement, steps):
    """It begins in the token that prefill samples and ends in the first or second decoded one;
    with 4 steps per dispatch the tokens after it have been computed, and are dropped."""
    first, second, third, *_ = greedy(16, 6)
    name = "decode" if "decode" in placement else "server"
    placement = placement | {name: replace(placement[name], steps=steps)}
    ran = served(
        placement,
        request(0, 16, max_tokens=6, stop=(f"{first}><{second}>",)),
        msgspec.structs.replace(
            request(0, 16, max_tokens=6, stop=("absent", f"{first}><{second}><{third}")), id=1
        ),
        decode=letters,
    )
    assert ran.tokens == {0: (first, second), 1: (first, second, third)}
    assert set(ran.ends.values()) == {"stop"}


@BOTH
def test_a_stop_token_that_is_decoded_stops(placement):
    tokens = greedy(16, 6)
    ran = served(placement, request(0, 16, max_tokens=6, stop_tokens=(999, tokens[2])))
    assert ran.tokens == {0: tokens[: tokens.index(tokens[2]) + 1]}


# --- Many, and those that go -------------------------------------------------------------


@BOTH
def test_more_requests_than_slots_are_all_served(placement):
    many = [request(i, 16, max_tokens=1 + i % 6) for i in range(3 * SLOTS)]
    ran = served(placement, *many)
    alone = {r.id: served(COLLOCATED, r).tokens[r.id] for r in many[:: SLOTS + 1]}
    assert {rid: ran.tokens[rid] for rid in alone} == alone
    assert [len(ran.tokens[r.id]) for r in many] == [r.max_tokens for r in many]


@BOTH
def test_requests_of_one_client_id_stay_apart(placement):
    twins = [
        msgspec.structs.replace(request(i, length, max_tokens=4), client_id="twin")
        for i, length in enumerate((16, 5))
    ]
    ran = served(placement, *twins, msgspec.structs.replace(twins[0], id=2))
    assert ran.tokens[0] == ran.tokens[2] == greedy(16, 4)
    assert ran.tokens[1] == served(COLLOCATED, twins[1]).tokens[1] != ran.tokens[0]


class Abort(NamedTuple):
    """When the client gives up, and how far it had come where prompts take chunks of 16: chunks
    dispatched, pieces of KV that had left and not landed, tokens seen."""

    at_ms: float
    chunks: int
    flying: bool
    tokens: range


# Two prompts of 16 keep the prefill busy for 13 ms. Then 33 tokens take three chunks, until
# 32 ms, and their 12 pieces cross one after the other, 3 ms for each of the first 8.
ABORTS = {
    "before it arrived": Abort(1, 0, False, range(12, 13)),
    "waiting for its turn": Abort(4, 0, False, range(0, 1)),
    "in its first chunk": Abort(15, 1, True, range(0, 1)),
    "in its second chunk": Abort(22, 2, True, range(0, 1)),
    "while its KV flies": Abort(35, 3, True, range(1, 2)),
    "while it decodes": Abort(60, 3, False, range(2, 12)),
    "after its end": Abort(200, 3, False, range(12, 13)),
}


@pytest.mark.parametrize("when", ABORTS)
@pytest.mark.parametrize("placement", [COLLOCATED, STREAMED], ids=["collocated", "split"])
def test_an_abort_gives_everything_back_and_disturbs_nobody(placement, when):
    abort = ABORTS[when]
    victim = request(0, 33, at_ms=2, max_tokens=12)
    others = [request(i, 16, at_ms=i - 1, max_tokens=8) for i in (1, 2)]
    others.append(request(3, 16, at_ms=220, max_tokens=2))
    ran = run(
        config_of(placement, transfer=Transfer(groups=LAYERS, link=Link(bytes_per_s=3e6))),
        [victim, *others],
        aborts={0: abort.at_ms},
    )
    assert_pools_are_full(ran.scheduler)
    end = "length" if abort.tokens == range(12, 13) else "abort"
    assert ran.ends == {0: end, 1: "length", 2: "length", 3: "length"}
    assert ran.tokens[0] == greedy(33, 12)[: len(ran.tokens[0])]
    for other in others:
        assert ran.tokens[other.id] == served(COLLOCATED, other).tokens[other.id]
    assert sorted((h.handle.rid, h.handle.pool) for h in ran.all(Hold)) == sorted(
        (r.rid, r.pool) for r in ran.all(Release)
    )
    if placement is STREAMED:  # that the abort came when it was meant to
        before = ran.records[: [isinstance(r.body, AbortAsked) for r in ran.records].index(True)]
        steps = [r.body for r in before if isinstance(r.body, Step)]
        sent = sum(send.rid == 0 for step in steps for send in step.sends)
        landed = sum(isinstance(r.body, Landed) and r.body.rid == 0 for r in before)
        assert sum(chunk.rid == 0 for step in steps for chunk in step.chunks) == abort.chunks
        assert (sent > landed) == abort.flying
        assert next(f.tokens for f in ran.all(Finish) if f.rid == 0) in abort.tokens


# --- One line for what is wrong from the start --------------------------------------------


def engine(placement: Placement, **changes) -> Callable[[], Engine]:
    return lambda: Engine(config_of(placement, **changes), "it", tiny())


def from_source(source: str, folder) -> Callable[[], object]:
    return lambda: serve_config(config_of(COLLOCATED, model=Model(source)), "it", folder)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            engine({"server": Role(instances=9)}),
            "asks for 9 devices (server 9x tp 1), but there",
        ),
        (
            engine(SPLIT | {"decode": replace(SPLIT["decode"], tp=3)}),
            "`placements.it.decode` has tp 3, which neither divides nor is a multiple of the 4 kv "
            "heads of tiny: use one of [1, 2, 4, 8]",
        ),
        (
            engine(SPLIT, transfer=Transfer(groups=LAYERS + 1)),
            "`transfer.groups` is 5, but the model has 4 layers: use at most that",
        ),
    ],
)
def test_a_placement_that_does_not_fit_is_told_in_one_line(build, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no/such/model", "no model at `no/such/model`; give `smollm2`, a .gguf file"),
        ("random:huge", "no architecture `huge` for random weights; we know ['llama3-70b'"),
    ],
)
def test_a_model_that_is_not_there_is_told_in_one_line(source, says, tmp_path):
    with pytest.raises(ModelError, match=re.escape(says)) as caught:
        from_source(source, tmp_path)()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", [0, 0.99])
def test_a_gguf_file_that_is_cut_short_is_told_in_one_line(part, smollm2, tmp_path):
    whole = find(smollm2).path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(ModelError, match=r"cut\.gguf` is cut short or not a GGUF file") as caught:
        from_source(str(cut), tmp_path)()
    assert "\n" not in str(caught.value)
