"""What can never be served is refused at submit, in one line with the numbers."""

import pytest
from decision_helpers import PLACEMENTS, Driven, both, decode, of_type, pool, prefill, request

from pdjax.core.config import SLO, Estimate, Routing
from pdjax.core.events import Refuse
from pdjax.core.policies.admission import Need, still_decoding, why_refused, why_rejected
from pdjax.core.scheduler import Scheduler

ROOMY = Need(tokens=4, pool="decode/0", pages=6, page_size=3)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "why"),
    [
        (0, 3, "the prompt is empty: send at least one token"),
        (4, 0, "`max_tokens` is 0: ask for at least 1"),
        (4, -2, "`max_tokens` is -2: ask for at least 1"),
        (30, 11, "prompt 30 + max_tokens 11 = 41 tokens exceed the context of 40"),
        (30, 10, ""),  # exactly the context
        (1, 1, ""),
    ],
)
def test_a_request_without_an_answer_is_told_why(prompt_len, max_tokens, why):
    assert why_refused(request(0, prompt_len, max_tokens), 40, [ROOMY]) == why


def test_the_first_pool_that_is_too_small_is_named_with_both_numbers():
    needs = [ROOMY, Need(18, "a", 6, 3), Need(19, "b", 6, 3), Need(99, "c", 6, 3)]
    assert why_refused(request(0), 40, needs) == (
        "the request needs KV memory for 19 tokens (7 pages of 3), but pool `b` has 6 pages in all"
    )


@pytest.mark.parametrize(
    ("placement", "prompt_len", "max_tokens", "tokens", "where"),
    [
        # The prefill pool holds the prompt only, the decode pool also what is fed back.
        ({"prefill": prefill(), "decode": decode(pool=pool(12))}, 19, 2, 19, "prefill/0"),
        ({"prefill": prefill(), "decode": decode(pool=pool(12))}, 18, 19, None, ""),
        ({"prefill": prefill(), "decode": decode(pool=pool(12))}, 18, 20, 37, "decode/0"),
        # One pool for both holds prompt and output, in every kind of placement that has one.
        ({"server": both()}, 10, 9, None, ""),
        ({"server": both()}, 10, 10, 19, "server/0"),
        (PLACEMENTS["logical_split"], 10, 10, 19, "prefill/0"),
        # One token is never stored, and needs no decode pool.
        ({"prefill": prefill(), "decode": decode(pool=pool(1))}, 18, 1, None, ""),
        ({"prefill": prefill(), "decode": decode(pool=pool(1))}, 3, 2, 4, "decode/0"),
    ],
)
def test_each_pool_is_asked_for_what_it_would_have_to_hold(
    placement, prompt_len, max_tokens, tokens, where
):
    run = Driven(placement)
    first, *others = run.arrive(0, prompt_len, max_tokens)
    if tokens is None:
        assert not isinstance(first, Refuse)
    else:
        assert f"for {tokens} tokens" in first.why and f"pool `{where}` has" in first.why
        assert not others and run.scheduler.idle
    run.drain()
    run.check()


# --- early rejection ---------------------------------------------------------------------

SLOW = SLO(ttft_s=1.0, tpot_s=0.05)
ESTIMATE = Estimate(prefill_token_s=0.1, decode_step_s=0.02, decode_request_s=0.01)


@pytest.mark.parametrize(
    ("ttft_s", "decoding", "why"),
    [
        (1.0, 2, ""),
        (1.01, 2, "the first token would come after 1.01 s; the objective is 1 s"),
        (1.0, 3, "a token would take 0.06 s beside 3 requests; the objective is 0.05 s"),
    ],
)
def test_who_would_miss_an_objective_is_told_which_and_by_how_much(ttft_s, decoding, why):
    assert why_rejected(SLOW, ESTIMATE, ttft_s, decoding) == why


def test_only_those_with_more_tokens_than_the_time_holds_still_decode():
    # Three decode together at 0.05 s per token: in 0.2 s four tokens come.
    assert still_decoding([3, 4, 5], ESTIMATE, 0.2) == 1


def rejecting(reject: str) -> Driven:
    run = Driven({"prefill": prefill(pool=pool(40)), "decode": decode(pool=pool(40), slots=8)})
    run.scheduler = Scheduler(
        {"prefill": prefill(pool=pool(40)), "decode": decode(pool=pool(40), slots=8)},
        context=40,
        routing=Routing(reject=reject, estimate=ESTIMATE),
        slo=SLOW,
    )
    return run


def test_a_queue_that_is_too_long_turns_new_requests_away():
    run = rejecting("now")
    assert not of_type(Refuse, run.arrive(0, prompt_len=6, max_tokens=2))
    assert of_type(Refuse, run.arrive(1, prompt_len=6, max_tokens=2))  # 6 + 6 tokens: 1.2 s
    assert not of_type(Refuse, run.arrive(2, prompt_len=4, max_tokens=2))
    run.drain()
    assert run.scheduler.idle


def test_by_prediction_those_on_their_way_to_decode_count_already():
    """Three prompts of one token are let in by what decodes now, which is nobody; the third would
    decode beside two others, the fourth beside three."""
    answers = {}
    for reject in ("now", "predicted", "never"):
        run = rejecting(reject)
        refused = [of_type(Refuse, run.arrive(rid, 1, 9)) for rid in range(4)]
        answers[reject] = [bool(r) for r in refused]
    assert answers["now"] == answers["never"] == [False] * 4
    assert answers["predicted"] == [False, False, False, True]
