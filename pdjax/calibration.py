"""A placement's cost, fitted to logs of serving it: a roofline per role, and how much steps that
share a processor slow each other down."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
from scipy.optimize import minimize_scalar

from pdjax.catalogue import Shape
from pdjax.core.config import Link, Role
from pdjax.core.events import Record
from pdjax.core.placement import Placement, role_of
from pdjax.cost import Cost
from pdjax.costs.batch import send_bytes_of
from pdjax.costs.domain import domain_of
from pdjax.costs.placement import per_role
from pdjax.costs.recorded import Sample, Timed, timed_of
from pdjax.costs.roofline import Coefficients, Padding, Roofline, fit, roofline
from pdjax.processors import Sharing, shared_processors
from pdjax.programs.batch import chunk_buckets

VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0}
"""Of a weight, or of K or V, by `model.dtype`."""
SLOWEST = 0.3
"""The least speed of two steps that run together that is looked for."""


class Calibration(NamedTuple):
    """By role: the time of its steps alone. sharing: what others on the processor do to it."""

    lines: Mapping[str, Roofline]
    sharing: Sharing

    def cost(self, shape: Shape, link: Link) -> Cost:
        costs = {
            role: roofline(line, shape, link, send_bytes_of(shape, line.kv_bytes))
            for role, line in self.lines.items()
        }
        return per_role(costs, link)._replace(sharing=self.sharing)


class Slowed(NamedTuple):
    """A step, and of its seconds how many each number of others ran on its processor."""

    step: Timed
    beside: Mapping[int, float]

    def alone_s(self, sharing: Sharing) -> float:
        """How long it would have lasted alone."""
        return sum(seconds * sharing.of(others + 1) for others, seconds in self.beside.items())


def calibrate(
    logs: Sequence[Iterable[Record]],
    placement: Placement,
    shape: Shape,
    *,
    value_bytes: float,
    host: bool,
) -> Calibration:
    """Fitted to all steps of these logs of one placement. host: its instances share a machine's
    cores, as virtual devices of a CPU do."""
    processors = shared_processors(placement, host)
    steps = [slowed for log in logs for slowed in slowed_of(timed_of(log), processors)]

    def at(speed: float) -> Calibration:
        sharing = Sharing(speed, host)
        alone = {name: [] for name in placement}
        for it in steps:
            sample = it.step.batch, it.alone_s(sharing)
            alone[role_of(it.step.instance)].append(sample)
        lines = {
            name: roofline_of(role, shape, alone[name], name=name, value_bytes=value_bytes)
            for name, role in placement.items()
        }
        return Calibration(lines, sharing)

    if not processors:
        return at(Sharing().speed)

    def loss(speed: float) -> float:
        found = at(speed)
        return sum(error_of(it, found, shape) ** 2 for it in steps)

    best = minimize_scalar(loss, bounds=(SLOWEST, 1.0), method="bounded", options={"xatol": 0.01})
    return at(float(best.x))


def error_of(it: Slowed, calibration: Calibration, shape: Shape) -> float:
    """Of its time as calibrated, relative to the one measured; others as they were."""
    line = calibration.lines[role_of(it.step.instance)]
    return line.seconds(shape, it.step.batch) / it.alone_s(calibration.sharing) - 1


def slowed_of(steps: Iterable[Timed], processors: Mapping[str, str]) -> list[Slowed]:
    """With what ran beside each; `processors` as pdjax.processors.shared_processors gives them."""
    steps = list(steps)
    found = []
    for step in steps:
        mine = processors.get(step.instance)
        others = [
            other
            for other in steps
            if mine is not None
            and other.instance != step.instance
            and processors.get(other.instance) == mine
            and other.began_ns < step.ended_ns
            and other.ended_ns > step.began_ns
        ]
        found.append(Slowed(step, _beside(step, others)))
    return found


def _beside(step: Timed, others: Sequence[Timed]) -> dict[int, float]:
    began, ended = step.began_ns, step.ended_ns
    inside = {t for other in others for t in (other.began_ns, other.ended_ns) if began < t < ended}
    second = step.seconds / max(1, ended - began)  # of one iteration, per ns of all of them
    seconds: dict[int, float] = {}
    for low, high in pairwise(sorted({began, ended} | inside)):
        together = sum(other.began_ns <= low and other.ended_ns >= high for other in others)
        seconds[together] = seconds.get(together, 0.0) + (high - low) * second
    return seconds


def roofline_of(
    role: Role, shape: Shape, samples: Sequence[Sample], *, name: str, value_bytes: float
) -> Roofline:
    """Fitted to these samples of `role`, whose engine pads what it computes."""
    buckets = chunk_buckets(range(1, role.chunk + 1), role.chunk, 1)
    line = Roofline(
        name=name,
        coefficients=Coefficients(),
        tp=role.tp,
        weight_bytes=value_bytes,
        kv_bytes=value_bytes,
        padding=Padding(
            buckets=tuple(buckets),
            slots=role.slots if role.decodes_here else 0,
            mixed=role.mixed,
        ),
        domain=domain_of(batch for batch, _ in samples),
    )
    works = [line.work(shape, batch) for batch, _ in samples]
    fitted = fit(works, [seconds for _, seconds in samples])
    return msgspec.structs.replace(line, coefficients=fitted)
