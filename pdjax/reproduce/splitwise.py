"""Splitwise (Patel et al., ISCA 2024): clusters of equal power and of equal cost.

Step times are the authors' measurements. `Mode` says how they are read, and how fast KV crosses.
"""

import functools
import re
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pdjax.catalogue import link as published_link
from pdjax.catalogue import model
from pdjax.core.config import Config, Link, Model, Pool, Role, Routing, Switching, Transfer
from pdjax.cost import Cost
from pdjax.costs.batch import send_bytes_of
from pdjax.costs.placement import per_role
from pdjax.costs.splitwise import Measured, as_simulated, read, splitwise
from pdjax.metrics import GROWTH, growth_of, outcomes
from pdjax.report_style import PLACEMENT_COLOURS, WIDTH
from pdjax.reproduce.result import Reproduction, Row, beside, drawn, judged, trace_file
from pdjax.reproduce.served import Draw, poisson
from pdjax.sim import simulate
from pdjax.traces import read_azure

MODEL, TP = "llama2-70b", 8
Mode = Literal["as measured", "as simulated"]
"""`as measured`: every measured point exactly; KV crosses in four layer groups at 200 Gb/s, the
paper's InfiniBand. `as simulated`: as the authors' simulator does it: a decode batch is looked up
by its number of requests on an axis of tokens; each transfer has a link of 200 GiB/s to itself."""
LINKS: Mapping[Mode, Link] = {
    "as measured": Link(bytes_per_s=200e9 / 8),
    "as simulated": published_link("splitwise-sim"),
}

SLOWDOWNS: Mapping[str, Mapping[int, float]] = {
    "TTFT": {50: 2.0, 90: 3.0, 99: 6.0},
    "TBT": {50: 1.25, 90: 1.5, 99: 5.0},
    "E2E": {50: 1.25, 90: 1.5, 99: 5.0},
}
"""Percentile -> most times as long as the same request takes alone on a DGX-A100 (table 6)."""
SCALE = 5
"""Clusters are a fifth of the published ones, and so are rates; what is shown is times five."""

Machines = tuple[str, int]
A100, H100, CAPPED = "a100-80gb", "h100-80gb", "h100-80gb-pcap"


class Cluster(NamedTuple):
    """Machines of eight GPUs that do prompts, and those that do tokens; `both` where none do."""

    prompt: Machines
    token: Machines | None = None

    def __str__(self) -> str:
        parts = [f"{self.prompt[1]} {self.prompt[0]}"]
        if self.token:
            parts.append(f"{self.token[1]} {self.token[0]}")
        return " + ".join(parts)


Design = tuple[Cluster, ...]
"""Candidates, of which the best counts."""

ISO_POWER: Mapping[str, Design] = {
    "Baseline-A100": (Cluster((A100, 14)),),
    "Baseline-H100": (Cluster((H100, 8)),),
    "Splitwise-AA": (Cluster((A100, 9), (A100, 5)),),
    "Splitwise-HH": (Cluster((H100, 5), (H100, 3)),),
    "Splitwise-HA": (Cluster((H100, 5), (A100, 5)),),
    "Splitwise-HHcap": (Cluster((H100, 5), (CAPPED, 4)),),
}
"""A fifth of 70 A100; 40 H100; 45+25; 25+15; 25+26; 25+21 (splitwise-sim, commit 8f99e7d)."""
ISO_POWER_CODE: Mapping[str, Design] = ISO_POWER | {
    "Splitwise-AA": (Cluster((A100, 11), (A100, 3)),),
    "Splitwise-HH": (Cluster((H100, 7), (H100, 1)),),
    "Splitwise-HA": (Cluster((H100, 7), (A100, 2)),),
    "Splitwise-HHcap": (Cluster((H100, 7), (CAPPED, 1)),),
}
"""For code: 55+15 and 35+5 (section 6.2); the others with 35 prompt machines and the power that is
left, as their figure's legend is not at hand."""
ISO_COST: Mapping[str, Design] = {
    "Baseline-A100": (Cluster((A100, 17)),),
    "Baseline-H100": (Cluster((H100, 8)),),
    "Splitwise-AA": tuple(Cluster((A100, 17 - n), (A100, n)) for n in (5, 6, 8)),
    "Splitwise-HH": tuple(Cluster((H100, 8 - n), (H100, n)) for n in (2, 3)),
    "Splitwise-HA": tuple(Cluster((H100, n), (A100, int(4.76 * (8 - n) / 2.21))) for n in (4, 5)),
    "Splitwise-HHcap": tuple(Cluster((H100, 8 - n), (CAPPED, n)) for n in (2, 3)),
}
"""A fifth of 86 A100 and 40 H100, and splits of the same cost (an H100 machine costs 4.76 where one
of A100 costs 2.21); the authors sweep the split, too."""
RATES = tuple(range(10, 81, 2))
"""Requests/s of a fifth of a cluster: the published 50 to 250, and more."""


class Bar(NamedTuple):
    """A design's throughput over another's, as published; None: above 1, no value."""

    name: str
    over: str
    ratio: float | None
    source: str


_TEXT = "Splitwise, ISCA 2024, section 6.2"
_ALL = "Splitwise, ISCA 2024, section 6.4 (all split designs beat both baselines)"
_COST = "Splitwise, ISCA 2024, section 6.3"
BARS: Mapping[tuple[str, str], tuple[Bar, ...]] = {
    ("power", "conv"): (
        Bar("Splitwise-AA", "Baseline-A100", 2.15, f"{_TEXT}, figure 18a"),
        Bar("Splitwise-HA", "Baseline-A100", 1.18, f"{_TEXT}, figure 18a"),
        Bar("Splitwise-HH", "Baseline-H100", None, _ALL),
        Bar("Splitwise-HHcap", "Baseline-H100", None, _ALL),
    ),
    ("power", "code"): (
        Bar("Splitwise-AA", "Baseline-H100", None, _TEXT),
        Bar("Splitwise-HH", "Baseline-H100", None, _TEXT),
        Bar("Splitwise-HHcap", "Baseline-H100", None, _TEXT),
    ),
    ("cost", "conv"): (
        Bar("Splitwise-AA", "Baseline-H100", 1.4, f"{_COST}, figure 18b"),
        Bar("Splitwise-AA", "Splitwise-HH", None, f"{_COST} (AA is best at equal cost)"),
        Bar("Splitwise-AA", "Splitwise-HHcap", None, f"{_COST} (AA is best at equal cost)"),
    ),
}
HEADLINE = 2.35
"""The abstract's gain at equal power and cost; of which design over which is not said."""


# --- serving -----------------------------------------------------------------------------------


@functools.cache
def measured(name: str) -> Measured:
    return read(trace_file("splitwise-sim/perf_model.csv"), MODEL, name, TP)


def independent(trace: str) -> Draw:
    """Prompts and outputs of an Azure trace, each drawn by itself, as the authors do it."""
    path = trace_file(f"azure2023/AzureLLMInferenceTrace_{trace}.csv")
    rows = [row for row in read_azure(path) if row.output_len]
    prompts = np.array([row.prompt_len for row in rows])
    outputs = np.array([row.output_len for row in rows])
    return lambda rng, n: np.stack([rng.choice(prompts, n), rng.choice(outputs, n)], axis=1)


DOES: Mapping[str, Literal["prefill", "decode", "both"]] = {
    "prompt": "prefill",
    "token": "decode",
    "both": "both",
}


def _server(cluster: Cluster, mode: Mode) -> tuple[Config, Cost]:
    """Machines as in the paper: batches of 2048 prompt tokens, 512 requests, decodes beside prompts
    where both are done."""
    link, send_bytes = LINKS[mode], send_bytes_of(model(MODEL))
    parts = {"prompt": cluster.prompt, "token": cluster.token}
    if cluster.token is None:
        parts = {"both": cluster.prompt}
    roles, costs = {}, {}
    for name, part in parts.items():
        assert part is not None
        chip, count = part
        roles[name] = Role(
            does=DOES[name],
            instances=count, tp=TP, pool=Pool(tokens=1_500_000, page_size=256),
            chunk=2048, prefills=512, slots=512, mixed=True, switches=name != "both",
        )  # fmt: skip
        cost_of = splitwise if mode == "as measured" else as_simulated
        costs[name] = cost_of(measured(chip), link, send_bytes)
    config = Config(
        placements={"it": roles},
        model=Model(context=32_768),
        transfer=Transfer(
            schedule="layerwise" if mode == "as measured" else "whole",
            groups=4 if mode == "as measured" else 1,
            link=link,
        ),
        routing=Routing("fewest_tokens", "fewest_tokens"),
        switching=_mixed_pool(cluster),
    )
    return config, per_role(costs, link)


def _mixed_pool(cluster: Cluster) -> Switching:
    """Machines join it, and leave it, at most every 50 ms (the authors' with every request)."""
    return Switching("mixed" if cluster.token else "never", every_s=0.05)


def slowdowns(
    cluster: Cluster, draw: Draw, rate: float, n: int, mode: Mode, seed: int = 0
) -> tuple[dict[str, np.ndarray], bool]:
    """(how many times as long as alone each request took, whether the queue grew)."""
    config, cost = _server(cluster, mode)
    source = poisson(draw, n, rate, seed)
    ends = outcomes(simulate(config, "it", source, cost))
    order = np.argsort(ends.arrival_s)  # ids ascend with arrivals
    alone = measured(A100)
    prompt = np.array([alone.prompt_alone.at(r.prompt_len) for r in source.requests])
    token = np.array([alone.token_alone.at(r.prompt_len) for r in source.requests])
    more = np.array([r.max_tokens - 1 for r in source.requests])
    ttft, tpot = ends.ttft_s[order], ends.tpot_s[order]
    took = {
        "TTFT": ttft / prompt,
        "TBT": (tpot / token)[more > 0],
        "E2E": (ttft + np.nan_to_num(tpot) * more) / (prompt + token * more),
    }
    growth = growth_of(ends.arrival_s, ends.ended_s)
    return took, growth.per_s > GROWTH * rate


def misses(took: Mapping[str, np.ndarray]) -> str:
    """The first percentile that is over its limit, or nothing."""
    for name, limits in SLOWDOWNS.items():
        for percent, limit in limits.items():
            if not np.percentile(took[name], percent) <= limit:
                return f"{name} p{percent}"
    return ""


class Best(NamedTuple):
    """The highest rate within all nine limits (0: none), by which cluster, and what ends it."""

    rate: float
    cluster: Cluster
    why: str


def highest(design: Design, draw: Draw, n: int, mode: Mode, rates: Sequence[float] = RATES) -> Best:
    """Of the best candidate, by bisection over `rates`."""
    return max((_highest(cluster, draw, n, mode, rates) for cluster in design), key=lambda b: b[0])


def _highest(cluster: Cluster, draw: Draw, n: int, mode: Mode, rates: Sequence[float]) -> Best:
    why: dict[float, str] = {}

    def fails(rate: float) -> bool:
        took, growing = slowdowns(cluster, draw, rate, n, mode)
        why[rate] = misses(took) or ("the queue grows" if growing else "")
        return bool(why[rate])

    i = bisect_left(rates, True, key=fails)
    ended = why[rates[i]] if i < len(rates) else f"beyond {SCALE * rates[-1]:g}/s"
    return Best(rates[i - 1] if i else 0.0, cluster, ended)


# --- figures -----------------------------------------------------------------------------------

Found = dict[tuple[str, Mode], dict[str, Best]]
"""(trace, mode) -> design -> its highest rate."""
RUNS: tuple[tuple[str, Mode], ...] = (
    ("conv", "as measured"),
    ("conv", "as simulated"),
    ("code", "as measured"),
)
NEAR = 0.25
"""Most that a ratio may be off, as a share of the published one."""
NEAR_HEADLINE = 1.5
"""Neither is more than so many times the other."""


def iso_power(n: int = 2000, runs: Sequence[tuple[str, Mode]] = RUNS) -> Reproduction:
    """Throughput within the SLO of clusters that draw the power of 40 DGX-H100."""
    return _bars("power", {"conv": ISO_POWER, "code": ISO_POWER_CODE}, n, runs)


def iso_cost(n: int = 2000, runs: Sequence[tuple[str, Mode]] = RUNS[:2]) -> Reproduction:
    """The same of clusters that cost what 40 DGX-H100 do."""
    return _bars("cost", {"conv": ISO_COST}, n, runs)


def _bars(
    equal: str,
    designs: Mapping[str, Mapping[str, Design]],
    n: int,
    runs: Sequence[tuple[str, Mode]],
) -> Reproduction:
    """designs: by trace."""
    found: Found = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for trace, mode in runs:
            draw = independent(trace)
            found[trace, mode] = {
                name: highest(design, draw, n, mode) for name, design in designs[trace].items()
            }
    rows = [row for (trace, mode), best in found.items() for row in _rows(equal, trace, mode, best)]
    return Reproduction(
        title=f"Splitwise at equal {equal}: requests/s within nine limits on slow-down",
        samples=f"{n:,} requests per rate, one seed; rates in steps of {SCALE * 2}/s of a whole "
        "cluster, so ratios are good to a step; no interval",
        rows=tuple(rows),
        figure=drawn(lambda: _draw(equal, found)),
        caption="Highest rate at which TTFT, TBT and E2E are within their limits at the median, "
        "p90 and p99. Black marks: the published ratio, times our bar of the baseline it is over. "
        "`as simulated` reads the same table as the authors' simulator does.",
        notes=(
            "Prompts and outputs are drawn independently of each other, as published. Clusters "
            "and rates are a fifth of the published ones; smaller ones even out less: rates are "
            "low bounds.",
            "Prompts longer than 2048 tokens are computed in chunks, which splitwise-sim does "
            "not do; decodes beside a prompt count as tokens of it.",
            "The limits and clusters are from splitwise-sim; the table is llama2-70b, tp 8.",
            "Chips differ as much as designs: see Baseline-H100 over Baseline-A100.",
            f"In some steps beyond what was measured, and extrapolated: {_quantities(told)}.",
        ),
    )


def _rows(equal: str, trace: str, mode: Mode, best: Mapping[str, Best]) -> list[Row]:
    where = f"{trace}, {mode}"
    rows = [
        beside(
            f"{where}: {name}, ended by {at.why}", "curve only", SCALE * at.rate,
            source=f"figures 16 and 18; a fifth of it: {at.cluster}", unit="requests/s",
        )
        for name, at in best.items()
    ]  # fmt: skip
    rows += [_bar_row(where, bar, _times(best[bar.name], best[bar.over]), equal)
             for bar in BARS[equal, trace]]  # fmt: skip
    a100, h100 = best["Baseline-A100"], best["Baseline-H100"]
    what = f"{where}: Baseline-H100 over Baseline-A100"
    rows.append(beside(what, "not given", _times(h100, a100), source="not published"))
    if equal == "power":
        rows.append(_headline(where, best))
    return rows


def _bar_row(where: str, bar: Bar, ratio: float | str, equal: str) -> Row:
    """A gain is met where there is one, and a published value is within NEAR of ours."""
    holds = isinstance(ratio, float) and ratio > 1
    criterion = f"above 1, at equal {equal}"
    if bar.ratio is not None:
        holds = holds and abs(float(ratio) - bar.ratio) <= NEAR * bar.ratio
        criterion = f"above 1 and within {100 * NEAR:g} %"
    return judged(
        f"{where}: {bar.name} over {bar.over}", "above 1" if bar.ratio is None else bar.ratio,
        ratio, holds, criterion=criterion, source=bar.source,
    )  # fmt: skip


def _headline(where: str, best: Mapping[str, Best]) -> Row:
    split = {name: at for name, at in best.items() if name.startswith("Splitwise")}
    top = max(split, key=lambda name: split[name].rate)
    ratio = _times(best[top], best["Baseline-A100"])
    holds = isinstance(ratio, float) and (
        HEADLINE / NEAR_HEADLINE <= ratio <= HEADLINE * NEAR_HEADLINE
    )
    return judged(
        f"{where}: {top} (the best) over Baseline-A100", HEADLINE, ratio, holds,
        criterion=f"within a factor of {NEAR_HEADLINE:g}", source="Splitwise, ISCA 2024, abstract",
    )  # fmt: skip


def _times(one: Best, other: Best) -> float | str:
    return one.rate / other.rate if other.rate else "the latter has none"


def _quantities(told: Sequence[warnings.WarningMessage]) -> str:
    """What the warnings of pdjax.costs.domain are about."""
    found = (re.search(r"asked for \S+ (.+?);", str(warning.message)) for warning in told)
    return ", ".join(sorted({match[1] for match in found if match})) or "nothing"


def _draw(equal: str, found: Found) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axes, ((trace, mode), best) in zip(panels, found.items(), strict=True):
        names = list(best)
        colours = [PLACEMENT_COLOURS[0] if "Splitwise" in name else "#999999" for name in names]
        axes.bar(range(len(best)), [SCALE * at.rate for at in best.values()], color=colours)
        for bar in BARS[equal, trace]:
            if bar.ratio is not None:
                height = SCALE * best[bar.over].rate * bar.ratio
                axes.plot(names.index(bar.name), height, "k_", markersize=22, markeredgewidth=2)
        axes.set_xticks(range(len(best)), names, rotation=35, ha="right")
        axes.set_title(f"{trace}, {mode}")
    panels[0].set_ylabel("requests/s within the SLO")
    return figure
