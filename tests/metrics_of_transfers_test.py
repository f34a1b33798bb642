"""What crosses, for what, and what of it is exposed: on logs short enough to measure by hand."""

import numpy as np
import pytest
from metrics_test import disaggregated_log, measured, stages_ms
from record_builders import (
    DISAGGREGATED,
    arrived,
    at,
    decode,
    done,
    hold,
    landed,
    placements,
    prefill,
    requests,
    served,
    step_ns,
)

from pdjax.core.events import Cancel, Finish, Send, SendFailed, Step
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics import Run, summary
from pdjax.metrics.lives import closed_form_ns, union_ns, waited_ns

P, D = "prefill/0", "decode/0"


def piece(number: int, group: int = 0, groups: int = 1, purpose="hand_off", **ends) -> Send:
    ends = {"source": P, "target": D, **ends}
    return Send(number, 0, start=0, length=8, group=group, groups=groups, purpose=purpose, **ends)


def run_of(log: list) -> Run:
    return measured(log, DISAGGREGATED)


def finished(ms: float, tokens: int = 2):
    return at(ms, Finish(0, "length", tokens))


def move(run: Run, purpose: str) -> dict[str, float]:
    """Wire, closed form and exposed time of the only request with that purpose, in ms."""
    row = run.moves[run.moves["purpose"] == purpose].iloc[0]
    return {key: round(row[f"{key}_s"] * 1e3, 6) for key in ("wire", "closed_form", "exposed")}


# --- hand-offs -----------------------------------------------------------------------------


def test_layerwise_hand_off_stands_beside_its_closed_form():
    # Prefill takes 40 ms; two pieces cross at 20..30 and 40..55 ms.
    run = run_of(disaggregated_log(40, 55))
    assert move(run, "hand_off") == {
        "wire": 25,
        "closed_form": 12.5,  # max(25 / 2, 25 - 40 / 2)
        "exposed": 15,
    }


@pytest.mark.parametrize(
    ("wire", "prefill_time", "moments", "expected"),
    [
        (8, 40, 4, 2),  # prefill hides all but the last piece
        (80, 40, 4, 50),  # the wire is the slower: 80 - 40 * 3 / 4
        (8, 40, 1, 8),  # whole: nothing is hidden
    ],
)
def test_closed_form_is_what_prefill_cannot_hide(wire, prefill_time, moments, expected):
    assert closed_form_ns(wire, prefill_time, moments) == expected


def whole_log(sent: float) -> list:
    """Two groups that leave together at `sent`, and cross one after the other."""
    return [
        arrived(0, 0, prompt_len=8, max_tokens=2),
        prefill(0, 0, 0, P),
        done(40, 0, 0, P, {0: 1}),
        at(sent, piece(0, 0, 2)),
        at(sent, piece(1, 1, 2)),
        landed(sent + 5, 0, 0, sent),
        landed(sent + 10, 1, 0, sent + 5),
        decode(62, 1, {0: 8}, D),
        done(70, 1, 62, D, {0: 1}),
        finished(70),
    ]


def test_whole_hand_off_is_exposed_in_full():
    run = run_of(whole_log(sent=40))
    assert move(run, "hand_off") == {"wire": 10, "closed_form": 10, "exposed": 10}
    assert stages_ms(run, 0) == [0, 40, 10, 12, 8]


def test_wait_for_room_at_the_target_is_decode_queue_not_transfer():
    run = run_of(whole_log(sent=50))
    assert move(run, "hand_off")["exposed"] == 10
    assert stages_ms(run, 0) == [0, 40, 10, 10 + 2, 8]


def test_chunks_that_leave_one_by_one_are_moments_of_their_own():
    log = [
        arrived(0, 0, prompt_len=16, max_tokens=2),
        prefill(0, 0, 0, P, 0, 8, last=False),
        done(20, 0, 0, P, {}),
        at(20, piece(0)),
        prefill(20, 1, 0, P, 8, 8),
        landed(24, 0, 0, 20),
        done(40, 1, 20, P, {0: 1}),
        at(40, piece(1)),
        landed(44, 1, 0, 40),
        decode(44, 2, {0: 16}, D),
        done(50, 2, 44, D, {0: 1}),
        finished(50),
    ]
    # Two pieces of 4 ms, Tp = 40 ms: the last of them cannot be hidden.
    assert move(run_of(log), "hand_off") == {"wire": 8, "closed_form": 4, "exposed": 4}


def test_pieces_that_share_the_wire_count_their_time_once():
    assert union_ns([(0, 10), (2, 6), (8, 14), (20, 21)]) == 15
    log = [*whole_log(40)[:5], landed(50, 0, 0, 40), landed(50, 1, 0, 40), *whole_log(40)[7:]]
    numbers = summary(run_of(log))
    assert numbers["hand_off_wire_s"] == numbers["transfer_wire_s"] == pytest.approx(0.010)


# --- streaming -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late_group", "landing", "ended", "expected"),
    [
        (1, 90, 100, 20),  # the other half of the step takes 10 ms, so it would have taken 20
        (0, 80, 100, 20),  # all of the step comes after: 20 ms
        (1, 65, 80, 0),  # landed before the first half was done
    ],
)
def test_step_that_joins_a_transfer_waits_for_what_it_lacks(late_group, landing, ended, expected):
    waits = [(piece(0, late_group, 2), landing)]
    assert waited_ns(waits, 1, began_ns=60, ended_ns=ended) == expected


def test_only_the_first_of_several_iterations_waits():
    # Two iterations of two groups at 5 each; group 1 landed 30 late.
    assert waited_ns([(piece(0, 1, 2), 95)], 2, began_ns=60, ended_ns=95 + 15) == 30


def streaming_log() -> list:
    return [
        arrived(0, 0, prompt_len=8, max_tokens=3),
        prefill(0, 0, 0, P, sends=(piece(0, 0, 2), piece(1, 1, 2))),
        landed(30, 0, 0, 20),
        done(40, 0, 0, P, {0: 1}),
        decode(45, 1, {0: 8}, D, awaits=(1,)),
        landed(75, 1, 0, 40),
        done(85, 1, 45, D, {0: 1}),  # half of it takes 10 ms: of its 40 ms it waited 20
        decode(85, 2, {0: 9}, D),
        done(100, 2, 85, D, {0: 1}),
        finished(100, 3),
    ]


def test_streaming_exposes_what_the_first_decode_step_waited_inside():
    run = run_of(streaming_log())
    assert run.steps["waited_s"].tolist() == pytest.approx([0, 0.020, 0])
    assert stages_ms(run, 0) == [0, 40, 20, 5, 35]
    assert move(run, "hand_off") == {"wire": 45, "closed_form": 25, "exposed": 20}
    assert summary(run)["step_waited_s"] == pytest.approx(0.020)


def test_streaming_exposes_the_wait_for_the_first_layer_group_too():
    log = streaming_log()
    log[2:4] = [done(30, 0, 0, P, {0: 1}), landed(42, 0, 0, 20)]  # 12 ms after prefill's end
    run = run_of(log)
    assert stages_ms(run, 0) == [0, 30, 12 + 20, 3, 35]


# --- loads, lost pieces --------------------------------------------------------------------


def test_load_of_a_cached_prefix_is_exposed_before_prefill():
    log = [
        arrived(0, 0, prompt_len=16, max_tokens=1),
        at(2, piece(0, purpose="load", source=D, target=P)),
        landed(12, 0, 0, 4),
        prefill(15, 0, 0, P, 8, 8),
        done(20, 0, 15, P, {0: 1}),
        finished(20, 1),
    ]
    run = run_of(log)
    assert stages_ms(run, 0) == [2 + 3, 5, 10, 0, 0]
    assert move(run, "load") == {"wire": 8, "closed_form": 8, "exposed": 10}
    assert "hand_off_bytes" not in summary(run)


def test_duplicates_count_once_and_lost_pieces_are_counted_by_their_end():
    log = whole_log(40)
    log.insert(3, hold(40, 0, D, (0, 1, 2)))
    log[7:7] = [
        at(41, piece(2)),
        at(42, SendFailed(0, 2, "checksum differs")),
        at(42, piece(3)),
        at(43, Cancel(0, 3)),
        at(43, SendFailed(0, 3, "cancelled")),
        landed(46, 0, 0, 40),
    ]
    run = run_of(log)
    numbers = summary(run)
    assert numbers["transfer_bytes"] == 200
    target = run.pools[run.pools["pool"] == D]
    assert target["stored_tokens"].tolist() == [0, 4, 8, 9]  # a duplicate stores nothing
    assert (numbers["pieces_failed"], numbers["pieces_cancelled"]) == (1, 1)
    failed = run.incidents[run.incidents["what"] == "piece failed"].iloc[0]
    assert (failed["where"], failed["how"]) == ("prefill/0 -> decode/0", "checksum differs")


def test_bytes_of_a_token_need_every_layer_group_once():
    log = whole_log(40)
    assert summary(run_of(log))["kv_token_bytes"] == pytest.approx(200 / 8)
    assert summary(run_of(log[:6]))["kv_token_bytes"] is None


def test_request_that_does_not_complete_has_wire_but_no_exposed_time():
    run = run_of([*whole_log(40)[:7], at(60, Finish(0, "abort", 1))])
    row = run.moves.iloc[0]
    assert row["wire_s"] == pytest.approx(0.010)
    assert np.isnan(row["exposed_s"])


# --- served logs ---------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_s", [50e6, 2e6])
def test_waits_found_in_the_log_are_those_of_virtual_time(bytes_per_s):
    placement, known = placements()["disaggregated"], requests(12, rate=2.5)
    log = served(placement, known, schedule="streaming", bytes_per_s=bytes_per_s)
    plans = {record.body.id: record.body for record in log if isinstance(record.body, Step)}
    steps = measured(log, placement).steps
    lasted = steps["ended_s"] - steps["began_s"]
    unhindered = np.array([step_ns(plans[step]) for step in steps["step"]]) * 1e-9
    np.testing.assert_allclose(steps["waited_s"], lasted - unhindered, rtol=0, atol=2e-9)
    assert steps["waited_s"].max() > 0


def test_slow_wire_exposes_what_the_closed_form_says_it_must():
    """One prompt at a time, in one chunk: nothing else is on the wire or in the step."""
    placement = placements()["disaggregated"]
    known = [Request(rid, rid * 10**10, 400, SamplingParams(max_tokens=3)) for rid in range(4)]
    log = served(placement, known, schedule="layerwise", groups=4, bytes_per_s=8e6)
    moves = measured(log, placement).moves
    # Tx = 400 * 4096 / 8e6 + latency, Tp = 205 ms, n = 4: the wire is as slow as prefill.
    np.testing.assert_allclose(moves["exposed_s"], moves["closed_form_s"], rtol=0.03)
    assert moves["exposed_s"].min() > 0.04
