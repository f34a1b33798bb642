"""Later turns repeat what was said; a cache finds it again, in one pool as in two, and no token
changes."""

import dataclasses
import functools

import pytest
from engine_helpers import COLLOCATED, LINK, SPLIT, config_of, tiny

from pdjax.chats import connect
from pdjax.core.config import (
    Arrivals,
    Cache,
    Config,
    ConfigError,
    Lengths,
    Placement,
    Transfer,
    Workload,
)
from pdjax.core.events import Arrived, Record, Reuse
from pdjax.core.loop import first_difference, serve
from pdjax.core.prefix import hash_blocks
from pdjax.engine import Engine
from pdjax.workload import make_source

WORKLOAD = Workload(
    requests=6,
    turns=2,
    think_s=0.01,
    shared=9,
    text="random",
    arrivals=Arrivals("poisson", rate=50),
    prompt=Lengths("lognormal", mean=14, low=10, high=18),
    output=Lengths("fixed", mean=6),
)
CACHE = Cache(prefix=True, block=4)
ROLES = {"prefill": SPLIT["prefill"], "decode": SPLIT["decode"]}
SMALL_PAGES = dataclasses.replace(ROLES["prefill"], pool=ROLES["decode"].pool)
TWO_POOLS: Placement = {"prefill": SMALL_PAGES, "decode": ROLES["decode"]}


def config_with(placement: Placement, cache: Cache = CACHE, **workload) -> Config:
    return config_of(
        placement,
        cache=cache,
        workload=dataclasses.replace(WORKLOAD, **workload),
        transfer=Transfer(groups=2, link=LINK),
    )


def source_of(config: Config):
    arch = tiny().arch
    return make_source(
        config.workload, 0, encode=list, vocab=arch.V, context=config.model.context, eos=()
    )


@functools.cache
def chat(name: str, prefix: bool = True, remote: bool = True) -> tuple[Engine, list[Record]]:
    placement = COLLOCATED if name == "collocated" else TWO_POOLS
    config = config_with(placement, dataclasses.replace(CACHE, prefix=prefix, remote=remote))
    engine = Engine(config, "it", tiny())
    requests = connect(source_of(config), config, lambda rid: engine.texts[rid].tokens)
    scheduler = engine.scheduler()
    records = list(serve(requests, engine.backend(), scheduler))
    assert first_difference(records, engine.scheduler()) == ""
    assert all(i.pool.free == i.pool.pages for i in scheduler.instances.values())
    return engine, records


def tokens(engine: Engine) -> dict[int, list[int]]:
    return {rid: engine.texts[rid].tokens for rid in range(WORKLOAD.requests)}


def found(records: list[Record], *how: str) -> dict[int, int]:
    """Tokens of each request's prompt that were not computed."""
    counts: dict[int, int] = {}
    for record in records:
        if isinstance(record.body, Reuse) and record.body.how in how:
            rid = record.body.rid
            counts[rid] = counts.get(rid, 0) + record.body.tokens
    return counts


def test_a_later_turn_is_all_that_was_said_and_something_new():
    engine, records = chat("collocated")
    arrived = {r.body.request.id: (r.t_ns, r.body.request) for r in records
               if isinstance(r.body, Arrived)}  # fmt: skip
    own = source_of(config_with(COLLOCATED)).requests
    for rid in range(3):
        second = engine.texts[rid + 3].request.prompt
        said = (*own[rid].prompt, *engine.texts[rid].tokens, *own[rid + 3].prompt)
        assert second == said
        assert arrived[rid + 3][1].blocks == hash_blocks(said, CACHE.block)[0]
        assert arrived[rid + 3][0] == arrived[rid + 3][1].arrival_ns


@pytest.mark.parametrize("name", ["collocated", "split"])
def test_a_cache_changes_no_token(name):
    assert tokens(chat(name)[0]) == tokens(chat("collocated", prefix=False)[0])


def test_two_pools_find_what_one_pool_finds():
    one, two = chat("collocated")[1], chat("split")[1]
    assert found(two, "local", "remote") == found(one, "local")
    assert found(two, "remote").keys() == {3, 4, 5}  # the answers, which decode pools have
    assert found(two, "target")  # what the decode pool had was not sent again


def test_second_turns_find_the_generated_tokens_too():
    engine, records = chat("collocated")
    for rid in range(3):
        first = engine.texts[rid]
        stored = first.request.prompt_len + len(first.tokens) - 1
        assert found(records, "local")[rid + 3] == stored - stored % CACHE.block


def test_without_loads_the_prefill_pool_finds_prompts_only():
    records = chat("split", remote=False)[1]
    assert not found(records, "remote")
    assert sum(found(records, "local").values()) < sum(
        found(chat("collocated")[1], "local").values()
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arrivals": Arrivals("closed", concurrency=2)}, "needs arrivals that do not wait"),
        ({"output": Lengths("fixed", mean=40)}, "use fewer or shorter turns"),
        ({"turns": 0}, "must be at least 0, 1 and 0"),
        ({"shared": 12}, "`workload.shared`"),
    ],
)
def test_a_conversation_that_cannot_be_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        config = config_with(COLLOCATED, **changes)
        connect(source_of(config), config, lambda rid: ())
