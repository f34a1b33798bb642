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
    for some, or had to give up its own."""
    while t.target.capacity < tokens:
        grown = instance.pool.grow(t.target, tokens, b.now_ns)
        if grown is not None:
            t.target, added = grown
            b.emit(Grow(added))
            return True
        youngest = _youngest(b, instance)
        if youngest.leaving or youngest.flying:
            return False  # it is giving its pages up, or can be made to once it has landed
        preempt(b, youngest, instance)
        if youngest is t:
            return False
    return True


def _youngest(b: Books, instance: Instance) -> Tracked:
    """Of those that hold pages of the instance's pool."""
    pool = instance.pool.name
    for t in reversed(b.requests.values()):
        if any(h is not None and h.pool == pool for h in (t.source, t.target)):
            return t
    raise AssertionError("a request that grows holds pages")
