"""DistServe (Zhong et al., OSDI 2024), figure 11: what disaggregation and placement each add."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pdjax.core.config import SLO
from pdjax.report_style import LINE_STYLES, PLACEMENT_COLOURS, WIDTH
from pdjax.reproduce.distserve import DRAWN, WITHIN
from pdjax.reproduce.distserve_servers import TARGET, Case, Deployment, attained
from pdjax.reproduce.result import (
    Reproduction,
    Row,
    beside,
    drawn,
    judged,
    mean_and_interval,
)
from pdjax.reproduce.served import crossing
from pdjax.reproduce.simdistserve import LEAST, compared, told

CASE = Case(
    "OPT-66B, figure 11", "opt-66b", DRAWN, SLO(0.4, 0.1, TARGET),
    (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75), per_gpu=25,
)  # fmt: skip
TPS, STAGES = (2, 4, 8), (1, 2)
"""Of an instance; stages are for decode. (The paper has tp 1, of which there is no fit for OPT-66B,
and up to 8 stages on either side.)"""
NODE_GPUS, NODES = 8, 4
SOURCE = "section 6.5 and figure 11; the artefact's 02-draw_rate_abalation.py"


class Curve(NamedTuple):
    """Attainment, runs x rates, and where each run crosses the target."""

    shares: np.ndarray
    crossings: list[float]

    @property
    def rate(self) -> float:
        return float(np.mean(self.crossings))


def near_each_other(deployment: Deployment) -> bool:
    """Whether stages of prefill and decode can share nodes, so that KV never leaves one: the
    constraint of DistServe-low (section 4.2), as the artefact's draw_rate_abalation.py has it."""
    if deployment.decode is None:
        return True
    (tp_p, pp_p), (tp_d, pp_d) = deployment.prefill, deployment.decode
    segments = (k for k in range(1, NODES + 1) if pp_p % k == 0 and pp_d % k == 0)
    return any(tp_p * pp_p // k + tp_d * pp_d // k <= NODE_GPUS for k in segments)


def figure_11(case: Case = CASE, tps: Sequence[int] = TPS, runs: int = 5) -> Reproduction:
    """The best placement under each system's freedom, by the simulator that the paper used. `tps`
    has 4, which is vLLM's."""
    parts = [(tp, stages) for tp in tps for stages in STAGES]
    split = [Deployment("distserve", (tp, 1), part) for tp in tps for part in parts]
    whole = [Deployment("vllm", (tp, 1)) for tp in tps]
    candidates = {
        "DistServe-High": split,
        "DistServe-Low": [d for d in split if near_each_other(d)],
        "vLLM++": whole,
        "vLLM": [Deployment("vllm", (4, 1))],
    }
    curves = {d: _curve(case, d, runs) for d in [*split, *whole]}
    best = {name: max(these, key=lambda d: curves[d].rate) for name, these in candidates.items()}
    found = {name: curves[d] for name, d in best.items()}
    return Reproduction(
        title="DistServe figure 11: what disaggregation and placement each add (OPT-66B)",
        samples=f"{runs} seeds; {case.per_gpu} requests per GPU and point as published, and at "
        f"least {LEAST}",
        rows=(*_order_rows(found), *_placement_rows(best, found), *compared(case, runs)),
        figure=drawn(lambda: _draw(case, found)),
        caption="Joint attainment (400 ms and 100 ms) of the best placement of each system: the "
        "mean of all seeds, and from the least to the highest of them.",
        notes=(
            "By the assumptions of simdistserve. Placements: tp 2, 4, 8, and 1 or 2 stages of "
            "decode. The paper also has tp 1, of which no fit was published, more stages, and "
            "stages of prefill.",
            "Stages are as many instances, each as slow as the whole pipeline. For decode that is "
            "within a point of simdistserve's pipeline. For prefill it flatters near saturation "
            "(91 for 57 % with P tp8 x 2 stages, D tp8, at 0.5): batches of unequal length leave a "
            "pipeline idle. So stages of prefill are not among the placements here.",
            f"{max(case.rates):g} is the highest rate that was served.",
            "Published is the order only: no values of the final figure are in the artefact.",
        ),
    )


def _curve(case: Case, deployment: Deployment, runs: int) -> Curve:
    n = max(case.per_gpu * deployment.gpus, LEAST)
    shares = [
        [attained(case, deployment, rate, n, seed, "simdistserve") for rate in case.rates]
        for seed in range(runs)
    ]
    return Curve(np.array(shares), [crossing(case.rates, run, TARGET) for run in shares])


def _order_rows(found: Mapping[str, Curve]) -> list[Row]:
    high, low, plus, vllm = found
    rate = {name: curve.rate for name, curve in found.items()}
    rows = [
        judged(
            f"{better} against {worse}", f"{better} {sign} {worse}",
            f"{rate[better]:.3g} and {rate[worse]:.3g}", holds,
            criterion=f"rate per GPU at 90 %: {sign}", source=SOURCE, unit="requests/s per GPU",
        )
        for better, worse, sign, holds in (
            (high, low, ">=", rate[high] >= rate[low]),
            (low, plus, ">", rate[low] > rate[plus]),
            (plus, vllm, ">=", rate[plus] >= rate[vllm]),
        )
    ]  # fmt: skip
    overlap = abs(rate[plus] - rate[vllm]) <= WITHIN["vLLM"] * rate[plus]
    rows.append(
        judged(
            f"{plus} against {vllm}", "overlap", f"{rate[plus]:.3g} and {rate[vllm]:.3g}", overlap,
            criterion="rates within 20 %", source=f"{SOURCE} (title)", unit="requests/s per GPU",
        )
    )  # fmt: skip
    return rows


def _placement_rows(best: Mapping[str, Deployment], found: Mapping[str, Curve]) -> list[Row]:
    rows = []
    for name, deployment in best.items():
        mean, interval = mean_and_interval(found[name].crossings)
        rows.append(
            beside(
                f"{name}, best with {told(deployment)}", "not given", mean, source=SOURCE,
                unit="requests/s per GPU", interval=interval,
            )
        )  # fmt: skip
    return rows


def _draw(case: Case, found: Mapping[str, Curve]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.subplots()
    for i, (name, curve) in enumerate(found.items()):
        percent, colour = 100 * curve.shares, PLACEMENT_COLOURS[i]
        axes.plot(
            case.rates, percent.mean(axis=0), LINE_STYLES[i], marker="o", color=colour, label=name
        )
        axes.fill_between(
            case.rates, percent.min(axis=0), percent.max(axis=0), color=colour, alpha=0.15,
            linewidth=0,
        )  # fmt: skip
    axes.axhline(100 * TARGET, color="#444444", linewidth=0.8)
    axes.set(xlabel="requests/s per GPU", ylabel="joint attainment (%)", ylim=(0, 102))
    axes.legend()
    return figure
