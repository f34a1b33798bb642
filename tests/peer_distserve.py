"""simdistserve's rules as a plain loop over milliseconds (LLMServe/DistServe, commit 82831f1), for
a whole deployment: pipelines of workers, of which each passes what it has done on to the next.

A worker prefills all that waits, in batches of up to 50,000 tokens, before it decodes; later stages
take the batches of the first as they are. A decode batch is all that waits, up to 50,000 tokens of
context. Only the first stage pays the overhead, and a stage takes its share of the fitted time.
"""

import heapq
from collections import deque
from itertools import count

import numpy as np

from pdjax.costs.distserve import FITS, Coefficients
from pdjax.reproduce.distserve_servers import Case, Deployment
from pdjax.reproduce.served import poisson

CAP = 50_000  # tokens, of a prefill batch and of the context of a decode batch


def prefill_ms(fit: Coefficients, lengths: list[int]) -> float:
    a, b, c = fit.prefill
    return a + b * sum(lengths) + c * sum(n * n for n in lengths)


def decode_ms(fit: Coefficients, contexts: list[int]) -> float:
    a, b, c = fit.small if len(contexts) < 95 else fit.large
    return a + b * (sum(contexts) + len(contexts)) + c * len(contexts)


def overhead_ms(tokens: int) -> float:
    return 2 + 1e-4 * tokens


class _Worker:
    def __init__(self, fit: Coefficients, stages: int, is_first: bool):
        self.fit, self.stages, self.is_first = fit, stages, is_first
        self.next: _Worker = self
        self.prompts: deque[list[int]] = deque()  # batches; of the first stage: one each
        self.decodes: deque[int] = deque()
        self.busy = self.prefills = False  # prefills: whether its batch is of prompts


class Peer:
    """What becomes of requests: (arrival in ms, prompt, output). `first`: ms of the first token,
    `last`: of the last. cap: of the context of a decode batch."""

    def __init__(
        self, deployment: Deployment, model: str, requests: list[tuple[float, int, int]],
        cap: float = CAP,
    ):  # fmt: skip
        self.requests, self.cap = requests, cap
        self.first, self.last = [0.0] * len(requests), [0.0] * len(requests)
        self.decoded = [0] * len(requests)
        fits = {tp: FITS[deployment.engine, model, tp] for tp in _tps(deployment)}
        self.prefill = _pipeline(fits, deployment.prefill)
        self.decode = _pipeline(fits, deployment.decode) if deployment.decode else []
        self.workers = self.prefill + self.decode
        self._order = count()
        self._heap: list[tuple[float, int, _Worker | None, list[int]]] = [
            (t, next(self._order), None, [i]) for i, (t, _, _) in enumerate(requests)
        ]
        heapq.heapify(self._heap)

    def run(self) -> None:
        while self._heap:
            now, _, worker, batch = heapq.heappop(self._heap)
            if worker is None:
                self.prefill[0].prompts.append(batch)
            else:
                worker.busy = False
                self._done(worker, batch, now)
                self._start(worker, now)
            for each in self.workers:
                self._start(each, now)

    def _start(self, worker: _Worker, now: float) -> None:
        if worker.busy or not (worker.prompts or worker.decodes):
            return
        prefills = bool(worker.prompts)
        batch = self._prompts(worker) if prefills else self._decodes(worker)
        contexts = [self.requests[i][1] + self.decoded[i] for i in batch]
        ms = (prefill_ms if prefills else decode_ms)(worker.fit, contexts) / worker.stages
        ms += overhead_ms(sum(contexts)) if worker.is_first else 0.0
        worker.busy, worker.prefills = True, prefills
        heapq.heappush(self._heap, (now + ms, next(self._order), worker, batch))

    def _prompts(self, worker: _Worker) -> list[int]:
        batch = worker.prompts.popleft()
        if worker.is_first:
            left = CAP - sum(self.requests[i][1] for i in batch)
            while worker.prompts and self.requests[worker.prompts[0][0]][1] <= left:
                more = worker.prompts.popleft()
                left -= self.requests[more[0]][1]
                batch = batch + more
        return batch

    def _decodes(self, worker: _Worker) -> list[int]:
        batch, left = [], self.cap
        while worker.decodes:
            i = worker.decodes[0]
            left -= self.requests[i][1] + self.decoded[i] + 1
            if left < 0:
                break
            batch.append(worker.decodes.popleft())
        return batch

    def _done(self, worker: _Worker, batch: list[int], now: float) -> None:
        is_last = worker.next.is_first
        if worker.prefills:
            if not is_last:
                worker.next.prompts.append(batch)
                return
            for i in batch:
                self.first[i] = now
                (self.decode[0] if self.decode else worker.next).decodes.append(i)
            return
        for i in batch:
            self.decoded[i] += is_last
            if self.decoded[i] == self.requests[i][2]:
                self.last[i] = now
            else:
                worker.next.decodes.append(i)


def _tps(deployment: Deployment) -> set[int]:
    return {part[0] for part in (deployment.prefill, deployment.decode) if part}


def _pipeline(fits: dict[int, Coefficients], part: tuple[int, int]) -> list[_Worker]:
    tp, stages = part
    workers = [_Worker(fits[tp], stages, is_first=i == 0) for i in range(stages)]
    for worker, following in zip(workers, workers[1:] + workers[:1], strict=True):
        worker.next = following
    return workers


def attained_by_peer(
    case: Case, deployment: Deployment, rate: float, n: int, seed: int, cap: float = CAP
) -> float:
    """The share of the same requests that both SLOs are met for."""
    source = poisson(case.draw, n, rate * deployment.gpus, seed)
    requests = [(r.arrival_ns / 1e6, r.prompt_len, r.max_tokens) for r in source.requests]
    peer = Peer(deployment, case.model, requests, cap)
    peer.run()
    in_time = [
        first - t <= 1e3 * case.slo.ttft_s and (last - first) / n_out <= 1e3 * case.slo.tpot_s
        for (t, _, n_out), first, last in zip(requests, peer.first, peer.last, strict=True)
    ]
    return float(np.mean(in_time))
