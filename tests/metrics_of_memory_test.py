"""KV memory held, stored and fragmented: replayed from hand-built logs."""

import pytest
from metrics_test import measured
from record_builders import arrived, at, decode, done, grow, hold, landed, prefill

from pdjax.core.config import Pool, Role
from pdjax.core.events import Release, Send
from pdjax.metrics import LogError, pool_config, summary

BOTH, P, D = "both/0", "prefill/0", "decode/0"
SWAPPING = {
    "both": Role(pool=Pool(tokens=64, page_size=4), chunk=64, preempt="swap", swap_tokens=32)
}
SHARED_POOL = {
    "prefill": Role("prefill", pool=Pool("slab", tokens=32, page_size=4), chunk=32),
    "decode": Role("decode", pool=Pool(tokens=64, page_size=4), chunk=64),
}


def test_shared_page_is_held_once_while_anyone_holds_it():
    log = [
        arrived(0, 0, prompt_len=8),
        arrived(0, 1, prompt_len=10),
        hold(0, 0, BOTH, (0, 1, 2)),
        prefill(0, 0, 0, BOTH),
        done(10, 0, 0, BOTH, {0: 1}),  # 8 tokens in pages 0 and 1
        hold(20, 1, BOTH, (0, 1, 7), shared=2),  # reads them, and owns page 7
        prefill(20, 1, 1, BOTH, start=8, length=2),
        done(30, 1, 20, BOTH, {1: 1}),
        at(40, Release(0, BOTH)),  # page 2 goes, 0 and 1 stay for request 1
        at(50, Release(1, BOTH)),
    ]
    pools = measured(log).pools
    assert pools["pages"].tolist() == [3, 3, 4, 4, 3, 0]
    assert pools["held_tokens"].tolist() == [12, 12, 16, 16, 12, 0]
    assert pools["stored_tokens"].tolist() == [0, 8, 8, 10, 10, 0]


def test_growth_adds_pages_to_those_a_request_has():
    log = [
        arrived(0, 0, prompt_len=8, max_tokens=8),
        hold(0, 0, BOTH, (5, 6)),
        prefill(0, 0, 0, BOTH),
        done(10, 0, 0, BOTH, {0: 1}),
        grow(10, 0, BOTH, (2,), capacity=12),
        decode(10, 1, {0: 8}, BOTH, count=2),
        done(20, 1, 10, BOTH, {0: 2}),
        at(30, Release(0, BOTH)),
    ]
    run = measured(log)
    assert run.pools["pages"].tolist() == [2, 2, 3, 3, 0]
    assert run.pools["stored_tokens"].tolist() == [0, 8, 8, 10, 0]
    numbers = summary(run)
    assert numbers["kv_held_tokens_peak"] == numbers[f"{BOTH}.held_tokens_peak"] == 12
    assert numbers["kv_held_tokens_mean"] == pytest.approx((10 * 8 + 20 * 12) / 30)
    stored = 10 * 8 + 10 * 10
    assert numbers[f"{BOTH}.fragmentation_internal"] == pytest.approx(1 - stored / (80 + 240))


def test_memory_held_sums_over_pools_at_each_moment():
    log = [
        arrived(0, 0, prompt_len=8),
        hold(0, 0, P, (0, 1)),
        hold(10, 0, D, (0, 1, 2)),
        at(20, Release(0, P)),
        at(40, Release(0, D)),
    ]
    numbers = summary(measured(log, SHARED_POOL))
    assert numbers["kv_held_tokens_peak"] == 8 + 12
    assert numbers["kv_held_tokens_mean"] == pytest.approx((10 * 8 + 10 * 20 + 20 * 12) / 40)


def test_swap_space_is_a_pool_of_its_own_and_not_device_memory():
    swap = {"rid": 0, "start": 0, "length": 8, "group": 0, "groups": 1}
    host = f"{BOTH}.host"
    log = [
        arrived(0, 0, prompt_len=8),
        hold(0, 0, BOTH, (0, 1)),
        hold(10, 0, host, (0, 1)),
        at(10, Send(0, source=BOTH, target=host, purpose="swap_out", **swap)),
        landed(20, 0, 0, 10),
        at(20, Release(0, BOTH)),
        at(30, Release(0, host)),
    ]
    run = measured(log, SWAPPING)
    swapped = run.pools[run.pools["pool"] == host]
    assert swapped["held_tokens"].tolist() == [8, 8, 0]
    assert swapped["stored_tokens"].tolist() == [0, 8, 0]
    numbers = summary(run)
    assert numbers["kv_held_tokens_peak"] == 8
    assert numbers[f"{host}.pool_pages"] == 8
    assert pool_config(host, SWAPPING).tokens == 32


def test_loaded_prefix_is_stored_after_the_shared_one():
    load = Send(0, 0, D, P, 4, 8, 0, 1, purpose="load")
    log = [
        arrived(0, 0, prompt_len=14),
        hold(0, 0, P, (0, 1, 2, 3), shared=1),
        hold(0, 0, D, (4, 5, 6), shared=3),  # a reader holds what it loads
        at(0, load),
        landed(10, 0, 0, 0),
        at(10, Release(0, D)),
        prefill(10, 0, 0, P, start=12, length=2),
        done(20, 0, 10, P, {0: 1}),
    ]
    pools = measured(log, SHARED_POOL).pools
    assert pools[pools["pool"] == P]["stored_tokens"].tolist() == [4, 12, 14]
    assert pools[pools["pool"] == D]["stored_tokens"].tolist() == [12, 0]


def test_growth_of_a_request_that_holds_nothing_is_one_clear_error():
    with pytest.raises(LogError, match="request 0 grows in pool `both/0`, where it holds nothing"):
        measured([arrived(0, 0), grow(0, 0, BOTH, (1,), 4)])
