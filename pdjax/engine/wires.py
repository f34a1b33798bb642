"""What carries KV between the ends of a placement: pools, and swap space named `INSTANCE.host`."""

from collections.abc import Mapping
from contextlib import ExitStack

from pdjax.core.events import Send
from pdjax.engine.pools import End, HostPool, layers_of
from pdjax.programs.transfer import Landing, Piece, corrupt
from pdjax.programs.transports import Transport, collective, from_host, to_host


class Wires:
    """Takes pieces out at one end, carries them, puts them in at the other.

    ends: where a Send may come from or go to. transport: between meshes; to and from host memory
    there is one way only.
    """

    def __init__(self, ends: Mapping[str, End], transport: Transport):
        self.ends, self._transport = ends, transport
        self._spoiled: set[int] = set()
        self._landings: dict[int, Landing] = {}

    def nbytes(self, send: Send) -> int:
        """K and V of the tokens that a piece carries; padding of its shape does not count."""
        layout = self.ends[send.source].layout
        begin, end = layers_of(send, layout.layers)
        return send.length * (end - begin) * layout.token_bytes

    def extract(self, send: Send) -> Piece:
        return self.ends[send.source].extract(send)

    def move(self, send: Send, piece: Piece) -> Piece:
        """The piece where its target can take it in, maybe before it is all there."""
        source, target = self.ends[send.source], self.ends[send.target]
        if isinstance(target, HostPool):
            kv = to_host(piece.kv)
        elif isinstance(source, HostPool):
            kv = from_host(piece.kv, target.mesh)
        else:
            with ExitStack() as launching:
                if self._transport is collective:
                    # Programs over several devices must start in one order on all of them.
                    for lock in sorted((source.lock, target.lock), key=id):
                        launching.enter_context(lock)
                kv = self._transport(piece.kv, target.mesh)
        piece = piece._replace(kv=kv)
        return corrupt(piece) if send.id in self._spoiled else piece

    def insert(self, send: Send, piece: Piece) -> Landing:
        landing = self.ends[send.target].insert(send, piece)
        if landing.sent_K is not None:
            self._landings[send.id] = landing
        return landing

    def deliver(self, send: Send, piece: Piece) -> Landing:
        return self.insert(send, self.move(send, piece))

    # --- damage ------------------------------------------------------------------------

    def spoil(self, send: int) -> None:
        """What piece `send` carries shall be damaged on its way."""
        self._spoiled.add(send)

    def damage(self, send: int) -> str:
        """Why a piece that was inserted is not what left, or nothing; nothing as well where no
        checksums are taken. Waits for the piece."""
        landing = self._landings.pop(send, None)
        if landing is None or landing.intact():
            return ""
        return "what landed is not what left: their checksums differ"

    def forget(self, send: int) -> None:
        """Nobody will ask for the damage of a piece that was cancelled."""
        self._landings.pop(send, None)
