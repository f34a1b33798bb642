"""What a reproduction comes to, and the few things that every one of them needs."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import msgspec
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from pdjax.report_style import STYLE, svg
from pdjax.traces import TraceError

Value = float | str
Verdict = Literal["reproduced", "not reproduced", "undecided", ""]
"""undecided: it depends on what is not known. Empty: shown beside, not judged."""


Interval = tuple[float, float]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One number or statement. source: of what was published (paper and place in it). interval:
    95 % for what was obtained, where it comes from several seeds."""

    what: str
    published: Value
    obtained: Value
    source: str
    unit: str = ""
    criterion: str = ""
    verdict: Verdict = ""
    interval: Interval | None = None


class Reproduction(msgspec.Struct, frozen=True, kw_only=True):
    """samples: how many requests, seeds and runs stand behind the numbers. figure: an <svg>
    element. caption: what to look for in it. notes: stand-ins, fitted constants and whatever else
    a reader has to know before believing the rows."""

    title: str
    samples: str
    rows: tuple[Row, ...]
    figure: str
    caption: str
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """How many of the judged rows are as published."""
        judged = [row.verdict for row in self.rows if row.verdict]
        undecided = judged.count("undecided")
        more = f", {undecided} undecided" if undecided else ""
        return f"{judged.count('reproduced')} of {len(judged)} reproduced{more}"


def judged(
    what: str, published: Value, obtained: Value, holds: bool | None, *, criterion: str,
    source: str, unit: str = "", interval: Interval | None = None,
) -> Row:  # fmt: skip
    """A row whose criterion the caller has checked; None: it cannot be said whether it holds."""
    verdicts: dict[bool | None, Verdict] = {
        True: "reproduced", False: "not reproduced", None: "undecided"
    }  # fmt: skip
    return Row(
        what=what,
        published=_storable(published),
        obtained=_storable(obtained),
        source=source,
        unit=unit,
        criterion=criterion,
        verdict=verdicts[holds],
        interval=interval,
    )


def near(
    what: str, published: float, obtained: float, *, within: float, source: str, unit: str = "",
    interval: Interval | None = None,
) -> Row:  # fmt: skip
    """A row that holds where the two differ by at most a share `within` of what was published."""
    limit = within * abs(published)
    holds = math.isfinite(limit) and abs(obtained - published) <= limit
    criterion = f"within {100 * within:g} %" if within else "equal"
    return judged(
        what, published, obtained, holds, criterion=criterion, source=source, unit=unit,
        interval=interval,
    )  # fmt: skip


def beside(
    what: str, published: Value, obtained: Value, *, source: str, unit: str = "",
    interval: Interval | None = None,
) -> Row:  # fmt: skip
    """A row that is shown and not judged."""
    return Row(
        what=what,
        published=_storable(published),
        obtained=_storable(obtained),
        source=source,
        unit=unit,
        interval=interval,
    )


def _storable(value: Value) -> Value:
    """JSON has no number that is infinite or none: such a value becomes a word."""
    return value if isinstance(value, str) or math.isfinite(value) else str(value)


def mean_and_interval(
    values: Sequence[float], most: float = math.inf
) -> tuple[float, Interval | None]:
    """Of one value per seed, from 0 to `most`: Student's t, 95 %; no interval for a single one."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean, (max(0.0, mean - half), min(most, mean + half))


def drawn(draw: Callable[[], Figure]) -> str:
    """The <svg> of a figure, in the style that all figures here have."""
    style: Any = STYLE  # matplotlib's annotations want literal names
    with matplotlib.rc_context(style):
        return svg(draw())


def trace_file(name: str) -> Path:
    """A file of the published traces: under `PDJAX_TRACES`, or under shared/traces beside the
    folder that holds the repository. Raises TraceError where it is not there."""
    folder = os.environ.get("PDJAX_TRACES")
    path = (Path(folder) if folder else Path("../shared/traces")) / name
    if not path.is_file():
        raise TraceError(
            f"no trace at `{path}`: set `PDJAX_TRACES` to the folder that has `{name}`, or run "
            "where ../shared/traces is"
        )
    return path
