"""The shapes that a cost model was measured on, and the warning for others."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping

from pdjax.costs.batch import Batch

Domain = Mapping[str, tuple[float, float]]
"""Smallest and largest value of each quantity (see `quantities`) that was measured."""


class OutsideDomain(UserWarning):
    """A step is of another size than all that were measured: its time is a guess."""


def quantities(batch: Batch) -> Iterator[tuple[str, float]]:
    """(name, value) of what makes a batch large; nothing for a part that it does not have."""
    if batch.chunks:
        yield "prompt tokens", batch.prompt_tokens
        yield "cached tokens", batch.cached_tokens
    if batch.decodes:
        yield "decoding requests", batch.decodes
        yield "context per request", batch.context / batch.decodes


def domain_of(batches: Iterable[Batch]) -> dict[str, tuple[float, float]]:
    """The smallest domain that has all of these."""
    domain: dict[str, tuple[float, float]] = {}
    for batch in batches:
        for name, value in quantities(batch):
            low, high = domain.get(name, (value, value))
            domain[name] = (min(low, value), max(high, value))
    return domain


def warner(model: str, domain: Domain) -> Callable[[Batch], None]:
    """A check of batches that warns (OutsideDomain) at the first value outside of each range. What
    the domain does not name is not checked."""
    told: set[str] = set()

    def check(batch: Batch) -> None:
        for name, value in quantities(batch):
            low, high = domain.get(name, (value, value))
            if not low <= value <= high and name not in told:
                told.add(name)
                warnings.warn(
                    f"`{model}` is asked for {value:g} {name}; it was measured from {low:g} to "
                    f"{high:g}, and its times beyond are extrapolated",
                    OutsideDomain,
                    stacklevel=2,
                )

    return check
