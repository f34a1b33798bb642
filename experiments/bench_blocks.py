"""How fast page accounting is: pages held and released, prefixes looked up, texts hashed.

    python -m experiments.bench_blocks --json=bench_blocks.json

One Python process, no arrays. Requests of log-normal length (mean 280 tokens, pages of 16) come
to a pool that is always full: some other, any one, leaves for each. Rates count pages, or blocks
of 16 tokens, per second of processor time, so that what else runs on the machine does not count.
Takes about 5 seconds and should meet every goal: 500,000 pages, 100,000 looked-up blocks.
"""

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

from experiments.bench_common import JSON, Row, report
from experiments.flags import run
from pdjax.core.config import Cache
from pdjax.core.ledger import Ledger
from pdjax.core.prefix import hash_blocks

PAGES, PAGE = 8192, 16
CLASSES = (16, 64, 256)
BLOCK = 16  # tokens of a cached block
REQUESTS = 3000
TEXTS, TEXT = 50, 2048  # how many, and tokens of each

Blocks = Sequence[int]


def main() -> None:
    setting: dict[str, object] = {
        "pages": PAGES,
        "page_size": PAGE,
        "block": BLOCK,
        "requests": REQUESTS,
    }
    report(rows(), JSON.value, setting)


def rows() -> list[Row]:
    """All rows, which other benchmarks may put beside their own."""
    rng = random.Random(0)
    lengths = [1 + int(rng.lognormvariate(5.3, 0.8)) for _ in range(REQUESTS)]
    texts = [[rng.randrange(50_000) for _ in range(TEXT)] for _ in range(TEXTS)]
    chains = [hash_blocks(text, BLOCK)[0] for text in texts]
    cached, small = pool(cache=True), pool(pages=PAGES // 4, cache=True)
    serve(cached, chains)
    assert all(cached.cached(chain, 0) == len(chain) for chain in chains), "all texts are cached"
    of_pages = {
        "hold and release, pages": lambda: churn(pool(), lengths),
        "hold and release, slab": lambda: churn(pool("slab"), lengths),
        f"hold and release, classes {CLASSES}": lambda: churn(pool(classes=CLASSES), lengths),
        "hold and release, cached prefix": lambda: serve(cached, chains),
    }
    of_blocks = {
        "prefix lookup": lambda: look_up(cached, chains),
        "hash of a text": lambda: sum(len(hash_blocks(text, BLOCK)[0]) for text in texts),
    }
    return [
        *(Row(what, rate(work), "pages/s", ">= 500000") for what, work in of_pages.items()),
        Row("hold, publish, release and evict", rate(lambda: serve(small, chains)), "pages/s"),
        *(Row(what, rate(work), "blocks/s", ">= 100000") for what, work in of_blocks.items()),
    ]


def rate(work: Callable[[], int], times: int = 5) -> float:
    """What `work` says it did per second of processor time: median of some runs after one that
    does not count."""
    work()
    rates = []
    for _ in range(times):
        began = time.process_time()
        done = work()
        rates.append(done / (time.process_time() - began))
    return median(rates)


def pool(
    form: str = "pages", *, pages: int = PAGES, classes: tuple[int, ...] = (), cache: bool = False
) -> Ledger:
    kept = Cache(prefix=cache, block=BLOCK)
    return Ledger("pool/0", pages=pages, page_size=PAGE, form=form, classes=classes, cache=kept)


def churn(ledger: Ledger, lengths: Sequence[int]) -> int:
    """Requests come, and any others leave when there is no room. Returns pages held."""
    rng = random.Random(0)
    held, pages = [], 0
    for rid, tokens in enumerate(lengths):
        while (handle := ledger.hold(rid, tokens)) is None:
            ledger.release(held.pop(rng.randrange(len(held))))
        held.append(handle)
        pages += len(handle.pages)
    for handle in held:
        ledger.release(handle)
    return pages


def serve(ledger: Ledger, chains: Sequence[Blocks]) -> int:
    """One request per text, one after the other, with a page of its own. Returns pages held."""
    pages = 0
    for rid, chain in enumerate(chains):
        handle = ledger.hold(rid, TEXT + PAGE, blocks=chain)
        assert handle is not None  # nobody else holds anything
        ledger.publish(handle, chain, 0)
        ledger.release(handle)
        pages += len(handle.pages)
    return pages


def look_up(ledger: Ledger, chains: Sequence[Blocks]) -> int:
    return sum(ledger.cached(chain, 0) for chain in chains)


if __name__ == "__main__":
    run(main)
