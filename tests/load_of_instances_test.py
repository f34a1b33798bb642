"""What routers are told of an instance: counted again, from the requests, after every event."""

from collections import Counter

import pytest
from decision_helpers import PLACEMENTS, check_run, request, served

from pdjax.core.config import Cache, Estimate, Routing
from pdjax.core.events import Step
from pdjax.core.policies.routing import RANKS
from pdjax.core.scheduler import Scheduler

TEXT = tuple(range(12))
CACHE = Cache(prefix=True, block=3)


class Audited(Scheduler):
    """Compares the counters of every instance with what its requests say."""

    def on_event(self, event, now_ns):
        actions = super().on_event(event, now_ns)
        for instance in self.instances.values():
            self._audit(instance)
        self._books.reorder()
        for side in (self._books.prefill_side, self._books.decode_side):
            self._audit_order(side)
        return actions

    def _audit_order(self, side) -> None:
        """Whoever of them does not fit, the rest come in the order of their loads."""
        rank = RANKS.get(side.router)
        if rank is None:
            return
        gone = set()
        for instance in sorted(side.instances, key=lambda i: rank(i.load)):
            assert side.choose(None, lambda i: i.name not in gone) is instance
            gone.add(instance.name)
        assert side.choose(None, lambda i: i.name not in gone) is None

    def _audit(self, instance) -> None:
        requests = self._books.requests
        waiting = [requests[rid] for rid in instance.queue]
        assert instance.queued_tokens == sum(t.length for t in waiting)
        here = [t for t in requests.values() if t.prefill is instance]
        assert instance.prompt_tokens == sum(t.prefill_tokens for t in here)
        for t in here:
            begun = t.rid not in instance.queue and t.source is not None and not t.leaving
            assert not begun or t.prefill_tokens == t.length - t.computed
        outputs = [t.decode_tokens for t in requests.values() if t.decode is instance]
        assert instance.output_tokens == sum(outputs)


def homes(placement: str, requests, router, cache: Cache = CACHE, **others) -> dict[int, str]:
    """Where each prompt was computed, counters audited on the way."""
    routing = Routing(prefill=router, estimate=Estimate(prefill_token_s=1e-3))
    scheduler = Audited(PLACEMENTS[placement], context=40, routing=routing, cache=cache)
    log = served(scheduler, requests, **others)
    check_run(log, PLACEMENTS[placement], scheduler, cache=cache)
    steps = [record.body for record in log if isinstance(record.body, Step)]
    return {chunk.rid: step.instance for step in steps for chunk in step.chunks}


@pytest.mark.parametrize("router", ["cache_aware", "shortest_ttft", "fewest_tokens"])
@pytest.mark.parametrize("placement", ["2P1D", "collocated", "mixed", "logical_split", "two_pools"])
def test_counters_are_those_of_the_requests(placement: str, router: str):
    """Shared prefixes, memory that runs short, aborts while queued, computed and decoded."""
    texts = [TEXT[: 3 + rid] for rid in range(8)] + [TEXT[rid:] for rid in range(4)]
    requests = [request(rid, text=t, max_tokens=5, at_ms=3 * rid) for rid, t in enumerate(texts)]
    homes(placement, requests, router, aborts=[(2, 9), (5, 15), (7, 60), (11, 34)])


@pytest.mark.parametrize("router", ["cache_aware", "shortest_ttft"])
def test_prompts_that_come_at_once_are_spread_though_none_holds_memory_yet(router: str):
    """The first of eight takes memory at once and the others queue: each adds what it will."""
    burst = [request(rid, text=[100 * rid + i for i in range(6)]) for rid in range(8)]
    assert Counter(homes("2P1D", burst, router).values()) == {"prefill/0": 4, "prefill/1": 4}


def test_a_queued_prompt_adds_no_more_than_it_has_to_compute():
    """An instance has nine tokens of the long prompt, and computes one of six that it does not
    know; so does the other. The long one queues at the former and adds three: 9 are before it, and
    6 before the other. The next six tokens go there, the last six here, for 9 are less than 12."""
    first = request(0, text=TEXT[:10], max_tokens=1)
    strangers = [request(rid, text=[90 + rid] * 6, at_ms=200, max_tokens=1) for rid in range(1, 5)]
    long = request(5, text=TEXT, at_ms=200, max_tokens=1)
    requests = [first, *strangers[:2], long, *strangers[2:]]
    found = homes("2P1D", requests, "shortest_ttft")
    assert [found[each.id][-1] for each in requests] == ["0", "0", "1", "0", "1", "0"]
