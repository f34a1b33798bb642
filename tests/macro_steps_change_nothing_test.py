"""Decode steps in one event change no token's time, no end and no page: only the log is shorter."""

import dataclasses

import msgspec
from decision_helpers import COST, MS, PLACEMENTS, Listed, pool, request
from hypothesis import given, settings
from hypothesis import strategies as st
from switching_helpers import wild

from pdjax.core.config import Clock, Config, Link, Model, Routing, Switching, Transfer
from pdjax.core.events import Drain, Finish, Landed, Preempt, Record, Refuse, Step, Switch
from pdjax.cost import affine
from pdjax.metrics import analyse
from pdjax.sim import simulate

# No two things of a run happen in the same nanosecond: then their order would be open.
ODD = affine(
    Clock(
        "modelled",
        step_s=0.010000019,
        prefill_token_s=0.001000003,
        decode_token_s=0.000700001,
        context_token_s=0.000030011,
    ),
    Link(bytes_per_s=997, latency_s=0.002000017),
    lambda send: send.length,
)


def config_of(placement, **transfer) -> Config:
    switches = any(role.switches for role in placement.values())
    return Config(
        {"it": placement},
        model=Model("none", context=60),
        transfer=Transfer(**transfer),
        routing=Routing("shortest_queue", "round_robin"),
        switching=Switching(wild.__name__ if switches else "never", every_s=0.0470000023),
    )


def token_times(config: Config, log: list[Record]) -> dict[int, list[float]]:
    run = analyse(log, config.placements["it"], config.slo)
    return {int(rid): rows["t_s"].tolist() for rid, rows in run.tokens.groupby("rid")}


def of(kind: type, log: list[Record]) -> list:
    return [(record.t_ns, record.body) for record in log if isinstance(record.body, kind)]


@st.composite
def placements(draw: st.DrawFn):
    kind = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))]
    growth = draw(st.sampled_from([0, 2]))
    preempt = draw(st.sampled_from(["recompute", "return", "swap"]))

    shared = any(role.pool_of for role in kind.values())

    def vary(role):
        return dataclasses.replace(
            role,
            pool=pool(draw(st.sampled_from([12, 20, 60]))),
            slots=3,
            growth=growth,
            preempt=preempt,
            swap_tokens=60,
            switches=role.does != "both" and not shared and draw(st.booleans()),
        )

    return {name: vary(role) for name, role in kind.items()}


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    placement=placements(),
    asked=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 30), st.integers(0, 10**9)),
        min_size=1,
        max_size=8,
    ),
)
def test_every_token_comes_when_it_would_one_step_at_a_time(placement, asked):
    requests = [
        msgspec.structs.replace(request(rid, prompt, output), arrival_ns=arrival)
        for rid, (prompt, output, arrival) in enumerate(asked)
    ]
    config = config_of(placement, groups=2)
    single = list(simulate(config, "it", Listed(requests), ODD, macro_steps=False))
    macro = list(simulate(config, "it", Listed(requests), ODD))
    assert token_times(config, macro) == token_times(config, single)
    for kind in (Finish, Refuse, Preempt, Landed, Drain, Switch):
        assert of(kind, macro) == of(kind, single)
    assert len(of(Step, macro)) <= len(of(Step, single))


def test_one_request_alone_decodes_in_one_event():
    config = config_of(PLACEMENTS["1P1D"])
    log = list(simulate(config, "it", Listed([request(0, 4, 9)]), COST))
    steps = [step for _, step in of(Step, log)]
    assert [(step.open, step.steps) for step in steps] == [(False, 1), (True, 8)]
    run = analyse(log, config.placements["it"], config.slo)
    gaps = run.tokens["itl_s"].dropna()
    assert (gaps.iloc[1:] * 1e9).round().tolist() == [11 * MS] * 7  # a step and a token
