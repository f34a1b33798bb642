"""How fast the simulator is: a published trace, a million requests, and fleets of many sizes.

    python -m experiments.bench_sim --traces=../shared/traces --json=bench_sim.json

All numbers are per second of processor time of one Python process, so that what else runs on the
machine does not count; records are read as they come and none is kept, as a goodput search does.

The trace is Mooncake's conversation trace (12,031 requests, arrivals of its own, blocks of 512
tokens), on 8 prefill and 8 decode instances: without, and with a prefix cache. The million are
synthetic, on 64 + 64 instances; --requests=20000 is enough to see their rate. Without the trace its
rows are left out. Some 7 minutes with a million, 1 with 20,000.
"""

import itertools
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags, logging
from msgspec.structs import replace

from experiments.bench_common import JSON, Row, report
from experiments.flags import run
from pdjax.core.config import (
    Arrivals,
    Cache,
    Clock,
    Config,
    Lengths,
    Link,
    Model,
    Pool,
    Role,
    Transfer,
    Workload,
)
from pdjax.core.events import Finish
from pdjax.core.loop import Source
from pdjax.core.request import Request, SamplingParams
from pdjax.cost import Cost, affine
from pdjax.metrics import Tally
from pdjax.sim import simulate
from pdjax.traces import BLOCK, read_mooncake
from pdjax.workload import make_source

TRACES = flags.DEFINE_string("traces", "../shared/traces", "Folder of published traces.")
REQUESTS = flags.DEFINE_integer("requests", 1_000_000, "Synthetic requests on 64 + 64.", 1)

FLEETS = (16, 256, 4096)
"""Instances, half of them for prefill."""
FLEET_REQUESTS = 4000
PAIR_RATE = 2.5
"""Synthetic requests per second for each prefill instance: half of what it can do."""
PART = 1000


class Measured(NamedTuple):
    """What a run took."""

    requests: int
    records: int
    cpu_s: float


class Given:
    """A source of requests that are all known."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests

    def first(self) -> Sequence[Request]:
        return self._requests

    def after(self, rid: int, t_ns: int) -> Sequence[Request]:
        return ()


def main() -> None:
    setting: dict[str, object] = {
        "trace": "mooncake/conversation_trace.jsonl, 8 prefill + 8 decode, pages of 512 tokens",
        "synthetic_requests": REQUESTS.value,
        "clock": "processor time of one process",
    }
    report([*trace_rows(), *fleet_rows(), *million_rows()], JSON.value, setting)


# --- what is served ----------------------------------------------------------------------------


def config(prefills: int, decodes: int, *, cache: bool = False) -> Config:
    """Instances of eight A800s with Llama-3-70B: 3 million tokens of KV in each (Mooncake's DRAM
    pool), 8192-token prefill steps, layers sent as one piece."""
    pool = Pool(tokens=3_000_000 // BLOCK * BLOCK, page_size=BLOCK)
    return Config(
        {
            "it": {
                "prefill": Role(
                    "prefill", instances=prefills, pool=pool, chunk=16 * BLOCK, prefills=4
                ),
                "decode": Role("decode", instances=decodes, pool=pool, slots=256, chunk=BLOCK),
            }
        },
        model=Model("", context=1 << 18),
        transfer=Transfer(link=Link(preset="rdma-400g")),
        cache=Cache(prefix=cache, block=BLOCK, remote=False),
    )


def cost_of(it: Config) -> Cost:
    """Round numbers of Llama-3-70B on eight A800s: weights in 11 ms, half of peak FLOP/s."""
    clock = Clock(
        "modelled",
        step_s=11e-3,
        prefill_token_s=112e-6,
        decode_token_s=0.1e-3,
        context_token_s=20e-9,
    )
    return affine(clock, it.transfer.link, lambda send: 327_680 * send.length)


def from_trace(path: Path, *, cache: bool) -> Given:
    """With a cache, a prompt's whole blocks are the trace's; what follows them nobody shares."""
    rows = [row for row in read_mooncake(path) if row.output_len]
    return Given(
        [
            Request(
                id=rid,
                arrival_ns=round(row.arrival_s * 1e9),
                prompt_len=row.prompt_len,
                sampling=SamplingParams(max_tokens=row.output_len),
                blocks=row.blocks[: row.prompt_len // BLOCK] if cache else (),
                tail=(rid,) * (row.prompt_len % BLOCK) if cache else (),
            )
            for rid, row in enumerate(rows)
        ]
    )


class Synthetic:
    """Poisson requests, of which only those that come next wait in memory: an end lets the next one
    in line be known, long before it arrives."""

    def __init__(self, count: int, rate: float, ahead: int):
        """ahead: requests known at a time; more than are ever open together."""
        self._left, self._ahead = _synthetic(count, rate), ahead

    def first(self) -> Sequence[Request]:
        return list(itertools.islice(self._left, self._ahead))

    def after(self, rid: int, t_ns: int) -> Sequence[Request]:
        return list(itertools.islice(self._left, 1))


def _synthetic(count: int, rate: float) -> Iterator[Request]:
    """Drawn a thousand at a time, each thousand with a seed of its own."""
    for number, begin in enumerate(range(0, count, PART)):
        workload = Workload(
            requests=min(PART, count - begin),
            arrivals=Arrivals("poisson", rate=rate),
            prompt=Lengths("lognormal", mean=1500, sigma=0.8, low=16, high=8000),
            output=Lengths("lognormal", mean=200, sigma=0.7, low=2, high=1000),
        )
        source = make_source(workload, number, encode=None, vocab=1, context=16384, eos=())
        for request in source.requests:
            arrival_ns = request.arrival_ns + round(begin / rate * 1e9)
            yield replace(request, id=begin + request.id, arrival_ns=arrival_ns)


# --- what is measured --------------------------------------------------------------------------


def measure(it: Config, source: Source) -> Measured:
    tally, records, began = Tally(), 0, time.process_time()
    for record in simulate(it, "it", source, cost_of(it)):
        tally.add(record)
        records += 1
    cpu_s = time.process_time() - began
    ends = tally.outcomes()
    assert ends.completed.all(), "a request was refused: the setting is wrong"
    return Measured(len(ends.completed), records, cpu_s)


def trace_rows() -> Iterator[Row]:
    path = Path(TRACES.value) / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        logging.warning("no trace at %s: its rows are left out; set --traces", path)
        return
    for cache, goal in ((False, ">= 5000"), (True, ">= 2000")):
        found = measure(config(8, 8, cache=cache), from_trace(path, cache=cache))
        what = f"Mooncake conversation, {found.requests} requests, 8P+8D"
        name = "with prefix cache" if cache else "without prefix cache"
        yield Row(f"{what}, {name}", found.requests / found.cpu_s, "requests/s", goal)
        yield Row(f"the same, {name}", found.records / found.requests, "records/request")


def fleet_rows() -> Iterator[Row]:
    for instances in FLEETS:
        pairs = instances // 2
        source = Synthetic(FLEET_REQUESTS, PAIR_RATE * pairs, ahead=FLEET_REQUESTS)
        found = measure(config(pairs, pairs), source)
        what = f"{instances} instances, {FLEET_REQUESTS} synthetic requests"
        yield Row(what, found.cpu_s / found.requests * 1e6, "us/request")


def million_rows() -> Iterator[Row]:
    count, pairs = REQUESTS.value, 64
    ahead = 100 * pairs
    found = measure(config(pairs, pairs), Synthetic(count, PAIR_RATE * pairs, ahead))
    rate = count / found.cpu_s
    yield Row(f"{count} synthetic requests, 64P+64D", rate, "requests/s")
    yield Row("a million of them, at this rate", 1e6 / rate / 60, "minutes", "<= 10")
    yield Row("memory per finished request", bytes_per_request(), "bytes", "<= 1000")


def bytes_per_request(half: int = 1000) -> float:
    """What is still held when twice as many requests have ended, the reader of the log included;
    those that wait or are served are as many both times."""
    it, tally, ended, held = config(4, 4), Tally(), 0, []
    source = Synthetic(4 * half, PAIR_RATE * 4, ahead=half)
    tracemalloc.start()
    for record in simulate(it, "it", source, cost_of(it)):
        tally.add(record)
        ended += isinstance(record.body, Finish)
        if ended == half * (len(held) + 1):
            held.append(tracemalloc.get_traced_memory()[0])
        if len(held) == 2:
            break
    tracemalloc.stop()
    return (held[1] - held[0]) / half


if __name__ == "__main__":
    run(main)
