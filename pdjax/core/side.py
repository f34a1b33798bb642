"""One side of a server, prefill or decode: who gets a request there."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from pdjax.core.config import Routing
from pdjax.core.policies.routing import RANKS, Load, Rank, looks_at_caches, router_of
from pdjax.core.state import Instance, Tracked

LoadOf = Callable[[Tracked, Instance], Load]
"""The load of an instance as a request sees it, with what a cache has for it."""


class Side:
    """The instances of a side, in the placement's order, and what routes requests to them.

    A router that ranks loads need not see them all: the instances stand in its order, and the
    first of them that will do is the one.
    """

    def __init__(
        self,
        instances: list[Instance],
        router: str,
        routing: Routing,
        remote: bool,
        load_of: LoadOf,
    ):
        """router: its name. remote: whether caches of other pools count. load_of: for routers
        that look at caches."""
        self.instances, self.router = instances, router
        self._route = router_of(router, routing, remote)
        self._load_of = load_of if looks_at_caches(router) else lambda t, instance: instance.load
        self._ranking = Ranking(instances, RANKS[router]) if router in RANKS else None
        self._routed = 0

    def choose(self, t: Tracked, fits: Callable[[Instance], bool]) -> Instance | None:
        """Who of those that fit gets the request; nobody, if nobody does."""
        if self._ranking is not None:
            return next(filter(fits, self._ranking), None)
        candidates = list(filter(fits, self.instances))
        if not candidates:
            return None
        loads = [self._load_of(t, instance) for instance in candidates]
        self._routed += 1
        return candidates[self._route(self._routed - 1, t.request, loads)]

    def reorder(self, changed: Iterable[Instance]) -> None:
        """The loads of these instances have changed."""
        if self._ranking is not None:
            self._ranking.reorder(changed)


class Ranking:
    """Instances by rank of their load, lowest first; of equals the one named first."""

    def __init__(self, instances: list[Instance], rank: Rank):
        self._instances, self._rank = instances, rank
        self._entries = {i.name: (rank(i.load), n) for n, i in enumerate(instances)}
        self._order = sorted(self._entries.values())

    def __iter__(self) -> Iterator[Instance]:
        return (self._instances[n] for _, n in self._order)

    def reorder(self, changed: Iterable[Instance]) -> None:
        """Puts those whose load has changed where they belong."""
        for instance in changed:
            old = self._entries.get(instance.name)
            if old is None:
                continue  # it is not of this side
            new = self._rank(instance.load), old[1]
            if new != old:
                del self._order[bisect_left(self._order, old)]
                insort(self._order, new)
                self._entries[instance.name] = new
