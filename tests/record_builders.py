"""Logs to measure: literal ones, whose numbers follow by hand, and served ones of real policies.

Milliseconds keep the literals short; `MS` turns them into the log's nanoseconds.
"""

import numpy as np

from pdjax.core.config import Fault, Link, Placement, Pool, Role, Transfer
from pdjax.core.events import (
    Action,
    Arrived,
    Chunk,
    Decode,
    Emitted,
    Event,
    Grow,
    Hold,
    KVHandle,
    Landed,
    Record,
    Send,
    Step,
    StepDone,
)
from pdjax.core.loop import serve
from pdjax.core.request import Request, SamplingParams
from pdjax.core.scheduler import Scheduler
from pdjax.cost import Cost
from pdjax.faults import with_faults
from pdjax.virtual import Unseen, VirtualBackend

MS = 1_000_000
KV_BYTES = 4096
"""Bytes of KV per token over all layers, in served logs."""

COLLOCATED: Placement = {"both": Role(pool=Pool(tokens=64, page_size=4), chunk=64)}
DISAGGREGATED: Placement = {
    "prefill": Role("prefill", pool=Pool("slab", tokens=32, page_size=4), chunk=32),
    "decode": Role("decode", pool=Pool(tokens=64, page_size=4), chunk=64),
}


def at(ms: float, body: Event | Action) -> Record:
    return Record(round(ms * MS), body)


def arrived(ms: float, rid: int, prompt_len: int = 8, max_tokens: int = 3) -> Record:
    sampling = SamplingParams(max_tokens=max_tokens)
    return at(ms, Arrived(Request(rid, round(ms * MS), prompt_len, sampling, f"c{rid}")))


def prefill(ms: float, step: int, rid: int, instance: str, start: int = 0, length: int = 8,
            last: bool = True, sends: tuple[Send, ...] = ()) -> Record:  # fmt: skip
    return at(ms, Step(step, instance, chunks=(Chunk(rid, start, length, last),), sends=sends))


def decode(ms: float, step: int, rids: dict[int, int], instance: str, count: int = 1,
           awaits: tuple[int, ...] = ()) -> Record:  # fmt: skip
    """rids: request -> the position of its newest token."""
    work = tuple(Decode(i, rid, position, count) for i, (rid, position) in enumerate(rids.items()))
    return at(ms, Step(step, instance, decodes=work, steps=count, awaits=awaits))


def done(ms: float, step: int, began_ms: float, instance: str, counts: dict[int, int]) -> Record:
    """counts: request -> how many tokens the step brought it."""
    emitted = tuple(Emitted(rid, tuple(range(n))) for rid, n in counts.items())
    return at(ms, StepDone(step, instance, round(began_ms * MS), emitted))


def landed(ms: float, send: int, rid: int, began_ms: float, nbytes: int = 100) -> Record:
    return at(ms, Landed(rid, send, round(began_ms * MS), nbytes))


def hold(ms: float, rid: int, pool: str, pages: tuple[int, ...], page_size: int = 4,
         shared: int = 0) -> Record:  # fmt: skip
    return at(ms, Hold(_handle(rid, pool, pages, len(pages) * page_size, shared)))


def grow(ms: float, rid: int, pool: str, pages: tuple[int, ...], capacity: int) -> Record:
    return at(ms, Grow(_handle(rid, pool, pages, capacity)))


def _handle(
    rid: int, pool: str, pages: tuple[int, ...], capacity: int, shared: int = 0
) -> KVHandle:
    return KVHandle(rid, pool, pages, (0,) * len(pages), capacity, shared=shared)


# --- served logs: the real policies in virtual time -----------------------------------------


def placements(slots: int = 16) -> dict[str, Placement]:
    """A collocated server, the same with chunked prefill in mixed steps, and 1P1D."""
    pool = Pool(tokens=16384, page_size=16)
    slab = Pool("slab", tokens=4096, page_size=16)
    return {
        "collocated": {"both": Role(pool=pool, slots=slots, chunk=1024)},
        "chunked": {"both": Role(pool=pool, slots=slots, chunk=128, mixed=True)},
        "disaggregated": {
            "prefill": Role("prefill", pool=slab, chunk=512),
            "decode": Role("decode", pool=pool, slots=slots, chunk=1024),
        },
    }


def requests(count: int, rate: float, seed: int = 0) -> list[Request]:
    """Poisson at `rate` per second; lognormal prompts of about 400 tokens, outputs of about 40."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, count))
    prompts = np.clip(rng.lognormal(5.7, 0.8, count), 8, 2048).astype(int)
    outputs = np.clip(rng.lognormal(3.4, 0.7, count), 1, 200).astype(int)
    return [
        Request(rid, int(arrivals_s[rid] * 1e9), int(prompts[rid]),
                SamplingParams(max_tokens=int(outputs[rid])), f"c{rid}")
        for rid in range(count)
    ]  # fmt: skip


class _Listed:
    def __init__(self, known: list[Request]):
        self._known = known

    def first(self) -> list[Request]:
        return self._known

    def after(self, rid: int, t_ns: int) -> tuple[()]:
        return ()


def _emit(action: Action) -> tuple[Emitted, ...]:
    if not isinstance(action, Step):
        return ()
    first = [Emitted(chunk.rid, (0,)) for chunk in action.chunks if chunk.last]
    more = [Emitted(work.rid, (1,) * work.count) for work in action.decodes]
    return (*first, *more)


def step_ns(step: Step) -> int:
    prompt = sum(chunk.length for chunk in step.chunks)
    return round((5 + 0.5 * prompt + 1.0 * len(step.decodes)) * MS)


def served(
    placement: Placement,
    known: list[Request],
    *,
    groups: int = 4,
    bytes_per_s: float = 50e6,
    schedule: str = "layerwise",
    checksum: bool = False,
    faults: tuple[Fault, ...] = (),
    **policies,
) -> list[Record]:
    """The log of serving `known` with the real policies in virtual time: a step takes 5 ms + 0.5 ms
    per prompt token + 1 ms per decode, a piece 1 ms + its bytes at `bytes_per_s`."""
    link = Link(bytes_per_s=bytes_per_s, latency_s=1e-3)
    cost = Cost(step_ns, lambda send: send.length * KV_BYTES // send.groups, link)
    transfer = Transfer(groups=groups, schedule=schedule, link=link, checksum=checksum)
    scheduler = Scheduler(placement, context=4096, transfer=transfer, **policies)
    backend = VirtualBackend(cost, _emit, lambda event: None, contents=Unseen(checksum))
    return list(serve(_Listed(known), with_faults(backend, faults, placement), scheduler))
