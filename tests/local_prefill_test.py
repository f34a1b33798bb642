"""Short prompts, which a decode instance prefills itself. Nothing of them moves."""

from decision_helpers import PLACEMENTS, check_run, request, served
from engine_helpers import COLLOCATED, SPLIT, assert_pools_are_full, config_of, run
from engine_helpers import request as prompt_of

from pdjax.core.config import Cache, Routing
from pdjax.core.events import Send, Step
from pdjax.core.scheduler import Scheduler


def homes(requests, routing: Routing, cache: Cache | None = None) -> dict[int, str]:
    """Where each request's prompt was computed."""
    scheduler = Scheduler(PLACEMENTS["1P1D"], context=40, routing=routing, cache=cache)
    log = served(scheduler, requests)
    check_run(log, PLACEMENTS["1P1D"], scheduler, cache=cache, local_prefill=True)
    steps = [record.body for record in log if isinstance(record.body, Step)]
    found = {chunk.rid: step.instance for step in steps for chunk in step.chunks}
    sends = {send.rid for step in steps for send in step.sends}
    sends |= {record.body.rid for record in log if isinstance(record.body, Send)}
    for rid, home in found.items():
        assert (rid in sends) == (home == "prefill/0")
    return found


def test_prompts_below_the_threshold_stay_on_the_decode_instance():
    requests = [request(rid, length, at_ms=100 * rid) for rid, length in enumerate((3, 4, 5, 6))]
    found = homes(requests, Routing(local_below=5))
    assert found == {0: "decode/0", 1: "decode/0", 2: "prefill/0", 3: "prefill/0"}


def test_a_cached_beginning_makes_a_long_prompt_short():
    """The second prompt repeats nine tokens of the first, whose KV the decode pool has."""
    texts = [tuple(range(10)), (*range(9), 77, 78)]
    requests = [request(rid, text=text, at_ms=200 * rid) for rid, text in enumerate(texts)]
    found = homes(requests, Routing(local_below=5), Cache(prefix=True, block=3))
    assert found == {0: "prefill/0", 1: "decode/0"}


def test_tokens_are_those_of_the_collocated_server():
    lengths = (33, 5, 16, 40, 1, 19)
    requests = [prompt_of(i, n, at_ms=2 * i, max_tokens=4) for i, n in enumerate(lengths)]
    ran = run(config_of(SPLIT, routing=Routing(local_below=20)), requests)
    chunked = {step.instance for step in ran.all(Step) if step.chunks}
    assert chunked == {"prefill/0", "decode/0"}
    assert ran.tokens == run(config_of(COLLOCATED), requests).tokens
    assert_pools_are_full(ran.scheduler)
