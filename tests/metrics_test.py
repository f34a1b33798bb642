"""Each metric's definition, on logs short enough to measure by hand."""

import json
import math

import numpy as np
import pytest
from record_builders import (
    COLLOCATED,
    DISAGGREGATED,
    KV_BYTES,
    arrived,
    at,
    decode,
    done,
    hold,
    placements,
    prefill,
    requests,
    served,
)

from pdjax.core.config import SLO, Pool, Role
from pdjax.core.events import AbortAsked, Emitted, Finish, Landed, Refuse, Release, Send, StepDone
from pdjax.metrics import STAGES, LogError, Run, analyse, attainment, queue_growth, summary
from pdjax.metrics.pools import external_fragmentation
from pdjax.metrics.summary import busy_s, time_mean

ANY = SLO(ttft_s=1.0, tpot_s=1.0)
BOTH = "both/0"

# Two requests on one collocated instance; the second asks for one token.
COLLOCATED_LOG = [
    arrived(0, 0, prompt_len=8, max_tokens=3),
    hold(0, 0, BOTH, (0, 1, 2)),  # 12 tokens for the 10 it will write
    prefill(0, 0, 0, BOTH),
    arrived(10, 1, prompt_len=8, max_tokens=1),
    done(40, 0, 0, BOTH, {0: 1}),  # request 0: first token after 40 ms
    hold(40, 1, BOTH, (3, 4)),
    prefill(40, 1, 1, BOTH),  # request 1 waited 30 ms
    done(70, 1, 40, BOTH, {1: 1}),  # request 1: first and last token after 60 ms
    at(70, Finish(1, "length", 1)),
    at(70, Release(1, BOTH)),
    decode(75, 2, {0: 8}, BOTH, count=2),  # request 0 waited 35 ms for its first decode
    done(95, 2, 75, BOTH, {0: 2}),  # two tokens together: gaps of 55 and 0 ms
    at(95, Finish(0, "length", 3)),
    at(95, Release(0, BOTH)),
]


def disaggregated_log(second_began: float, second_landed: float) -> list:
    """One request whose KV crosses in two pieces: the first at 20..30 ms, the second as given."""
    sends = tuple(Send(g, 0, "prefill/0", "decode/0", 0, 8, g, 2) for g in (0, 1))
    log = [
        arrived(0, 0, prompt_len=8, max_tokens=2),
        hold(0, 0, "prefill/0", (2, 3)),
        hold(0, 0, "decode/0", (0, 1, 2)),
        prefill(0, 0, 0, "prefill/0", sends=sends),
        at(30, Landed(0, 0, 20_000_000, 100)),
        done(40, 0, 0, "prefill/0", {0: 1}),
        at(second_landed, Landed(0, 1, round(second_began * 1e6), 100)),
        decode(60, 1, {0: 8}, "decode/0"),
        done(70, 1, 60, "decode/0", {0: 1}),
        at(70, Finish(0, "length", 2)),
        at(70, Release(0, "prefill/0")),
        at(70, Release(0, "decode/0")),
    ]
    return sorted(log, key=lambda record: record.t_ns)


def measured(log: list, placement=COLLOCATED, slo: SLO = ANY) -> Run:
    return analyse(log, placement, slo)


def stages_ms(run: Run, rid: int) -> list[float]:
    return [round(run.requests.loc[rid, f"{stage}_s"] * 1e3, 6) for stage in STAGES]


# --- latencies -----------------------------------------------------------------------------


def test_ttft_tpot_itl_and_e2e_follow_their_definitions():
    run = measured(COLLOCATED_LOG)
    first = run.requests.loc[0]
    assert first["ttft_s"] == pytest.approx(0.040)
    assert first["tpot_s"] == pytest.approx((0.095 - 0.040) / 2)
    assert first["e2e_s"] == pytest.approx(0.095)
    # Tokens that one step brings arrive together.
    assert run.tokens["itl_s"].dropna().tolist() == pytest.approx([0.055, 0.0])


def test_tpot_of_one_token_is_undefined_and_not_zero():
    run = measured(COLLOCATED_LOG)
    assert run.requests.loc[1, "ttft_s"] == pytest.approx(0.060)
    assert math.isnan(run.requests.loc[1, "tpot_s"])
    assert summary(run)["tpot_n"] == 1


def test_stages_of_a_collocated_request_by_hand():
    run = measured(COLLOCATED_LOG)
    #                            queue prefill exposed queue decode
    assert stages_ms(run, 0) == [0, 40, 0, 35, 20]
    assert stages_ms(run, 1) == [30, 30, 0, 0, 0]


@pytest.mark.parametrize(
    ("began", "landed", "expected"),
    [
        (40, 55, [0, 40, 15, 5, 10]),  # lands after prefill: 15 ms were not hidden
        (30, 35, [0, 40, 0, 20, 10]),  # lands before prefill ends: all hidden, 20 ms queue
    ],
)
def test_transfer_counts_as_exposed_only_after_prefill(began, landed, expected):
    run = measured(disaggregated_log(began, landed), DISAGGREGATED)
    assert stages_ms(run, 0) == expected
    assert sum(expected) == pytest.approx(run.requests.loc[0, "e2e_s"] * 1e3)


def test_bytes_pieces_and_wire_time_by_hand():
    numbers = summary(measured(disaggregated_log(40, 55), DISAGGREGATED))
    assert numbers["transfer_bytes"] == 200
    assert numbers["transfer_pieces"] == 2
    assert numbers["transfer_wire_s"] == pytest.approx(0.010 + 0.015)
    assert numbers["transfer_exposed_s"] == pytest.approx(0.015)


def test_tokens_after_finish_are_ignored():
    late = [*COLLOCATED_LOG, decode(95, 3, {0: 10}, BOTH), done(99, 3, 95, BOTH, {0: 1})]
    run = measured(late)
    assert run.requests.loc[0, "tokens"] == 3
    assert run.requests.loc[0, "e2e_s"] == pytest.approx(0.095)


def test_tokens_beyond_what_finish_states_are_ignored():
    log = [
        arrived(0, 0, max_tokens=2),
        prefill(0, 0, 0, BOTH),
        done(10, 0, 0, BOTH, {0: 1}),
        decode(10, 1, {0: 8}, BOTH, count=4),
        done(30, 1, 10, BOTH, {0: 4}),  # the step ran on past the end
        at(30, Finish(0, "stop", 2)),
    ]
    assert summary(measured(log))["output_tokens"] == 2


def test_prefill_of_several_chunks_ends_with_the_last():
    log = [
        arrived(0, 0, prompt_len=8, max_tokens=1),
        prefill(5, 0, 0, BOTH, start=0, length=4, last=False),
        done(20, 0, 5, BOTH, {}),
        prefill(30, 1, 0, BOTH, start=4, length=4),
        done(50, 1, 30, BOTH, {0: 1}),
        at(50, Finish(0, "length", 1)),
    ]
    assert stages_ms(measured(log), 0) == [5, 45, 0, 0, 0]


# --- requests that do not complete ---------------------------------------------------------

LOSSY_LOG = [
    arrived(0, 0, max_tokens=1),
    prefill(0, 0, 0, BOTH),
    arrived(1, 1, prompt_len=999),
    at(1, Refuse(1, "too long")),
    arrived(2, 2),
    at(3, AbortAsked(2)),
    at(3, Finish(2, "abort", 0)),  # aborted before its prefill
    arrived(4, 3),  # the log ends before anything happens to it
    done(10, 0, 0, BOTH, {0: 1}),
    at(10, Finish(0, "length", 1)),
]


def test_every_outcome_is_counted_and_only_completed_requests_attain():
    numbers = summary(measured(LOSSY_LOG))
    counts = ("requests", "completed", "refused", "aborted", "unfinished", "slo_attained")
    assert [numbers[key] for key in counts] == [4, 1, 1, 1, 1, 1]
    assert numbers["slo_attainment"] == 0.25


def test_aborted_request_keeps_its_ttft_and_has_no_e2e():
    log = [
        *COLLOCATED_LOG[:5],
        at(45, AbortAsked(0)),
        at(45, Finish(0, "abort", 1)),
    ]
    row = measured(log).requests.loc[0]
    assert row["ttft_s"] == pytest.approx(0.040)
    assert np.isnan([row["tpot_s"], row["e2e_s"], row["decode_s"]]).all()
    assert not row["attained"]


def test_interrupted_log_measures_what_it_has():
    numbers = summary(measured(COLLOCATED_LOG[:11]))
    assert (numbers["completed"], numbers["unfinished"]) == (1, 1)
    assert numbers["ttft_n"] == 2
    assert numbers["e2e_n"] == 1


# --- objectives ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slo", "attained"),
    [
        (SLO(ttft_s=0.050, tpot_s=0.030), [True, False]),  # request 1's TTFT is 60 ms
        (SLO(ttft_s=0.070, tpot_s=0.030), [True, True]),  # one token: judged on TTFT alone
        (SLO(ttft_s=0.070, tpot_s=0.020), [False, True]),  # request 0's TPOT is 27.5 ms
    ],
)
def test_attainment_is_joint(slo, attained):
    assert measured(COLLOCATED_LOG, slo=slo).requests["attained"].tolist() == attained


def test_attainment_interval_is_wilsons():
    reached = attainment(measured(LOSSY_LOG))
    n, p, z = 4, 0.25, 1.959963984540054
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (reached.attained, reached.requests) == (1, 4)
    assert (reached.low, reached.high) == pytest.approx((centre - half, centre + half))


# --- rates, instances, pools ---------------------------------------------------------------


def test_rates_are_over_the_makespan():
    numbers = summary(measured(COLLOCATED_LOG))
    assert numbers["makespan_s"] == pytest.approx(0.095)
    assert numbers["output_tokens_per_s"] == pytest.approx(4 / 0.095)
    assert numbers["total_tokens_per_s"] == pytest.approx((4 + 16) / 0.095)
    assert numbers["goodput_requests_per_s"] == pytest.approx(2 / 0.095)


def test_instance_numbers_by_hand():
    numbers = summary(measured(COLLOCATED_LOG))
    assert numbers[f"{BOTH}.steps"] == 3
    assert numbers[f"{BOTH}.busy_s"] == pytest.approx(0.090)  # idle from 70 to 75 ms
    assert numbers[f"{BOTH}.utilisation"] == pytest.approx(90 / 95)
    assert numbers[f"{BOTH}.decode_batch_mean"] == 1
    assert numbers[f"{BOTH}.prompt_tokens"] == 16
    assert numbers[f"{BOTH}.output_tokens"] == 4


def test_overlapping_steps_are_busy_once():
    log = [
        arrived(0, 0),
        prefill(0, 0, 0, BOTH),
        decode(5, 1, {0: 8}, BOTH),  # dispatched with a lag
        done(20, 0, 0, BOTH, {0: 1}),
        done(30, 1, 10, BOTH, {0: 1}),
    ]
    assert busy_s(measured(log).steps) == pytest.approx(0.030)


def test_idle_instance_is_reported():
    placement = {"both": Role(instances=2)}
    assert summary(measured(COLLOCATED_LOG, placement))["both/1.utilisation"] == 0


def test_pool_occupancy_and_internal_fragmentation_by_hand():
    numbers = summary(measured(COLLOCATED_LOG))
    # Pages held: 3 for 40 ms, 5 for 30 ms, 3 for 25 ms, of 16.
    assert numbers[f"{BOTH}.pool_pages_peak"] == 5
    assert numbers[f"{BOTH}.pool_occupancy_mean"] == pytest.approx((120 + 150 + 75) / 95 / 16)
    # Tokens held 12, 20, 12; written 0, 8, 8 (request 1's are written as it leaves).
    expected = 1 - (30 * 8 + 25 * 8) / (40 * 12 + 30 * 20 + 25 * 12)
    assert numbers[f"{BOTH}.fragmentation_internal"] == pytest.approx(expected)


def test_stored_tokens_follow_chunks_landings_and_decodes():
    pools = measured(disaggregated_log(40, 55), DISAGGREGATED).pools
    decode_pool = pools[pools["pool"] == "decode/0"]
    # Half the layers land, then all, then one decode writes position 8.
    assert decode_pool["stored_tokens"].tolist() == [0, 4, 8, 9, 0]
    prefill_pool = pools[pools["pool"] == "prefill/0"]
    assert prefill_pool["stored_tokens"].tolist() == [0, 8, 0]


def test_external_fragmentation_is_of_slabs():
    assert external_fragmentation(8, [2, 3]) == pytest.approx(1 - 4 / 6)  # free: 2 and 4 pages
    assert external_fragmentation(8, []) == 0
    assert math.isnan(external_fragmentation(2, [0, 1]))
    numbers = summary(measured(disaggregated_log(40, 55), DISAGGREGATED))
    # Pages 2 and 3 of 8 are held all the time.
    assert numbers["prefill/0.fragmentation_external"] == pytest.approx(1 / 3)
    assert numbers["decode/0.fragmentation_external"] is None


def test_shared_pool_belongs_to_the_role_it_is_named_after():
    placement = {
        "prefill": Role("prefill", beside="decode", pool_of="decode", chunk=64),
        "decode": Role("decode", pool=Pool(tokens=64, page_size=4), chunk=64),
    }
    log = [
        arrived(0, 0),
        hold(0, 0, "decode/0", (0, 1, 2)),
        prefill(0, 0, 0, "prefill/0"),
        done(10, 0, 0, "prefill/0", {0: 1}),
    ]
    run = measured(log, placement)
    assert run.pools["pool"].unique().tolist() == ["decode/0"]
    assert run.pools["stored_tokens"].tolist() == [0, 8]
    assert summary(run)["devices"] == 1


def test_time_mean_leaves_undefined_spans_out():
    assert time_mean(np.array([1.0, 2.0]), np.array([6.0, np.nan]), 0.0, 4.0) == pytest.approx(3.0)


# --- the queue -----------------------------------------------------------------------------


def test_queue_grows_when_nothing_is_served_and_not_when_all_is():
    arrivals = [arrived(10 * i, i) for i in range(30)]
    stuck = queue_growth(measured(arrivals))
    assert stuck.growing is True
    assert stuck.per_s == pytest.approx(100.0)  # every arrival stays
    gone = [r for i, a in enumerate(arrivals) for r in (a, at(10 * i, Refuse(i, "full")))]
    assert queue_growth(measured(gone)).growing is False


def test_queue_growth_of_few_requests_or_a_burst_is_unknown():
    assert queue_growth(measured([arrived(10 * i, i) for i in range(8)])).growing is None
    assert queue_growth(measured([arrived(0, i) for i in range(40)])).growing is None


def test_queue_growth_tells_overload_from_light_load():
    placement = placements()["collocated"]
    overload = served(placement, requests(80, rate=40.0))
    light = served(placement, requests(80, rate=0.5))
    assert queue_growth(measured(overload, placement)).growing is True
    assert queue_growth(measured(light, placement)).growing is False


# --- served logs, and errors ---------------------------------------------------------------


@pytest.mark.parametrize("name", placements())
def test_served_log_adds_up(name):
    placement, known = placements()[name], requests(30, rate=2.5)
    run = measured(served(placement, known), placement)
    table = run.requests
    total = table[[f"{stage}_s" for stage in STAGES]].sum(axis=1)
    np.testing.assert_allclose(total, table["e2e_s"], rtol=0, atol=1e-9)
    assert (table[[f"{stage}_s" for stage in STAGES]] >= 0).all(axis=None)
    assert table["tokens"].tolist() == [request.max_tokens for request in known]
    assert run.steps["prompt_tokens"].sum() == sum(request.prompt_len for request in known)
    assert run.steps["tokens"].sum() == table["tokens"].sum()
    last = run.pools.groupby("pool").last()
    assert (last[["pages", "held_tokens", "stored_tokens"]] == 0).all(axis=None)
    moved = [r.prompt_len * KV_BYTES * (r.max_tokens > 1) for r in known]
    assert table["bytes"].tolist() == (moved if name == "disaggregated" else [0] * len(known))


def test_summary_is_flat_and_json_able():
    text = json.dumps(summary(measured(LOSSY_LOG)), allow_nan=False)
    assert all(not isinstance(value, dict | list) for value in json.loads(text).values())


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ([], "no request arrives"),
        ([arrived(0, 0), at(1, Finish(7, "length", 1))], r"record 2 \(Finish\).* 7,"),
        ([arrived(0, 0), at(1, StepDone(5, BOTH, 0, (Emitted(0, (1,)),)))], r"\(StepDone\).* 5,"),
        ([arrived(0, 0), at(1, Landed(0, 3, 0, 1))], r"record 2 \(Landed\).* 3,"),
        ([arrived(0, 0), hold(0, 0, "decode/0", (0,))], "`decode/0`.*roles \\['both'\\]"),
    ],
)
def test_log_that_cannot_be_analysed_is_one_clear_error(log, message):
    with pytest.raises(LogError, match=message) as error:
        measured(log)
    assert "\n" not in str(error.value)
