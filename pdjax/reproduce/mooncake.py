"""Mooncake (Qin et al., FAST 2025): what its cache hits, and what its schedulers make of that.

Both need its released traces, which say by chained block ids what prompts share.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pdjax.catalogue import CHIPS, MODELS
from pdjax.core.config import (
    Cache,
    Config,
    Estimate,
    Link,
    Model,
    Pool,
    Role,
    Routing,
    Transfer,
)
from pdjax.core.ledger import Ledger
from pdjax.cost import Cost
from pdjax.costs.batch import send_bytes_of
from pdjax.costs.roofline import Roofline, on_chip, roofline
from pdjax.report_style import LINE_STYLES, PLACEMENT_COLOURS, WIDTH, log_ticks
from pdjax.reproduce.replay import Replayed, estimate_of, replay, requests_of
from pdjax.reproduce.result import Reproduction, Row, beside, drawn, judged, near, trace_file
from pdjax.traces import BLOCK, TraceRow, read_mooncake

TRACES = {
    "conversation": "mooncake/conversation_trace.jsonl",
    "synthetic": "mooncake/synthetic_trace.jsonl",
}
MILLION = 1_000_000

# --- Figure 9 and table 2: hit rate against capacity -------------------------------------------

TABLE_2 = {"conversation": (12031, 12035, 343, 40), "synthetic": (3993, 15325, 149, 66)}
"""Requests, mean prompt and output tokens, cache ratio in percent."""
AT_3M = {"conversation": 41, "synthetic": 46}
"""Figure 9: percent of the highest hit rate that a cache of 3 million tokens reaches."""
CAPACITIES = tuple(round(m * MILLION) for m in (0.1, 0.3, 1, 3, 10, 20, 50, 100))  # tokens
COUNTED = {
    "conversation": {1000: 4.5, 10_000: 21.1, 30_000: 32.6, 50_000: 35.5, 100_000: 36.4},
    "synthetic": {1000: 8.3, 10_000: 42.4, 30_000: 62.4, 50_000: 64.0, 100_000: 64.0},
}
"""Blocks of capacity -> percent of blocks that plain LRU hits."""
INFINITE = {"conversation": (36.6, 37.4), "synthetic": (64.0, 65.1)}
"""Percent of blocks and of tokens that an infinite cache hits."""
COUNT = "another count of the released traces: plain LRU in a dict, by chained ids"


def fig9(
    capacities: Sequence[int] = CAPACITIES, blocks: Sequence[int] = tuple(COUNTED["synthetic"])
) -> Reproduction:
    """Hit rate of one LRU cache of so many tokens, and of an infinite one, on both traces. 3 and 50
    million tokens should be among them. blocks: capacities, of those in COUNTED, to be counted
    again. Raises TraceError without the traces."""
    rows: list[Row] = []
    curves: dict[str, list[float]] = {}
    for name, file in TRACES.items():
        trace = read_mooncake(trace_file(file))
        everything = len({block for row in trace for block in row.blocks}) * BLOCK
        most = hit_rate(trace, everything)
        curve = {capacity: hit_rate(trace, capacity).blocks for capacity in capacities}
        curves[name] = [100 * rate for rate in curve.values()]
        rows += _hit_rows(name, trace, curve, most)
        rows += _counted_rows(name, trace, most, blocks)
    return Reproduction(
        title="Mooncake figure 9: cache hit rate against capacity",
        samples="every request of both traces (12,031 and 3,993), once, in order; no chance in it",
        rows=tuple(rows),
        figure=drawn(lambda: _hit_figure(capacities, curves)),
        caption="Share of the trace's blocks that one LRU cache has, against its size (3 million "
        "tokens: 1 TB of DRAM at 320 KB a token). The paper gives shares of the highest rate.",
        notes=(
            "A hit is a leading block of 512 tokens that is in the cache when the request comes; "
            "the last, partial block of a prompt counts as one, as its id does in the trace. "
            "Requests come one after the other, so nothing that is in use stands in the way.",
            "Our cache evicts the end of a prompt before its beginning, without which the end is "
            "of no use. Plain LRU with the beginning first hits up to 0.16 points less, on the "
            "smallest caches; what the other count has there lies between the two.",
            "Cache ratios are those of an infinite cache. Table 2 has more than one finds in the "
            "released traces, by blocks or by tokens; why is not known.",
            "The trace of tools and agents (figure 9: 75 %) is not at hand.",
        ),
    )


class Hits(NamedTuple):
    """Shares of a trace's blocks, and of its prompt tokens, that a cache has when they come."""

    blocks: float
    tokens: float


def hit_rate(trace: Sequence[TraceRow], capacity: int) -> Hits:
    """Of an LRU cache of `capacity` tokens. A prompt that is larger than the cache finds nothing
    and leaves nothing."""
    cache = Cache(prefix=True, block=BLOCK)
    pool = Ledger("cache", pages=capacity // BLOCK, page_size=BLOCK, form="pages", cache=cache)
    blocks = tokens = 0
    for rid, row in enumerate(trace):
        handle = pool.hold(rid, row.prompt_len, blocks=row.blocks)
        if handle is not None:
            blocks += handle.shared
            tokens += min(handle.shared * BLOCK, row.prompt_len)
            pool.publish(handle, row.blocks, now_ns=0)
            pool.release(handle)
    return Hits(
        blocks / sum(len(row.blocks) for row in trace),
        tokens / sum(row.prompt_len for row in trace),
    )


def _hit_rows(
    name: str, trace: Sequence[TraceRow], curve: Mapping[int, float], most: Hits
) -> Iterator[Row]:
    requests, prompt, output, ratio = TABLE_2[name]
    table, figure = "FAST 2025, table 2", "FAST 2025, figure 9"
    yield near(f"{name}: requests", requests, len(trace), within=0, source=table)
    for what, published, lengths in (
        ("prompt", prompt, [row.prompt_len for row in trace]),
        ("output", output, [row.output_len for row in trace]),
    ):
        mean = float(np.mean(lengths))
        yield near(f"{name}: mean {what}", published, round(mean), within=0, source=table)
    for what, share in zip(most._fields, most, strict=True):
        yield judged(
            f"{name}: cache ratio, of {what}", ratio, 100 * share, round(100 * share) == ratio,
            criterion="equal to the percent", source=table, unit="%",
        )  # fmt: skip
    for capacity, published, within in ((3 * MILLION, AT_3M[name], 5), (50 * MILLION, 100, 2)):
        if capacity in curve:
            ours = 100 * curve[capacity] / most.blocks
            yield judged(
                f"{name}: of that at {capacity // MILLION} M tokens", published, ours,
                abs(ours - published) <= within,
                criterion=f"within {within} points", source=figure, unit="%",
            )  # fmt: skip


def _counted_rows(
    name: str, trace: Sequence[TraceRow], most: Hits, blocks: Sequence[int]
) -> Iterator[Row]:
    """Ours against plain LRU, which was noted to a tenth of a percent."""
    for n in blocks:
        percent, ours = COUNTED[name][n], 100 * hit_rate(trace, n * BLOCK).blocks
        yield judged(
            f"{name}: hits, {n:,} blocks", percent, round(ours, 2),
            0 <= round(ours - percent, 1) <= 0.1,
            criterion="equal, or 0.1 points more by order of eviction", source=COUNT, unit="%",
        )  # fmt: skip
    for what, percent, share in zip(most._fields, INFINITE[name], most, strict=True):
        yield judged(
            f"{name}: hits, infinite cache, of {what}", percent, round(100 * share, 2),
            round(100 * share, 1) == percent, criterion="equal to a tenth of a percent",
            source=COUNT, unit="%",
        )  # fmt: skip


def _hit_figure(capacities: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    axes = figure.subplots()
    for i, (name, percent) in enumerate(curves.items()):
        colour = PLACEMENT_COLOURS[i]
        millions = [capacity / MILLION for capacity in capacities]
        axes.semilogx(
            millions, percent, marker="o", color=colour, linestyle=LINE_STYLES[i], label=name
        )
        counted = [n * BLOCK / MILLION for n in COUNTED[name]]
        axes.plot(counted, list(COUNTED[name].values()), "+", color=colour, markersize=11)
        axes.plot(3, AT_3M[name] / 100 * max(percent), "x", color=colour, markersize=9)
        axes.axhline(INFINITE[name][0], color=colour, linewidth=0.8, linestyle=":")
    axes.set(xlabel="capacity (million tokens)", ylabel="blocks found (%)", ylim=(0, None))
    log_ticks(axes.xaxis)
    handles, labels = axes.get_legend_handles_labels()
    marks = {"+": "plain LRU, another count", "x": "figure 9 at 3 M tokens"}
    handles += [Line2D([], [], color="#444444", marker=mark, linestyle="") for mark in marks]
    handles.append(Line2D([], [], color="#444444", linestyle=":"))
    axes.legend(handles, [*labels, *marks.values(), "infinite cache, another count"])
    return figure


# --- Figure 5: four schedulers -----------------------------------------------------------------

FIG5 = {  # scheduler: mean TTFT in seconds, router, loads from other pools
    "random": (19.65, "random", False),
    "load balance": (5.27, "fewest_tokens", False),
    "local cache aware": (3.58, "shortest_ttft", False),
    "global cache aware": (3.07, "shortest_ttft", True),
}
NICS = Link(bytes_per_s=4 * 25e9)  # of a node: 4 x 200 Gb/s
DRAM_TOKENS = 3 * MILLION  # 1 TB at 320 KB a token
TP = 8


def fig5(requests: int = 12031, instances: int = 8) -> Reproduction:
    """Mean TTFT of four schedulers on the first `requests` of the conversation trace, on so many
    instances for prefill and as many for decode. Raises TraceError without the trace."""
    trace = read_mooncake(trace_file(TRACES["conversation"]))[:requests]
    sent = requests_of(trace, block=BLOCK)
    cost, estimate = _a800()
    found: dict[str, Replayed] = {}
    for name, (_, router, remote) in FIG5.items():
        config = _cluster(instances, router, remote, estimate)
        found[name] = replay(config, "cluster", sent, cost)
    return Reproduction(
        title="Mooncake figure 5: mean TTFT of four schedulers",
        samples=f"{requests:,} requests of a trace at its own times, one replay; so no interval",
        rows=tuple(_scheduler_rows(found)),
        figure=drawn(lambda: _scheduler_figure(found)),
        caption="Left: mean TTFT, published (grey) and simulated. Right: the distribution of "
        "simulated TTFTs.",
        notes=(
            "Stand-ins: the conversation trace (the figure does not name its trace), "
            f"{instances} prefill and {instances} decode nodes of 8 A800, Llama-3-70B "
            "by the roofline with 70 % of peak FLOP/s (an A100's kernels by AIConfigurator), a "
            "DRAM cache of 3 million tokens per node that loads at once, and prefixes of other "
            "nodes at 100 GB/s. Nothing is fitted to the figure.",
            "The schedulers' estimates are a polynomial fitted to the cost model; the balancing "
            "threshold of algorithm 1 is 1.",
            "Absolute seconds depend on the load, which the paper does not state.",
        ),
    )


def _a800() -> tuple[Cost, Estimate]:
    """Llama-3-70B on 8 A800, and what a scheduler knows of it."""
    shape = MODELS["llama3-70b"]
    model = Roofline(name="8 x A800", coefficients=on_chip(CHIPS["a800"], compute=0.7), tp=TP)
    estimate = estimate_of(model, shape, shape.kv_token_bytes() / NICS.bytes_per_s)
    return roofline(model, shape, NICS, send_bytes_of(shape)), estimate


def _cluster(instances: int, router: Any, remote: bool, estimate: Estimate) -> Config:
    """Prefill nodes whose pool is their DRAM cache, and decode nodes with what Llama-3-70B leaves
    of 8 x 80 GB."""
    cached = Pool(tokens=DRAM_TOKENS, page_size=BLOCK)
    decoding = Pool(tokens=1_331_200, page_size=BLOCK)
    return Config(
        placements={
            "cluster": {
                "prefill": Role(
                    "prefill", instances=instances, tp=TP, pool=cached, chunk=16 * BLOCK
                ),
                "decode": Role("decode", instances=instances, tp=TP, pool=decoding, slots=256),
            }
        },
        model=Model(context=1 << 20),
        cache=Cache(prefix=True, block=BLOCK, remote=remote),
        routing=Routing(prefill=router, decode="fewest_tokens", estimate=estimate),
        transfer=Transfer(schedule="chunkwise", link=NICS),
    )


def _scheduler_rows(found: Mapping[str, Replayed]) -> Iterator[Row]:
    source = "FAST 2025, figure 5"
    means = {name: run.mean_ttft_s for name, run in found.items()}
    for (worse, a), (better, b) in pairwise(means.items()):
        published = f"{FIG5[worse][0]} > {FIG5[better][0]}"
        yield judged(
            f"{worse} > {better}", published, f"{a:.2f} > {b:.2f}", a > b,
            criterion="same order", source=source, unit="s",
        )  # fmt: skip
    best = list(FIG5)[-1]
    for name, mean in list(means.items())[:-1]:
        published, ours = FIG5[name][0] / FIG5[best][0], mean / means[best]
        yield near(f"{name} over {best}", published, ours, within=0.25, source=source)
    for name, run in found.items():
        share = f"{run.hit_rate:.1%}"
        yield beside(f"{name}: tokens from caches", "-", share, source="not published")


def _scheduler_figure(found: Mapping[str, Replayed]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    bars, spread = figure.subplots(1, 2)
    x = np.arange(len(found))
    colours = PLACEMENT_COLOURS[: len(found)]
    bars.bar(x - 0.2, [FIG5[name][0] for name in found], 0.36, color="#bbbbbb", label="published")
    means = [run.mean_ttft_s for run in found.values()]
    bars.bar(x + 0.2, means, 0.36, color=colours, label="simulated")
    bars.set_xticks(x, [name.replace(" ", "\n", 1) for name in found])
    bars.set(ylabel="mean TTFT (s)")
    bars.legend()
    for (name, run), colour, style in zip(found.items(), colours, LINE_STYLES, strict=True):
        ttft_s = np.sort(run.outcomes.ttft_s)
        shares = np.linspace(0, 1, len(ttft_s))
        spread.semilogx(ttft_s, shares, color=colour, linestyle=style, label=name)
    spread.set(xlabel="TTFT (s)", ylabel="share of requests")
    spread.legend()
    return figure
