"""The simulator's benchmark serves what it says, and its numbers are of that."""

from itertools import pairwise

from experiments.bench_sim import PART, Synthetic, bytes_per_request, config, from_trace, measure
from pdjax.traces import BLOCK, read_mooncake

TRACE = "mooncake/conversation_trace.jsonl"


def test_synthetic_requests_come_one_by_one_in_order_at_their_rate():
    source = Synthetic(PART + 500, rate=50.0, ahead=10)
    requests = list(source.first())
    assert len(requests) == 10
    while more := source.after(0, 0):
        requests += more
    assert [r.id for r in requests] == list(range(PART + 500))
    assert all(a.arrival_ns <= b.arrival_ns + 2e9 for a, b in pairwise(requests))
    assert 0.9 < requests[-1].arrival_ns / 1e9 / (len(requests) / 50) < 1.1


def test_every_request_is_served_and_counted():
    found = measure(config(2, 2), Synthetic(40, rate=5.0, ahead=20))
    assert found.requests == 40 and found.records > 8 * 40 and found.cpu_s > 0


def test_a_request_that_ended_leaves_little_behind():
    assert 0 < bytes_per_request(half=100) < 1000


def test_the_trace_is_served_with_its_blocks_as_a_prefix_cache_wants_them(traces):
    rows = [row for row in read_mooncake(traces / TRACE) if row.output_len]
    bare, cached = (from_trace(traces / TRACE, cache=cache).first() for cache in (False, True))
    assert len(bare) == len(cached) == len(rows) == 12_031
    assert not any(r.blocks for r in bare)
    for request, row in zip(cached[:50], rows, strict=False):
        assert len(request.blocks) * BLOCK + len(request.tail) == row.prompt_len
        assert request.blocks == row.blocks[: len(request.blocks)]
