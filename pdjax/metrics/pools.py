"""Who holds which pages of each pool, replayed from Hold, Grow and Release."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
from msgspec import structs

from pdjax.core.config import Placement, Pool, instances_of, pool_owner, role_of
from pdjax.core.events import Grow, Hold, KVHandle, Landed, Record, Release, StepDone
from pdjax.metrics.lives import Log, LogError
from pdjax.metrics.moves import NS

HOST = ".host"


def pool_of(name: str, placement: Placement) -> str:
    """The pool that an end of a transfer works on: an instance's own, that of the instance which
    `pool_of` names, or an instance's swap space in host memory (`INSTANCE.host`)."""
    instance = name.removesuffix(HOST)
    role, _, index = instance.rpartition("/")
    if role not in placement or not index.isdigit():
        raise LogError(
            f"the log names instance `{instance}`, the placement has roles {sorted(placement)}; "
            "analyse it with the placement that it ran on"
        )
    return name if name.endswith(HOST) else pool_owner(instance, placement)


def pool_config(pool: str, placement: Placement) -> Pool:
    """Size and form of the pool that `pool` (an instance's name, or its `.host`) owns."""
    owner = pool_owner(pool_of(pool, placement).removesuffix(HOST), placement)
    config = placement[role_of(owner)].pool
    if not pool.endswith(HOST):
        return config
    swap_tokens = placement[role_of(pool.removesuffix(HOST))].swap_tokens
    return Pool(tokens=max(swap_tokens, config.page_size), page_size=config.page_size)


class _Books:
    """Who holds which pages of one pool, and how many tokens of them are stored."""

    def __init__(self, config: Pool):
        self.config = config
        self.handles: dict[int, KVHandle] = {}
        self.holders = Counter[int]()  # of each page
        self.owned: set[int] = set()  # pages whose one writer holds them; the others are read only
        self.written: dict[int, float] = {}  # tokens of each request, shared ones included
        self.written_by_owners = 0.0  # the sum of those that are not shared
        self.external = self._external()

    def hold(self, handle: KVHandle) -> None:
        """A second Hold of a request replaces its first: a handle names all its pages."""
        self.drop(handle.rid)
        self.handles[handle.rid] = handle
        self._take(handle.pages, handle.pages[handle.shared :])
        self.written[handle.rid] = self._shared_tokens(handle)
        self.external = self._external()

    def grow(self, more: KVHandle) -> None:
        if more.rid not in self.handles:
            raise LogError(
                f"request {more.rid} grows in pool `{more.pool}`, where it holds nothing"
            )
        held = self.handles[more.rid]
        pages = held.pages + more.pages
        self.handles[more.rid] = structs.replace(held, pages=pages, capacity=more.capacity)
        self._take(more.pages, more.pages)
        self.external = self._external()

    def drop(self, rid: int) -> None:
        if rid not in self.handles:
            return
        handle = self.handles.pop(rid)
        self.written_by_owners -= self.written.pop(rid) - self._shared_tokens(handle)
        self.owned.difference_update(handle.pages[handle.shared :])
        self.holders.subtract(handle.pages)
        for page in handle.pages:
            if not self.holders[page]:
                del self.holders[page]
        self.external = self._external()

    def write(self, rid: int, *, upto: float = 0, more: float = 0) -> None:
        """Tokens up to a position, or `more` of them, are stored (those of a request that no
        longer holds pages are not)."""
        if rid in self.handles:
            before = self.written[rid]
            tokens = min(max(before + more, upto), self.handles[rid].capacity)
            self.written[rid] = tokens
            self.written_by_owners += tokens - before

    def row(self) -> tuple[int, int, float, float]:
        """Pages and tokens held, tokens stored (of a shared page once), external."""
        pages, page_size = len(self.holders), self.config.page_size
        read_only = pages - len(self.owned)
        stored = read_only * page_size + self.written_by_owners
        return pages, pages * page_size, stored, self.external

    def _take(self, pages: Sequence[int], owned: Sequence[int]) -> None:
        self.holders.update(pages)
        self.owned.update(owned)

    def _shared_tokens(self, handle: KVHandle) -> int:
        return handle.shared * self.config.page_size

    def _external(self) -> float:
        if self.config.form != "slab":
            return float("nan")
        return external_fragmentation(self.config.pages, sorted(self.holders))


def external_fragmentation(pages: int, taken: Sequence[int]) -> float:
    """1 - longest free run / free pages, of `pages` with the sorted `taken` ones; NaN when full."""
    edges = np.array([-1, *taken, pages])
    runs = np.diff(edges) - 1
    return 1 - runs.max() / runs.sum() if runs.sum() else float("nan")


def pool_table(records: Sequence[Record], log: Log, placement: Placement) -> pd.DataFrame:
    """A row per change of a pool; see Run.pools.

    A prompt's KV is stored in the prefill pool when its chunk is done, in another pool when it
    lands there; a decode step stores the tokens it was fed, one per token it emits.
    """
    owners = {pool_owner(name, placement) for name in instances_of(placement)}
    books = {name: _Books(pool_config(name, placement)) for name in sorted(owners)}
    landed: set[int] = set()
    rows = []
    for record in records:
        if isinstance(record.body, Hold | Grow):
            name = pool_of(record.body.handle.pool, placement)
        elif isinstance(record.body, Release):
            name = pool_of(record.body.pool, placement)
        elif isinstance(record.body, StepDone):
            name = pool_of(record.body.instance, placement)
        elif isinstance(record.body, Landed) and record.body.send not in landed:
            landed.add(record.body.send)
            name = pool_of(log.sends[record.body.send].target, placement)
        else:
            continue
        if name not in books:  # a swap space, from its first use on
            books[name] = _Books(pool_config(name, placement))
        _enter(books[name], record.body, log)
        rows.append((name, record.t_ns * NS, *books[name].row()))
    columns = "pool t_s pages held_tokens stored_tokens external"
    return pd.DataFrame(rows, columns=columns.split())


def _enter(books: _Books, body: Hold | Grow | Release | StepDone | Landed, log: Log) -> None:
    match body:
        case Hold(handle=handle):
            books.hold(handle)
        case Grow(handle=more):
            books.grow(more)
        case Release(rid=rid):
            books.drop(rid)
        case StepDone(step=step, emitted=emitted):
            for chunk in log.plans[step].chunks:
                books.write(chunk.rid, upto=chunk.start + chunk.length)
            counts = {e.rid: len(e.tokens) for e in emitted}
            for decode in log.plans[step].decodes:
                books.write(decode.rid, upto=decode.position + counts.get(decode.rid, 0))
        case Landed(rid=rid, send=send):
            books.write(rid, more=log.sends[send].length / log.sends[send].groups)
