"""What DistServe's authors' simulator gives, beside what its assumptions give in ours.

simdistserve was run at the paper's placements, with synthetic lengths that are not ours (its data
sets are not published). On equal requests ours gives its attainment within a point, which a test
shows against a loop of its rules. What differs here: lengths, seeds, and two rules. It lets decodes
take turns where those of an iteration have more than 50,000 tokens of context, and its stages of
prefill wait for each other where batches are unequal (here they are independent instances).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pdjax.reproduce.distserve_servers import TARGET, Case, Deployment, attained
from pdjax.reproduce.result import Row, beside, mean_and_interval
from pdjax.reproduce.served import crossing

SOURCE = "simdistserve (commit 82831f1), run at the same placements with synthetic lengths"
LEAST = 200
"""Requests per point: so many per GPU as the paper's, and at least this."""
LARGE = 1000
"""So many requests are served under two seeds: they say what fewer do under five."""


class Ran(NamedTuple):
    """What simdistserve gave for a deployment: the rate per GPU at 90 % attainment (0: below the
    lowest), percent attained from the lowest rate on, as far as they were noted, and percent
    attained of other numbers of requests: (rate per GPU, requests) -> percent."""

    rate: float
    percent: tuple[float, ...] = ()
    by_requests: Mapping[tuple[float, int], float] = {}


_OPT_66B = Deployment("distserve", (4, 1), (2, 2)), Deployment("vllm", (4, 1))
RAN: Mapping[str, Mapping[Deployment, Ran]] = {
    "OPT-13B, ShareGPT": {
        Deployment("distserve", (2, 1), (1, 1)): Ran(
            2.29,
            by_requests={
                (1.6, 3000): 93.3, (1.7, 3000): 24.1,
                (2.0, 300): 93.7, (2.0, 1000): 45.0, (2.0, 3000): 14.6,
                (2.25, 100): 85.0, (2.25, 300): 93.3, (2.25, 1000): 24.3, (2.25, 3000): 8.0,
            },
        ),
        Deployment("vllm", (1, 1)): Ran(
            0.25, (90, 89, 83.5, 77.5, 73, 70.5, 64.5, 50),
            {(0.25, 2000): 87.9, (1.0, 2000): 82.0, (2.0, 2000): 72.6},
        ),
    },
    "OPT-66B, ShareGPT": {_OPT_66B[0]: Ran(0.854), _OPT_66B[1]: Ran(0.384)},
    "OPT-66B, HumanEval": {_OPT_66B[0]: Ran(1.094), _OPT_66B[1]: Ran(0.0, (86.5,))},
    "OPT-66B, LongBench": {_OPT_66B[0]: Ran(0.519), _OPT_66B[1]: Ran(0.147)},
    "OPT-66B, figure 11": {
        _OPT_66B[0]: Ran(0.25, (99.5, 98, 90, 81.5, 66.5, 52.5, 40)),
        Deployment("distserve", (8, 1), (4, 1)): Ran(
            0.396, (100, 100, 98.7, 92.7, 76.3, 40.3, 23.7)
        ),
        Deployment("distserve", (8, 2), (8, 1)): Ran(
            0.383, (99.8, 99.8, 99.3, 93.5, 37.3, 18.5, 9.3)
        ),
        _OPT_66B[1]: Ran(0.0, (83, 79, 64, 38, 24, 12, 2)),
        Deployment("vllm", (8, 1)): Ran(0.196, (98.5, 96.5, 85, 43, 20.5, 8.5, 3.5)),
    },
}  # fmt: skip
"""Case -> deployment -> what it gave."""


def compared(case: Case, runs: int) -> Iterator[Row]:
    """Rows of all that simdistserve gave for a case. runs: of ours, one seed each; two of LARGE."""
    for deployment, ran in RAN.get(case.name, {}).items():
        what = f"as simdistserve: {told(deployment)}"
        n = max(case.per_gpu * deployment.gpus, LEAST)
        curves = _percent(case, deployment, case.rates, n, runs)
        crossings = [crossing(case.rates, curve, 100 * TARGET) for curve in curves]
        mean, interval = mean_and_interval(crossings)
        none = f"below {case.rates[0]:g}"
        yield beside(
            f"{what}, rate at 90 %", ran.rate or none, mean or none, source=SOURCE,
            unit="requests/s per GPU", interval=interval,
        )  # fmt: skip
        if ran.percent:
            rates = case.rates[: len(ran.percent)]
            yield beside(
                f"{what}, attainment at {_listed(rates)} requests/s per GPU",
                _listed(ran.percent), _listed(curves.mean(axis=0)[: len(rates)]),
                source=SOURCE, unit="%",
            )  # fmt: skip
        for (rate, requests), percent in ran.by_requests.items():
            times = runs if requests < LARGE else min(runs, 2)
            percents = _percent(case, deployment, (rate,), requests, times)[:, 0].tolist()
            mean, interval = mean_and_interval(percents, most=100)
            yield beside(
                f"{what}, attainment of {requests:,} requests at {rate:g} requests/s per GPU",
                percent, mean, source=SOURCE, unit="%", interval=interval,
            )  # fmt: skip


def _percent(
    case: Case, deployment: Deployment, rates: Sequence[float], n: int, runs: int
) -> np.ndarray:
    """Attainment, runs x rates."""
    shares = [
        [attained(case, deployment, rate, n, seed, "simdistserve") for rate in rates]
        for seed in range(runs)
    ]
    return 100 * np.array(shares)


def told(deployment: Deployment) -> str:
    """`P tp4, D tp2 x 2 stages, 8 GPUs`."""
    if deployment.decode is None:
        return f"vLLM {_part(deployment.prefill)}, {deployment.gpus} GPUs"
    parts = f"P {_part(deployment.prefill)}, D {_part(deployment.decode)}"
    return f"{parts}, {deployment.gpus} GPUs"


def _part(part: tuple[int, int]) -> str:
    tp, stages = part
    return f"tp{tp}" + (f" x {stages} stages" if stages > 1 else "")


def _listed(values: Sequence[float] | np.ndarray) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
