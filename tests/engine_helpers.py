"""Small runs of a whole engine for tests: requests, a source of them, and what came of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from pdjax.core.config import Clock, Config, Link, Model, Placement, Pool, Role, Transfer
from pdjax.core.events import AbortAsked, Finish, Record, Refuse
from pdjax.core.loop import serve
from pdjax.core.request import Request, SamplingParams
from pdjax.core.scheduler import Scheduler
from pdjax.engine import Engine
from pdjax.programs.weights import Checkpoint, open_checkpoint

VOCAB, LAYERS = 256, 4  # of random:tiny

# Compiled programs are shared by engines with the same devices, pools, slots and context, so
# tests keep to these.
CONTEXT, SLOTS = 64, 4
LINK = Link(bytes_per_s=1e9, latency_s=1e-4)
PAGES = Pool(tokens=512, page_size=4)
SLAB = Pool("slab", tokens=512, page_size=16)
COLLOCATED = {"server": Role(slots=SLOTS, chunk=64, pool=PAGES)}
SPLIT = {
    "prefill": Role("prefill", chunk=64, pool=SLAB),
    "decode": Role("decode", slots=SLOTS, chunk=64, pool=PAGES),
}


@functools.cache
def tiny() -> Checkpoint:
    return open_checkpoint("random:tiny")


def config_of(placement: Placement, **changes: Any) -> Config:
    """A config of the tiny model and one placement, `it`, on the deterministic clock, layer by
    layer: programs of one layer compile fastest."""
    given = {
        "model": Model("random:tiny", context=CONTEXT),
        "clock": Clock("modelled"),
        "transfer": Transfer(groups=LAYERS, link=LINK),
    }
    return Config(placements={"it": placement}, **given | changes)


def request(rid: int, prompt: int | Sequence[int], at_ms: float = 0, **sampling: Any) -> Request:
    """A request with these prompt tokens, or with this many tokens that follow from `rid`."""
    if isinstance(prompt, int):
        prompt = np.random.default_rng(rid).integers(0, VOCAB, prompt).tolist()
    prompt = tuple(prompt)
    params = SamplingParams(**sampling)
    return Request(rid, round(at_ms * 1e6), len(prompt), params, f"client {rid}", prompt)


@dataclass
class Fixed:
    """A core.loop.Source of requests that are all known from the start."""

    requests: Sequence[Request]

    def first(self) -> Sequence[Request]:
        return self.requests

    def after(self, rid: int, t_ns: int) -> Sequence[Request]:
        return ()


class Ran(NamedTuple):
    """One served run, with the engine and the scheduler as they were at its end."""

    engine: Engine
    scheduler: Scheduler
    records: list[Record]

    def all(self, kind: type) -> list[Any]:
        """The events or actions of one kind, in order."""
        return [record.body for record in self.records if isinstance(record.body, kind)]

    @property
    def tokens(self) -> dict[int, tuple[int, ...]]:
        """What each request that was served got."""
        return {f.rid: tuple(self.engine.texts[f.rid].tokens) for f in self.all(Finish)}

    @property
    def ends(self) -> dict[int, str]:
        """Why each request ended; for a refused one what it was told."""
        finished = {f.rid: f.reason for f in self.all(Finish)}
        return finished | {r.rid: r.why for r in self.all(Refuse)}


def run(
    config: Config,
    requests: Sequence[Request],
    *,
    devices: Sequence[int] | None = None,
    checkpoint: Checkpoint | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    aborts: Mapping[int, float] | None = None,
) -> Ran:
    """Serves `requests` under the config's placement `it`.

    devices: which of the virtual devices the placement is carved from, in order.
    aborts: request -> milliseconds at which its client gives up.
    """
    chosen = [jax.devices()[i] for i in devices] if devices else None
    engine = Engine(config, "it", checkpoint or tiny(), decode=decode, devices=chosen)
    backend, scheduler = engine.backend(), engine.scheduler()
    try:
        for rid, at_ms in (aborts or {}).items():
            backend.submit(AbortAsked(rid), round(at_ms * 1e6))
        records = list(serve(Fixed(requests), backend, scheduler))
    finally:
        backend.close()
    return Ran(engine, scheduler, records)


def assert_pools_are_full(scheduler: Scheduler) -> None:
    """Every page is free again and every slot empty."""
    for instance in scheduler.instances.values():
        assert instance.pool.free == instance.pool.pages, instance.name
        assert not any(slot is not None for slot in instance.slots), instance.name
