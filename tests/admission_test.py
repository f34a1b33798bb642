"""What can never be served is refused at submit, in one line with the numbers."""

import pytest
from decision_helpers import PLACEMENTS, Driven, both, decode, pool, prefill, request

from pdjax.core.events import Refuse
from pdjax.core.policies.admission import Need, why_refused

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
