"""2,000 requests through pools of 16 blocks: every output is the collocated one, every page comes
back, and the process grows by nothing that counts. 60 texts come again and again, so that a cache
has something to do; greedy, so that a text's tokens are the same whoever asks.

About 25 s on two cores, compiled programs included; PDJAX_SOAK=100 for a first look.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_helpers import COLLOCATED, SPLIT, Fixed, assert_pools_are_full, config_of, request, tiny
from engine_helpers import run as run_all

from pdjax.core.config import Cache, Placement, Pool
from pdjax.core.events import Finish
from pdjax.core.loop import serve
from pdjax.core.prefix import hash_blocks
from pdjax.core.request import Request
from pdjax.engine import Engine

REQUESTS = int(os.environ.get("PDJAX_SOAK", "2000"))
BLOCKS = Pool(tokens=16 * 4, page_size=4)
CACHE = Cache(prefix=True, block=4)
GROWS = 8 << 20  # bytes in half a run; KV of one request is 40 KiB, so one lost in 2 would show

P, D = replace(SPLIT["prefill"], pool=BLOCKS), replace(SPLIT["decode"], pool=BLOCKS)
PLACEMENTS: dict[str, Placement] = {
    "room for all": {"p": P, "d": D},
    "swap": {"p": P, "d": replace(D, growth=1, preempt="swap", swap_tokens=64)},
}


def texts() -> list[Request]:
    """Prompts of 1 to 24 tokens, some of which begin alike, and 1 to 8 more."""
    random, found = np.random.default_rng(0), []
    for rid in range(60):
        prompt = request(rid % 7, int(random.integers(1, 25))).prompt
        blocks, tail = hash_blocks(prompt, CACHE.block)
        asked = request(rid, prompt, max_tokens=int(random.integers(1, 9)))
        found.append(msgspec.structs.replace(asked, blocks=blocks, tail=tail))
    return found


def asked(count: int) -> Iterator[Request]:
    """They come a little faster than they are served, so that all pools are always full."""
    different = texts()
    which = np.random.default_rng(1).integers(0, len(different), count).tolist()
    for rid, text in enumerate(which):
        again = different[text]
        yield msgspec.structs.replace(
            again, id=rid, arrival_ns=rid * 12_000_000, client_id=str(text)
        )


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc: memory is not seen")
@pytest.mark.parametrize("name", PLACEMENTS)
def test_thousands_of_requests_through_16_blocks_leave_no_trace(name):
    expected = run_all(config_of(COLLOCATED), texts()).tokens
    requests = list(asked(REQUESTS // len(PLACEMENTS)))
    engine = Engine(config_of(PLACEMENTS[name], cache=CACHE), "it", tiny())
    backend, scheduler = engine.backend(), engine.scheduler()
    finished, warm = 0, 0
    try:
        for record in serve(Fixed(requests), backend, scheduler):
            if isinstance(record.body, Finish):
                finish = record.body
                text = int(requests[finish.rid].client_id)
                assert tuple(engine.texts[finish.rid].tokens) == expected[text]
                finished += 1
                warm = resident() if finished == len(requests) // 2 else warm
    finally:
        backend.close()
    assert finished == len(requests)
    assert_pools_are_full(scheduler)
    assert resident() - warm < GROWS
