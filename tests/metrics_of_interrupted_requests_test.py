"""Requests that are preempted, retried or failed: measured by hand, and adding up when served."""

import numpy as np
import pytest
from metrics_test import measured, stages_ms
from record_builders import (
    COLLOCATED,
    DISAGGREGATED,
    arrived,
    at,
    decode,
    done,
    hold,
    landed,
    prefill,
    served,
)

from pdjax.core.config import Fault, Pool, Recovery, Role
from pdjax.core.events import Down, Finish, Preempt, Release, Retry, Send, SendFailed, Up
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics import STAGES, summary

BOTH, P, D = "both/0", "prefill/0", "decode/0"

BEGUN = [  # two tokens until 20 ms
    arrived(0, 0, prompt_len=8, max_tokens=4),
    prefill(0, 0, 0, BOTH),
    done(10, 0, 0, BOTH, {0: 1}),
    decode(10, 1, {0: 8}, BOTH),
    done(20, 1, 10, BOTH, {0: 1}),
]
ENDED = [  # two more until 50 ms, from a prefill of prompt and output until 45 ms
    prefill(30, 2, 0, BOTH, start=0, length=10),
    done(45, 2, 30, BOTH, {0: 1}),
    decode(47, 3, {0: 10}, BOTH),
    done(50, 3, 47, BOTH, {0: 1}),
    at(50, Finish(0, "length", 4)),
]


@pytest.mark.parametrize(
    "interruption", [Preempt(0, BOTH, "recompute"), Retry(0, "both/0 went down")]
)
def test_stages_of_an_interrupted_request_are_sums_over_its_passes(interruption):
    run = measured([*BEGUN, at(20, interruption), *ENDED])
    # First pass: 10 ms prefill, 10 ms decode; second: 10 queue, 15 prefill, 2 queue, 3 decode.
    assert stages_ms(run, 0) == [10, 10 + 15, 0, 2, 10 + 3]
    row = run.requests.loc[0]
    assert row["e2e_s"] == pytest.approx(0.050)
    assert row["ttft_s"] == pytest.approx(0.010)
    assert run.tokens["itl_s"].dropna().tolist() == pytest.approx([0.010, 0.025, 0.005])
    assert row["interrupted_s"] == pytest.approx(0.025)  # from 20 ms to its third token
    assert (row["computed"], row["redone"]) == (8, 10)


def test_tokens_of_a_step_from_before_a_retry_do_not_count():
    late = [
        decode(20, 9, {0: 9}, BOTH),
        at(21, Retry(0, "hand-off expired")),
        done(24, 9, 20, BOTH, {0: 1}),  # says the third token, which is computed again
    ]
    run = measured([*BEGUN, *late, *ENDED])
    assert run.tokens["t_s"].tolist() == pytest.approx([0.010, 0.020, 0.045, 0.050])


def test_step_that_ends_twice_counts_once():
    run = measured([*BEGUN, BEGUN[-1], *ENDED])
    assert run.requests.loc[0, "tokens"] == 4
    assert len(run.steps) == 4


def test_second_interruption_before_the_next_token_adds_no_time_twice():
    log = [*BEGUN, at(20, Preempt(0, BOTH, "recompute")), at(25, Retry(0, "again")), *ENDED]
    row = measured(log).requests.loc[0]
    assert (row["preempted"], row["retried"]) == (1, 1)
    assert row["interrupted_s"] == pytest.approx(0.025)


def test_preemptions_are_counted_by_how_and_retries_in_total():
    log = [
        *BEGUN,
        *(at(20, Preempt(0, BOTH, how)) for how in ("swap", "return", "swap")),
        at(21, Retry(0, "lease expired")),
    ]
    run = measured(log)
    numbers = summary(run)
    hows = [numbers[f"preemptions_{how}"] for how in ("recompute", "return", "swap")]
    assert (numbers["preemptions"], hows, numbers["retries"]) == (3, [0, 1, 2], 1)
    assert run.incidents["how"].tolist() == ["swap", "return", "swap", "lease expired"]


def test_swapped_request_queues_for_memory_and_waits_for_its_way_back():
    swap = {"rid": 0, "start": 0, "length": 9, "group": 0, "groups": 1}
    log = [
        *BEGUN,
        at(20, Preempt(0, BOTH, "swap")),
        at(20, Send(0, source=BOTH, target=f"{BOTH}.host", purpose="swap_out", **swap)),
        landed(26, 0, 0, 20, nbytes=90),
        at(40, Send(1, source=f"{BOTH}.host", target=BOTH, purpose="swap_in", **swap)),
        landed(48, 1, 0, 41, nbytes=90),
        decode(49, 2, {0: 9}, BOTH, count=2),
        done(55, 2, 49, BOTH, {0: 2}),
        at(55, Finish(0, "length", 4)),
    ]
    run = measured(log)
    assert stages_ms(run, 0) == [0, 10, 8, 20 + 1, 10 + 6]
    moves = run.moves.set_index("purpose")
    assert moves["wire_s"].to_dict() == pytest.approx({"swap_in": 0.007, "swap_out": 0.006})
    assert moves.loc["swap_in", "exposed_s"] == pytest.approx(0.008)
    assert np.isnan(moves.loc["swap_out", "exposed_s"])  # it is others who wait for the room


def test_preempted_request_whose_prompt_is_still_in_its_prefill_pool_waits_for_another_place():
    def piece(number: int) -> Send:
        return Send(number, 0, P, D, 0, 8, 0, 1)

    log = [
        arrived(0, 0, prompt_len=8, max_tokens=2),
        prefill(0, 0, 0, P),
        done(10, 0, 0, P, {0: 1}),
        at(10, piece(0)),
        landed(13, 0, 0, 10),
        at(13, Preempt(0, D, "return")),
        at(20, piece(1)),
        landed(23, 1, 0, 20),
        decode(23, 1, {0: 8}, D),
        done(25, 1, 23, D, {0: 1}),
        at(25, Finish(0, "length", 2)),
    ]
    run = measured(log, DISAGGREGATED)
    assert stages_ms(run, 0) == [0, 10, 3 + 3, 7, 2]
    assert run.moves["closed_form_s"].tolist() == pytest.approx([0.006])  # both whole


def test_step_that_never_ends_leaves_the_time_it_took_to_its_stage():
    placement = {"both": Role(pool=COLLOCATED["both"].pool, chunk=64, instances=2)}
    log = [
        arrived(0, 0, prompt_len=8, max_tokens=1),
        hold(0, 0, BOTH, (0, 1)),
        prefill(5, 0, 0, BOTH),
        at(15, Down(BOTH, returns=True)),
        at(15, Release(0, BOTH)),
        at(15, Retry(0, "both/0 went down")),
        prefill(20, 1, 0, "both/1"),
        at(30, Up(BOTH)),
        done(40, 1, 20, "both/1", {0: 1}),
        at(40, Finish(0, "length", 1)),
    ]
    run = measured(log, placement)
    assert stages_ms(run, 0) == [5 + 5, 10 + 20, 0, 0, 0]
    assert run.requests.loc[0, ["computed", "redone"]].tolist() == [0, 8]
    assert run.incidents["what"].tolist() == ["down", "retry", "up"]
    numbers = summary(run)
    assert numbers["instances_down"] == 1
    assert (numbers["both/0.steps"], numbers["both/1.steps"]) == (0, 1)
    assert run.pools["pages"].tolist()[:2] == [2, 0]


def test_hand_off_that_fails_exposes_the_time_it_was_waited_for():
    def piece(number: int) -> Send:
        return Send(number, 0, P, D, 0, 8, 0, 1)

    log = [
        arrived(0, 0, prompt_len=8, max_tokens=2),
        prefill(0, 0, 0, P),
        done(10, 0, 0, P, {0: 1}),
        at(10, piece(0)),
        at(14, SendFailed(0, 0, "link is down")),
        at(14, Retry(0, "link is down")),
        prefill(16, 1, 0, P, 0, 9),
        done(26, 1, 16, P, {0: 1}),
        at(26, piece(1)),
        landed(29, 1, 0, 26),
        at(29, Finish(0, "length", 2)),
    ]
    run = measured(log, DISAGGREGATED)
    assert stages_ms(run, 0) == [2, 10 + 10, 4, 0, 0]  # its last token needs no second hand-off
    assert run.moves["exposed_s"].tolist() == pytest.approx([0.004])
    assert summary(run)["pieces_failed"] == 1


def test_failed_request_counts_as_missed_and_keeps_why():
    run = measured([*BEGUN, at(30, Finish(0, "failed", 2, "KV lost 3 times"))])
    numbers = summary(run)
    assert (numbers["failed"], numbers["completed"], numbers["slo_attained"]) == (1, 0, 0)
    assert run.requests.loc[0, "why"] == "KV lost 3 times"
    assert run.incidents["what"].tolist() == ["failed"]


# --- served logs ---------------------------------------------------------------------------


def pressed(how: str) -> dict[str, Role]:
    """A decode pool of 32 pages that four growing requests do not fit into."""
    pool = Pool(tokens=512, page_size=16)
    slab = Pool("slab", tokens=1024, page_size=16)
    return {
        "prefill": Role("prefill", pool=slab, chunk=128),
        "decode": Role(
            "decode", pool=pool, slots=8, chunk=128, growth=16, preempt=how, swap_tokens=512
        ),
    }


@pytest.mark.parametrize("how", ["recompute", "return", "swap"])
def test_stages_of_preempted_requests_add_up(how):
    known = [Request(i, i * 10**7, 80, SamplingParams(max_tokens=120)) for i in range(8)]
    placement = pressed(how)
    run = measured(served(placement, known), placement)
    table = run.requests
    assert table["preempted"].sum() > 0
    assert table["completed"].all()
    stages = table[[f"{stage}_s" for stage in STAGES]]
    np.testing.assert_allclose(stages.sum(axis=1), table["e2e_s"], rtol=0, atol=1e-9)
    assert (stages >= 0).all(axis=None)
    assert table["tokens"].tolist() == [request.max_tokens for request in known]
    last = run.pools.groupby("pool").last()
    assert (last[["pages", "held_tokens", "stored_tokens"]] == 0).all(axis=None)
    assert (run.pools["stored_tokens"] <= run.pools["held_tokens"]).all()
    assert summary(run)["kv_held_tokens_peak"] <= 512 + 1024


FAULTS = {  # fault, and what it must have cost somebody
    "kill decode": (Fault("kill", at=20, instance="decode/0", seconds=0.5), "instances_down"),
    "kill prefill": (Fault("kill", at=3, instance="prefill/0", seconds=0.2), "instances_down"),
    "drop": (Fault("drop", at=10), "pieces_cancelled"),
    "corrupt": (Fault("corrupt", at=10), "pieces_failed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_stages_of_retried_requests_add_up(name):
    fault, count = FAULTS[name]
    slab = Pool("slab", tokens=2048, page_size=16)
    pool = Pool(tokens=2048, page_size=16)
    placement = {
        "prefill": Role("prefill", pool=slab, chunk=256),
        "decode": Role("decode", instances=2, pool=pool, chunk=256),
    }
    known = [Request(i, i * 10**8, 100, SamplingParams(max_tokens=30)) for i in range(10)]
    recovery = Recovery(lease_s=0.5)
    log = served(placement, known, faults=(fault,), checksum=True, recovery=recovery)
    run = measured(log, placement)
    numbers, table = summary(run), run.requests
    assert numbers[count] == 1
    assert numbers["retries"] >= 1
    assert numbers["interrupted_s"] > 0
    assert numbers["redone_tokens"] >= 100
    stages = table[[f"{stage}_s" for stage in STAGES]]
    np.testing.assert_allclose(stages.sum(axis=1), table["e2e_s"], rtol=0, atol=1e-9)
    assert table["tokens"].tolist() == [30] * 10
    assert (run.pools.groupby("pool").last()["stored_tokens"] == 0).all()
