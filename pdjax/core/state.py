"""The scheduler's books: one Tracked per open request, one Instance per running program pair."""

from collections import deque
from dataclasses import dataclass, field

from pdjax.core.blocks import Ledger
from pdjax.core.config import Placement, Role, instances_of, pool_owner, role_of
from pdjax.core.events import KVHandle, Step
from pdjax.core.policies.routing import Load
from pdjax.core.policies.transfer import Piece
from pdjax.core.request import Request


@dataclass(slots=True)
class Instance:
    """One instance of a role: what waits for it, what it holds, what it is doing.

    queue: prompts that hold no memory yet. prompts: prompts in progress, oldest first.
    ready: requests with their KV in `pool`, waiting for a slot. slots: who decodes where.
    """

    name: str
    role: Role
    pool: Ledger
    queue: deque[int] = field(default_factory=deque)
    prompts: deque[int] = field(default_factory=deque)
    ready: deque[int] = field(default_factory=deque)
    slots: list[int | None] = field(default_factory=list)
    free_slots: int = 0
    running: int = 0  # steps dispatched and not done
    open_requests: int = 0
    open_tokens: int = 0

    @property
    def load(self) -> Load:
        return Load(self.open_requests, self.open_tokens)


@dataclass(slots=True)
class Tracked:
    """Where an open request stands. `busy` counts steps and sends that touch its pages."""

    request: Request
    prefill: Instance
    decode: Instance | None = None
    source: KVHandle | None = None
    target: KVHandle | None = None
    dispatched: int = 0  # prompt tokens given to a step
    computed: int = 0  # prompt tokens whose step is done
    asked: int = 0  # output tokens that steps have been asked for
    generated: int = 0  # output tokens seen
    slot: int | None = None
    busy: int = 0
    sending: int = 0
    unsent: list[Piece] = field(default_factory=list)
    ended: bool = False

    @property
    def prefilled(self) -> bool:
        return self.computed == self.request.prompt_len

    @property
    def decodes_in_place(self) -> bool:
        return self.source is not None and self.source is self.target

    @property
    def arrived_at_target(self) -> bool:
        return self.prefilled and self.target is not None and not self.sending and not self.unsent


@dataclass(slots=True)
class RunningStep:
    """A step that is not done, and the pieces that leave when it is."""

    step: Step
    leave_after: list[tuple[int, Piece]]


def build_instances(placement: Placement, layouts: dict[str, str]) -> dict[str, Instance]:
    """One Instance per instance of each role, named `role/i`; shared pools are one Ledger."""
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
                layout=layouts.get(owner, ""),
            )
        slots = role.slots if role.decodes_here else 0
        instances[name] = Instance(
            name, role, ledgers[owner], slots=[None] * slots, free_slots=slots
        )
    return instances
