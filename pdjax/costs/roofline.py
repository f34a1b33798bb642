"""A roofline with efficiencies: from a chip's data sheet, or fitted to measured steps.

t = t0 + t_layer L + t_req n + max(F / f, W / w) + A / a + KV / k + C / c + t_ar n_ar, for a step of
n requests with F FLOPs of matrices, W bytes of weights, A FLOPs of attention, KV bytes of cache and
C bytes of all-reduces, per chip. Williams et al. 2009 (CACM 52(4)) for the matrices; attention
and the cache add to them, since they do not run at the same time.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import nnls

from pdjax.catalogue import Chip, Shape
from pdjax.core.config import Link
from pdjax.core.events import Send
from pdjax.cost import Cost
from pdjax.costs.batch import Batch, CostError, decode_ns_at_once, step_ns_by
from pdjax.costs.domain import warner
from pdjax.costs.work import Rows, Work, work_of


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per unit of Work; 0 is free."""

    step_s: float = 0.0
    layer_s: float = 0.0
    request_s: float = 0.0
    flop_s: float = 0.0
    weight_byte_s: float = 0.0
    attention_flop_s: float = 0.0
    kv_byte_s: float = 0.0
    comm_byte_s: float = 0.0
    allreduce_s: float = 0.0

    def seconds(self, work: Work) -> float:
        return (
            self.step_s
            + self.layer_s * work.layers
            + self.request_s * work.requests
            + max(self.flop_s * work.flops, self.weight_byte_s * work.weight_bytes)
            + self.attention_flop_s * work.attention_flops
            + self.kv_byte_s * work.kv_bytes
            + self.comm_byte_s * work.comm_bytes
            + self.allreduce_s * work.allreduces
        )


def on_chip(
    chip: Chip,
    *,
    compute: float = 0.63,
    weights: float = 0.71,
    kv: float = 0.53,
    link: float = 0.65,
    step_s: float = 126e-6,
    layer_s: float = 32e-6,
    request_s: float = 4e-6,
    allreduce_s: float = 10e-6,
) -> Coefficients:
    """Of a chip that reaches these shares of its peaks.

    Defaults: `compute` is what AIConfigurator 0.12's kernel tables give prefill of an 8B model on
    H100 (0.57 to 0.64 from 512 tokens on, without the FLOPs of embeddings and of logits that nobody
    samples; 0.7 on A100, 0.5 on L40S and B200); `weights`, `kv` and the three overheads are BLIS's
    learned corrections for vLLM on H100; `link` is calculon's for NVLink; `allreduce_s` is
    AIConfigurator's latency of one hop. Software of 2023 reached a third to a half of these:
    calibrate where numbers matter.
    """
    return Coefficients(
        step_s=step_s,
        layer_s=layer_s,
        request_s=request_s,
        flop_s=1 / (compute * chip.flops),
        weight_byte_s=1 / (weights * chip.hbm_bytes_per_s),
        attention_flop_s=1 / (compute * chip.flops),
        kv_byte_s=1 / (kv * chip.hbm_bytes_per_s),
        comm_byte_s=1 / (link * chip.link_bytes_per_s),
        allreduce_s=allreduce_s,
    )


class Padding(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine computes for its fixed shapes. buckets: chunks are padded to the next of
    these lengths. slots: rows of every decode step. mixed: steps without decodes have them too."""

    buckets: tuple[int, ...] = ()
    slots: int = 0
    mixed: bool = False

    def rows(self, batch: Batch) -> Rows:
        padded = sum(self._bucket(length) for _, length in batch.chunks)
        decodes = max(batch.decodes, self.slots if batch.decodes or self.mixed else 0)
        return Rows(padded + decodes, len(batch.chunks) + decodes)

    def _bucket(self, length: int) -> int:
        return next((bucket for bucket in self.buckets if bucket >= length), length)


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a simulation needs to time steps. name: whose times these are.
    weight_bytes, kv_bytes: per value. domain: the shapes measured; empty where none were."""

    name: str
    coefficients: Coefficients
    tp: int = 1
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    padding: Padding = Padding()
    domain: dict[str, tuple[float, float]] = {}

    def seconds(self, shape: Shape, batch: Batch) -> float:
        return self.coefficients.seconds(self.work(shape, batch))

    def work(self, shape: Shape, batch: Batch) -> Work:
        return work_of(
            shape,
            batch,
            tp=self.tp,
            weight_bytes=self.weight_bytes,
            kv_bytes=self.kv_bytes,
            rows_of=self.padding.rows,
        )


def roofline(
    roofline: Roofline, shape: Shape, link: Link, send_bytes: Callable[[Send], int]
) -> Cost:
    """The cost of `shape` on the roofline's chips. Warns (OutsideDomain) beyond its domain."""
    check = warner(roofline.name, roofline.domain)

    def seconds(batch: Batch) -> float:
        check(batch)
        return roofline.seconds(shape, batch)

    def many_seconds(batch: Batch) -> Any:
        for i in (0, -1):
            check(batch._replace(context=batch.context[i]))
        return roofline.seconds(shape, batch)

    return Cost(step_ns_by(seconds), send_bytes, link, decode_ns_at_once(many_seconds))


def read_roofline(path: str | Path) -> Roofline:
    """Of a file that `experiments.calibrate` wrote. Raises CostError for another."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=_File).roofline
    except (OSError, msgspec.MsgspecError) as error:
        raise CostError(f"`{path}` is not a calibration: {error}") from None


class _File(msgspec.Struct):
    roofline: Roofline


# --- Fitting -----------------------------------------------------------------------------

CANDIDATES, SEARCHES = 33, 4
"""Ridges that are tried at once, and how often, each time between the best one's neighbours."""
REWEIGHTS = 3
"""Times that errors are measured anew, relative to what was fitted last."""
_LINEAR = ("requests", "attention_flops", "kv_bytes", "comm_bytes")
_SECONDS_OF = {
    "one": "step_s",
    "layers": "layer_s",
    "requests": "request_s",
    "weight_bytes": "weight_byte_s",
    "attention_flops": "attention_flop_s",
    "kv_bytes": "kv_byte_s",
    "comm_bytes": "comm_byte_s",
}


def fit(works: Sequence[Work], seconds: Sequence[float]) -> Coefficients:
    """The coefficients with the least sum of squared relative errors, none of them negative.

    Errors are relative to the fitted times, found by weighting again (iteratively reweighted least
    squares): relative to the measured ones, a step that was measured short would weigh more than
    one measured long, and noise of 20 % would make all that is fitted 4 % too short.

    For a given ridge (FLOPs per byte at which the maximum changes sides) all is linear, a problem
    of non-negative least squares (Lawson and Hanson 1974); the ridge is searched over the range
    that the steps have, ever more finely. Layers have a coefficient of their own where their
    number differs, and all-reduces' latency is part of the others. Raises CostError for fewer than
    2 steps.
    """
    if len(works) != len(seconds) or len(works) < 2 or min(seconds) <= 0:
        raise CostError(
            f"a fit needs at least 2 steps with positive times; there are {len(works)} steps and "
            f"{len(seconds)} times"
        )
    times = np.asarray(seconds, float)
    columns = {name: np.array([getattr(w, name) for w in works], float) for name in Work._fields}
    found = _search(columns, times, times)
    for _ in range(REWEIGHTS):
        found = _search(columns, times, np.array([found.seconds(work) for work in works]))
    return found


def _search(columns: dict[str, np.ndarray], times: np.ndarray, unit: np.ndarray) -> Coefficients:
    """The best coefficients over all ridges, for errors in units of `unit`."""
    intensity = np.log(columns["flops"] / columns["weight_bytes"])
    low, high = float(intensity.min()), float(intensity.max())
    for _ in range(SEARCHES):
        ridges = np.linspace(low, high, CANDIDATES)
        best = int(np.argmin([_solve(columns, times, unit, np.exp(r))[1] for r in ridges]))
        low, high = ridges[max(best - 1, 0)], ridges[min(best + 1, CANDIDATES - 1)]
    ridge = float(np.exp(ridges[best]))
    solution, _ = _solve(columns, times, unit, ridge)
    return Coefficients(**solution, flop_s=solution["weight_byte_s"] / ridge)


def _solve(
    columns: dict[str, np.ndarray], times: np.ndarray, unit: np.ndarray, ridge: float
) -> tuple[dict[str, float], float]:
    """Coefficients for one ridge, and the norm of the errors in units of `unit`."""
    used = {"one": np.ones_like(times)}
    if np.ptp(columns["layers"]):
        used["layers"] = columns["layers"]
    used["weight_bytes"] = np.maximum(columns["flops"] / ridge, columns["weight_bytes"])
    used |= {name: columns[name] for name in _LINEAR}
    matrix = np.stack([column / unit for column in used.values()], axis=1)
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    found, loss = nnls(matrix / scale, times / unit)
    values = (found / scale).tolist()
    return {_SECONDS_OF[name]: value for name, value in zip(used, values, strict=True)}, loss
