"""Steps as a recorded run had them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from scipy.spatial import KDTree

from pdjax.core.config import Link
from pdjax.core.events import Record, Send, Step, StepDone
from pdjax.cost import NANOSECONDS, Cost
from pdjax.costs.batch import Batch, CostError, batches, decode_ns_by, step_ns_by
from pdjax.costs.domain import domain_of, quantities, warner

Sample = tuple[Batch, float]
"""A batch and the seconds that it took."""

Kind = tuple[str, ...]
"""Names of the quantities that a batch has."""
ShapeKey = tuple[Kind, tuple[float, ...]]
"""A batch's kind, and the base-2 logarithms of its quantities, those of contexts rounded."""

OCTAVE = 8
"""Contexts in one eighth of a doubling count as the same shape."""


class Timed(NamedTuple):
    """A step that ended. Of one with k iterations: the middle one, and a k-th of the time."""

    instance: str
    batch: Batch
    seconds: float
    began_ns: int
    ended_ns: int


def timed_of(records: Iterable[Record]) -> Iterator[Timed]:
    """Every step of a log that ended."""
    steps: dict[tuple[str, int], Step] = {}
    for record in records:
        body = record.body
        if isinstance(body, Step):
            steps[body.instance, body.id] = body
        elif isinstance(body, StepDone):
            step = steps.pop((body.instance, body.step))
            # An open step may have been cut.
            iterations = list(batches(step))[: len(body.ends_ns) or step.steps]
            seconds = (record.t_ns - body.began_ns) / NANOSECONDS / len(iterations)
            middle = iterations[len(iterations) // 2]
            yield Timed(body.instance, middle, seconds, body.began_ns, record.t_ns)


def samples_of(records: Iterable[Record], instance: str | None = None) -> list[Sample]:
    """Every step of a log that ended, of one instance or of all."""
    return [
        (step.batch, step.seconds)
        for step in timed_of(records)
        if instance in (None, step.instance)
    ]


def shape_key(batch: Batch) -> ShapeKey:
    sizes = {name: math.log2(1 + value) for name, value in quantities(batch)}
    rounded = ("cached tokens", "context per request")
    values = (round(x * OCTAVE) / OCTAVE if n in rounded else x for n, x in sizes.items())
    return tuple(sizes), tuple(values)


def medians_of(samples: Iterable[Sample]) -> dict[ShapeKey, Sample]:
    """Of each shape, the sample with the median time (of an even number, the shorter)."""
    by_shape: dict[ShapeKey, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_shape[shape_key(sample[0])].append(sample)
    middle = {shape: sorted(same, key=lambda sample: sample[1]) for shape, same in by_shape.items()}
    return {shape: same[(len(same) - 1) // 2] for shape, same in middle.items()}


def recorded(samples: Sequence[Sample], link: Link, send_bytes: Callable[[Send], int]) -> Cost:
    """A step lasts as the median of the recorded ones of its shape (lengths and requests; contexts
    to an eighth of a doubling), else as the nearest shape of the same kind (prefill, decode or
    both), by ratios. Warns (OutsideDomain) beyond what was recorded, and raises CostError for a
    kind that was not.
    """
    if not samples:
        raise CostError("no step was recorded: the log has no StepDone")
    medians = {shape: seconds for shape, (_, seconds) in medians_of(samples).items()}
    kinds: dict[Kind, list[ShapeKey]] = defaultdict(list)
    for shape in medians:
        kinds[shape[0]].append(shape)
    trees = {kind: KDTree([size for _, size in shapes]) for kind, shapes in kinds.items()}
    check = warner("the recorded run", domain_of(batch for batch, _ in samples))

    def seconds_of(batch: Batch) -> float:
        shape = kind, size = shape_key(batch)
        if shape not in medians:
            if kind not in trees:
                known = "; ".join(" and ".join(kind) for kind in trees)
                raise CostError(f"no recorded step has {' and '.join(kind)}, only {known}")
            check(batch)
            medians[shape] = medians[kinds[kind][trees[kind].query(size)[1]]]
        return medians[shape]

    return Cost(step_ns_by(seconds_of), send_bytes, link, decode_ns_by(seconds_of))
