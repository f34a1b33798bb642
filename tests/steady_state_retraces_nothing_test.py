"""After its warm-up an engine traces and compiles nothing more, and updates its pools in place."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import pytest
from engine_helpers import COLLOCATED, LAYERS, SPLIT, Fixed, config_of, request, tiny
from switching_helpers import wild

from pdjax.core.config import Clock, Placement, Pool, Switching, Transfer
from pdjax.core.events import AbortAsked, Send, Step, Switch
from pdjax.core.loop import serve
from pdjax.engine import Engine
from pdjax.engine.live import LiveBackend
from pdjax.programs import transports
from pdjax.programs.step import step_programs
from pdjax.programs.transfer import transfer_programs

LENGTHS = (49, 5, 33, 16, 1)
MIXED = {"server": replace(COLLOCATED["server"], mixed=True, chunk=16, prefills=2)}
LAGGING = {"server": replace(COLLOCATED["server"], lag=1, steps=2)}
STREAMED = {"prefill": replace(SPLIT["prefill"], chunk=16, prefills=2), "decode": SPLIT["decode"]}


@contextmanager
def compilations() -> Iterator[Counter]:
    """Counts what JAX traces and compiles inside, in every thread; compiled programs that come
    from a cache on disk count too."""
    seen: Counter = Counter()

    def note(event: str, seconds: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            seen[event.rsplit("/", 1)[1]] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(autouse=True)
def own_programs(monkeypatch):
    """Engines here compile for themselves: what other tests compiled must not hide anything."""
    monkeypatch.setattr("pdjax.engine.instance.step_programs", step_programs.__wrapped__)
    monkeypatch.setattr("pdjax.engine.pools.transfer_programs", transfer_programs.__wrapped__)
    fresh = functools.cache(transports._exchange.__wrapped__)
    monkeypatch.setattr(transports, "_exchange", fresh)


def workload():
    """Batches of several sizes, greedy and sampled, of every length that was announced."""
    return [
        request(i, LENGTHS[i % 5], at_ms=3 * i, max_tokens=1 + i % 5, temperature=i % 2, top_k=i)
        for i in range(15)
    ]


def pointers(engine: Engine) -> dict[str, list[int]]:
    """Where every shard of every array of every pool lies in memory."""
    return {
        name: [
            shard.data.unsafe_buffer_pointer()
            for kv in pool.kvs
            for array in kv
            for shard in array.addressable_shards
        ]
        for name, pool in engine.pools.items()
    }


@pytest.mark.parametrize(
    ("placement", "schedule", "clock"),
    [
        (COLLOCATED, "layerwise", "modelled"),
        (MIXED, "layerwise", "modelled"),
        (LAGGING, "layerwise", "modelled"),
        (SPLIT, "whole", "modelled"),
        (STREAMED, "layerwise", "wall"),
    ],
    ids=["collocated", "mixed", "lag and steps", "split, whole", "split, streamed, live"],
)
def test_serving_after_the_warm_up_compiles_nothing(placement: Placement, schedule, clock):
    config = config_of(
        placement, clock=Clock(clock), transfer=Transfer(schedule=schedule, groups=LAYERS)
    )
    engine = Engine(config, "it", tiny())
    for warm_up in engine.warm_ups(LENGTHS):
        warm_up()
    before = pointers(engine)
    backend = engine.backend()
    backend.submit(AbortAsked(3), 20_000_000)
    with compilations() as seen:
        records = list(serve(Fixed(workload()), backend, engine.scheduler()))
    if isinstance(backend, LiveBackend):
        backend.close()
    assert not seen
    assert pointers(engine) == before  # every program that updates a pool was given it
    kinds = {(bool(s.chunks), bool(s.decodes)) for r in records if isinstance(s := r.body, Step)}
    assert kinds >= ({(True, True)} if placement is MIXED else {(True, False), (False, True)})
    moved = any(isinstance(r.body, Send) or getattr(r.body, "sends", ()) for r in records)
    assert moved == (len(engine.pools) > 1)


SWAPPING = SPLIT | {
    "decode": replace(
        SPLIT["decode"],
        pool=Pool(tokens=96, page_size=4),
        growth=4,
        preempt="swap",
        swap_tokens=256,
    )
}


@pytest.mark.parametrize(
    ("placement", "transport"),
    [(SPLIT, "collective"), (SPLIT, "host"), (SWAPPING, "device_put")],
    ids=["collective", "host", "swap"],
)
def test_every_way_of_kv_is_warmed_up(placement: Placement, transport):
    transfer = Transfer(transport, groups=2, checksum=True)
    engine = Engine(config_of(placement, transfer=transfer), "it", tiny())
    for warm_up in engine.warm_ups([16, 13]):
        warm_up()
    requests = [request(i, 16 - 3 * (i % 2), max_tokens=20) for i in range(4)]
    with compilations() as seen:
        records = list(serve(Fixed(requests), engine.backend(), engine.scheduler()))
    assert not seen
    purposes = {r.body.purpose for r in records if isinstance(r.body, Send)}
    assert ("swap_in" in purposes) == (placement is SWAPPING)


@pytest.mark.parametrize("clock", ["modelled", "wall"])
def test_an_instance_that_switches_has_the_programs_of_both_jobs(clock):
    """Those of its own kind, of the other, and of both in one step; and ways to all others."""
    changes = {"pool": Pool(tokens=512, page_size=4), "switches": True, "mixed": True, "chunk": 16}
    placement = {name: replace(role, **changes) for name, role in SPLIT.items()}
    placement["prefill"] = replace(placement["prefill"], instances=2)
    rules = Switching(wild.__name__, every_s=0.01)
    engine = Engine(config_of(placement, clock=Clock(clock), switching=rules), "it", tiny())
    for warm_up in engine.warm_ups(LENGTHS):
        warm_up()
    backend = engine.backend()
    with compilations() as seen:
        records = list(serve(Fixed(workload()), backend, engine.scheduler()))
    backend.close()
    assert not seen
    assert any(isinstance(r.body, Switch) for r in records)
    steps = [r.body for r in records if isinstance(r.body, Step)]
    if clock == "modelled":
        kinds = {(s.instance, bool(s.chunks), bool(s.decodes)) for s in steps}
        both = {name for name, chunks, decodes in kinds if decodes}
        assert both & {"prefill/0", "prefill/1"}


def test_serving_without_a_warm_up_is_seen_to_compile():
    """That the test above could fail."""
    engine = Engine(config_of(SPLIT), "it", tiny())
    with compilations() as seen:
        list(serve(Fixed(workload()[1:2]), engine.backend(), engine.scheduler()))
    assert seen["jaxpr_trace_duration"] >= 8 and seen["backend_compile_duration"] >= 8


def test_a_warm_up_changes_no_pool_and_no_slot():
    engine = Engine(config_of(SPLIT), "it", tiny())
    for warm_up in engine.warm_ups([5]):
        warm_up()
    for pool in engine.pools.values():
        assert not any(array.any() for kv in pool.kvs for array in kv)
