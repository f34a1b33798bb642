"""In float32 a disaggregated server gives the tokens of a collocated one, token for token."""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
from engine_helpers import (
    COLLOCATED,
    CONTEXT,
    LAYERS,
    PAGES,
    SLOTS,
    SPLIT,
    Ran,
    assert_pools_are_full,
    config_of,
    request,
    run,
)

from pdjax.core.config import Model, Placement, Pool, Role, Transfer
from pdjax.core.events import Landed, Step
from pdjax.core.request import Request
from pdjax.programs.weights import open_checkpoint
from pdjax.tokenizer import load_tokenizer

PROMPTS = (49, 1, 16, 5, 33, 13, 4, 48, 9, 15)  # 1 token, pages of 4 and 16, less and more by 1
SAMPLING = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "seed": 2},
    {"temperature": 1.3, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "seed": 4},
)


def workload() -> list[Request]:
    """Ten requests that overlap: every prompt length, 1 to 6 tokens, greedy and sampled ones."""
    return [
        request(i, length, at_ms=4 * i, max_tokens=1 + (i + 5) % 6, **SAMPLING[i % len(SAMPLING)])
        for i, length in enumerate(PROMPTS)
    ]


@functools.cache
def collocated_tokens() -> dict[int, tuple[int, ...]]:
    return run(config_of(COLLOCATED), workload(), devices=[0]).tokens


# Programs are compiled per mesh: each tp has its own devices, and keeps them in every case.
DEVICES = {(1, 1): [0, 1], (2, 1): [2, 3, 1], (1, 2): [0, 2, 3], (2, 4): [2, 3, 4, 5, 6, 7]}


class Case(NamedTuple):
    """tp and pages (page sizes) are those of prefill and decode; form: of the prefill pool."""

    tp: tuple[int, int]
    groups: int
    pages: tuple[int, int]
    chunk: int  # 64 holds the longest prompt, 16 does not
    form: str
    schedule: str


# Every pair of values of two columns occurs somewhere.
CASES = [
    Case((1, 1), 1, (16, 4), 64, "slab", "whole"),
    Case((1, 1), 2, (4, 16), 16, "pages", "layerwise"),
    Case((1, 1), LAYERS, (4, 16), 64, "slab", "whole"),
    Case((1, 2), 1, (16, 16), 64, "pages", "layerwise"),
    Case((1, 2), 2, (4, 4), 16, "slab", "whole"),
    Case((1, 2), LAYERS, (4, 4), 64, "pages", "layerwise"),
    Case((2, 1), 1, (4, 4), 16, "pages", "layerwise"),
    Case((2, 1), 2, (16, 16), 64, "pages", "layerwise"),
    Case((2, 1), LAYERS, (16, 16), 16, "slab", "whole"),
    Case((2, 4), 1, (4, 4), 16, "slab", "layerwise"),
    Case((2, 4), 2, (16, 16), 64, "slab", "layerwise"),
    Case((2, 4), LAYERS, (16, 4), 16, "pages", "whole"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)).replace(" ", ""))
def test_one_prefill_and_one_decode_instance_match(case: Case):
    pools = [
        Pool(form, 512, page) for form, page in zip((case.form, "pages"), case.pages, strict=True)
    ]
    placement = {
        "prefill": Role("prefill", tp=case.tp[0], pool=pools[0], chunk=case.chunk),
        "decode": Role("decode", tp=case.tp[1], pool=pools[1], slots=SLOTS, chunk=64),
    }
    transfer = Transfer(schedule=case.schedule, groups=case.groups)
    ran = run(config_of(placement, transfer=transfer), workload(), devices=DEVICES[case.tp])
    assert ran.tokens == collocated_tokens()
    assert_pools_are_full(ran.scheduler)
    crossed = {landed.rid for landed in ran.all(Landed)}
    assert crossed == {r.id for r in workload() if r.max_tokens > 1}


def test_kv_that_is_pulled_matches():
    transfer = Transfer(schedule="whole", groups=LAYERS, initiator="pull")
    ran = run(config_of(SPLIT, transfer=transfer), workload(), devices=[0, 1])
    assert ran.tokens == collocated_tokens()
    assert_pools_are_full(ran.scheduler)


def test_the_cases_cover_every_pair_of_choices():
    """Guards the table above: what is not in it is not tested."""
    flat = [(c.tp, c.groups, *c.pages, c.chunk, c.form, c.schedule) for c in CASES]
    for one, other in itertools.combinations(zip(*flat, strict=True), 2):
        assert set(itertools.product(one, other)) == set(zip(one, other, strict=True))


P, D = SPLIT["prefill"], SPLIT["decode"]
SERVER = COLLOCATED["server"]
PLACEMENTS: dict[str, tuple[Placement, list[int]]] = {
    "chunked": ({"server": replace(SERVER, chunk=16)}, [0]),
    "mixed": ({"server": replace(SERVER, chunk=16, mixed=True, prefills=2)}, [0]),
    "lag": ({"server": replace(SERVER, lag=1)}, [0]),
    "steps": ({"server": replace(SERVER, steps=3)}, [0]),
    "logical split": (
        {"p": replace(P, pool=PAGES), "d": replace(D, beside="p", pool_of="p")},
        [0],
    ),
    "two pools": ({"p": P, "d": replace(D, beside="p")}, [0]),
    "2P1D": ({"p": replace(P, instances=2), "d": D}, [0, 2, 1]),
    "1P2D": ({"p": P, "d": replace(D, instances=2)}, [0, 1, 2]),
    "prompts that share a step": ({"p": replace(P, prefills=4), "d": D}, [0, 1]),
    "lag and steps on the decode side": ({"p": P, "d": replace(D, lag=1, steps=3)}, [0, 1]),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_matches(name: str):
    placement, devices = PLACEMENTS[name]
    ran = run(config_of(placement), workload(), devices=devices)
    assert ran.tokens == collocated_tokens()
    assert_pools_are_full(ran.scheduler)
    # All of the placement was used, and nothing crosses within a pool.
    assert {step.instance for step in ran.all(Step)} == set(ran.engine.instances)
    assert bool(ran.all(Landed)) == (len(ran.engine.pools) > 1)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_decoded_token_is_what_prefilling_its_whole_text_samples(sampling: dict):
    """Ties the collocated oracle itself to something else: no decode step runs here."""
    prompt = list(request(0, 13).prompt)
    decoded = run(config_of(COLLOCATED), [request(0, prompt, max_tokens=4, **sampling)])
    tokens = decoded.tokens[0]
    for i, token in enumerate(tokens):
        longer = request(0, [*prompt, *tokens[:i]], max_tokens=1, **sampling)
        assert run(config_of(COLLOCATED), [longer]).tokens == {0: (token,)}


def test_smollm2_matches_layer_by_layer_and_with_stop_strings(smollm2: str):
    """Both stop strings begin in the token that prefill samples and end in a decoded one."""
    checkpoint, tokenizer = open_checkpoint(smollm2), load_tokenizer(smollm2)
    asked = {"The capital of France is": " Paris.", "1, 2, 3,": " 4, 5", "def add(a, b):\n": None}
    requests = [
        request(i, tokenizer.encode(text), max_tokens=8, stop=(stop,) if stop else ())
        for i, (text, stop) in enumerate(asked.items())
    ]

    def served(placement: Placement) -> Ran:
        config = config_of(
            placement,
            model=Model(smollm2, context=CONTEXT),
            transfer=Transfer(groups=checkpoint.arch.L),  # per layer, which also compiles fastest
        )
        return run(config, requests, checkpoint=checkpoint, decode=tokenizer.decode)

    collocated, disaggregated = served(COLLOCATED), served(SPLIT)
    assert disaggregated.tokens == collocated.tokens
    texts = [tokenizer.decode(tokens) for tokens in disaggregated.tokens.values()]
    assert sorted(texts)[:2] == [" 4, 5", " Paris."]
    assert disaggregated.ends == collocated.ends == {0: "stop", 1: "stop", 2: "length"}
