"""The two vocabularies that decisions and computation share, and their log.

An Event says that something happened; an Action says what to do about it. Both are ids
and counts. A run's log is the sequence of Records, one JSON object per line; every metric
and every figure is computed from it, and replaying its events must give its actions.
Times are integer nanoseconds since the run began.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pdjax.core.placement import Does
from pdjax.core.request import Request

FinishReason = Literal["stop", "length", "abort", "failed"]
Purpose = Literal["hand_off", "load", "swap_out", "swap_in"]


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Base of all events and actions; the JSON field `type` names the class. (No message can be
    part of a cycle, so the garbage collector need not look at any.)"""


# --- Events ------------------------------------------------------------------------------


class Arrived(_Message):
    """A request reached the front door."""

    request: Request


class AbortAsked(_Message):
    """The client gave up on request `rid`."""

    rid: int


class Emitted(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Tokens of one request that a step produced. `stopped`: the last of them ends the text."""

    rid: int
    tokens: tuple[int, ...]
    stopped: bool = False


class StepDone(_Message):
    """Step `step` of `instance` ended; its tokens are on the host. It ran from `began_ns` on.
    `ends_ns`: when each of its iterations ended, counted from then, for a step that is `open`."""

    step: int
    instance: str
    began_ns: int
    emitted: tuple[Emitted, ...] = ()
    ends_ns: tuple[int, ...] = ()


class Landed(_Message):
    """One piece of a request's KV is in the target's pages. `nbytes` crossed from `began_ns` on."""

    rid: int
    send: int
    began_ns: int
    nbytes: int


class SendFailed(_Message):
    """A piece did not arrive, and nothing will write it any more: its way failed, what landed was
    not what left, or it was cancelled."""

    rid: int
    send: int
    why: str


class Down(_Message):
    """An instance died, with its pool, its steps and all that was on its way to it or in it.
    `returns`: it will come up again, empty."""

    instance: str
    returns: bool = False


class Up(_Message):
    """An instance that was down is back."""

    instance: str


class TimeUp(_Message):
    """The time that an Alarm named is over; of one moment's events this is the last."""


# --- Actions -----------------------------------------------------------------------------


class KVHandle(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a request's KV lies: pages (`pool`, offset, generation), oldest token first.

    `layout` is the fingerprint of the pool's arrays; `capacity` is in tokens. The first `shared`
    pages belong to other requests too, or to the prefix cache: they are read, never written.
    """

    rid: int
    pool: str
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    capacity: int
    layout: str = ""
    shared: int = 0


class Hold(_Message):
    """The request owns these pages from now on."""

    handle: KVHandle


class Grow(_Message):
    """The request owns these pages too: `handle` has the new ones, and the capacity with them."""

    handle: KVHandle


class Release(_Message):
    """The request gives back its pages in `pool`; whatever read or wrote them has finished."""

    rid: int
    pool: str


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + length) of a request's text; `last` samples the token after them.

    The text is the prompt and, where a request's KV is computed again, its tokens so far."""

    rid: int
    start: int
    length: int
    last: bool


class Decode(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Up to `count` tokens for the request in `slot`, whose newest token sits at `position`.
    `joined`: it has just taken the slot, so the step before does not have that token."""

    slot: int
    rid: int
    position: int
    count: int = 1
    joined: bool = False


class Send(_Message):
    """Copy tokens [start, start + length) of layer group `group` of `groups` between pools.

    `source` and `target` are instances; `INSTANCE.host` is an instance's swap space. `id` is
    unique in the run. Ends in one Landed or one SendFailed, unless an end of it goes down.
    """

    id: int
    rid: int
    source: str
    target: str
    start: int
    length: int
    group: int
    groups: int
    purpose: Purpose = "hand_off"


class Cancel(_Message):
    """Piece `send` is not wanted any more. Unless it has landed or failed, SendFailed follows."""

    rid: int
    send: int


class Step(_Message):
    """One step of an instance: prefill chunks, decode slots, or both (a mixed batch).

    `steps` decode iterations run in one dispatch. `sends` leave from inside the step: each as
    soon as its layer group has been computed. `awaits` are pieces (ids of Sends) that may still be
    on their way: a layer group of the step starts once those of that group have landed. An `open`
    step stands for `steps` decode steps one after the other, as many as Cut lets it have.
    """

    id: int
    instance: str
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    steps: int = 1
    sends: tuple[Send, ...] = ()
    awaits: tuple[int, ...] = ()
    open: bool = False


class Cut(_Message):
    """The open step of `instance` ends with the iteration that is in progress."""

    step: int
    instance: str


class Reuse(_Message):
    """The first `tokens` tokens of the request's text are in the pool of `instance` already.

    how: `local` (its prefill skips them), `remote` (they were loaded from another pool, the ones
    after the local ones) or `target` (a decode pool has them, the hand-off skips them)."""

    rid: int
    instance: str
    tokens: int
    how: Literal["local", "remote", "target"]


class Preempt(_Message):
    """The request gives up its pages of `instance` to an older one, and will go on later."""

    rid: int
    instance: str
    how: Literal["recompute", "return", "swap"]


class Retry(_Message):
    """The request's KV was lost; it is computed again. What steps that run now still say of the
    request does not count."""

    rid: int
    why: str


class Drain(_Message):
    """The instance takes nothing new of what it will not do any more, and Switch follows when it
    has finished what it has of that."""

    instance: str
    to: Does


class Switch(_Message):
    """The instance does this from now on."""

    instance: str
    does: Does


class Alarm(_Message):
    """TimeUp shall happen at `at_ns`."""

    at_ns: int


class Refuse(_Message):
    """The request is turned away at submit; `why` is for its client."""

    rid: int
    why: str


class Finish(_Message):
    """The request ended with `tokens` tokens. `why` is for the client of one that `failed`."""

    rid: int
    reason: FinishReason
    tokens: int
    why: str = ""


Event = Arrived | AbortAsked | StepDone | Landed | SendFailed | Down | Up | TimeUp
Action = (
    Hold
    | Grow
    | Release
    | Send
    | Cancel
    | Step
    | Cut
    | Reuse
    | Preempt
    | Retry
    | Drain
    | Switch
    | Alarm
    | Refuse
    | Finish
)


# --- The log -----------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, gc=False):
    """One line of a log: at `t_ns` this happened, or was decided."""

    t_ns: int
    body: Event | Action

    @property
    def is_event(self) -> bool:
        return isinstance(self.body, Event)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def write_line(record: Record) -> bytes:
    """One line of events.jsonl; prompts stay out of the log."""
    body = record.body
    if isinstance(body, Arrived) and body.request.prompt:
        bare = msgspec.structs.replace(body.request, prompt=())
        record = Record(record.t_ns, Arrived(bare))
    return _encoder.encode(record) + b"\n"


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    with open(path, "wb") as file:
        file.writelines(write_line(record) for record in records)


def read_jsonl(path: Path) -> Iterator[Record]:
    """Raises ValueError naming the line that is not a record (a cut log, another file)."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}:{number}: not a record of a pdjax log: {error}") from None
