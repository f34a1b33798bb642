"""DistServe's iteration times: constants verbatim, formula by hand, known efficiency."""

import csv
import json

import pytest
from costs_helpers import LINK, decode, mixed, ms, no_bytes, prefill

from pdjax.catalogue import chip, model
from pdjax.costs.batch import CostError
from pdjax.costs.distserve import FITS, KV_TOKENS, distserve

COST = distserve("opt-13b", 1, LINK, no_bytes)


def test_constants_are_those_of_the_artefact(traces):
    published = {}
    for engine in ("distserve", "vllm"):
        path = traces / "distserve" / f"profiler-a100-80g.{engine}.json"
        for name, by_tp in json.loads(path.read_text()).items():
            for tp, fit in by_tp.items():
                three = (fit["prefill"], fit["decoding_smallbs"], fit["decoding_largebs"])
                key = (engine, name.removeprefix("facebook/"), int(tp))
                published[key] = tuple(map(tuple, three))
                assert fit["decoding_large_small_bs_threshold"] == 95
    assert {key: tuple(fit) for key, fit in FITS.items()} == published


def test_kv_capacities_are_those_of_the_artefact(traces):
    with open(traces / "distserve" / "max_num_tokens.csv") as file:
        published = {
            (row["model"].removeprefix("facebook/"), int(row["tp"]), int(row["pp"])): int(
                row["max_num_tokens"]
            )
            for row in csv.DictReader(file)
        }
    assert len(KV_TOKENS) == 50 and KV_TOKENS.items() <= published.items()


@pytest.mark.parametrize(
    ("step", "milliseconds"),
    [
        # 18.1025 + 0.101912 * 512 + 7.122e-6 * 512^2
        (prefill((0, 512)), 72.149),
        # 18.1025 + 0.101912 * 300 + 7.122e-6 * (100^2 + 200^2)
        (prefill((0, 100), (0, 200)), 49.032),
        # 19.9347 + 6.2694e-4 * 94 * 500 + 0.038507 * 94, and one request more: the other line,
        # 7.1662 + 5.7980e-4 * 95 * 500 + 0.158311 * 95
        (decode(*[500] * 94), 53.021),
        (decode(*[500] * 95), 49.746),
    ],
)
def test_times_are_the_papers_formula(step, milliseconds):
    assert ms(COST, step) == pytest.approx(milliseconds, abs=2e-3)


def test_chunks_square_to_their_prompt():
    a = FITS["distserve", "opt-13b", 1].prefill[0]
    halves = ms(COST, prefill((0, 300))) + ms(COST, prefill((300, 300)))
    assert halves == pytest.approx(ms(COST, prefill((0, 600))) + a, abs=1e-5)


def test_decodes_beside_a_chunk_add_what_they_read_and_are():
    """6.2694e-4 * 700 + 0.038507 * 2 more than the chunk alone."""
    more = ms(COST, mixed((0, 512), 300, 400)) - ms(COST, prefill((0, 512)))
    assert more == pytest.approx(0.51587, abs=1e-4)


@pytest.mark.parametrize(("tokens", "mfu"), [(256, 0.48), (512, 0.59), (1024, 0.66), (2048, 0.67)])
def test_prefill_of_opt_13b_reaches_the_known_share_of_an_a100(tokens, mfu):
    opt = model("opt-13b")
    flops = 2 * opt.parameters * tokens + opt.L * opt.attention.chunk_flops(0, tokens)
    seconds = ms(COST, prefill((0, tokens))) / 1e3
    assert flops / seconds / chip("a100-80g").flops == pytest.approx(mfu, abs=0.01)


def test_vllm_is_slower_than_distserves_own_engine():
    vllm = distserve("opt-13b", 1, LINK, no_bytes, engine="vllm")
    for step in (prefill((0, 512)), decode(500), decode(*[500] * 100)):
        assert ms(vllm, step) > ms(COST, step)


def test_what_was_not_published_is_refused_with_what_was():
    with pytest.raises(CostError, match=r"no fit of `opt-175b` with tp 8.*opt-66b tp 8"):
        distserve("opt-175b", 8, LINK, no_bytes)
    with pytest.raises(CostError, match="the engine `sglang`; there are fits of the engines"):
        distserve("opt-13b", 1, LINK, no_bytes, engine="sglang")
