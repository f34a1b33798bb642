"""What must hold of any simulated run, checked on its log alone: order, memory, ends, bytes."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.config import (
    Arrivals,
    Clock,
    Config,
    Lengths,
    Line,
    Link,
    Model,
    Nodes,
    Placement,
    Pool,
    Role,
    Routing,
    Transfer,
    Workload,
    instances_of,
    pool_owner,
    role_of,
)
from pdjax.core.events import (
    Arrived,
    Finish,
    Grow,
    Hold,
    Landed,
    Record,
    Refuse,
    Release,
    Send,
    Step,
    StepDone,
    write_line,
)
from pdjax.cost import affine
from pdjax.sim import simulate
from pdjax.workload import Source, make_source

PAGE = 4


def roles(separate: bool, draw: st.DrawFn) -> Placement:
    number = st.integers(1, 3)

    def vary(does: str, **more) -> Role:
        pool = Pool(tokens=PAGE * draw(st.integers(16, 40)), page_size=PAGE)
        return Role(
            does, instances=draw(number), pool=pool, slots=draw(number), prefills=draw(number),
            chunk=PAGE * draw(number), growth=draw(st.sampled_from([0, 3])), **more,
        )  # fmt: skip

    if separate:
        return {"p": vary("prefill"), "d": vary("decode")}
    return {"s": vary("both", mixed=draw(st.booleans()))}


FABRIC = Line(bytes_per_s=2e3, latency_s=1e-4)  # not faster than what is between nodes
NODES = st.one_of(
    st.just(Nodes()),
    st.builds(
        Nodes,
        devices=st.integers(1, 3),
        fill=st.sampled_from(["by_role", "interleaved"]),
        fabric=st.just(FABRIC),
        nics=st.integers(0, 1),
        spine_bytes_per_s=st.sampled_from([0.0, 2e3]),
    ),
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Config, Source, list[Record]]:
    schedule = draw(st.sampled_from(["whole", "chunkwise", "layerwise", "streaming"]))
    nodes = draw(NODES)
    link = Link(
        bytes_per_s=draw(st.sampled_from([0.0, 3e3])),
        latency_s=1e-4,
        sharing=draw(st.sampled_from(["max_min", "one_at_a_time", "exclusive"])),
        nodes=nodes,
    )
    config = Config(
        {"it": roles(draw(st.booleans()), draw)},
        model=Model("none", context=70),
        transfer=Transfer(
            schedule=schedule,
            groups=draw(st.integers(1, 3)),
            link=link,
        ),
        routing=Routing(near=nodes.devices > 0 and draw(st.booleans())),
        workload=Workload(
            requests=12,
            arrivals=Arrivals(
                draw(st.sampled_from(["poisson", "burst", "closed"])), rate=100, concurrency=3
            ),
            prompt=Lengths("lognormal", mean=12, high=60),
            output=Lengths("lognormal", mean=8, high=30),
        ),
    )
    source = make_source(
        config.workload, draw(st.integers(0, 99)), encode=None, vocab=1, context=80, eos=()
    )
    cost = affine(Clock("modelled"), config.transfer.link, lambda send: send.length)
    return config, source, list(simulate(config, "it", source, cost))


def of(kind: type, log: Sequence[Record]) -> list:
    return [(record.t_ns, record.body) for record in log if isinstance(record.body, kind)]


LAWS = settings(max_examples=60, derandomize=True, deadline=None)


@LAWS
@given(runs())
def test_a_request_arrives_is_prefilled_lands_and_decodes_in_that_order(run):
    _, _, log = run
    arrived = {e.request.id: e.request.arrival_ns for _, e in of(Arrived, log)}
    plans = {step.id: (t, step) for t, step in of(Step, log)}
    sends = {send.id: (t, send) for t, send in of(Send, log)}
    sends |= {send.id: (t, send) for t, step in of(Step, log) for send in step.sends}
    computed = Counter()
    for t, done in of(StepDone, log):
        dispatched, step = plans[done.step]
        assert dispatched <= done.began_ns <= t
        for chunk in step.chunks:
            assert arrived[chunk.rid] <= dispatched
            computed[chunk.rid] = max(computed[chunk.rid], t)
        for decode in step.decodes:
            assert computed[decode.rid] <= dispatched  # its text was computed before
    for t, landed in of(Landed, log):
        left, send = sends[landed.send]
        assert arrived[send.rid] <= left <= landed.began_ns <= t
    streaming = {send for _, step in plans.values() for send in step.awaits}
    landed = [(sends[e.send][1], t) for t, e in of(Landed, log) if e.send not in streaming]
    last = {send.rid: t for send, t in landed if send.purpose == "hand_off"}
    first = {}
    for t, step in plans.values():
        for decode in step.decodes:
            first.setdefault(decode.rid, t)
    preempted = {r.body.rid for r in log if type(r.body).__name__ in ("Preempt", "Retry")}
    for rid in (last.keys() & first.keys()) - preempted:
        assert last[rid] <= first[rid]


@LAWS
@given(runs())
def test_every_request_ends_once_with_the_tokens_it_asked_for(run):
    config, source, log = run
    ends = Counter(e.rid for _, e in of(Finish, log)) + Counter(e.rid for _, e in of(Refuse, log))
    assert ends == Counter(request.id for request in source.requests)
    emitted = Counter()
    for _, done in of(StepDone, log):
        for e in done.emitted:
            emitted[e.rid] += len(e.tokens)
    asked = {request.id: request.max_tokens for request in source.requests}
    for _, finish in of(Finish, log):
        assert finish.reason == "length" and finish.tokens == asked[finish.rid]
        assert emitted[finish.rid] >= finish.tokens  # more where some had to be computed again
    refused = [r for r in source.requests if r.prompt_len + r.max_tokens > config.model.context]
    assert {r.id for r in refused} <= {e.rid for _, e in of(Refuse, log)}


@LAWS
@given(runs())
def test_pages_have_one_owner_fit_their_pool_and_all_come_back(run):
    config, _, log = run
    placement = config.placements["it"]
    held: dict[str, dict[int, int]] = {}  # pool -> page -> request
    for record in log:
        body = record.body
        if isinstance(body, Hold | Grow):
            handle = body.handle
            pages = held.setdefault(handle.pool, {})
            assert not pages.keys() & set(handle.pages)
            pages |= dict.fromkeys(handle.pages, handle.rid)
            pool = placement[role_of(handle.pool.removesuffix(".host"))].pool
            assert len(pages) <= pool.pages and max(pages, default=0) < pool.pages
        elif isinstance(body, Release):
            pages = held[body.pool]
            mine = [page for page, rid in pages.items() if rid == body.rid]
            assert mine
            for page in mine:
                del pages[page]
    assert not any(held.values())
    assert held.keys() <= {pool_owner(name, placement) for name in instances_of(placement)}


@LAWS
@given(runs())
def test_instances_never_run_two_steps_at_once_nor_more_than_their_slots(run):
    config, _, log = run
    plans = {step.id: step for _, step in of(Step, log)}
    until: dict[str, int] = {}
    for t, done in of(StepDone, log):
        step = plans[done.step]
        role = config.placements["it"][role_of(step.instance)]
        assert done.began_ns >= until.get(step.instance, 0)
        until[step.instance] = t
        slots = [decode.slot for decode in step.decodes]
        assert len(set(slots)) == len(slots) and all(slot < role.slots for slot in slots)
        assert sum(chunk.length for chunk in step.chunks) <= role.chunk


@LAWS
@given(runs())
def test_bytes_that_land_are_those_of_the_prompt_and_no_link_is_faster_than_it_is(run):
    """Each token has as many bytes as there are groups, unless its pages were lost again."""
    config, source, log = run
    link, groups = config.transfer.link, config.transfer.groups
    preempted = {r.body.rid for r in log if type(r.body).__name__ in ("Preempt", "Retry")}
    crossed = Counter()
    for t, landed in of(Landed, log):
        crossed[landed.rid] += landed.nbytes
        if link.bytes_per_s:
            least_ns = landed.nbytes / link.bytes_per_s * 1e9 + link.latency_s * 1e9
            assert t - landed.began_ns >= least_ns - 1
    separate = "p" in config.placements["it"]
    refused = {e.rid for _, e in of(Refuse, log)}
    for request in source.requests:
        if request.id not in preempted | refused:
            moves = separate and request.max_tokens > 1
            assert crossed[request.id] == (request.prompt_len * groups if moves else 0)


# --- the same seed gives the same bytes --------------------------------------------------------

PROGRAM = """
import hashlib, sys
from simulation_laws_test import example_log
print(hashlib.sha256(example_log(int(sys.argv[1]))).hexdigest())
"""


def example_log(seed: int) -> bytes:
    pool = Pool(tokens=PAGE * 24, page_size=PAGE)
    placement = {
        "p": Role("prefill", instances=2, pool=pool, chunk=8),
        "d": Role("decode", instances=2, pool=pool, slots=3, chunk=8, growth=3),
    }
    workload = Workload(
        requests=60,
        arrivals=Arrivals("poisson", rate=60),
        prompt=Lengths("lognormal", mean=12, high=60),
        output=Lengths("lognormal", mean=8, high=30),
    )
    nodes = Nodes(3, fabric=Line(bytes_per_s=9e3), spine_bytes_per_s=4e3)
    link = Link(bytes_per_s=3e3, nodes=nodes)
    config = Config({"it": placement}, model=Model("none", context=70), workload=workload)
    cost = affine(Clock("modelled"), link, lambda send: send.length)
    source = make_source(workload, seed, encode=None, vocab=1, context=80, eos=())
    return b"".join(map(write_line, simulate(config, "it", source, cost)))


def digest(seed: int, hash_seed: str) -> str:
    """Of a run in a process of its own, where sets and dicts of strings have another order."""
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parent)])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    command = [sys.executable, "-c", PROGRAM, str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return run.stdout.strip()


def test_the_same_seed_gives_the_same_bytes_in_any_process():
    assert example_log(7) == example_log(7)
    assert digest(7, "1") == digest(7, "2")
    assert digest(7, "1") != digest(8, "1")
