"""The two kinds of memory that hold KV: pools on a mesh, and swap space in the host's."""

import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pdjax.core.events import KVHandle, Send
from pdjax.programs import kv as kv_pool
from pdjax.programs.batch import token_bucket
from pdjax.programs.checksum import sums
from pdjax.programs.step import group_bounds
from pdjax.programs.transfer import Landing, Piece, transfer_programs

NOBODY = -1  # the request that warm-up runs for; all its pages are the one that does not exist


class NotHeld(ValueError):
    """Pages that a request does not have (any more)."""


_bounds = functools.cache(group_bounds)


def layers_of(send: Send, layers: int) -> tuple[int, int]:
    """Layers [begin, end) that a piece carries."""
    return _bounds(layers, send.groups)[send.group]


class _Held(NamedTuple):
    """Pages of one request, as a table filled up with a page that does not exist."""

    table_n: np.ndarray
    pages: int
    capacity: int


class PoolArrays:
    """The arrays of one pool and who has which of its pages. Every program that updates the
    arrays is given them (donation), so they are taken and put back under `lock`.

    context: tokens of the longest text. lock: may be shared by pools on the same devices.
    implementation: who moves pieces, see programs.moves.
    """

    def __init__(
        self,
        layout: kv_pool.Layout,
        mesh: Mesh,
        context: int,
        *,
        checksum: bool = False,
        lock: "threading.RLock | None" = None,
        implementation: str = "xla",
    ):
        self.layout, self.mesh, self.lock = layout, mesh, lock or threading.RLock()
        self.kvs = kv_pool.make_pool(layout, mesh)
        self._programs = transfer_programs(mesh, layout.kv_heads, checksum, implementation)
        self._width = -(-context // layout.page_size)
        self.empty_table = np.full(self._width, layout.pages, np.int32)
        self._held = {NOBODY: _Held(self.empty_table, 0, context)}

    # --- who has which pages -----------------------------------------------------------

    def hold(self, handle: KVHandle) -> None:
        if handle.layout != self.layout.fingerprint:
            raise ValueError(
                f"a handle of request {handle.rid} is for the layout `{handle.layout}`, pool "
                f"`{handle.pool}` has `{self.layout.fingerprint}`"
            )
        self._held[handle.rid] = self._add(_Held(self.empty_table, 0, 0), handle)

    def grow(self, handle: KVHandle) -> None:
        """The new pages follow those that the request has."""
        self._held[handle.rid] = self._add(self._of(handle.rid), handle)

    def _add(self, held: _Held, handle: KVHandle) -> _Held:
        """In a table of its own: a program may still be reading the old one."""
        table_n, end = held.table_n.copy(), held.pages + len(handle.pages)
        room = min(end, self._width)  # pages past the longest text are never used
        table_n[held.pages : room] = handle.pages[: room - held.pages]
        return _Held(table_n, end, handle.capacity)

    def release(self, rid: int) -> None:
        del self._held[rid]

    def table(self, rid: int) -> np.ndarray:
        return self._of(rid).table_n

    def _of(self, rid: int) -> _Held:
        if rid not in self._held:
            raise NotHeld(f"request {rid} has no pages here: they were released, or never held")
        return self._held[rid]

    def _span(self, send: Send) -> tuple[np.ndarray, np.int32, np.int32]:
        held, end = self._of(send.rid), send.start + send.length
        if end > held.capacity:
            raise NotHeld(
                f"piece {send.id} of request {send.rid}, from `{send.source}` to `{send.target}`, "
                f"ends at token {end}, but the request has pages for {held.capacity}"
            )
        return held.table_n, np.int32(send.start), np.int32(send.length)

    # --- pieces ------------------------------------------------------------------------

    def extract(self, send: Send) -> Piece:
        """A copy of its own, so that the pool may be updated at once."""
        begin, end = layers_of(send, self.layout.layers)
        span, T = self._span(send), token_bucket(send.length)
        with self.lock:
            return self._programs.extract(self.kvs[begin:end], *span, T=T)

    def insert(self, send: Send, piece: Piece) -> Landing:
        """Puts a piece that is on this mesh into its pages."""
        begin, end = layers_of(send, self.layout.layers)
        span = self._span(send)
        with self.lock:
            self.kvs[begin:end], landing = self._programs.insert(self.kvs[begin:end], piece, *span)
        return landing


class HostPool:
    """KV of requests that wait in host memory, as [2, tokens, K, H] per layer."""

    def __init__(self, layout: kv_pool.Layout, checksum: bool):
        self.layout, self.checksum = layout, checksum
        self._held: dict[int, Sequence[np.ndarray]] = {}

    def hold(self, handle: KVHandle) -> None:
        self._held[handle.rid] = self._zeros(handle.capacity)

    def _zeros(self, tokens: int) -> Sequence[np.ndarray]:
        one = self.layout
        shape = (2, tokens, one.kv_heads, one.head_dim)
        return [np.zeros(shape, jnp.dtype(one.dtype)) for _ in range(one.layers)]

    def release(self, rid: int) -> None:
        del self._held[rid]

    def extract(self, send: Send) -> Piece:
        span = slice(send.start, send.start + send.length)
        padding = ((0, 0), (0, token_bucket(send.length) - send.length), (0, 0), (0, 0))
        kv = [np.pad(layer[:, span], padding) for layer in self._layers(send)]
        return Piece(kv, self._sums(kv, send))

    def insert(self, send: Send, piece: Piece) -> Landing:
        for layer, new in zip(self._layers(send), piece.kv, strict=True):
            layer[:, send.start : send.start + send.length] = new[:, : send.length]
        found = self.extract(send)
        return Landing(None, piece.sums_K, found.sums_K)

    def _layers(self, send: Send) -> Sequence[np.ndarray]:
        end = send.start + send.length
        held = self._zeros(end) if send.rid == NOBODY else self._held.get(send.rid)
        if held is None or end > held[0].shape[1]:
            raise NotHeld(
                f"piece {send.id} of request {send.rid}, from `{send.source}` to `{send.target}`, "
                f"ends at token {end}, but the request has host memory for "
                f"{0 if held is None else held[0].shape[1]}"
            )
        begin, end = layers_of(send, self.layout.layers)
        return held[begin:end]

    def _sums(self, kv: Sequence[np.ndarray], send: Send) -> np.ndarray | None:
        if not self.checksum:
            return None
        return sums(kv, np.uint32(send.start), np.uint32(send.length))


End = PoolArrays | HostPool
