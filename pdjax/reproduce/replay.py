"""Traces as requests with prefixes, and simulations of which only the numbers are kept."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pdjax.catalogue import Shape
from pdjax.core.config import Config, Estimate
from pdjax.core.events import Record, Reuse
from pdjax.core.request import Request, SamplingParams
from pdjax.cost import Cost
from pdjax.costs.batch import Batch
from pdjax.costs.roofline import Roofline
from pdjax.metrics import Outcomes, outcomes
from pdjax.sim import simulate
from pdjax.traces import TraceRow
from pdjax.workload import Source


class Replayed(NamedTuple):
    """prompt_tokens: of all requests. reused: those of them that were found, by where (`local`,
    `remote`; and `target`, in decode pools)."""

    outcomes: Outcomes
    prompt_tokens: int
    reused: Mapping[str, int]

    @property
    def mean_ttft_s(self) -> float:
        return float(self.outcomes.ttft_s.mean())

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that prefill did not compute."""
        return (self.reused["local"] + self.reused["remote"]) / self.prompt_tokens


def requests_of(
    trace: Sequence[TraceRow],
    *,
    block: int,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    rate_scale: float = 1.0,
) -> tuple[Request, ...]:
    """A request per row; the trace's blocks become the hashes of blocks of `block` tokens, which is
    to be the trace's 512 times `prompt_scale`. The partial block at the end of a prompt is nobody
    else's. A row has at least one token of output."""
    requests = []
    for rid, row in enumerate(trace):
        prompt_len = max(1, round(row.prompt_len * prompt_scale))
        whole = min(len(row.blocks), prompt_len // block)
        requests.append(
            Request(
                rid,
                round(row.arrival_s / rate_scale * 1e9),
                prompt_len,
                SamplingParams(max_tokens=max(1, round(row.output_len * output_scale))),
                blocks=row.blocks[:whole],
                tail=(0,) * (prompt_len - whole * block),
            )
        )
    return tuple(requests)


def estimate_of(model: Roofline, shape: Shape, load_token_s: float = 0.0) -> Estimate:
    """What a scheduler knows of prefill: a polynomial of the prompt's length, as Mooncake's
    algorithm 1 has it, fitted to the cost model from 512 to 32,768 tokens."""
    lengths = np.array([512 * 2**i for i in range(7)])
    seconds = [model.seconds(shape, Batch(((0, length),))) for length in lengths.tolist()]
    square_s, token_s, step_s = np.polyfit(lengths, seconds, 2).tolist()
    return Estimate(
        step_s=step_s, prefill_token_s=token_s, pair_s=2 * square_s, load_token_s=load_token_s
    )


def replay(config: Config, placement: str, requests: tuple[Request, ...], cost: Cost) -> Replayed:
    """Serves the requests in virtual time."""
    reused: Counter[str] = Counter()
    log = simulate(config, placement, Source(requests), cost)
    prompt_tokens = sum(request.prompt_len for request in requests)
    return Replayed(outcomes(_counting(log, reused)), prompt_tokens, reused)


def _counting(records: Iterable[Record], reused: Counter[str]) -> Iterator[Record]:
    for record in records:
        if isinstance(record.body, Reuse):
            reused[record.body.how] += record.body.tokens
        yield record
