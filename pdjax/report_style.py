"""How figures look: colours, line styles, legends, axes, and the SVG they become.

Colours are Okabe and Ito's (2008), which colour-blind readers can tell apart: one per placement,
and others for what an instance does. Line styles differ too, so that print needs no colour.
"""

import io
from collections.abc import Container, Mapping
from itertools import cycle
from typing import Literal

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pdjax.metrics import Run

Runs = Mapping[str, Run]

PLACEMENT_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LineStyle = Literal["-", "--", "-.", ":"]
LINE_STYLES: tuple[LineStyle, ...] = ("-", "--", "-.", ":")
WORK_COLOURS = {
    "prefill": "#E69F00",
    "decode": "#56B4E9",
    "mixed": "#CC79A7",
    "transfer": "#000000",
}
STAGE_COLOURS = {
    "prefill_queue": "#DDDDDD",
    "prefill": WORK_COLOURS["prefill"],
    "transfer_exposed": WORK_COLOURS["transfer"],
    "decode_queue": "#999999",
    "decode": WORK_COLOURS["decode"],
}
INCIDENT_MARKS = {  # what: marker, colour
    "preempt": ("v", "#D55E00"),
    "retry": ("<", "#D55E00"),
    "piece failed": ("X", "#CC0000"),
    "down": ("s", "#CC0000"),
    "up": ("^", "#009E73"),
    "drain": ("d", "#0072B2"),
    "switch": ("D", "#0072B2"),
    "failed": ("X", "#000000"),
}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "pdjax",  # the same run draws the same bytes
}
WIDTH = 11.0  # inches


def placement_colours(names: Mapping[str, object]) -> dict[str, str]:
    """A colour per placement, the same in every figure and table of a page."""
    return dict(zip(names, cycle(PLACEMENT_COLOURS), strict=False))


def styled(runs: Runs) -> list[tuple[Run, str, LineStyle]]:
    """Each run with its colour and its line style."""
    colours = placement_colours(runs)
    styles = cycle(LINE_STYLES)
    return [(run, colours[name], next(styles)) for name, run in runs.items()]


def around(values: np.ndarray) -> tuple[float, float]:
    """Limits of a logarithmic axis."""
    return (values.min() / 1.3, values.max() * 1.3) if len(values) else (1.0, 10.0)


def log_ticks(axis: Axis) -> None:
    """Plain numbers at 1, 10, ..., or at 1, 2, 5, 10, ... where few decades are in view."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def placement_legend(figure: Figure, runs: Runs) -> None:
    """One line per placement, above the panels."""
    lines = [
        Line2D([], [], color=colour, linestyle=style, linewidth=1.6)
        for _, colour, style in styled(runs)
    ]
    figure.legend(lines, list(runs), loc="outside upper right", ncols=len(runs))


def patch_legend(figure: Figure, colours: Mapping[str, str], marked: Container[str] = ()) -> None:
    """One patch per colour and one mark per kind of incident in `marked`, above the panels."""
    patches = [
        Patch(color=colour, label=name.replace("_", " ")) for name, colour in colours.items()
    ]
    marks = [
        Line2D([], [], color=colour, marker=marker, linestyle="", label=what)
        for what, (marker, colour) in INCIDENT_MARKS.items()
        if what in marked
    ]
    handles = [*patches, *marks]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))


def svg(figure: Figure) -> str:
    """The <svg> element alone, to stand in a page or in a file; no date, no outside reference."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    return text[text.index("<svg") :]
