"""Times between measured ones: interpolation over a grid of prefill and one of decode."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from pdjax.core.config import Link
from pdjax.core.events import Send
from pdjax.cost import Cost
from pdjax.costs.batch import Batch, CostError, decode_ns_by, step_ns_by
from pdjax.costs.domain import warner


class Grid(msgspec.Struct, frozen=True):
    """seconds[i][j] at rows[i], columns[j]; both ascend."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        for name in ("rows", "columns"):
            axis = getattr(self, name)
            if not axis or any(low >= high for low, high in pairwise(axis)):
                raise CostError(f"`{name}` of a grid are {axis}; they must ascend")
        if [len(line) for line in self.seconds] != [len(self.columns)] * len(self.rows):
            raise CostError(
                f"`seconds` of a grid are no table of {len(self.rows)} x {len(self.columns)}"
            )

    def at(self, row: float, column: float) -> float:
        """Bilinear; beyond the grid the last cell goes on as it is, below it time stays.

        By hand because it runs once per simulated step: scipy's interpolators take 20 times as
        long for one point. Tests compare the two.
        """
        i, u = _place(self.rows, row)
        j, v = _place(self.columns, column)
        at = self.seconds[i][j]
        if u:
            at += u * (self.seconds[i + 1][j] - at)
        if not v:
            return at
        right = self.seconds[i][j + 1]
        if u:
            right += u * (self.seconds[i + 1][j + 1] - right)
        return at + v * (right - at)


def _place(axis: Sequence[float], x: float) -> tuple[int, float]:
    """(i, share of the way to i + 1) of x on an axis."""
    if x <= axis[0] or len(axis) == 1:
        return 0, 0.0
    i = min(bisect_right(axis, x), len(axis) - 1) - 1
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


class Table(msgspec.Struct, frozen=True):
    """prefill: rows are tokens of one chunk, columns the tokens before it. decode: rows are
    requests, columns the keys that each of them sees."""

    name: str
    prefill: Grid
    decode: Grid


def table(table: Table, link: Link, send_bytes: Callable[[Send], int]) -> Cost:
    """Several chunks of a step count as one, of all their tokens after as many cached ones as a
    token of theirs has on average. Decodes beside chunks are tokens more of the chunk, and add
    what decoding takes longer at their context than at the shortest one. Warns (OutsideDomain)
    beyond the grid.
    """
    domain = {
        "prompt tokens": (table.prefill.rows[0], table.prefill.rows[-1]),
        "cached tokens": (table.prefill.columns[0], table.prefill.columns[-1]),
        "decoding requests": (table.decode.rows[0], table.decode.rows[-1]),
        "context per request": (table.decode.columns[0], table.decode.columns[-1]),
    }
    check = warner(table.name, domain)

    def seconds(batch: Batch) -> float:
        check(batch)
        n, prefill, decode = batch.decodes, table.prefill, table.decode
        context = batch.context / n if n else 0.0
        if not batch.chunks:
            return decode.at(n, context)
        tokens = batch.prompt_tokens
        cached = sum(start * length for start, length in batch.chunks) / tokens
        alone = prefill.at(tokens + n, cached)
        return alone + (decode.at(n, context) - decode.at(n, decode.columns[0]) if n else 0.0)

    return Cost(step_ns_by(seconds), send_bytes, link, decode_ns_by(seconds))


# --- Reading -----------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True):
    phase: Literal["prefill", "decode"]
    size: int
    context: int
    seconds: float


class _File(msgspec.Struct, frozen=True):
    model: str
    chip: str
    tp: int
    rows: tuple[_Row, ...]


def read_table(path: str | Path) -> Table:
    """A table as JSON: model, chip, tp, and rows of phase (`prefill`, `decode`), size (tokens of
    the chunk, requests of the batch), context (tokens before the chunk, keys per request) and
    seconds. Every size needs every context.

    Raises CostError for a file that is not such a table.
    """
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=_File)
        prefill, decode = (_grid(file.rows, phase) for phase in ("prefill", "decode"))
    except (OSError, msgspec.MsgspecError, CostError) as error:
        raise CostError(f"`{path}` is not a table of step times: {error}") from None
    return Table(f"{file.model} on {file.chip}, tp {file.tp}", prefill, decode)


def _grid(rows: Sequence[_Row], phase: str) -> Grid:
    points = {(row.size, row.context): row.seconds for row in rows if row.phase == phase}
    sizes = sorted({size for size, _ in points})
    contexts = sorted({context for _, context in points})
    missing = [(s, c) for s in sizes for c in contexts if (s, c) not in points]
    if missing or not points:
        size, context = missing[0] if missing else ("any", "any")
        raise CostError(f"no row of phase `{phase}` has size {size} and context {context}")
    seconds = tuple(tuple(points[size, context] for context in contexts) for size in sizes)
    return Grid(tuple(sizes), tuple(contexts), seconds)
