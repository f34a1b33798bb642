"""Pieces of a live run on their way: from pages through a link into pages, unless cancelled.

A piece is taken out by its source's thread, moved by the thread of its wire, held back until the
emulated link says that it has crossed, and put in by its target's thread: as a job of its own, or
by a step that awaits it, whichever comes first. So that nothing reads or writes pages which
may have a new owner, whoever does takes the piece first, and a cancelled piece cannot be taken.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import jax

from pdjax.core.events import Landed, Send, SendFailed, Step
from pdjax.engine.threads import Threads
from pdjax.engine.wires import Wires
from pdjax.links import NANOSECONDS, NEVER, Network
from pdjax.programs.transfer import Landing, Piece

CANCELLED = "cancelled"


@dataclass(eq=False)
class _Flight:
    """taken: some thread reads or writes pages for it. moved: the piece on the target's mesh.
    crossed: the link has let it through. put: it is in its pages, or about to be."""

    send: Send
    taken: bool = False
    cancelled: bool = False
    moved: Piece | None = None
    crossed: bool = False
    put: bool = False
    began_ns: int = 0

    @property
    def here(self) -> bool:
        return self.crossed and self.moved is not None


class Flights:
    """All pieces on their way. post(event) is called once for each: Landed or SendFailed."""

    def __init__(
        self,
        wires: Wires,
        network: Network,
        threads: Threads,
        now: Callable[[], int],
        post: Callable[[Landed | SendFailed], object],
    ):
        self._wires, self._threads, self._now, self._post = wires, threads, now, post
        self._network = network
        self._open: dict[int, _Flight] = {}
        self._closed = False
        self._lock = threading.Lock()  # of everything here
        self._changed = threading.Condition(self._lock)  # for steps that await pieces
        self._timed = threading.Condition(self._lock)  # for the thread that keeps the links' time
        threads.do("links", self._keep_time)

    def add(self, send: Send) -> None:
        """To be called before anything else is done with a piece."""
        with self._lock:
            self._open[send.id] = _Flight(send)

    def cancel(self, id: int) -> None:
        """SendFailed follows once nothing reads or writes for the piece; nothing follows if it has
        already landed or failed."""
        with self._lock:
            flight = self._open.get(id)
            if flight is None:
                return
            flight.cancelled = True
            self._network.cancel(self._now(), id)
            if not flight.taken:
                self._end(flight)
            self._wake()

    def stall(self, instance: str, seconds: float) -> None:
        """Nothing moves on the links into `instance` for so long (0: for ever)."""
        with self._lock:
            now_ns = self._now()
            until_ns = now_ns + round(seconds * NANOSECONDS) if seconds else NEVER
            self._network.stall(now_ns, instance, until_ns)
            self._wake()

    def close(self) -> None:
        """Ends all waiting."""
        with self._lock:
            self._closed = True
            self._wake()

    # --- in the source's thread ------------------------------------------------------------

    def leave(self, send: Send) -> None:
        """Takes the piece out of its pages and hands it to its wire."""
        flight = self._take(send.id)
        if flight is None:
            return
        piece = self._wires.extract(send)
        with self._lock:
            flight.taken = False
            if flight.cancelled:
                self._end(flight)
                return
        wire = f"{send.source} -> {send.target}"
        self._threads.do(wire, lambda: self._cross(flight, piece))

    # --- in the wire's thread ----------------------------------------------------------------

    def _cross(self, flight: _Flight, piece: Piece) -> None:
        send = flight.send
        if flight.cancelled:
            return
        jax.block_until_ready(piece)
        with self._lock:
            if flight.cancelled:
                return
            nbytes = self._wires.nbytes(send)
            self._network.start(self._now(), send.id, send.source, send.target, nbytes)
            self._let_through()
        moved = jax.block_until_ready(self._wires.move(send, piece))
        with self._lock:
            flight.moved = moved
            self._arrive(flight)

    # --- in the links' thread ----------------------------------------------------------------

    def _keep_time(self) -> None:
        with self._lock:
            while not self._closed:
                self._let_through()
                at_ns = self._network.next_finish()
                self._timed.wait(None if at_ns is None else (at_ns - self._now()) / NANOSECONDS)

    def _let_through(self) -> None:
        """Whatever has crossed by now, may arrive; with the lock held."""
        for id, began_ns in self._network.finish(self._now()):
            flight = self._open[id]
            flight.crossed, flight.began_ns = True, began_ns
            self._arrive(flight)
        if self._network.next_finish() is not None:
            self._timed.notify()

    def _arrive(self, flight: _Flight) -> None:
        if flight.here and not flight.cancelled:
            self._changed.notify_all()
            self._threads.do(flight.send.target, lambda: self._put(flight))

    # --- in the target's thread --------------------------------------------------------------

    def join(self, step: Step, group: int) -> None:
        """Waits until all pieces of layer group `group` that the step awaits are in their pages,
        will be before whatever is dispatched next, or will never be."""
        for id in step.awaits:
            with self._lock:
                flight = self._open.get(id)
                if flight is None or flight.send.group != group:
                    continue
                while not (flight.put or flight.here or flight.cancelled or self._closed):
                    self._changed.wait()
            self._put(flight)

    def _put(self, flight: _Flight) -> None:
        """Puts the piece into its pages, unless that has been done or it was cancelled."""
        send, piece = flight.send, flight.moved
        if flight.put or piece is None or not flight.crossed or self._take(send.id) is None:
            return
        flight.put = True
        landing = self._wires.insert(send, piece)
        flight.moved = None
        self._threads.do(f"{send.target} collector", lambda: self._landed(flight, landing))

    # --- in the target's collector -------------------------------------------------------------

    def _landed(self, flight: _Flight, landing: Landing) -> None:
        jax.block_until_ready(landing.done)
        why = self._wires.damage(flight.send.id)
        with self._lock:
            self._end(flight, why)

    # --- with or without the lock ----------------------------------------------------------------

    def _take(self, id: int) -> _Flight | None:
        """The piece, if it is still wanted; from now on cancelling it has to wait."""
        with self._lock:
            flight = self._open.get(id)
            if flight is None or flight.taken or flight.cancelled:
                return None
            flight.taken = True
            return flight

    def _end(self, flight: _Flight, why: str = "") -> None:
        """With the lock held: the piece has come to its end, one way or the other."""
        send = flight.send
        del self._open[send.id]
        why = CANCELLED if flight.cancelled else why
        if why:
            self._post(SendFailed(send.rid, send.id, why))
        else:
            nbytes = self._wires.nbytes(send)
            self._post(Landed(send.rid, send.id, flight.began_ns, nbytes))

    def _wake(self) -> None:
        self._changed.notify_all()
        self._timed.notify_all()
