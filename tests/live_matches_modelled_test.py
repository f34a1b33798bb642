"""The live backend gives the modelled clock's tokens, works concurrently, and fails aloud."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from engine_helpers import (
    COLLOCATED,
    LAYERS,
    SPLIT,
    Fixed,
    assert_pools_are_full,
    config_of,
    request,
    run,
    tiny,
)

from pdjax.core.config import Clock, Placement, Transfer
from pdjax.core.events import (
    AbortAsked,
    Finish,
    Landed,
    Record,
    StepDone,
    read_jsonl,
    write_jsonl,
)
from pdjax.core.loop import first_difference, serve
from pdjax.core.request import Request
from pdjax.engine import Engine
from pdjax.engine.live import LiveBackend

PATIENCE = 60  # seconds after which something is taken to hang; nothing here takes long
TWO_TO_TWO = {name: replace(role, instances=2) for name, role in SPLIT.items()}
STREAMED = {
    "prefill": replace(SPLIT["prefill"], chunk=16, prefills=2),
    "decode": replace(SPLIT["decode"], lag=1),
}
LIVE = Clock("wall")


def workload() -> list[Request]:
    return [
        request(i, (5, 16, 33, 49)[i % 4], i, max_tokens=1 + i % 7, temperature=i % 3, seed=i)
        for i in range(14)
    ]


@pytest.mark.parametrize("placement", [COLLOCATED, SPLIT, STREAMED, TWO_TO_TWO])
def test_live_tokens_match_modelled_tokens(placement: Placement):
    live = run(config_of(placement, clock=LIVE), workload())
    assert live.tokens == run(config_of(placement), workload()).tokens
    assert_pools_are_full(live.scheduler)
    assert len({done.instance for done in live.all(StepDone)}) == len(live.engine.instances)


def test_the_times_of_a_live_log_make_sense():
    ran = run(config_of(STREAMED, clock=LIVE), workload())
    times = [record.t_ns for record in ran.records]
    assert times == sorted(times)
    for record in ran.records:
        if isinstance(record.body, StepDone | Landed):
            assert 0 < record.body.began_ns <= record.t_ns
    for instance in ran.engine.instances:  # one step after the other
        steps = [
            (record.body.began_ns, record.t_ns)
            for record in ran.records
            if isinstance(record.body, StepDone) and record.body.instance == instance
        ]
        assert all(end <= began for (_, end), (began, _) in pairwise(steps))


def test_a_live_log_replays_through_a_file(tmp_path):
    """With aborts and steps that were under way; the log is all that a fresh scheduler sees."""
    aborts = {3: 5.0, 6: 9.0, 12: 14.0}
    ran = run(config_of(STREAMED, clock=LIVE), workload(), aborts=aborts)
    assert len(ran.ends) == 14
    write_jsonl(tmp_path / "events.jsonl", ran.records)
    assert not first_difference(read_jsonl(tmp_path / "events.jsonl"), ran.engine.scheduler())
    assert_pools_are_full(ran.scheduler)


# --- Concurrency -------------------------------------------------------------------------


def serving(engine: Engine, requests: list[Request]) -> Iterator[Record]:
    """The log of a live run as it grows; the threads end with it."""
    backend = LiveBackend(engine)
    try:
        yield from serve(Fixed(requests), backend, engine.scheduler())
    finally:
        backend.close()


def waits(event: threading.Event, call: Callable, when: Callable[..., bool]) -> Callable:
    """`call`, but not before `event` where `when` says so."""

    def later(*args):
        if when(*args):
            assert event.wait(PATIENCE), "the other instance waited too"
        return call(*args)

    return later


def test_a_decode_instance_goes_on_while_a_prefill_instance_is_stuck():
    """Request 1's prefill is not even dispatched before all ten tokens of request 0 are out."""
    engine, finished = Engine(config_of(SPLIT, clock=LIVE), "it", tiny()), threading.Event()
    prefill = engine.instances["prefill/0"]
    prefill.dispatch = waits(
        finished, prefill.dispatch, lambda step, *_: any(c.rid == 1 for c in step.chunks)
    )
    requests = [request(0, 5, max_tokens=10), request(1, 16, max_tokens=2)]
    ends = []
    for record in serving(engine, requests):
        if isinstance(record.body, Finish):
            ends.append((record.body.rid, record.body.tokens))
            finished.set()
    assert ends == [(0, 10), (1, 2)]


def test_a_prefill_instance_goes_on_while_a_decode_instance_is_stuck():
    """No token is decoded before the third prompt has been computed."""
    engine, computed = Engine(config_of(SPLIT, clock=LIVE), "it", tiny()), threading.Event()
    decode = engine.instances["decode/0"]
    decode.dispatch = waits(computed, decode.dispatch, lambda *_: True)
    prefilled, ends = [], 0
    for record in serving(engine, [request(i, 16, max_tokens=3) for i in range(3)]):
        if isinstance(record.body, StepDone) and record.body.instance == "prefill/0":
            prefilled += [emitted.rid for emitted in record.body.emitted]
            if len(prefilled) == 3:
                computed.set()
        ends += isinstance(record.body, Finish)
    assert prefilled == [0, 1, 2] and ends == 3


def test_two_prefill_instances_are_at_work_together():
    """Both are inside a dispatch at once, or the barrier breaks."""
    engine, barrier = Engine(config_of(TWO_TO_TWO, clock=LIVE), "it", tiny()), threading.Barrier(2)
    for name in ("prefill/0", "prefill/1"):
        instance = engine.instances[name]

        def together(*args, call=instance.dispatch):
            barrier.wait(PATIENCE)
            return call(*args)

        instance.dispatch = together
    records = list(serving(engine, [request(i, 16, max_tokens=2) for i in range(2)]))
    assert sum(isinstance(record.body, Finish) for record in records) == 2


# --- Failures ----------------------------------------------------------------------------


class Broken(Exception):
    pass


def what_it_raises(call: Callable[[], object]) -> BaseException | None:
    """Runs `call` in a thread that may be given up: a call that hangs fails the test."""
    raised: list[BaseException | None] = []

    def run_it() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run_it, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert raised, "it hangs"
    return raised[0]


def fail(*_: object, **__: object) -> None:
    raise Broken


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("prefill/0", "dispatch"),
        ("prefill/0", "collect"),
        ("wires", "extract"),
        ("wires", "move"),
        ("wires", "insert"),
        ("decode/0", "dispatch"),
        ("decode/0", "collect"),
    ],
)
def test_what_a_thread_raises_ends_the_run_and_the_threads(part, method, monkeypatch):
    before = set(threading.enumerate())
    transfer = Transfer(schedule="whole", groups=LAYERS)
    engine = Engine(config_of(SPLIT, clock=LIVE, transfer=transfer), "it", tiny())
    monkeypatch.setattr(engine.instances.get(part, engine.wires), method, fail)
    raised = what_it_raises(lambda: list(serving(engine, workload())))
    assert isinstance(raised, Broken)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread.name


def test_a_loop_that_waits_for_nothing_is_told():
    engine = Engine(config_of(COLLOCATED, clock=LIVE), "it", tiny())
    backend = engine.live()
    backend.submit(AbortAsked(5), 0)
    assert isinstance(backend.next_event()[1], AbortAsked)
    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        backend.next_event()
    backend.close()


def test_an_engine_that_serves_the_same_ids_again_forgets_the_first_run():
    """The slot that a request's namesake left last must not pass its token on."""
    first = [request(0, 5, max_tokens=4, temperature=1.0, seed=1)]
    second = [request(0, 13, max_tokens=6, temperature=1.0, seed=2)]
    ran = run(config_of(COLLOCATED), first)
    list(serve(Fixed(second), ran.engine.backend(), ran.engine.scheduler()))
    again = tuple(ran.engine.texts[0].tokens)
    assert again == tuple(run(config_of(COLLOCATED), second).engine.texts[0].tokens)
    assert again != tuple(run(config_of(COLLOCATED), first).engine.texts[0].tokens)
