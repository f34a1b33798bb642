"""The scheduler's books: one Tracked per open request, one Instance per running program pair."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from pdjax.core.config import Cache, Placement, Role, instances_of, pool_owner, role_of
from pdjax.core.events import Send, Step
from pdjax.core.ledger import Ledger
from pdjax.core.placement import Does
from pdjax.core.policies.routing import Load
from pdjax.core.policies.transfer import Piece
from pdjax.core.request import Request

Leaving = Literal["", "end", "retry", "recompute", "return", "swap"]
Maybe = Any  # None in those states of a request that have no such thing; no checker knows which


@dataclass(slots=True)
class Instance:
    """One instance of a role: what waits for it, what it holds, what it is doing.

    queue: prompts that hold no memory yet. loading: prompts whose cached beginning is on its way
    from another pool. prompts: prompts in progress, oldest first. ready: requests with their KV
    in `pool`, waiting for a slot. slots: who decodes where. swapped: requests with their KV in
    `host`, waiting for room in `pool`, oldest first. members: the requests that it has work for.
    changed: of all instances those whose load has changed since they were last ranked.
    does: its job. to: the job that it will have; another one while it drains.
    """

    name: str
    role: Role
    does: Does
    to: Does
    pool: Ledger
    host: Ledger | None = None
    queue: deque[int] = field(default_factory=deque)
    loading: dict[int, None] = field(default_factory=dict)
    prompts: deque[int] = field(default_factory=deque)
    ready: deque[int] = field(default_factory=deque)
    swapped: deque[int] = field(default_factory=deque)
    slots: list[int | None] = field(default_factory=list)
    free_slots: int = 0
    running: int = 0  # steps dispatched and not done
    landing: int = 0  # requests placed here that have not decoded yet
    members: dict[int, None] = field(default_factory=dict)
    prompt_tokens: int = 0  # of prompts sent here and not computed yet
    queued_tokens: int = 0  # of the prompts in `queue`
    output_tokens: int = 0  # of requests that decode here, from first to last
    up: bool = True
    returns: bool = True  # up, or down for a while only
    changed: dict[str, "Instance"] = field(default_factory=dict, repr=False)

    @property
    def has_news(self) -> bool:
        """Whether somebody waits who may be in its next step."""
        seats = self.free_slots > 0 and bool(self.ready or self.swapped)
        return seats or bool(self.queue or self.prompts)

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts may be sent here, as far as its job goes."""
        return self.does != "decode" and self.to != "decode"

    @property
    def takes_decodes(self) -> bool:
        """Whether requests may come here to decode, as far as its job goes."""
        return self.does != "prefill" and self.to != "prefill"

    @property
    def load(self) -> Load:
        tokens = self.prompt_tokens + self.output_tokens
        return Load(len(self.members), tokens, prompts=self.prompt_tokens)

    def add_member(self, rid: int) -> None:
        self.members[rid] = None
        self.changed[self.name] = self

    def drop_member(self, rid: int) -> None:
        self.members.pop(rid, None)
        self.changed[self.name] = self

    def add_tokens(self, *, prompt: int = 0, output: int = 0) -> None:
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.changed[self.name] = self


@dataclass(slots=True)
class Tracked:
    """Where an open request stands.

    Its text is the prompt and the tokens generated so far; `length` of it must be computed by
    prefill before the request decodes (the prompt, or more where KV is computed again). Positions
    [0, reused) of those were found in a cache. `busy` counts steps and sends that touch its pages;
    `leaving` is what happens once nothing does.
    """

    request: Request
    age: int  # how many requests arrived before
    length: int
    prefill: Maybe = None  # the Instance where its text is computed
    decode: Maybe = None  # the Instance where it decodes
    source: Maybe = None  # KVHandle in the pool of `prefill`
    target: Maybe = None  # KVHandle in the pool of `decode`; the same object if that is one pool
    loan: Maybe = None  # KVHandle of its prefix in another pool, while that is loaded from there
    lender: Maybe = None  # an Instance of that pool
    load_lost: bool = False
    swap: Maybe = None  # KVHandle in host memory
    blocks: list[int] = field(default_factory=list)  # hashes of its text's whole blocks
    tail: tuple[int, ...] = ()  # the text's tokens after those
    reused: int = 0
    skip: int = 0  # leading tokens that the target pool had already
    dispatched: int = 0  # tokens of `length` given to a step
    computed: int = 0  # tokens of `length` whose step is done
    asked: int = 0  # output tokens that steps have been asked for
    generated: int = 0  # output tokens seen
    slot: Maybe = None  # int
    joined: bool = False  # took its slot and has not decoded in it yet
    credit: bool = False  # counts in `decode.landing`
    seated: bool = False  # is in `decode.ready` or in a slot
    busy: int = 0
    flying: dict[int, Send] = field(default_factory=dict)
    unsent: list[Piece] = field(default_factory=list)
    prefill_tokens: int = 0  # of `prefill.prompt_tokens`
    decode_tokens: int = 0  # of `decode.output_tokens`
    leaving: Leaving = ""
    ended: bool = False
    spoiled: bool = False  # a piece of its KV did not arrive
    losses: int = 0

    @property
    def rid(self) -> int:
        return self.request.id

    def owe(self, tokens: int) -> None:
        """So many tokens of its text are to be computed where it is prefilled."""
        self.prefill.add_tokens(prompt=tokens - self.prefill_tokens)
        self.prefill_tokens = tokens

    @property
    def prefilled(self) -> bool:
        return self.computed == self.length

    @property
    def decodes(self) -> bool:
        """Whether it wants more tokens than the one that prefill gives."""
        return self.request.max_tokens > self.text_tokens + 1

    @property
    def text_tokens(self) -> int:
        """Output tokens that were part of the text when its prefill began."""
        return self.length - self.request.prompt_len

    @property
    def stored(self) -> int:
        """Tokens whose KV its decode pool holds: all but the newest."""
        return self.request.prompt_len + self.generated - 1

    @property
    def in_place(self) -> bool:
        return self.source is not None and self.source is self.target

    @property
    def arrived(self) -> bool:
        """All its KV is where it decodes."""
        return self.prefilled and self.target is not None and not self.flying and not self.unsent


@dataclass(slots=True)
class RunningStep:
    """A step that is not done, and the pieces that leave when it is."""

    step: Step
    leave_after: list[tuple[int, Piece]]


def build_instances(
    placement: Placement, layouts: dict[str, str], cache: Cache, changed: dict[str, Instance]
) -> dict[str, Instance]:
    """One Instance per instance of each role, named `role/i`; shared pools are one Ledger.
    changed: where all of them note that their load has changed."""
    ledgers: dict[str, Ledger] = {}
    instances = {}
    for name in instances_of(placement):
        role, owner = placement[role_of(name)], pool_owner(name, placement)
        pool = placement[role_of(owner)].pool
        if owner not in ledgers:
            ledgers[owner] = Ledger(
                owner,
                pages=pool.pages,
                page_size=pool.page_size,
                form=pool.form,
                classes=pool.classes,
                layout=layouts.get(owner, ""),
                cache=cache if cache.prefix else None,
            )
        host = None
        if role.swap_tokens:
            pages = role.swap_tokens // pool.page_size
            host = Ledger(f"{name}.host", pages=pages, page_size=pool.page_size, form="pages")
        slots = role.slots if role.decodes_here else 0
        instances[name] = Instance(
            name,
            role,
            role.does,
            role.does,
            ledgers[owner],
            host,
            slots=[None] * slots,
            free_slots=slots,
            changed=changed,
        )
    return instances
