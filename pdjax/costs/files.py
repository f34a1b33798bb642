"""A cost read from a file that an experiment wrote, whatever kind it is."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from pdjax.catalogue import Shape
from pdjax.core.config import Link
from pdjax.core.events import Send
from pdjax.cost import Cost
from pdjax.costs.batch import CostError
from pdjax.costs.roofline import read_roofline, roofline
from pdjax.costs.table import read_table, table


def read_cost(
    path: str | Path, shape: Shape, link: Link, send_bytes: Callable[[Send], int]
) -> Cost:
    """Steps of `shape` as a calibration (`experiments.calibrate`) or a table of step times
    (`experiments.tpu_costs`) says. Raises CostError for another file."""
    try:
        content = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise CostError(f"`{path}` has no costs: {error}") from None
    if isinstance(content, dict) and "roofline" in content:
        return roofline(read_roofline(path), shape, link, send_bytes)
    return table(read_table(path), link, send_bytes)
