"""When does the wire start to hurt? The same requests over links from fast to slow.

    python -m experiments.link_sweep --config=configs/links.py

Every transfer schedule is served over every preset link and over --bandwidths. The table has, as
medians over requests, the bytes of a hand-off, the time that they need on the link alone (Tx), for
how long pieces of it were on the wire, how much of that the request waited for (exposed), beside
the closed form max(Tx/L, Tx - Tp (L - 1)/L) for L layer groups and a prefill that takes Tp: what no
layerwise schedule can hide. Waiting shows in TPOT, not in TTFT: prefill emits the first token.

Runs and a figure, link_sweep.svg, go to the results' folder. Interrupted, it goes on there when
it is started again. Takes about 10 minutes on 2 cores.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import matplotlib
from absl import flags
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.flags import run_with_config, setup_devices
from pdjax.core.config import Config, Link
from pdjax.links import PRESETS, resolve
from pdjax.metrics import Run
from pdjax.report_style import PLACEMENT_COLOURS, STYLE, svg

SCHEDULES = ("whole", "layerwise", "streaming")
PLACEMENT = flags.DEFINE_string("placement", "disaggregated", "One of the config's placements.")
BANDWIDTHS = flags.DEFINE_list(
    "bandwidths", ["3e8", "1e8", "3e7", "1e7", "3e6"], "Links besides the presets, in bytes/s."
)


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


def links(bandwidths: Sequence[str]) -> dict[str, Link]:
    """The presets and these, fastest first."""
    all_links = {name: Link(preset=name) for name in PRESETS}  # type: ignore[arg-type]
    all_links |= {f"{float(text):g}": Link(bytes_per_s=float(text)) for text in bandwidths}
    by_speed = sorted(all_links.items(), key=lambda item: -resolve(item[1]).bytes_per_s)
    return dict(by_speed)


def measured(schedule: str, name: str, link: Link, run: Run) -> Row:
    """Of the requests whose KV was handed off."""
    speed, moves = resolve(link), run.moves[run.moves["purpose"] == "hand_off"]
    nbytes = moves["bytes"].median()
    alone_s = speed.latency_s + nbytes / speed.bytes_per_s
    times = [moves[column].median() for column in ("wire_s", "exposed_s", "closed_form_s")]
    clients = [run.requests[column].median() for column in ("ttft_s", "tpot_s")]
    in_ms = (1e3 * seconds for seconds in (alone_s, *times, *clients))
    return Row(schedule, name, speed.bytes_per_s, nbytes / 1e6, *in_ms)


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
    with matplotlib.rc_context(STYLE):
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
        for name, preset in PRESETS.items():
            axes.axvline(preset.bytes_per_s / 1e9, color="#bbbbbb", linewidth=0.8)
            axes.text(preset.bytes_per_s / 1e9, 1.01, name, rotation=60, fontsize=7,
                      transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set(xscale="log", yscale="symlog", xlabel="bandwidth, one way (GB/s)",
                 ylabel="waited for the wire (ms)", ylim=(0, None))  # fmt: skip
        axes.legend()
        return svg(figure)


def main(config: Config, workdir: Path) -> None:
    setup_devices()
    from pdjax.experiment import sweep

    chosen = links(BANDWIDTHS.value)
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
