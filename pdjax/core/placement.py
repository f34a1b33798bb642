"""Roles, their memory and how they share devices: what a server is made of."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


class ConfigError(ValueError):
    """A config that cannot be served; the message says which values clash and what to change."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(message)


Does = Literal["prefill", "decode", "both"]
JOBS: Mapping[Does, frozenset[str]] = {
    "prefill": frozenset({"prefill"}),
    "decode": frozenset({"decode"}),
    "both": frozenset({"prefill", "decode"}),
}
"""What an instance that does this has to do."""


@dataclass(frozen=True)
class Pool:
    """KV memory of one instance, in pages of `page_size` tokens.

    form: `pages` (a request's pages lie anywhere) or `slab` (they are one contiguous run).
    classes: sizes in tokens of the blocks that `pages` are given out in, for example (8, 32, 128);
        the smallest is `page_size`, each divides the next. Empty: single pages.
    """

    form: Literal["pages", "slab"] = "pages"
    tokens: int = 16384
    page_size: int = 16
    classes: tuple[int, ...] = ()

    def __post_init__(self):
        require(
            self.page_size > 0 and self.tokens >= self.page_size,
            f"a pool of {self.tokens} tokens does not hold one page of {self.page_size}: "
            "set `pool.tokens` >= `pool.page_size` > 0",
        )
        sizes = self.classes
        fit = all(big > small and big % small == 0 for small, big in itertools.pairwise(sizes))
        require(
            not sizes or (self.form == "pages" and sizes[0] == self.page_size and fit),
            f"`pool.classes` {sizes} of a pool of {self.form} with pages of {self.page_size}: use "
            "`pages`, begin with the page size, and let each size divide the next",
        )

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size


@dataclass(frozen=True)
class Role:
    """Instances that do the same work.

    does: `prefill`, `decode` or `both` (collocated).
    tp: devices per instance; each instance gets devices of its own unless `beside` names a role:
        then instance i runs on the devices of that role's instance i.
    pool: the instance's KV memory, unless `pool_of` names a role beside it: then instance i uses
        that instance's pool and a hand-off between them copies nothing.
    slots: requests decoded together. chunk: most prompt tokens per step.
    prefills: most prompts in progress. mixed: one step carries decodes and a chunk; otherwise
        prompts go first.
    steps: decode iterations per dispatch. lag: steps dispatched before the tokens of the step
        before them have been seen (0 or 1).
    growth: output tokens that a request must find room for beside its prompt before it decodes;
        more pages are taken as it goes on. 0: room for all its output, so nothing runs out.
    preempt: what happens to the youngest request when pages run out: its KV is computed again
        here (`recompute`), the request goes back to a prefill instance (`return`), or its KV
        waits in host memory of `swap_tokens` tokens (`swap`; recompute when that is full).
    switches: `does` is what its instances begin with; `Config.switching` can give them other work,
        so they have slots and programs for both.
    """

    does: Does = "both"
    instances: int = 1
    tp: int = 1
    beside: str = ""
    pool: Pool = field(default_factory=Pool)
    pool_of: str = ""
    slots: int = 8
    chunk: int = 512
    prefills: int = 1
    mixed: bool = False
    steps: int = 1
    lag: int = 0
    growth: int = 0
    preempt: Literal["recompute", "return", "swap"] = "recompute"
    swap_tokens: int = 0
    switches: bool = False

    def __post_init__(self):
        for name in ("instances", "tp", "slots", "chunk", "prefills", "steps"):
            value = getattr(self, name)
            require(value >= 1, f"`{name}` of a role is {value}; it must be at least 1")
        require(self.lag in (0, 1), f"`lag` of a role is {self.lag}; it must be 0 or 1")
        require(
            not self.mixed or self.does == "both" or self.switches,
            "`mixed` needs a role that does `both`, or one that `switches`",
        )
        require(
            not self.switches or self.does != "both",
            "a role that does `both` has nothing to switch to: unset `switches`",
        )
        require(self.growth >= 0, f"`growth` of a role is {self.growth}; it must be at least 0")
        require(
            self.preempt != "swap" or self.swap_tokens > 0,
            "a role that preempts by `swap` needs host memory: set `swap_tokens`",
        )

    @property
    def prefills_here(self) -> bool:
        """Whether its instances prefill, now or when they have switched."""
        return self.does != "decode" or self.switches

    @property
    def decodes_here(self) -> bool:
        """Whether its instances decode, now or when they have switched."""
        return self.does != "prefill" or self.switches


Placement = Mapping[str, Role]


def instances_of(placement: Placement) -> tuple[str, ...]:
    """Names `role/i` of all instances, in the placement's order."""
    return tuple(f"{name}/{i}" for name, r in placement.items() for i in range(r.instances))


def role_of(instance: str) -> str:
    """The role that `instance` is one of."""
    return instance.rpartition("/")[0]


def pool_owner(instance: str, placement: Placement) -> str:
    """The instance whose pool `instance` works on: itself, or the one that `pool_of` names."""
    role, _, i = instance.rpartition("/")
    return f"{placement[role].pool_of or role}/{i}"


def check_placement(name: str, placement: Placement) -> None:
    """Raises ConfigError where the roles of a placement do not add up to a server."""
    where = f"placement `{name}`"
    require(
        any(role.does != "decode" for role in placement.values()),
        f"{where} has no role that does `prefill` or `both`",
    )
    require(
        any(role.does != "prefill" for role in placement.values()),
        f"{where} has no role that does `decode` or `both`",
    )
    require(
        len({role.does == "both" for role in placement.values()}) == 1,
        f"{where} mixes roles that do `both` with prefill or decode roles; use one kind",
    )
    for role_name, role in placement.items():
        who = f"{where}, role `{role_name}`"
        _check_sharing(who, role, placement)
        page_size = (placement[role.pool_of] if role.pool_of else role).pool.page_size
        require(
            not role.prefills_here or role.chunk % page_size == 0,
            f"{who}: `chunk` {role.chunk} is not a multiple of `pool.page_size` {page_size}",
        )


def _check_sharing(where: str, role: Role, placement: Placement) -> None:
    for attribute in ("beside", "pool_of"):
        other = getattr(role, attribute)
        if not other:
            continue
        require(
            other in placement and placement[other] is not role,
            f"{where}: `{attribute}` names `{other}`; other roles are "
            f"{sorted(n for n, r in placement.items() if r is not role)}",
        )
        host = placement[other]
        require(
            not getattr(host, attribute),
            f"{where}: `{attribute}` names `{other}`, which itself is beside another role",
        )
        require(
            (role.tp, role.instances) == (host.tp, host.instances),
            f"{where}: shares with `{other}` but has (tp, instances) {(role.tp, role.instances)}, "
            f"not {(host.tp, host.instances)}",
        )
    require(
        not role.pool_of or role.beside == role.pool_of,
        f"{where}: `pool_of` is `{role.pool_of}` but `beside` is `{role.beside}`; "
        "one pool needs one mesh",
    )
    require(
        not role.pool_of or not (role.switches or placement[role.pool_of].switches),
        f"{where}: `pool_of` is `{role.pool_of}`, and one of the two `switches`: an instance that "
        "switches needs a pool of its own",
    )
