"""How many chips for prefill and how many for decode, and whether to separate them at all.

A config's placements are forms to be sized: what they say of instances, tp and pool memory is
replaced. Each form in each size that fits the chips is a candidate. A closed form bounds its rate,
and the goodput of those that may be their form's best is searched in virtual time.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from pdjax.catalogue import Chip, Shape
from pdjax.core.config import Config, Placement, Role
from pdjax.core.policies.batching import Prompt, plan_chunks
from pdjax.cost import Cost
from pdjax.costs.batch import Batch, send_bytes_of
from pdjax.costs.placement import per_role
from pdjax.costs.roofline import Roofline, on_chip, roofline
from pdjax.goodput import goodput, serve_at, simulated
from pdjax.workload import make_source

MARGIN = 1.2
"""The closed form takes every request for a mean one: a candidate is left out only where this
many times as much would still be less than another's goodput."""
SAMPLE = 64
"""Prompts that are looked at one by one."""


class PlanError(ValueError):
    """Nothing to choose from; one line."""


@dataclass(frozen=True)
class Hardware:
    """What there is to divide. tps: sizes of instances to try. memory: share of a chip's that
    weights and KV may take (vLLM's default)."""

    shape: Shape
    chip: Chip
    chips: int
    tps: tuple[int, ...] = (1, 2, 4, 8)
    memory: float = 0.9

    def seconds(self, tp: int, batch: Batch) -> float:
        return self._roofline(tp).seconds(self.shape, batch)

    def cost(self, config: Config, placement: Placement) -> Cost:
        """Every role's steps as the roofline of its tp says, over the config's link."""
        link, send_bytes = config.transfer.link, send_bytes_of(self.shape)
        costs = {
            name: roofline(self._roofline(role.tp), self.shape, link, send_bytes)
            for name, role in placement.items()
        }
        return per_role(costs, link)

    def kv_tokens(self, tp: int) -> int:
        """Tokens of KV that fit beside the weights of one instance; negative: weights do not."""
        free = self.memory * self.chip.hbm_bytes - 2 * self.shape.parameters / tp
        return int(free * min(tp, self.shape.attention.kv_shares) / self.shape.kv_token_bytes())

    def _roofline(self, tp: int) -> Roofline:
        name = f"{self.shape.name} on {self.chip.name}"
        return Roofline(name=name, coefficients=on_chip(self.chip), tp=tp)


@dataclass(frozen=True)
class Candidate:
    """A form in one size. bound: requests per second that it would serve at best, by closed form;
    why: what keeps it from serving at all, where that is 0."""

    form: str
    placement: Placement
    bound: float
    why: str = ""

    @property
    def chips(self) -> int:
        return sum(role.instances * role.tp for role in self.placement.values())

    @property
    def name(self) -> str:
        sizes = (f"{r.instances} {name} tp{r.tp}" for name, r in self.placement.items())
        return f"{self.form}: {' + '.join(sizes)}"


class Result(msgspec.Struct, frozen=True):
    """A candidate's goodput and its interval (requests per second), or why it was not searched.

    requests: served at every rate, over all seeds. in_time: share of them at the goodput; growth:
    of the queue there, as a share of what arrives. ended: what is wrong at the next rate above.
    """

    name: str
    form: str
    chips: int
    bound: float
    rate: float = 0.0
    low: float | None = None
    high: float | None = None
    requests: int = 0
    in_time: float = 0.0
    growth: float = 0.0
    ended: str = ""
    skipped: str = ""

    @property
    def per_chip(self) -> float:
        return self.rate / self.chips

    @property
    def interval(self) -> tuple[float, float]:
        """Of the goodput per chip; everything, where seeds do not say."""
        low, high = (0.0 if self.low is None else self.low), (self.high or float("inf"))
        return low / self.chips, high / self.chips


# --- candidates --------------------------------------------------------------------------------


def candidates(config: Config, hardware: Hardware) -> list[Candidate]:
    """Every form in every size to which no instance can be added, the most promising per chip
    first. Raises PlanError where there is none."""
    mean = _mean_requests(config)
    found = []
    for form, roles in config.placements.items():
        for tps in itertools.product(hardware.tps, repeat=len(roles)):
            for counts in _counts(tps, hardware.chips):
                placement = _sized(roles, tps, counts, hardware)
                bound, why = _bound(config, placement, hardware, mean)
                found.append(Candidate(form, placement, bound, why))
    if not found:
        raise PlanError(
            f"{hardware.chips} chips hold no instance of each role with tp {hardware.tps}: "
            "give more chips or a smaller tp"
        )
    return sorted(found, key=lambda c: c.bound / c.chips, reverse=True)


def _counts(tps: Sequence[int], chips: int) -> Iterator[tuple[int, ...]]:
    """Instances of each role, at least one, such that none can be added."""
    ranges = (range(1, chips // tp + 1) for tp in tps)
    for counts in itertools.product(*ranges):
        left = chips - sum(n * tp for n, tp in zip(counts, tps, strict=True))
        if 0 <= left < min(tps):
            yield counts


def _sized(
    roles: Placement, tps: Sequence[int], counts: Sequence[int], hardware: Hardware
) -> Placement:
    def size(role: Role, tp: int, count: int) -> Role:
        tokens = max(hardware.kv_tokens(tp), role.pool.page_size)
        return replace(role, tp=tp, instances=count, pool=replace(role.pool, tokens=tokens))

    sized = map(size, roles.values(), tps, counts)
    return dict(zip(roles, sized, strict=True))


# --- the closed form ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Means:
    """Of the requests to be served. decodes: tokens after the first. context: keys that such a
    token sees; held: tokens that its request has pages for. prompts: their lengths."""

    prompts: tuple[int, ...]
    prompt: float
    decodes: float
    context: float
    held: float


def _mean_requests(config: Config) -> Means:
    source = make_source(
        config.workload, config.seed, encode=None, vocab=1, context=config.model.context, eos=()
    )
    prompt = np.array([r.prompt_len for r in source.requests], float)
    decodes = np.array([r.max_tokens - 1 for r in source.requests], float)
    weights = decodes if decodes.any() else None
    return Means(
        tuple(r.prompt_len for r in source.requests),
        float(prompt.mean()),
        float(decodes.mean()),
        float(np.average(prompt + (decodes + 1) / 2, weights=weights)),
        float(np.average(prompt + decodes, weights=weights)),
    )


def _bound(
    config: Config, placement: Placement, hardware: Hardware, mean: Means
) -> tuple[float, str]:
    """Requests per second: the smaller of what all prefill and what all decode instances can do;
    and what is wrong where that is 0."""
    for name, role in placement.items():
        room = hardware.kv_tokens(role.tp)
        if room < config.model.context:
            return 0.0, f"`{name}` with tp {role.tp} has no room for {config.model.context} tokens"
    rates = {"prefill": 0.0, "decode": 0.0, "both": 0.0}
    some = mean.prompts[:: max(1, len(mean.prompts) // SAMPLE)]
    for role in placement.values():
        alone_s = np.array([_prefill_s([length], role, hardware) for length in some])
        early = float(np.mean(alone_s <= config.slo.ttft_s))
        if role.prefills_here and early < config.slo.target:
            return 0.0, f"only {early:.0%} of prompts alone are prefilled within the TTFT"
        rates[role.does] += role.instances * _rate(config, role, hardware, mean)
    bound = rates["both"] or min(rates["prefill"], rates["decode"])
    return bound, "" if bound else "one request alone takes longer than the TPOT"


def _rate(config: Config, role: Role, hardware: Hardware, mean: Means) -> float:
    """Of one instance that always has work, with as many requests decoding together as its slots,
    its memory and the TPOT allow."""
    prefill_s = 0.0
    if role.prefills_here:
        prefill_s = _prefill_s(mean.prompts, role, hardware) / len(mean.prompts)
    if not role.decodes_here or not mean.decodes:
        return 1 / prefill_s
    most = min(role.slots, int(role.pool.tokens / mean.held))
    rate = 0.0
    for n in range(1, most + 1):
        token_s = _token_s(n, role, hardware, mean, prefill_s)
        if token_s > config.slo.tpot_s:
            break
        rate = n / (mean.decodes * token_s)
    return rate


def _token_s(n: int, role: Role, hardware: Hardware, mean: Means, prefill_s: float) -> float:
    """Mean seconds from token to token where `n` requests decode, and as many prompts are
    prefilled in between, or in the same steps, as requests end."""
    prompts = n / mean.decodes  # that begin per token of all
    if not role.mixed:
        return hardware.seconds(role.tp, Batch((), n, n * mean.context)) + prompts * prefill_s
    tokens = prompts * mean.prompt
    if tokens > role.chunk:
        return float("inf")
    chunk = (max(0.0, mean.prompt - tokens) / 2, tokens)  # halfway through the prompt
    return hardware.seconds(role.tp, Batch((chunk,), n, n * mean.context))  # pyright: ignore


def _prefill_s(lengths: Sequence[int], role: Role, hardware: Hardware) -> float:
    """Prompts one after the other, in steps as full as can be."""
    waiting = [Prompt(rid, 0, length) for rid, length in enumerate(lengths)]
    total, first = 0.0, 0
    while first < len(waiting):
        chunks = plan_chunks(waiting[first : first + role.prefills], budget=role.chunk, page_size=1)
        total += hardware.seconds(role.tp, Batch(tuple((c.start, c.length) for c in chunks)))
        for chunk in chunks:
            waiting[chunk.rid] = waiting[chunk.rid]._replace(done=chunk.start + chunk.length)
        first += sum(chunk.last for chunk in chunks)
    return total


# --- the search --------------------------------------------------------------------------------


def search(
    config: Config,
    hardware: Hardware,
    *,
    seeds: Sequence[int],
    tolerance: float,
    known: Mapping[str, Result] = {},
) -> Iterator[Result]:
    """One Result per candidate, in their order. A candidate is left out where MARGIN times its
    bound is less per chip than what another of its form reached, or where it fails at as much.
    known: results of an earlier, interrupted search, by name."""
    best: dict[str, float] = {}
    for candidate in candidates(config, hardware):
        result = known.get(candidate.name)
        if result is None:
            reached = best.get(candidate.form, 0.0)
            result = _result(config, hardware, candidate, reached, seeds, tolerance)
        best[candidate.form] = max(best.get(candidate.form, 0.0), result.per_chip)
        yield result


def _result(
    config: Config,
    hardware: Hardware,
    candidate: Candidate,
    reached: float,
    seeds: Sequence[int],
    tolerance: float,
) -> Result:
    result = Result(candidate.name, candidate.form, candidate.chips, candidate.bound)
    at_best = MARGIN * candidate.bound / candidate.chips
    if not candidate.bound:
        return msgspec.structs.replace(result, skipped=candidate.why)
    if at_best < reached:
        why = f"at best {at_best:.3g} requests/s per chip, another has {reached:.3g}"
        return msgspec.structs.replace(result, skipped=why)
    sized = config.replace(placements={"it": candidate.placement})
    serve = functools.cache(simulated(sized, "it", hardware.cost(sized, candidate.placement)))
    start = reached * candidate.chips or candidate.bound
    if reached and not (point := serve_at(serve, config.slo, start, seeds)).counts:
        why = f"at {start:.4g} requests/s, as much per chip as another reaches: {point.why}"
        return msgspec.structs.replace(result, skipped=why)
    found = goodput(serve, config.slo, start=start, seeds=seeds, tolerance=tolerance)
    return msgspec.structs.replace(
        result,
        rate=found.rate,
        low=None if np.isnan(found.low) else found.low,
        high=None if np.isnan(found.high) else found.high,
        requests=found.requests,
        in_time=found.at.attainment.share if found.at else 0.0,
        growth=found.at.growth if found.at else 0.0,
        ended=f"{found.beyond.why} at {found.fails_at:.4g}/s",
    )


def best_of_forms(results: Iterable[Result]) -> list[Result]:
    """The one with the most goodput per chip, of each form that has any; the best form first."""
    best: dict[str, Result] = {}
    for result in sorted(results, key=lambda r: r.per_chip):
        if result.rate:
            best[result.form] = result
    return sorted(best.values(), key=lambda r: r.per_chip, reverse=True)


def separates(config: Config, form: str) -> bool:
    return all(role.does != "both" for role in config.placements[form].values())


def verdict(results: Iterable[Result], config: Config) -> str:
    """What to do, in one line: the best form that separates prefill from decode against the best
    that does not, whichever of the two wins."""
    best = best_of_forms(results)
    if not best:
        return "No candidate meets the SLO at any rate: relax it, or give larger instances."
    first = best[0]
    separate = separates(config, first.form)
    said = "Separate prefill and decode" if separate else "Do not separate prefill from decode"
    line = f"{said}: {first.name} serves {first.per_chip:.3g} requests/s per chip"
    others = [r for r in best if separates(config, r.form) != separate]
    if not others:
        other = "one that does not separate them" if separate else "one that separates them"
        return f"{line}; of the other kind ({other}) none meets the SLO."
    second = others[0]
    line += f", {first.per_chip / second.per_chip:.2f} times as many as {second.name}"
    unsure = second.interval[1] > first.interval[0]
    return line + (" (their intervals overlap: more seeds would tell)." if unsure else ".")


# --- results on disk ---------------------------------------------------------------------------


def read_results(path: Path, setting: str) -> dict[str, Result]:
    """Results of an earlier search, by name; a file that does not exist has none, and one that was
    cut short has those before the cut. Raises PlanError where it is of another setting."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, setting, [])
        return {}
    written, *lines = path.read_text().splitlines() or [""]
    if written != setting:
        raise PlanError(
            f"`{path}` has results of another config, chip, model or search: delete it, or set "
            "`--workdir` to another folder"
        )
    results = {}
    for line in lines:
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.MsgspecError:
            break
        results[result.name] = result
    _write(path, setting, results.values())
    return results


def _write(path: Path, setting: str, results: Iterable[Result]) -> None:
    path.write_text(setting + "\n")
    for result in results:
        add_result(path, result)


def add_result(path: Path, result: Result) -> None:
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")
