"""When does the wire start to hurt? The same requests over links from fast to slow.

    python -m experiments.link_sweep --config=configs/links.py

Every transfer schedule is served over each of --links. The table has, as
medians over requests, the bytes of a hand-off, the time that they need on the link alone (Tx), for
how long pieces of it were on the wire, how much of that the request waited for (exposed), beside
the closed form max(Tx/L, Tx - Tp (L - 1)/L) for L layer groups and a prefill that takes Tp: what no
layerwise schedule can hide. Waiting shows in TPOT, not in TTFT: prefill emits the first token.

Runs and a figure, link_sweep.svg, go to the results' folder. Interrupted, it goes on there when
it is started again. Each point takes about half a minute on two busy cores, and what the wire adds.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from absl import flags
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.flags import run_with_config, setup_devices
from pdjax.core.config import Config, ConfigError, Link
from pdjax.links import PRESETS, resolve
from pdjax.metrics import Run
from pdjax.report_style import PLACEMENT_COLOURS, STYLE, svg

SCHEDULES = ("whole", "layerwise", "streaming")
PLACEMENT = flags.DEFINE_string("placement", "disaggregated", "One of the config's placements.")
SWEPT = ["nvlink4", "pcie5", "rdma-400g", "tcp-10g", "3e8", "1e8", "3e7", "1e7", "3e6"]
LINKS = flags.DEFINE_list("links", SWEPT, "Presets and bandwidths in bytes/s.")


class Row(NamedTuple):
    """One schedule over one link; medians over requests, times in ms."""

    schedule: str
    link: str
    bytes_per_s: float
    mb: float
    alone_ms: float
    wire_ms: float
    exposed_ms: float
    closed_form_ms: float
    ttft_ms: float
    tpot_ms: float


def links(names: Sequence[str]) -> dict[str, Link]:
    """The links of these names, fastest first. Raises ConfigError where one is not a link."""
    found = {name: _link(name) for name in names}
    return dict(sorted(found.items(), key=lambda item: -resolve(item[1]).bytes_per_s))


def _link(name: str) -> Link:
    try:
        link = Link(preset=name) if name in PRESETS else Link(bytes_per_s=float(name))  # type: ignore[arg-type]
    except ValueError:
        link = Link()
    if not 0 < resolve(link).bytes_per_s < math.inf:
        raise ConfigError(
            f"`--links={name}`: `{name}` is neither bytes/s nor one of {', '.join(PRESETS)}"
        )
    return link


def measured(schedule: str, name: str, link: Link, run: Run) -> Row:
    """Of the requests whose KV was handed off."""
    speed, moves = resolve(link), run.moves.query("purpose == 'hand_off'")
    nbytes = _median(moves, "bytes")
    seconds = (
        speed.latency_s + nbytes / speed.bytes_per_s,
        *(_median(moves, column) for column in ("wire_s", "exposed_s", "closed_form_s")),
        *(_median(run.requests, column) for column in ("ttft_s", "tpot_s")),
    )
    return Row(schedule, name, speed.bytes_per_s, nbytes / 1e6, *(1e3 * s for s in seconds))


def _median(table: pd.DataFrame, column: str) -> float:
    return float(np.nanmedian(np.asarray(table[column])))


def show(rows: Sequence[Row]) -> None:
    table = Table("link", "GB/s", "schedule", "MB", "Tx", "wire", "exposed", "closed form",
                  "TTFT", "TPOT", caption="times in ms")  # fmt: skip
    for row in sorted(rows, key=lambda row: -row.bytes_per_s):
        times = [f"{value:.3g}" for value in row[4:]]
        gb_s, mb = f"{row.bytes_per_s / 1e9:.3g}", f"{row.mb:.3g}"
        table.add_row(row.link, gb_s, row.schedule, mb, *times)
    Console(width=120).print(table)


def draw(rows: Sequence[Row]) -> str:
    """What a request waits for against the link's bandwidth, one line per schedule, as SVG."""
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(7.0, 4.0))
        axes = figure.subplots()
        for schedule, colour in zip(SCHEDULES, PLACEMENT_COLOURS, strict=False):
            mine = sorted((row.bytes_per_s / 1e9, row) for row in rows if row.schedule == schedule)
            speeds = [speed for speed, _ in mine]
            axes.plot(speeds, [row.exposed_ms for _, row in mine], "o-", color=colour,
                      label=f"{schedule}: exposed")  # fmt: skip
            if schedule == "layerwise":
                axes.plot(speeds, [row.closed_form_ms for _, row in mine], "k--", linewidth=1,
                          label="closed form")  # fmt: skip
        presets = {row.link: row.bytes_per_s / 1e9 for row in rows if row.link in PRESETS}
        for height, (name, speed) in zip(cycle((0.99, 0.79, 0.59)), presets.items(), strict=False):
            axes.axvline(speed, color="#bbbbbb", linewidth=0.8)
            axes.text(speed, height, name, rotation=90, ha="right", va="top", fontsize=7,
                      transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set(xscale="log", xlabel="bandwidth, one way (GB/s)")
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set(ylabel="waited for the wire (ms)")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left")
        return svg(figure)


def main(config: Config, workdir: Path) -> None:
    setup_devices()
    from pdjax.experiment import sweep

    chosen = links(LINKS.value)
    transfers = {
        f"{schedule}-{name}": replace(config.transfer, schedule=schedule, link=link)
        for schedule in SCHEDULES
        for name, link in chosen.items()
    }
    rows = []
    try:
        for way, run in sweep(config, PLACEMENT.value, transfers, workdir):
            schedule, _, name = way.partition("-")
            rows.append(measured(schedule, name, chosen[name], run))
            (workdir / "link_sweep.json").write_text(
                json.dumps({"rows": [row._asdict() for row in rows]}, indent=1)
            )
            (workdir / "link_sweep.svg").write_text(draw(rows))
    finally:
        show(rows)
        print(workdir / "link_sweep.svg")


if __name__ == "__main__":
    run_with_config(main)
