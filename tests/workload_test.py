"""Requests follow from the config and the seed, and each concern from its own stream."""

import heapq
import logging
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from scipy import stats

from pdjax.core.config import Arrivals, ConfigError, Lengths, Phase, Trace, Workload
from pdjax.workload import documentation, draw_lengths, make_source

LOGNORMAL = Lengths("lognormal", mean=40, sigma=0.8, high=300)
WORKLOAD = Workload(requests=40, prompt=LOGNORMAL, output=Lengths("lognormal", mean=9, sigma=0.5))
EOS = (250, 251)


def encode(text):
    """One token per byte: results can be read off by eye."""
    return list(text.encode())


def source(workload, seed=0, *, encode=encode, vocab=256, context=4096, chat=None):
    return make_source(
        workload, seed, encode=encode, vocab=vocab, context=context, eos=EOS, chat=chat
    )


def requests(workload, seed=0, **options):
    return source(workload, seed, **options).requests


def gaps_s(arrivals, n):
    workload = Workload(requests=n, arrivals=arrivals)
    times = [request.arrival_ns for request in requests(workload, encode=None)]
    assert times[0] == 0
    assert all(type(time) is int for time in times)
    return np.diff(times) / 1e9


def text_of(request):
    return bytes(request.prompt).decode(errors="replace")


# --- Arrivals ----------------------------------------------------------------------------


def test_poisson_gaps_are_exponential_with_the_asked_rate():
    gaps = gaps_s(Arrivals("poisson", rate=8), 20_001)
    # The mean of n exponential gaps has the standard error mean / sqrt(n): 5 of them.
    assert gaps.mean() == pytest.approx(1 / 8, rel=5 / np.sqrt(len(gaps)))
    assert stats.kstest(gaps, stats.expon(scale=1 / 8).cdf).pvalue > 1e-4


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_asked_cv(cv):
    gaps = gaps_s(Arrivals("gamma", rate=8, cv=cv), 40_001)
    assert gaps.mean() == pytest.approx(1 / 8, rel=5 * cv / np.sqrt(len(gaps)))
    # A gamma has kurtosis 3 + 6 cv^2, so the variance's relative error is sqrt((2 + 6 cv^2) / n).
    variance = (cv / 8) ** 2
    assert gaps.var() == pytest.approx(variance, rel=5 * np.sqrt((2 + 6 * cv**2) / len(gaps)))


def test_uniform_gaps_are_equal_and_a_burst_has_none():
    assert gaps_s(Arrivals("uniform", rate=4), 9) == pytest.approx([0.25] * 8)
    assert gaps_s(Arrivals("burst"), 9).tolist() == [0] * 8


def test_ids_count_up_in_order_of_arrival():
    given = requests(WORKLOAD)
    assert [request.id for request in given] == list(range(40))
    assert sorted(given, key=lambda request: request.arrival_ns) == list(given)
    assert len({request.client_id for request in given}) == 40


def test_an_open_source_tells_everything_first_and_an_end_causes_nothing():
    served = source(WORKLOAD)
    assert tuple(served.first()) == served.requests
    assert all(not served.after(rid, 10**12) for rid in range(40))


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_a_closed_loop_never_has_more_than_its_clients_open(concurrency):
    workload = replace(WORKLOAD, arrivals=Arrivals("closed", concurrency=concurrency))
    served = source(workload)
    for _ in range(2):  # a second placement is served the same requests
        rng = random.Random(5)
        arrived, open_, most = [], [], 0
        newcomers, now = served.first(), 0
        while newcomers or open_:
            for request in newcomers:
                assert request.arrival_ns == now
                arrived.append(request)
                heapq.heappush(open_, (now + rng.randint(1, 99), request.id))
            most = max(most, len(open_))
            clients = [arrived[rid].client_id for _, rid in open_]
            assert len(set(clients)) == len(clients)  # one open request per client
            now, ended = heapq.heappop(open_)
            newcomers = served.after(ended, now)
            assert all(request.client_id == arrived[ended].client_id for request in newcomers)
        assert most == min(concurrency, 40)
        assert [request.id for request in arrived] == list(range(40))
        assert [r.prompt for r in arrived] == [r.prompt for r in served.requests]


def test_an_end_is_told_once():
    served = source(replace(WORKLOAD, arrivals=Arrivals("closed", concurrency=2)))
    served.first()
    served.after(0, 5)
    with pytest.raises(KeyError):
        served.after(0, 6)


# --- One seed, one stream per concern ----------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_and_another_does_not():
    first, again, other = (msgspec.json.encode(requests(WORKLOAD, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("text", ["stdlib", "random"])
@pytest.mark.parametrize(
    "arrivals", [Arrivals("poisson", rate=50), Arrivals("gamma", cv=4), Arrivals("closed")]
)
def test_other_arrivals_keep_lengths_prompts_and_seeds(text, arrivals):
    workload = replace(WORKLOAD, text=text)

    def without_time(request):
        return msgspec.structs.replace(request, arrival_ns=0)

    one, other = requests(workload), requests(replace(workload, arrivals=arrivals))
    assert [without_time(r) for r in one] == [without_time(r) for r in other]


def test_twice_the_rate_halves_the_arrival_times():
    slow = requests(replace(WORKLOAD, arrivals=Arrivals(rate=2)))
    fast = requests(replace(WORKLOAD, arrivals=Arrivals(rate=4)))
    assert [r.arrival_ns for r in slow] == pytest.approx([2 * r.arrival_ns for r in fast], abs=1)


def test_another_output_keeps_the_prompts():
    other = replace(WORKLOAD, output=Lengths(mean=3), temperature=0.7)
    assert [r.prompt for r in requests(other)] == [r.prompt for r in requests(WORKLOAD)]


@pytest.mark.parametrize("text", ["stdlib", "random"])
@pytest.mark.parametrize("process", ["poisson", "gamma", "uniform", "burst", "closed"])
def test_the_first_requests_are_the_same_however_many_follow(process, text):
    few = replace(WORKLOAD, requests=7, arrivals=Arrivals(process, cv=2), text=text)
    assert requests(few) == requests(replace(few, requests=60))[:7]


def test_sampling_follows_the_workload_and_each_request_has_a_seed_of_its_own():
    workload = replace(WORKLOAD, temperature=0.7, top_k=5, top_p=0.9)
    given = [request.sampling for request in requests(workload)]
    assert {(s.temperature, s.top_k, s.top_p, s.stop_tokens) for s in given} == {(0.7, 5, 0.9, ())}
    assert len({s.seed for s in given}) == 40
    assert all(0 <= s.seed < 2**31 for s in given)  # fits an int32
    stopping = requests(replace(workload, ignore_eos=False))
    assert {request.sampling.stop_tokens for request in stopping} == {EOS}


# --- Lengths -----------------------------------------------------------------------------


def test_a_lognormal_has_the_asked_mean_and_sigma():
    lengths = Lengths("lognormal", mean=2000, sigma=0.8)
    drawn = draw_lengths(lengths, 40_000, np.random.default_rng(1))
    # A lognormal's coefficient of variation is sqrt(exp(sigma^2) - 1).
    cv = np.sqrt(np.exp(0.8**2) - 1)
    assert drawn.mean() == pytest.approx(2000, rel=5 * cv / np.sqrt(len(drawn)))
    assert np.log(drawn).std() == pytest.approx(0.8, rel=5 / np.sqrt(2 * len(drawn)))


def test_lengths_stay_within_their_bounds():
    lengths = Lengths("lognormal", mean=50, sigma=2.0, low=20, high=90)
    drawn = draw_lengths(lengths, 500, np.random.default_rng(1))
    assert (drawn.min(), drawn.max()) == (20, 90)
    assert set(draw_lengths(Lengths(mean=7), 5, np.random.default_rng(1))) == {7}
    assert set(draw_lengths(Lengths(mean=7, low=9), 5, np.random.default_rng(1))) == {9}


def test_prompt_and_output_lengths_are_independent_without_a_trace():
    given = requests(replace(WORKLOAD, requests=2000), encode=None)
    prompt, output = zip(*[(r.prompt_len, r.max_tokens) for r in given], strict=True)
    assert abs(stats.spearmanr(prompt, output).statistic) < 5 / np.sqrt(2000)


def test_a_request_too_long_for_the_context_loses_the_end_of_its_prompt(caplog):
    caplog.set_level(logging.WARNING, logger="absl")
    workload = replace(WORKLOAD, prompt=Lengths(mean=100), output=Lengths(mean=30))
    whole, cut = source(workload), source(workload, context=64)
    assert (whole.clipped, cut.clipped) == (0, 40)
    for request, complete in zip(cut.requests, whole.requests, strict=True):
        assert (request.prompt_len, request.max_tokens) == (34, 30)
        assert request.prompt == complete.prompt[:34]
    assert len(caplog.records) == 1  # warned about once, not per request
    assert "40 of 40" in caplog.text


def test_an_output_too_long_for_the_context_is_cut_too():
    workload = replace(WORKLOAD, prompt=Lengths(mean=10), output=Lengths(mean=99))
    assert {(r.prompt_len, r.max_tokens) for r in requests(workload, context=64)} == {(1, 63)}


# --- Text --------------------------------------------------------------------------------


def encode_by(size):
    """Tokens of `size` bytes: with 50, a prompt needs more text than a few letters a token."""

    def encode(text):
        data = text.encode()
        return [int.from_bytes(data[i : i + size]) for i in range(0, len(data), size)]

    return encode


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize("mean", [1, 30, 3000])
def test_prompts_have_exactly_the_wanted_tokens(size, mean):
    workload = Workload(requests=5, prompt=Lengths(mean=mean))
    assert [len(r.prompt) for r in requests(workload, encode=encode_by(size))] == [mean] * 5


def test_prompts_are_pieces_of_the_documentation_that_start_with_a_sentence():
    text, starts = documentation()
    given = requests(replace(WORKLOAD, requests=100))
    for request in given:
        piece = text_of(request).rstrip("\N{REPLACEMENT CHARACTER}")
        assert piece in text + text
        assert piece[0].isupper()
    # Each has a sentence of its own: no prompt begins as another does by accident of the draw.
    assert len(starts) > 1000
    assert len({r.prompt for r in requests(Workload(requests=1000))}) > 990


def test_a_prompt_longer_than_the_documentation_goes_round():
    text, _ = documentation()
    size = len(text.encode())
    workload = Workload(requests=1, prompt=Lengths(mean=2 * size + 10))
    (request,) = requests(workload, context=10 * size)
    assert request.prompt[:size] == request.prompt[size : 2 * size]


def test_random_text_is_uniform_over_the_vocabulary():
    workload = Workload(requests=50, prompt=Lengths(mean=1000), text="random")
    tokens = np.concatenate([r.prompt for r in requests(workload, vocab=11)])
    counts = np.bincount(tokens)
    assert len(counts) == 11
    assert stats.chisquare(counts).pvalue > 1e-4


def test_a_run_that_only_counts_has_the_same_requests_without_prompts():
    bare = requests(WORKLOAD, encode=None)
    assert bare == tuple(msgspec.structs.replace(r, prompt=()) for r in requests(WORKLOAD))


def test_a_chat_has_its_template_around_text_and_still_the_wanted_length():
    workload = replace(WORKLOAD, prompt=Lengths("lognormal", mean=60, low=20), chat=True)
    given = source(workload, chat=lambda text: f"<user>{text}</user>\n<bot>")
    plain = requests(replace(workload, chat=False))
    for request, without in zip(given.requests, plain, strict=True):
        assert len(request.prompt) == request.prompt_len == without.prompt_len
        content = request.prompt[len("<user>") : -len("</user>\n<bot>")]
        assert request.prompt == (*encode("<user>"), *content, *encode("</user>\n<bot>"))
        assert content == without.prompt[: len(content)]


# --- Errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"requests": 0}, "`workload.requests` is 0; it must be positive"),
        ({"arrivals": Arrivals("poisson", rate=0)}, "`workload.arrivals.rate` is 0"),
        ({"arrivals": Arrivals("uniform", rate=float("nan"))}, "`workload.arrivals.rate` is nan"),
        ({"arrivals": Arrivals("gamma", cv=0)}, "`workload.arrivals.cv` is 0"),
        ({"arrivals": Arrivals("closed", concurrency=0)}, "`workload.arrivals.concurrency` is 0"),
        ({"arrivals": Arrivals("trace")}, "`workload.trace.path` is empty"),
        ({"trace": Trace("x", length_scale=0)}, "`workload.trace.length_scale` is 0"),
        ({"trace": Trace("x", rate_scale=-1)}, "`workload.trace.rate_scale` is -1"),
        ({"prompt": Lengths(low=0)}, "`workload.prompt` has `low` 0"),
        ({"prompt": Lengths(low=9, high=8)}, "`low` 9 and `high` 8"),
        ({"output": Lengths(mean=0)}, "`workload.output` has `mean` 0"),
        ({"output": Lengths("lognormal", sigma=-1)}, "`sigma` -1"),
        ({"chat": True}, "no chat template"),
    ],
)
def test_values_that_make_no_workload_are_one_line_errors(changes, says):
    with pytest.raises(ConfigError, match=says) as caught:
        requests(replace(WORKLOAD, **changes))
    assert "\n" not in str(caught.value)


def test_a_negative_seed_a_tiny_context_and_a_prompt_shorter_than_its_template_are_refused():
    with pytest.raises(ConfigError, match="`seed` is -1"):
        requests(WORKLOAD, seed=-1)
    with pytest.raises(ConfigError, match=r"`model\.context` is 1"):
        requests(WORKLOAD, context=1)
    chatty = replace(WORKLOAD, prompt=Lengths(mean=13), chat=True)
    with pytest.raises(ConfigError, match=r"prompt of 13 .* the 13 of the chat .* at least 14"):
        requests(chatty, chat=lambda text: f"<user>{text}</user>")


# --- phases ------------------------------------------------------------------------------------


def test_lengths_shift_where_a_phase_begins_and_nothing_else_does():
    longer = Lengths("lognormal", mean=400, sigma=0.8, high=3000)
    plain = requests(WORKLOAD, encode=None)
    shifted = requests(replace(WORKLOAD, phases=(Phase(25, longer, LOGNORMAL),)), encode=None)
    whole = requests(replace(WORKLOAD, prompt=longer, output=LOGNORMAL), encode=None)
    assert shifted[:25] == plain[:25] and shifted[25:] == whole[25:]
    assert shifted[25:] != plain[25:]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ((Phase(0, LOGNORMAL, LOGNORMAL),), r"`workload.phases` begin at \[0\]"),
        ((Phase(9, LOGNORMAL, LOGNORMAL), Phase(9, LOGNORMAL, LOGNORMAL)), r"begin at \[9, 9\]"),
        ((Phase(9, LOGNORMAL, Lengths(low=0)),), r"`workload.phases\[0\].output` has `low` 0"),
    ],
)
def test_phases_that_are_none_are_told_in_one_line(phases, message):
    with pytest.raises(ConfigError, match=message):
        source(replace(WORKLOAD, phases=phases))
