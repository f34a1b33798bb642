"""When a decode pool runs out: older requests take pages from younger ones.

The oldest request that holds pages of a pool is never made to give them up, and alone it fits, so
it always goes on, ends, and leaves the next one the oldest: every request ends.
"""

from pdjax.core.books import Books
from pdjax.core.events import Grow
from pdjax.core.lives import preempt
from pdjax.core.state import Instance, Tracked


def make_room(b: Books, instance: Instance, t: Tracked, tokens: int) -> bool:
    """Pages for `tokens` tokens of a request that decodes in `instance`; False when it has to wait
    for some, or had to give up its own. While it waits nobody younger gets pages."""
    pool = instance.pool
    while t.target.capacity < tokens:
        grown = pool.grow(t.target, tokens, b.now_ns)
        if grown is not None:
            t.target, added = grown
            b.emit(Grow(added))
            break
        holders = _holders(b, pool.name)
        youngest = holders[-1]
        prefilling = youngest.busy and not youngest.prefilled
        if youngest.flying or prefilling or any(other.leaving for other in holders):
            b.claim(pool.name, t)  # pages are coming, or can be taken once they have landed
            return False
        preempt(b, youngest, instance)
        if youngest is t:
            return False
    b.drop_claim(pool.name, t)
    return True


def _holders(b: Books, pool: str) -> list[Tracked]:
    """Those that hold pages of the pool, oldest first."""
    return [
        t
        for t in b.requests.values()
        if any(h is not None and h.pool == pool for h in (t.source, t.target, t.loan))
    ]
