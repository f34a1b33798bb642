"""NVIDIA Dynamo's KV-aware router: its documented example, and its gain over random routing."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from pdjax.catalogue import CHIPS, MODELS
from pdjax.core.config import Cache, Config, Estimate, Link, Model, Pool, Role, Routing
from pdjax.core.policies.routing import Load, cache_aware_costs
from pdjax.costs.batch import send_bytes_of
from pdjax.costs.roofline import Roofline, on_chip, roofline
from pdjax.metrics import growth_of
from pdjax.report_style import LINE_STYLES, PLACEMENT_COLOURS, WIDTH, log_ticks
from pdjax.reproduce.mooncake import TRACES
from pdjax.reproduce.replay import Replayed, estimate_of, replay, requests_of
from pdjax.reproduce.result import Reproduction, Row, beside, drawn, judged, near, trace_file
from pdjax.traces import read_mooncake

DOCS = "Dynamo docs, router: routing concepts"
BLOCKS = 10
WORKERS = ((2, 10, 18), (5, 5, 10), (8, 9, 11))
"""Of a request's 10 blocks that a worker has cached, blocks of its active requests, and what it
would cost."""

README = "Dynamo docs, architecture: KV-aware routing (a figure of NVIDIA's own)"
OUTPUT = 800  # mean tokens, as published
BLOCK = 128  # tokens; a quarter of the trace's, as prompts are
RATES = (1.0, 2.0, 3.0)  # times the trace's
DYNAMO = "Dynamo's cost"
ROUTERS = {
    "random": "random",
    DYNAMO: "cache_aware",
    "expected TTFT": "shortest_ttft",
}


class Point(NamedTuple):
    """One rate under each of ROUTERS."""

    scale: float
    runs: Mapping[str, Replayed]

    @property
    def random(self) -> Replayed:
        return self.runs["random"]

    def gain(self, router: str) -> float:
        """How many times longer TTFT is under random routing."""
        return self.random.mean_ttft_s / self.runs[router].mean_ttft_s

    @property
    def sustained(self) -> bool:
        """Whether random routing keeps up, so that its TTFT is not just the run's length."""
        return not growth_of(self.random.outcomes.arrival_s, self.random.outcomes.ended_s).growing


def router_example(requests: int = 3993, rates: Sequence[float] = RATES) -> Reproduction:
    """The documented costs, exactly; then mean TTFT under random and under two KV-aware routers,
    of the first `requests` of a trace at `rates` times its own rate, and of a trace that comes in
    bursts. Raises TraceError without the traces."""
    points = [_served("synthetic", requests, scale) for scale in rates]
    bursts = _served("conversation", requests, 1.0)
    rows = _example_rows()
    rows += _judged_gains(DYNAMO, points, bursts)
    for router in list(ROUTERS)[1:]:
        rows += _gains(router, points, bursts)
    return Reproduction(
        title="Dynamo's router: the documented costs, and KV-aware against random routing",
        samples=f"{requests:,} requests of a trace at each rate, one replay; so no interval",
        rows=tuple(rows),
        figure=drawn(lambda: _figure(points)),
        caption="Left: mean TTFT against load under each router. Right: how many times longer it "
        "is under random routing; the dotted line is the published 3 x.",
        notes=(
            "Published of 100,000 requests to R1, with mean 4K prompt and 800 output tokens, on "
            "Llama-70B in FP8 on two nodes of H100. Stand-ins: Mooncake's synthetic trace "
            "(Poisson) with a quarter of its prompts and outputs so long "
            "that the means are these; 8 workers of 2 H100, collocated, with chunks in every step, "
            "by a roofline at half of the FP8 peak.",
            "Dynamo's cost counts a request from its routing on: its prompt, less what is cached, "
            "as prefill until it is computed, and its blocks as active until it ends. In bursts "
            "(Mooncake's conversation trace, where many requests come at one instant) reuse is "
            "rarer and the gain small. Published is nothing about bursts.",
            "Expected TTFT is Mooncake's algorithm 1 without loads from others: it counts prompts "
            "before the request and no decodes, which here slow prompts down. It is shown beside.",
        ),
    )


def _example_rows() -> list[Row]:
    loads = [Load(0, 0, cached, held) for cached, held, _ in WORKERS]
    costs = cache_aware_costs(1.0, BLOCKS, loads)
    rows = [
        near(f"cost of worker {i}", published, cost, within=0, source=DOCS, unit="blocks")
        for i, ((_, _, published), cost) in enumerate(zip(WORKERS, costs, strict=True), 1)
    ]
    chosen = costs.index(min(costs)) + 1
    return [*rows, near("worker chosen", 2, chosen, within=0, source=DOCS)]


def _judged_gains(router: str, points: Sequence[Point], bursts: Point) -> list[Row]:
    best = max((p.gain(router) for p in points if p.sustained), default=float("nan"))
    what = f"mean TTFT, random over {router}"
    return [
        judged(
            f"{what}, {where}", 3, gain, gain >= 2, unit="x", criterion=f"at least 2{when}",
            source=README,
        )
        for where, gain, when in (
            ("Poisson arrivals", best, " at a rate that random routing sustains"),
            ("in bursts", bursts.gain(router), ""),
        )
    ]  # fmt: skip


def _gains(router: str, points: Sequence[Point], bursts: Point) -> list[Row]:
    source = "not published"
    where = {f"{p.scale:g} x the trace's rate": p for p in points} | {"in bursts": bursts}
    return [
        *(
            beside(
                f"mean TTFT, random over {router}, {at}", "-",
                f"{p.runs['random'].mean_ttft_s:.3g} s / {p.runs[router].mean_ttft_s:.3g} s = "
                f"{p.gain(router):.3g}{'' if p.sustained else ', random not sustained'}",
                source=source,
            )
            for at, p in where.items()
        ),
        beside(
            f"prompt tokens from caches, random and {router}", "-",
            f"{points[0].random.hit_rate:.1%}, {points[0].runs[router].hit_rate:.1%}",
            source=source,
        ),
    ]  # fmt: skip


def _served(trace: str, requests: int, scale: float) -> Point:
    rows = read_mooncake(trace_file(TRACES[trace]))[:requests]
    outputs = sum(row.output_len for row in rows) / len(rows)
    sent = requests_of(
        rows, block=BLOCK, prompt_scale=1 / 4, output_scale=OUTPUT / outputs, rate_scale=scale
    )
    shape, model = MODELS["llama3-70b"], _two_h100()
    cost = roofline(model, shape, Link(), send_bytes_of(shape))
    estimate = estimate_of(model, shape)
    runs = {
        name: replay(_workers(router, estimate), "workers", sent, cost)
        for name, router in ROUTERS.items()
    }
    return Point(scale, runs)


def _two_h100() -> Roofline:
    """In FP8, whose peak is twice that of bf16."""
    coefficients = on_chip(CHIPS["h100"], compute=2 * 0.5)
    return Roofline(name="2 x H100", coefficients=coefficients, tp=2, weight_bytes=1)


def _workers(router: Any, estimate: Estimate) -> Config:
    """Two nodes. The weights leave 226,000 tokens of KV (90 % of 160 GB, less 70 GB)."""
    pool = Pool(tokens=226_000, page_size=BLOCK)
    worker = Role(instances=8, tp=2, pool=pool, slots=256, chunk=16 * BLOCK, prefills=4, mixed=True)
    return Config(
        placements={"workers": {"worker": worker}},
        model=Model(context=1 << 20),
        cache=Cache(prefix=True, block=BLOCK, remote=False),
        routing=Routing(prefill=router, estimate=estimate),
    )


def _figure(points: Sequence[Point]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    times, gains = figure.subplots(1, 2)
    scales = [point.scale for point in points]
    for name, colour, style in zip(ROUTERS, PLACEMENT_COLOURS, LINE_STYLES, strict=False):
        look = {"marker": "o", "color": colour, "linestyle": style, "label": name}
        times.plot(scales, [point.runs[name].mean_ttft_s for point in points], **look)
        gains.plot(scales, [point.gain(name) for point in points], **look)
    times.set(xlabel="load (x the trace's rate)", ylabel="mean TTFT (s)", yscale="log")
    log_ticks(times.yaxis)
    times.legend()
    gains.axhline(3, color="#555555", linestyle=":")
    gains.set(xlabel="load (x the trace's rate)", ylabel="TTFT, random over this", ylim=(0, None))
    return figure
