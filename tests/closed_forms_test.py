"""The simulator against queueing theory, and against times worked out by hand.

Formulas are those of DistServe (Zhong et al., OSDI 2024, section 3.1); D is how long a prompt takes
and R the rate of Poisson arrivals, so that the M/D/1 wait is R D^2 / (2 (1 - R D)).
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
from decision_helpers import Listed
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.config import (
    Arrivals,
    Config,
    Lengths,
    Link,
    Model,
    Pool,
    Role,
    Routing,
    Transfer,
    Workload,
)
from pdjax.core.events import Finish, Landed, Record, StepDone
from pdjax.core.request import Request, SamplingParams
from pdjax.cost import Cost
from pdjax.metrics import analyse, outcomes, summary
from pdjax.sim import simulate
from pdjax.workload import make_source

D_S, RATE = 0.020, 35.0  # a load of 0.7
PROMPT = 8  # tokens, of which one step has as many: prompts are prefilled one by one
SEEDS, REQUESTS = 6, 1500
NO_LINK = Link()
POOL = Pool(tokens=1 << 20, page_size=PROMPT)


def role(does: str, **changes) -> Role:
    return Role(does, **{"pool": POOL, "chunk": PROMPT, "slots": 1, **changes})


def config(
    prefills: int = 1, decodes: int = 1, output: int = 1, router: str = "round_robin", **transfer
) -> Config:
    roles = {"p": role("prefill", instances=prefills), "d": role("decode", instances=decodes)}
    workload = Workload(
        requests=REQUESTS,
        arrivals=Arrivals("poisson", rate=RATE),
        prompt=Lengths(mean=PROMPT),
        output=Lengths(mean=output),
    )
    return Config(
        {"it": roles},
        model=Model("none", context=4096),
        transfer=Transfer(**transfer),
        routing=Routing(router, router),
        workload=workload,
    )


def steps_of(prefill_ns: int, decode_ns: int = 0, link: Link = NO_LINK) -> Cost:
    """Steps that last so long, whatever is in them; a token has a byte."""
    step_ns = lambda step: prefill_ns if step.chunks else decode_ns  # noqa: E731
    return Cost(step_ns, lambda send: send.length, link)


def ms(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


# --- queues ------------------------------------------------------------------------------------


def mean_of_seeds(it: Config, cost: Cost, measure: str) -> tuple[float, float]:
    """Mean over requests and seeds, and its standard error by how seeds differ."""
    means = []
    for seed in range(SEEDS):
        source = make_source(it.workload, seed, encode=None, vocab=1, context=4096, eos=())
        ends = outcomes(simulate(it, "it", source, cost))
        assert ends.completed.all()
        seen = ends.ttft_s if measure == "ttft" else ends.ended_s - ends.arrival_s
        means.append(float(seen.mean()))
    return fmean(means), stdev(means) / SEEDS**0.5


def md1_wait(rate: float, service_s: float) -> float:
    return rate * service_s**2 / (2 * (1 - rate * service_s))


def test_a_prefill_instance_alone_is_an_md1_queue():
    mean, error = mean_of_seeds(config(), steps_of(ms(20)), "ttft")
    expected = D_S + RATE * D_S**2 / (2 * (1 - RATE * D_S))
    assert abs(mean - expected) < 3 * error < 0.1 * expected


@pytest.mark.parametrize("speed_up", [1.4, 1.9])
def test_tensor_parallel_prefill_is_an_md1_queue_that_is_faster_by_k(speed_up):
    mean, error = mean_of_seeds(config(), steps_of(ms(20 / speed_up)), "ttft")
    k, d, r = speed_up, D_S, RATE
    expected = d / k + r * d**2 / (2 * k * (k - r * d))
    assert abs(mean - expected) < 3 * error < 0.1 * expected


def test_prefill_and_decode_of_one_token_are_a_pipeline_of_two_stages():
    """Each stage has half of D, and the second never makes anybody wait."""
    mean, error = mean_of_seeds(config(output=2), steps_of(ms(10), ms(10)), "e2e")
    expected = D_S + RATE * D_S**2 / (4 * (2 - RATE * D_S))
    assert abs(mean - expected) < 3 * error < 0.1 * expected


def test_waits_of_a_busier_queue_are_not_those_of_a_calmer_one():
    """The tests above could fail: a fifth more of service time is seen."""
    mean, error = mean_of_seeds(config(), steps_of(ms(24)), "ttft")
    assert abs(mean - (D_S + md1_wait(RATE, D_S))) > 10 * error


def test_littles_law_holds_over_a_whole_run():
    """Requests in the system, on average over time, are arrivals per second times mean sojourn."""
    it = config(prefills=2, output=9)
    workload = replace(it.workload, requests=400)
    source = make_source(workload, 0, encode=None, vocab=1, context=4096, eos=())
    log = list(simulate(it, "it", source, steps_of(ms(35), ms(2), Link(bytes_per_s=4e3))))
    ended = {r.body.rid: r.t_ns for r in log if isinstance(r.body, Finish)}
    sojourns_s = [(ended[r.id] - r.arrival_ns) / 1e9 for r in source.requests]
    span_s = max(ended.values()) / 1e9
    run = analyse(log, it.placements["it"], it.slo)
    assert summary(run)["in_system_mean"] == pytest.approx(sum(sojourns_s) / span_s, rel=1e-9)


# --- one request, by hand ------------------------------------------------------------------------


def asked(*prompts: int, output: int = 1, at_ns: Sequence[int] = ()) -> Listed:
    times = at_ns or [0] * len(prompts)
    return Listed(
        Request(rid, at, prompt, SamplingParams(max_tokens=output))
        for rid, (prompt, at) in enumerate(zip(prompts, times, strict=True))
    )


def ends_ns(log: Sequence[Record]) -> dict[int, int]:
    return {r.body.rid: r.t_ns for r in log if isinstance(r.body, Finish)}


def landings_ns(log: Sequence[Record]) -> list[tuple[int, int]]:
    return sorted((r.t_ns, r.body.rid) for r in log if isinstance(r.body, Landed))


@pytest.mark.parametrize("macro_steps", [True, False])
def test_one_request_takes_its_prefill_its_last_group_and_its_decode_to_the_nanosecond(macro_steps):
    """Prefill 40,000,004 ns in 4 groups of 10,000,001; a group has 8 bytes of the prompt at
    1000 B/s: 8 ms, less than a group takes. So the link is idle when the last group leaves, and
    3 ms of latency and 5 decode steps of 7,000,003 ns come after it."""
    it = config(output=6, groups=4)
    cost = steps_of(40_000_004, 7_000_003, Link(bytes_per_s=1000, latency_s=0.003))
    log = list(simulate(it, "it", asked(PROMPT, output=6), cost, macro_steps=macro_steps))
    landed = [(g + 1) * 10_000_001 + 8_000_000 + 3_000_000 for g in range(4)]
    assert [t for t, _ in landings_ns(log)] == landed
    assert ends_ns(log) == {0: landed[-1] + 5 * 7_000_003}


def test_chunks_of_a_prompt_and_a_slow_link_add_up_to_the_nanosecond():
    """Two chunks of 30 ms, each of 8 bytes at 100 B/s: the first leaves at 30 and crosses until
    110, the second has been waiting since 60 and crosses until 190; then 2 steps of 5 ms."""
    it = config(output=3, schedule="chunkwise")
    cost = steps_of(ms(30), ms(5), Link(bytes_per_s=100))
    log = list(simulate(it, "it", asked(2 * PROMPT, output=3), cost))
    assert [t for t, _ in landings_ns(log)] == [ms(110), ms(190)]
    assert ends_ns(log) == {0: ms(190) + 2 * ms(5)}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    groups=st.integers(1, 16),
    prefill_us=st.integers(100, 50_000),
    byte_us=st.integers(1, 5_000),
)
def test_layerwise_transfer_exposes_what_its_closed_form_says(groups, prefill_us, byte_us):
    """max(Tx / L, Tx - Tp (L - 1) / L) of a transfer of Tx in L groups behind a prefill of Tp."""
    it = config(output=2, groups=groups)
    cost = steps_of(prefill_us * 1000, 1000, Link(bytes_per_s=1e6 / byte_us))
    log = list(simulate(it, "it", asked(PROMPT, output=2), cost))
    prefilled = next(r.t_ns for r in log if isinstance(r.body, StepDone))
    tp, tx = prefill_us * 1e3, PROMPT * byte_us * 1e3 * groups  # a group has all tokens' bytes
    exposed = max(tx / groups, tx - tp * (groups - 1) / groups)
    assert landings_ns(log)[-1][0] - prefilled == pytest.approx(exposed, abs=2 * groups)


# --- transfers that meet -----------------------------------------------------------------------


@pytest.mark.parametrize("sources", [1, 2, 3, 7])
def test_n_prefills_that_end_together_share_the_way_into_one_decode_instance(sources):
    """8 bytes each at 1000 B/s in all: everybody's last byte arrives after n * 8 ms."""
    it = config(prefills=sources, output=2)
    cost = steps_of(ms(10), ms(1), Link(bytes_per_s=1000, latency_s=0.002))
    log = list(simulate(it, "it", asked(*[PROMPT] * sources, output=2), cost))
    landed = ms(10) + sources * ms(8) + ms(2)
    assert landings_ns(log) == [(landed, rid) for rid in range(sources)]


def test_transfers_of_different_lengths_are_max_min_fair_by_hand():
    """Round robin sends 0 and 2 to one decode instance, 1 and 3 to the other, from four prefill
    instances; bytes 8, 2, 4, 6 at 1000 B/s.

    Into d/0: both have 500 B/s; 2 is over after 8 ms, 0 has 4 of its bytes left and all of the
    link: 12 ms. Into d/1: 1 is over after 4 ms, 3 has 4 bytes left: 8 ms.
    """
    it = config(prefills=4, decodes=2, output=2)
    cost = steps_of(ms(10), ms(1), Link(bytes_per_s=1000))
    log = list(simulate(it, "it", asked(8, 2, 4, 6, output=2), cost))
    assert landings_ns(log) == [(ms(14), 1), (ms(18), 2), (ms(18), 3), (ms(22), 0)]


def test_transfers_out_of_one_prefill_instance_share_its_way_out():
    """8 bytes each at 400 B/s, to two decode instances. 0 is alone from 10 to 20 ms, then both have
    200 B/s: 0 is over after its other 4 bytes, and 1 sends its last 4 at 400 B/s."""
    it = config(decodes=2, output=2)
    cost = steps_of(ms(10), ms(1), Link(bytes_per_s=400))
    log = list(simulate(it, "it", asked(8, 8, output=2), cost))
    assert landings_ns(log) == [(ms(40), 0), (ms(50), 1)]


def test_the_queue_of_a_link_lasts_as_long_as_all_its_bytes():
    """Prompts every 5 ms, a link that needs 8 ms for each: the n-th lands after 5 + 8 n ms."""
    it = config(output=2)
    cost = steps_of(ms(5), 1, Link(bytes_per_s=1000))
    log = list(simulate(it, "it", asked(*[PROMPT] * 9, output=2), cost))
    assert np.array(landings_ns(log))[:, 0].tolist() == [ms(5 + 8 * (n + 1)) for n in range(9)]
