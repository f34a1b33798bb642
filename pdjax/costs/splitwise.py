"""Splitwise's measured step times (Patel et al., ISCA 2024): llama2-70b and bloom-176b on A100 and
H100, as its simulator reads them, and as we would.

The file is perf_model.csv of Mutinifni/splitwise-sim (commit 8f99e7d, MIT), times in ms, five
repeats. It has batches of 1 at prompts of 128 to 8192 tokens, and of up to 64 at 512.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from pdjax.core.config import Link
from pdjax.core.events import Send
from pdjax.cost import Cost
from pdjax.costs.batch import Batch, CostError, decode_ns_by, step_ns_by
from pdjax.costs.domain import warner

MIXED = 1.1
"""What decodes beside prompts cost in Splitwise's simulator, whatever they are: a factor."""
MILLISECOND = 1e-3


class Curve(NamedTuple):
    """seconds at x, which ascends."""

    x: np.ndarray
    seconds: np.ndarray

    def at(self, x: float) -> float:
        """Linear; beyond the last point the last piece goes on, below the first time stays."""
        if x <= self.x[-1]:
            return float(np.interp(x, self.x, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.x[-1] - self.x[-2])
        return float(self.seconds[-1] + slope * (x - self.x[-1]))


class Measured(NamedTuple):
    """Medians of one model on one chip at one tp, in seconds.

    prompt_alone, token_alone: of a batch of 1, by prompt length. prompt_batch, token_batch: of
    prompts of BATCHED tokens, by number of requests. prompt_tokens, token_tokens: over prompt
    length times number of requests, whichever they are.
    """

    name: str
    prompt_alone: Curve
    prompt_batch: Curve
    prompt_tokens: Curve
    token_alone: Curve
    token_batch: Curve
    token_tokens: Curve


BATCHED = 512
"""Length of the prompts that were measured in batches."""


def read(path: str | Path, model: str, chip: str, tp: int) -> Measured:
    """Raises CostError for another file, and for a combination that was not measured."""
    try:
        rows = pd.read_csv(path)
        kinds = rows.groupby(["model", "hardware", "tensor_parallel"]).size().index.tolist()
    except (OSError, ValueError, KeyError) as error:
        raise CostError(f"`{path}` is not Splitwise's perf_model.csv: {error}") from None
    if (model, chip, tp) not in kinds:
        known = "; ".join(f"{m} on {c}, tp {t}" for m, c, t in kinds)
        raise CostError(f"`{path}` has no {model} on {chip}, tp {tp}; it has {known}")
    rows = rows.query("model == @model and hardware == @chip and tensor_parallel == @tp")
    rows = rows.assign(tokens=rows["prompt_size"] * rows["batch_size"])
    cuts = (
        (rows.query("batch_size == 1"), "prompt_size"),
        (rows.query("prompt_size == @BATCHED"), "batch_size"),
        (rows, "tokens"),
    )
    curves = [_curve(cut, by, time) for time in ("prompt_time", "token_time") for cut, by in cuts]
    return Measured(f"Splitwise's {model} on {chip}, tp {tp}", *curves)


def _curve(rows: pd.DataFrame, by: str, time: str) -> Curve:
    medians = rows.groupby(by)[time].median()
    return Curve(np.asarray(medians.index, float), np.asarray(medians) * MILLISECOND)


def splitwise(measured: Measured, link: Link, send_bytes: Callable[[Send], int]) -> Cost:
    """Every measured point exactly, and between them what is plausible.

    Prompts: by tokens of the batch, between the times of one long prompt and of many of 512
    tokens, as their mean length is (in logs) between the two. Tokens: by requests, plus what the
    mean context makes one request longer than at 512 tokens; that was measured for one alone.
    Chunks count as prompts, decodes beside them as tokens of them. Warns (OutsideDomain) beyond.
    """
    alone, batched = measured.prompt_alone, measured.prompt_batch
    domain = {
        "prompt tokens": (alone.x[0], max(alone.x[-1], batched.x[-1] * BATCHED)),
        "decoding requests": (measured.token_batch.x[0], measured.token_batch.x[-1]),
        "context per request": (measured.token_alone.x[0], measured.token_alone.x[-1]),
    }
    check = warner(measured.name, domain)

    def prompt_s(tokens: float, prompts: int) -> float:
        if tokens <= BATCHED or prompts == 1:
            return alone.at(tokens)
        share = np.log(tokens / prompts / BATCHED) / np.log(tokens / BATCHED)
        share = min(max(float(share), 0.0), 1.0)
        return share * alone.at(tokens) + (1 - share) * batched.at(tokens / BATCHED)

    def seconds(batch: Batch) -> float:
        check(batch)
        if batch.chunks:
            return prompt_s(batch.prompt_tokens + batch.decodes, len(batch.chunks))
        context = batch.context / max(batch.decodes, 1)
        longer = measured.token_alone.at(context) - measured.token_alone.at(BATCHED)
        return measured.token_batch.at(batch.decodes) + longer

    return Cost(step_ns_by(seconds), send_bytes, link, decode_ns_by(seconds))


def as_simulated(measured: Measured, link: Link, send_bytes: Callable[[Send], int]) -> Cost:
    """As Splitwise's own simulator looks them up (its performance_model.py), for comparison: all
    by the tokens of a batch, of which a decode is one.

    So the time of n decodes is read at n on an axis that was measured at n * 512 tokens and more:
    it is extrapolated down from the first two points, without what a batch adds.
    """

    def seconds(batch: Batch) -> float:
        if not batch.chunks:
            return _extended(measured.token_tokens, batch.decodes)
        alone = _extended(measured.prompt_tokens, batch.prompt_tokens + batch.decodes)
        return alone * MIXED if batch.decodes else alone

    return Cost(step_ns_by(seconds), send_bytes, link, decode_ns_by(seconds))


def _extended(curve: Curve, x: float) -> float:
    """Linear through the first two points below them, too (scipy's interp1d, `extrapolate`)."""
    if x >= curve.x[0]:
        return curve.at(x)
    slope = (curve.seconds[1] - curve.seconds[0]) / (curve.x[1] - curve.x[0])
    return float(curve.seconds[0] + slope * (x - curve.x[0]))
