"""DistServe's figures from its published fits; an independent loop stands for its own simulator."""

from collections import deque

import numpy as np
import pytest

from pdjax.core.config import SLO
from pdjax.costs.distserve import FITS, Coefficients
from pdjax.reproduce import distserve
from pdjax.reproduce.distserve import OPT_13B, OPT_66B, SHAREGPT, figure_8, figure_11
from pdjax.reproduce.distserve_servers import Case, Deployment, attained, crossing_of, serve
from pdjax.reproduce.served import crossing, poisson, resampled


def _prefill_ms(fit: Coefficients, lengths: list[int]) -> float:
    a, b, c = fit.prefill
    total = sum(lengths)
    return a + b * total + c * sum(n * n for n in lengths) + 2 + 1e-4 * total


def _decode_ms(fit: Coefficients, contexts: list[int]) -> float:
    a, b, c = fit.small if len(contexts) < 95 else fit.large
    return a + b * (sum(contexts) + len(contexts)) + c * len(contexts) + 2 + 1e-4 * sum(contexts)


class _Worker:
    """simdistserve's worker as a plain loop over milliseconds: whoever waits is prefilled before
    anybody decodes, in batches of up to 50,000 tokens."""

    def __init__(self, requests: list[tuple[float, int, int]]):
        self.requests = requests
        self.first, self.last = [0.0] * len(requests), [0.0] * len(requests)
        self.decoded = [0] * len(requests)

    def run(self, fit: Coefficients, arrivals, prefills: bool, decodes: bool):
        coming, prompts, running = deque(arrivals), deque(), deque()
        entry = prompts if prefills else running
        now, done = 0.0, []
        while coming or prompts or running:
            if not (prompts or running):
                now = max(now, coming[0][0])
            while coming and coming[0][0] <= now:
                entry.append(coming.popleft()[1])
            batch = self._batch(prompts) or list(running)
            if prompts_now := self._are_prompts(batch, running):
                now += _prefill_ms(fit, [self.requests[i][1] for i in batch])
            else:
                now += _decode_ms(fit, [self.requests[i][1] + self.decoded[i] for i in batch])
                running.clear()
            while coming and coming[0][0] <= now:
                entry.append(coming.popleft()[1])
            for i in batch:
                if prompts_now:
                    self.first[i] = now
                    done.append((now, i))
                    running.extend([i] * decodes)
                    continue
                self.decoded[i] += 1
                self.last[i] = now
                if self.decoded[i] < self.requests[i][2]:
                    running.append(i)
        return done

    def _batch(self, prompts: deque) -> list[int]:
        batch, left = [], 50_000
        while prompts and self.requests[prompts[0]][1] <= left:
            left -= self.requests[prompts[0]][1]
            batch.append(prompts.popleft())
        return batch

    @staticmethod
    def _are_prompts(batch: list[int], running: deque) -> bool:
        return not running or batch[0] not in running


def _peer(case: Case, deployment: Deployment, rate: float, n: int, seed: int) -> float:
    source = poisson(case.draw, n, rate * deployment.gpus, seed)
    requests = [(r.arrival_ns / 1e6, r.prompt_len, r.max_tokens) for r in source.requests]
    worker = _Worker(requests)
    arrivals = [(request[0], i) for i, request in enumerate(requests)]
    fit = FITS[deployment.engine, case.model, deployment.prefill[0]]
    if deployment.decode is None:
        worker.run(fit, arrivals, True, True)
    else:
        handed = worker.run(fit, arrivals, True, False)
        worker.run(FITS[deployment.engine, case.model, deployment.decode[0]], handed, False, True)
    in_time = [
        first - t <= 1e3 * case.slo.ttft_s and (last - first) / n_out <= 1e3 * case.slo.tpot_s
        for (t, _, n_out), first, last in zip(requests, worker.first, worker.last, strict=True)
    ]
    return float(np.mean(in_time))


@pytest.mark.parametrize(
    "panel, system, rates",
    [
        (OPT_13B, "ours", (1.0, 2.25)),
        (OPT_13B, "baseline", (0.25, 2.0)),
        (OPT_66B, "baseline", (0.375, 0.5)),
    ],
)
def test_attainment_is_simdistserves_within_a_point(panel, system, rates):
    case, deployment = panel.case, getattr(panel, system)
    for rate in rates:
        ours = attained(case, deployment, rate, 200, 3, "simdistserve")
        assert abs(ours - _peer(case, deployment, rate, 200, 3)) <= 0.01
        assert 0.1 < ours < 1  # where nobody or everybody is in time, there is nothing to compare


def test_lengths_are_the_published_ones():
    assert len(SHAREGPT) == 100
    assert SHAREGPT[:3] == ((55, 4), (1316, 9), (829, 170))
    assert SHAREGPT[-2:] == ((26, 894), (914, 530))
    assert max(prompt + output for prompt, output in SHAREGPT) < 2048


def test_gpus_are_the_published_ones():
    panels = (OPT_13B, OPT_66B, distserve.HUMANEVAL, distserve.LONGBENCH)
    assert [panel.ours.gpus for panel in panels] == [3, 8, 8, 8]
    assert [panel.baseline.gpus for panel in panels] == [1, 4, 4, 4]


PREFILL = Case(  # 74 ms each in large batches, so 4.5 requests/s per GPU at most
    "prefill", "opt-13b", resampled([(1000, 2)]), SLO(0.25, 1.0, 0.9), (1.0, 2.0, 3.0, 4.0, 5.0), 0
)


def test_crossings_of_fewer_requests_scatter_more():
    few, many = (
        [crossing_of(PREFILL, OPT_13B.ours, n, seed, "simdistserve") for seed in range(6)]
        for n in (25, 200)
    )
    assert np.std(few) > np.std(many)


def test_fewer_requests_flatter_a_server_whose_queue_grows():
    few, many = (
        np.mean([attained(PREFILL, OPT_13B.ours, 6.0, n, seed) for seed in range(4)])
        for n in (25, 200)
    )
    assert few > many + 0.1


def test_figure_8_at_a_small_setting_has_verdicts_and_a_figure(monkeypatch):
    small = OPT_13B._replace(case=OPT_13B.case._replace(rates=(0.5, 2.0), per_gpu=20))
    monkeypatch.setattr(distserve, "OPT_13B", small)
    monkeypatch.setattr(distserve, "OPT_66B", small)
    found = figure_8(runs=1, study={40: 1})
    assert found.figure.startswith("<svg")
    ours = next(row for row in found.rows if row.what == "OPT-13B, ShareGPT: DistServe")
    assert ours.published == 2.30 and 0.5 < float(ours.obtained) <= 2.0


def test_low_affinity_fits_segments_into_a_node():
    """Eight GPUs a node: 4 + 4 fit, 8 + 4 do not; two stages of 4 + 4 are two segments."""
    fits = distserve.near_each_other
    assert fits(Deployment("distserve", (4, 1), (2, 2)))
    assert fits(Deployment("distserve", (4, 2), (4, 2)))
    assert not fits(Deployment("distserve", (8, 1), (4, 1)))
    assert not fits(Deployment("distserve", (8, 2), (8, 1)))


def test_figure_11_orders_the_systems():
    found = figure_11(parts=((4, 1), (8, 1)), per_gpu=8, rates=(0.125, 0.375))
    verdicts = [row.verdict for row in found.rows if row.verdict]
    assert len(verdicts) == 4
    assert verdicts[0] == verdicts[2] == "reproduced"  # more freedom is never worse


def test_a_lone_request_takes_its_fit_and_the_overhead():
    """OPT-13B, tp 2: a prompt of 1000; two decodes at tp 1 with 1001 and 1002 tokens."""
    case = Case("one", "opt-13b", resampled([(1000, 2)]), SLO(), (1.0,), 1)
    ends = serve(case, OPT_13B.ours, 1.0, 1, 0, "simdistserve")
    p, d = FITS["distserve", "opt-13b", 2], FITS["distserve", "opt-13b", 1]
    assert ends.ttft_s[0] * 1e3 == pytest.approx(_prefill_ms(p, [1000]), abs=1e-4)
    both = _decode_ms(d, [1000]) + _decode_ms(d, [1001])
    assert ends.tpot_s[0] * 1e3 == pytest.approx(both / 2, abs=1e-4)


@pytest.mark.parametrize(
    "shares, expected", [([1.0, 0.95, 0.85], 2.5), ([0.8, 1.0, 1.0], 0.0), ([1.0, 1.0, 0.9], 3.0)]
)
def test_a_crossing_lies_between_the_rates(shares, expected):
    assert crossing([1.0, 2.0, 3.0], shares, 0.9) == pytest.approx(expected)
