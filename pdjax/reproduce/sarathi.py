"""Sarathi-Serve (Agrawal et al., OSDI 2024): chunked prefill with a token budget, the baseline that
disaggregation has to beat."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pdjax.architecture import Architecture
from pdjax.catalogue import Chip, chip, shape_of
from pdjax.core.config import SLO, Config, Lengths, Link, Model, Placement, Pool, Role, Transfer
from pdjax.cost import Cost
from pdjax.costs.batch import send_bytes_of
from pdjax.costs.roofline import Roofline, on_chip, roofline
from pdjax.metrics import analyse, devices
from pdjax.report_style import PLACEMENT_COLOURS, WIDTH, log_ticks
from pdjax.reproduce.result import Reproduction, beside, drawn, judged
from pdjax.reproduce.served import poisson
from pdjax.sim import simulate
from pdjax.workload import draw_lengths

MISTRAL = shape_of(
    Architecture("mistral-7b", V=32000, D=4096, F=14336, L=32, N=32, K=8, H=128),
    "Mistral 7B, arXiv 2310.06825, table 1",
)
POOL = Pool(tokens=384_000, page_size=64)
"""Tokens of KV beside the weights: 0.9 * 80 GB, less 14.5 GB of weights and some room, over 128
KiB; rounded down."""
CONTEXT = 8192
STRICT_S, RELAXED_S = 0.1, 0.5
"""SLOs on the p99 of TBT for Mistral-7B on an A100 (table 3, quoted from memory)."""
QUEUE_S = 2.0
"""Most that the median request may wait to be scheduled (section 5)."""


def lengths(rng: np.random.Generator, n: int) -> np.ndarray:
    """Log-normals through the quantiles that the paper gives of openchat_sharegpt4 (table 2, quoted
    from memory): prompts with a median of 1730 and a p90 of 5696 tokens, outputs with 415 and 834.
    """
    pairs = []
    for median, p90, high in ((1730, 5696, 7168), (415, 834, 1024)):
        sigma = float(np.log(p90 / median) / 1.2816)  # the normal's 0.9 quantile
        mean = median * float(np.exp(sigma**2 / 2))
        pairs.append(draw_lengths(Lengths("lognormal", mean, sigma, low=4, high=high), n, rng))
    return np.stack(pairs, axis=1)


def _placements(budgets: Sequence[int]) -> dict[str, Placement]:
    """Whole prompts first (vLLM of then), chunks beside decodes, and one instance of each kind."""

    def both(chunk: int, mixed: bool) -> Placement:
        return {"both": Role(chunk=chunk, prefills=128, slots=128, mixed=mixed, pool=POOL)}

    return {
        "whole prompts": both(CONTEXT, mixed=False),
        **{f"budget {budget}": both(budget, mixed=True) for budget in budgets},
        "1P1D": {
            "prefill": Role(does="prefill", chunk=CONTEXT, prefills=128, pool=POOL),
            "decode": Role(does="decode", slots=128, pool=POOL),
        },
    }


class Tail(NamedTuple):
    """Of one run: seconds."""

    tbt_p99: float
    ttft_p50: float
    ttft_p90: float
    queue_p50: float

    def within(self, tbt_s: float) -> bool:
        return self.tbt_p99 <= tbt_s and self.queue_p50 <= QUEUE_S


def serve(placement: Placement, rate: float, n: int, seed: int = 0) -> Tail:
    """`n` requests at `rate` per second and chip."""
    config, cost = _config(placement, chip("a100-80g"))
    source = poisson(lengths, n, rate * devices(placement), seed)
    run = analyse(list(simulate(config, "it", source, cost)), placement, SLO())
    ttft = run.requests["ttft_s"].to_numpy()
    return Tail(
        float(np.nanpercentile(run.tokens["itl_s"].to_numpy(), 99)),
        float(np.percentile(ttft, 50)),
        float(np.percentile(ttft, 90)),
        float(np.nanmedian(run.requests["prefill_queue_s"].to_numpy())),
    )


def _config(placement: Placement, a100: Chip) -> tuple[Config, Cost]:
    link = Link(bytes_per_s=a100.link_bytes_per_s)
    config = Config(
        placements={"it": placement},
        model=Model(context=CONTEXT + 1),
        transfer=Transfer(schedule="whole", link=link),
    )
    times = Roofline(name="Mistral-7B on an A100", coefficients=on_chip(a100))
    return config, roofline(times, MISTRAL, link, send_bytes_of(MISTRAL))


def capacity(placement: Placement, tbt_s: float, rates: Sequence[float], n: int) -> float:
    """The highest of `rates` (ascending, per chip) within the SLO, 0 if none is."""
    over = bisect_left(rates, True, key=lambda rate: not serve(placement, rate, n).within(tbt_s))
    return rates[over - 1] if over else 0.0


BUDGETS = (256, 512, 1024, 2048)
RATES = tuple(np.round(np.geomspace(0.2, 4.0, 22), 2).tolist())
SOURCE = "Sarathi-Serve, OSDI 2024, abstract and section 5"


def budgets(
    budgets: Sequence[int] = BUDGETS,
    rate: float = 2.0,
    n: int = 600,
    rates: Sequence[float] = RATES,
) -> Reproduction:
    """TBT tail against TTFT over the budget at one rate, and capacity under both SLOs. `budgets`
    has 512 and 2048, the paper's choices for the strict and the relaxed one."""
    placements = _placements(budgets)
    tails = {name: serve(placement, rate, n) for name, placement in placements.items()}
    found = {
        name: (capacity(placement, STRICT_S, rates, n), capacity(placement, RELAXED_S, rates, n))
        for name, placement in placements.items()
    }
    return Reproduction(
        title="Sarathi-Serve: the token budget trades TTFT for the tail of TBT (Mistral-7B, A100)",
        samples=f"{n} requests at each rate, one seed; rates in steps of 15 %",
        rows=(*_tail_rows(tails, rate), *_capacity_rows(found)),
        figure=drawn(lambda: _draw(tails, found)),
        caption=f"Left: p99 of the time between tokens against median TTFT at {rate:g} requests/s "
        "per chip. Right: the highest rate per chip under the strict and the relaxed SLO.",
        notes=(
            "Step times are a roofline's with today's efficiencies, not the authors' measurements, "
            "so ratios are judged and no times.",
            "Lengths are log-normals through the published median and p90, cut to a context of "
            f"{CONTEXT}.",
            "1P1D is not in the paper: its rate is per chip, of which it has two, and KV crosses "
            "NVLink whole.",
        ),
    )


def _tail_rows(tails: Mapping[str, Tail], rate: float) -> list:
    one = [name for name in tails if name.startswith("budget")]
    tbt = [tails[name].tbt_p99 for name in [*one, "whole prompts"]]
    ttft = [tails[name].ttft_p50 for name in one]
    at = f"at {rate:g} requests/s"
    rows = [
        judged(
            f"p99 TBT {at}, by budget up to whole prompts", "rises",
            " < ".join(f"{1e3 * t:.0f}" for t in tbt), sorted(tbt) == tbt,
            criterion="ascending", source=SOURCE, unit="ms",
        ),
        judged(
            f"median TTFT {at}, by budget", "falls", ", ".join(f"{t:.2f}" for t in ttft),
            ttft[-1] < ttft[0], criterion="less with the largest than with the least",
            source=SOURCE, unit="s",
        ),
    ]  # fmt: skip
    pd = tails["1P1D"]
    told = f"{1e3 * pd.tbt_p99:.0f} ms and {pd.ttft_p50:.2f} s"
    return [
        *rows,
        beside(f"1P1D {at} per chip: p99 TBT, median TTFT", "not given", told, source=SOURCE),
    ]


def _capacity_rows(found: Mapping[str, tuple[float, float]]) -> list:
    def ratio(one: float, other: float) -> float | str:
        return one / other if other else "the latter: none"

    whole, strict, relaxed = (found[n] for n in ("whole prompts", "budget 512", "budget 2048"))
    gain = ratio(strict[0], whole[0])
    rows = [
        judged(
            "capacity under the strict SLO, budget 512 / whole prompts", 2.6, gain,
            isinstance(gain, str) or 2.6 / 1.5 <= gain <= 2.6 * 1.5,
            criterion="within a factor of 1.5, or whole prompts have none", source=SOURCE,
        ),
        judged(
            "capacity under the relaxed SLO, budget 2048 / 512", "above 1",
            ratio(relaxed[1], strict[1]), relaxed[1] >= strict[1],
            criterion="at least 1", source=SOURCE,
        ),
    ]  # fmt: skip
    rows += [
        beside(
            f"capacity of {name}, strict and relaxed", "curves only",
            f"{pair[0]:g} and {pair[1]:g}", source=SOURCE, unit="requests/s per chip",
        )
        for name, pair in found.items()
    ]  # fmt: skip
    return rows


def _draw(tails: Mapping[str, Tail], found: Mapping[str, tuple[float, float]]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    scatter, bars = figure.subplots(1, 2)
    for name, tail in tails.items():
        colour = PLACEMENT_COLOURS[{"whole prompts": 0, "1P1D": 1}.get(name, 2)]
        scatter.plot(tail.ttft_p50, 1e3 * tail.tbt_p99, "o", color=colour)
        scatter.annotate(
            name, (tail.ttft_p50, 1e3 * tail.tbt_p99), xytext=(5, 3), textcoords="offset points"
        )
    scatter.axhline(1e3 * STRICT_S, color="#444444", linewidth=0.8)
    scatter.set(xlabel="median TTFT (s)", ylabel="p99 TBT (ms)", yscale="log")
    log_ticks(scatter.yaxis)
    x = np.arange(len(found))
    for i, label in enumerate(("strict", "relaxed")):
        bars.bar(
            x + 0.4 * i,
            [pair[i] for pair in found.values()],
            0.38,
            label=label,
            color=PLACEMENT_COLOURS[i],
        )
    bars.set_xticks(x + 0.2, list(found), rotation=30, ha="right")
    bars.set_ylabel("requests/s per chip")
    bars.legend()
    return figure
