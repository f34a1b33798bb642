"""The sizes that are tried, the closed form that bounds them, and a search that can be resumed."""

import msgspec
import pytest

from configs.plan import get_config
from experiments.plan import table
from pdjax.catalogue import chip, model
from pdjax.core.config import SLO, Arrivals, Config, Lengths, Model, Pool, Role, Workload
from pdjax.costs.batch import Batch
from pdjax.plan import (
    Hardware,
    PlanError,
    Result,
    add_result,
    best_of_forms,
    candidates,
    read_results,
    search,
    verdict,
)

HARDWARE = Hardware(model("llama3-8b"), chip("h100"), chips=2, tps=(1, 2))
POOL = Pool(page_size=64)
CHEAP = {"seeds": [0, 1], "tolerance": 0.3}


def config(slo: SLO = SLO(ttft_s=0.4, tpot_s=0.02), **workload) -> Config:  # noqa: B008
    """Prompts of 1000 tokens and answers of 51."""
    return Config(
        {
            "apart": {
                "prefill": Role("prefill", pool=POOL, chunk=4096),
                "decode": Role("decode", pool=POOL, chunk=64, slots=64),
            },
            "together": {"server": Role("both", pool=POOL, chunk=4096, slots=64)},
        },
        model=Model("", context=4096),
        workload=Workload(
            requests=150,
            arrivals=Arrivals("uniform"),
            **{"prompt": Lengths(mean=1000), "output": Lengths(mean=51), **workload},
        ),
        slo=slo,
    )


def sizes(found) -> set[tuple]:
    return {(c.form, *((r.instances, r.tp) for r in c.placement.values())) for c in found}


def test_every_size_fills_the_chips():
    hardware = Hardware(HARDWARE.shape, HARDWARE.chip, chips=4, tps=(1, 2))
    assert sizes(candidates(config(), hardware)) == {
        ("apart", (1, 1), (3, 1)),
        ("apart", (2, 1), (2, 1)),
        ("apart", (3, 1), (1, 1)),
        ("apart", (2, 1), (1, 2)),
        ("apart", (1, 2), (2, 1)),
        ("apart", (1, 2), (1, 2)),
        ("together", (4, 1)),
        ("together", (2, 2)),
    }


def test_an_instance_has_the_memory_that_weights_leave():
    weights, token = 2 * 8.03e9, 131_072  # bf16 bytes of the model, and of a token's KV
    assert HARDWARE.kv_tokens(1) == pytest.approx((0.9 * 80e9 - weights) / token, rel=1e-3)
    assert HARDWARE.kv_tokens(2) == pytest.approx((2 * 0.9 * 80e9 - weights) / token, rel=1e-3)
    of_candidate = candidates(config(), HARDWARE)[0].placement
    for role in of_candidate.values():
        assert role.pool.tokens == HARDWARE.kv_tokens(role.tp)


def test_a_model_that_does_not_fit_is_left_out_with_the_reason():
    small = Hardware(model("llama3-70b"), chip("h100"), chips=2, tps=(1, 2))
    found = candidates(config(), small)
    assert all(c.bound == 0 and "has no room for 4096 tokens" in c.why for c in found
               if any(role.tp == 1 for role in c.placement.values()))  # fmt: skip
    results = list(search(config(), small, **CHEAP))
    assert all(result.skipped for result in results if "tp1" in result.name)


def test_the_closed_form_is_the_slower_of_the_two_pools_by_hand():
    prefill_s = HARDWARE.seconds(1, Batch(((0, 1000),)))
    # 64 slots decode together: 50 tokens after the first, which see 1026 keys on average.
    token_s = HARDWARE.seconds(1, Batch((), 64, 64 * 1025.5))
    assert token_s < 0.02
    bound = {c.name: c.bound for c in candidates(config(), HARDWARE)}
    expected = min(1 / prefill_s, 64 / (50 * token_s))
    assert bound["apart: 1 prefill tp1 + 1 decode tp1"] == pytest.approx(expected, rel=1e-3)
    # Together, 64 tokens take their step and the prefill of 64 / 50 prompts.
    largest = max(n for n in range(1, 65) if each_s(n, prefill_s) <= 0.02)
    expected = 2 * largest / (50 * each_s(largest, prefill_s))
    assert bound["together: 2 server tp1"] == pytest.approx(expected, rel=1e-3)


def each_s(n: int, prefill_s: float) -> float:
    return HARDWARE.seconds(1, Batch((), n, n * 1025.5)) + n / 50 * prefill_s


@pytest.fixture(scope="module")
def found() -> list[Result]:
    return list(search(config(), HARDWARE, **CHEAP))


def test_no_goodput_is_above_its_closed_form(found):
    assert [r.name for r in found] == [c.name for c in candidates(config(), HARDWARE)]
    assert any(r.rate for r in found)
    assert all(0 < r.rate <= 1.05 * r.bound for r in found if not r.skipped)


def test_what_is_left_out_says_why_and_is_not_the_best(found):
    assert all(bool(r.skipped) != bool(r.rate) for r in found)
    assert {r.form for r in best_of_forms(found)} == {"apart", "together"}


def test_a_search_goes_on_where_it_was_stopped(found, tmp_path, monkeypatch):
    path = tmp_path / "plan.jsonl"
    assert read_results(path, "this question") == {}
    for result in found[:2]:
        add_result(path, result)
    with open(path, "ab") as file:
        file.write(b'{"name": "cut sh')
    known = read_results(path, "this question")
    assert list(known.values()) == found[:2]
    assert list(search(config(), HARDWARE, **CHEAP, known=known)) == found
    monkeypatch.setattr("pdjax.plan.goodput", None)  # nothing is searched twice
    assert list(search(config(), HARDWARE, **CHEAP, known={r.name: r for r in found})) == found
    with pytest.raises(PlanError, match="results of another"):
        read_results(path, "another question")


def result(form: str, rate: float, chips: int = 2, **more) -> Result:
    return Result(f"{form} {rate}", form, chips, bound=99.0, rate=rate, **more)


def test_the_verdict_says_when_not_to_separate():
    line = verdict([result("apart", 4.0), result("together", 6.0), result("apart", 5.0)], config())
    assert line.startswith("Do not separate prefill from decode: together 6.0 serves 3 requests/s")
    assert "1.20 times as many as apart 5.0" in line


def test_the_verdict_compares_the_best_of_each_kind():
    """Two forms that do not separate are best; what counts is how far separation is behind."""
    chunked = config().replace(
        placements={**config().placements, "chunked": {"server": Role(pool=POOL, mixed=True)}}
    )
    found = [result("chunked", 9.0), result("together", 8.0), result("apart", 6.0)]
    assert "chunked 9.0 serves 4.5 requests/s per chip, 1.50 times as many as apart 6.0" in verdict(
        found, chunked
    )
    assert "of the other kind (one that separates them) none" in verdict(found[:2], chunked)


def test_the_table_says_how_steady_a_goodput_is_and_what_ends_it(found):
    """Of every candidate that was searched; the queue's gain is below the limit, and what is wrong
    above is late requests or a queue that grows."""
    shown = table(found)
    for r in found:
        if r.rate:
            assert r.in_time >= 0.9 and r.growth <= 0.1
            assert "in time" in r.ended or "queue grows" in r.ended
            (line,) = [line for line in shown.splitlines() if line.strip().startswith(r.name)]
            assert f"{r.in_time:.1%}" in line and r.ended in line
        else:
            assert f"not searched: {r.name}: {r.skipped}" in shown


def test_the_verdict_says_when_to_separate_and_when_it_is_not_sure():
    sure = [result("apart", 8.0, low=7, high=9), result("together", 4.0, low=3, high=5)]
    assert verdict(sure, config()).endswith("2.00 times as many as together 4.0.")
    unsure = [result("apart", 8.0, low=2, high=9), result("together", 7.0, low=3, high=12)]
    assert "intervals overlap" in verdict(unsure, config())
    assert verdict([result("apart", 0.0)], config()).startswith("No candidate meets the SLO")


def test_goodput_counts_per_chip():
    best = best_of_forms([result("apart", 8.0, chips=8), result("together", 5.0, chips=4)])
    assert [r.form for r in best] == ["together", "apart"]


def test_prompts_that_are_late_alone_leave_nothing_to_search():
    late = config(SLO(ttft_s=0.001, tpot_s=0.02))
    results = list(search(late, HARDWARE, **CHEAP))
    assert all("0% of prompts alone" in r.skipped for r in results)


def test_chips_that_hold_no_instance_of_each_role_are_told():
    with pytest.raises(PlanError, match="2 chips hold no instance"):
        candidates(config(), Hardware(HARDWARE.shape, HARDWARE.chip, chips=2, tps=(4,)))


def test_the_shipped_config_has_the_three_forms():
    eight = Hardware(HARDWARE.shape, HARDWARE.chip, chips=8)
    found = candidates(get_config(), eight)
    assert {c.form for c in found} == {"disaggregated", "collocated", "chunked"}
    assert all(c.bound for c in found) and all(c.chips == 8 for c in found)
    assert msgspec.json.encode(get_config())  # the file of results begins with it
