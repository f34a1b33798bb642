"""The figures of a report, as SVG: every one is drawn from Runs alone."""

from collections.abc import Mapping
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdjax.metrics import HOST, STAGES, Run, in_system, pool_config
from pdjax.report_style import (
    INCIDENT_MARKS,
    LINE_STYLES,
    STAGE_COLOURS,
    STYLE,
    WIDTH,
    WORK_COLOURS,
    Runs,
    around,
    log_ticks,
    patch_legend,
    placement_colours,
    placement_legend,
    styled,
    svg,
)

MANY = 3000  # points; more are drawn as pixels, or thinned
FLOOR_MS = 0.1  # where smaller times are drawn on a logarithmic axis


class Drawn(NamedTuple):
    """A finished figure: file name, heading, what to look for, and the picture."""

    name: str
    title: str
    caption: str
    svg: str


def draw_all(runs: Runs) -> list[Drawn]:
    """Every figure of a comparison (or, of one run, of a report), in reading order."""
    with matplotlib.rc_context(STYLE):
        return [
            Drawn(draw.__name__, title, caption, svg(draw(runs)))
            for draw, title, caption in (
                (latencies, "Latency distributions", _latency_caption(runs)),
                (stages, "Where the time goes", STAGES_CAPTION),
                (timeline_zoom, "Who did what, around the longest wait for a token", ZOOM_CAPTION),
                (timeline, "Who did what, whole run", TIMELINE_CAPTION),
                (token_gaps, "Gaps between tokens over time", _gap_caption(runs)),
                (load, "Requests in the system", LOAD_CAPTION),
                (occupancy, "KV memory", OCCUPANCY_CAPTION),
            )
        ]


STAGES_CAPTION = (
    "Mean seconds per stage, over all completed requests and over the slowest tenth of them by "
    "E2E. The five stages of a request add up to its E2E. Grey is waiting; black is transfer time "
    "that prefill did not hide."
)
TIMELINE_CAPTION = (
    "One row per instance and per pair of instances that KV crosses between. Look for decode "
    "(blue) interrupted by prefill (orange), and for idle (white) instances. Neighbouring steps "
    "of one kind are drawn as one bar. Marks, if any: preemptions, instances down and up and lost "
    "pieces on their row; retries and failed requests along the top."
)
ZOOM_CAPTION = (
    "The same rows, every step by itself, over the same seconds in each placement: around the "
    "longest gap between two tokens of any request of any placement. Numbers are the ids of the "
    "requests being prefilled."
)
LOAD_CAPTION = (
    "Requests that arrived and have not ended. A line that climbs until arrivals stop (dotted) "
    "means that the rate is above what the placement sustains; latencies then grow with the run's "
    "length and say little else."
)
OCCUPANCY_CAPTION = (
    "Share of each pool's pages that requests hold. Pages are reserved before their tokens are "
    "stored; the table below has the fragmentation that this costs."
)


def _latency_caption(runs: Runs) -> str:
    counts = {
        name: f"{run.requests['ttft_s'].count()} TTFT, {run.requests['tpot_s'].count()} TPOT, "
        f"{run.tokens['itl_s'].count()} ITL"
        for name, run in runs.items()
    }
    return (
        "Share of requests (TTFT, TPOT) or of gaps (ITL) at or below a time; further left is "
        "faster, and a long way to 1 is a tail. Logarithmic milliseconds; dotted lines are the "
        f"SLO; times under {FLOOR_MS} ms are drawn there. {_counted(counts)}"
    )


def _gap_caption(runs: Runs) -> str:
    counts = {name: f"{run.tokens['itl_s'].count()} gaps" for name, run in runs.items()}
    return (
        "Each dot is a token: when it came, and how long its client had waited since the one "
        "before. Bands well above the bulk are decodes that waited for someone's prefill. The "
        f"dotted line is the TPOT objective. {_counted(counts)}"
    )


def _counted(counts: Mapping[str, str]) -> str:
    if len(set(counts.values())) == 1:
        return f"n = {next(iter(counts.values()))}{' in each placement' * (len(counts) > 1)}."
    return "n = " + "; ".join(f"{count} ({name})" for name, count in counts.items()) + "."


# --- figures -------------------------------------------------------------------------------


def latencies(runs: Runs) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    axes = figure.subplots(1, 3, sharey=True)
    slo = next(iter(runs.values())).slo
    limits_ms = ([slo.ttft_s * 1e3], [slo.tpot_s * 1e3], [])
    for ax, name, limit_ms in zip(axes, ("ttft", "tpot", "itl"), limits_ms, strict=True):
        values_ms = [_latency_ms(run, name) for run in runs.values()]
        ax.set(xscale="log", xlim=around(np.concatenate([*values_ms, limit_ms])))
        for values, (_, colour, style) in zip(values_ms, styled(runs), strict=True):
            if len(values):
                ax.ecdf(values, color=colour, linestyle=style, linewidth=1.6)
        for limit in limit_ms:
            ax.axvline(limit, color="#444444", linestyle=":", linewidth=1)
        ax.set(title=name.upper(), xlabel=f"{name.upper()} (ms)", ylim=(0, 1.01))
        log_ticks(ax.xaxis)
    axes[0].set_ylabel("share at or below")
    placement_legend(figure, runs)
    return figure


def stages(runs: Runs) -> Figure:
    figure = Figure(figsize=(WIDTH, 1.2 + 0.42 * len(runs)))
    panels = {"all completed requests": 1.0, "slowest tenth by E2E": 0.1}
    for ax, (title, share) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for row, run in enumerate(runs.values()):
            left = 0.0
            for stage, seconds in stage_means(run, share).items():
                ax.barh(row, seconds, left=left, color=STAGE_COLOURS[str(stage)], height=0.65)
                left += seconds
            ax.annotate(
                f"{left:.3g} s", (left, row), (3, 0), textcoords="offset points", va="center"
            )
        ax.set(title=f"mean of {title}", xlabel="seconds", yticks=range(len(runs)))
        ax.set_yticklabels(list(runs))
        ax.margins(x=0.12)
        ax.grid(visible=False, axis="y")
    ax.invert_yaxis()
    patch_legend(figure, STAGE_COLOURS)
    return figure


def stage_means(run: Run, share: float = 1.0) -> pd.Series:
    """Mean seconds per stage of the `share` of completed requests with the longest E2E."""
    completed = run.requests[run.requests["completed"]]
    slowest = completed.nlargest(max(1, round(share * len(completed))), "e2e_s")
    return pd.Series({stage: slowest[f"{stage}_s"].sum() for stage in STAGES}) / max(
        1, len(slowest)
    )


def timeline(runs: Runs) -> Figure:
    ended = max(run.ended_s for run in runs.values())
    return _timeline(runs, min(run.began_s for run in runs.values()), ended, merge=True)


def timeline_zoom(runs: Runs) -> Figure:
    return _timeline(runs, *zoom_window(runs), merge=False)


def zoom_window(runs: Runs) -> tuple[float, float]:
    """Seconds around the longest gap between tokens in any run, a part of the whole."""
    span = max(run.makespan_s for run in runs.values())
    tokens = pd.concat([run.tokens[["t_s", "itl_s"]] for run in runs.values()])
    if not tokens["itl_s"].count():
        began = min(run.began_s for run in runs.values())
        return began, began + span
    worst = tokens.loc[tokens["itl_s"] == tokens["itl_s"].max()].iloc[0]
    width = min(max(2 * worst["itl_s"], span / 50), span)
    began = max(worst["t_s"] - (worst["itl_s"] + width) / 2, 0.0)
    return began, began + width


def token_gaps(runs: Runs) -> Figure:
    figure, axes = _panels(runs, 2.6, sharey=True)
    gaps = [run.tokens.dropna() for run in runs.values()]
    gaps_ms = [np.maximum(gap["itl_s"].to_numpy() * 1e3, FLOOR_MS) for gap in gaps]
    limit_ms = next(iter(runs.values())).slo.tpot_s * 1e3
    view = around(np.concatenate([*gaps_ms, [limit_ms]]))
    for ax, gap, ms, (_, colour, _) in zip(axes, gaps, gaps_ms, styled(runs), strict=True):
        ax.set(yscale="log", ylim=view)
        many = len(ms) > MANY
        ax.plot(gap["t_s"], ms, ".", color=colour, ms=3, alpha=0.5, mew=0, rasterized=many)
        ax.axhline(limit_ms, color="#444444", linestyle=":", linewidth=1)
        ax.set_xlabel("time of the run (s)")
        log_ticks(ax.yaxis)
    axes[0].set_ylabel("ITL (ms)")
    return figure


def load(runs: Runs) -> Figure:
    figure = Figure(figsize=(WIDTH, 2.8))
    ax = figure.subplots()
    for run, colour, style in styled(runs):
        counts = in_system(run)
        ax.step(counts.index, counts, where="post", color=colour, linestyle=style, linewidth=1.3)
        ax.axvline(run.requests["arrival_s"].max(), color="#444444", linestyle=":", linewidth=1)
    ax.set(xlabel="time of the run (s)", ylabel="requests")
    ax.set_ylim(bottom=0)
    placement_legend(figure, runs)
    return figure


def occupancy(runs: Runs) -> Figure:
    figure, axes = _panels(runs, 2.6, sharey=True)
    for ax, run in zip(axes, runs.values(), strict=True):
        for name, changes in run.pools.groupby("pool"):
            percent = 100 * changes["pages"] / pool_config(str(name), run.placement).pages
            colour, style = _pool_style(run, str(name))
            ax.step(changes["t_s"], percent, where="post", color=colour, ls=style, lw=1, label=name)
        ax.set_xlabel("time of the run (s)")
        if len(run.pools):
            ax.legend(loc="upper right", fontsize=8)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("pages held (%)")
    return figure


def _pool_style(run: Run, pool: str) -> tuple[str, str]:
    """The colour of what its instance does, grey for host memory; a style per instance."""
    role, _, index = pool.removesuffix(HOST).rpartition("/")
    does = run.placement[role].does
    colour = WORK_COLOURS["mixed" if does == "both" else does]
    style = LINE_STYLES[int(index) % len(LINE_STYLES)]
    return "#999999" if pool.endswith(HOST) else colour, style


# --- parts ---------------------------------------------------------------------------------


def _latency_ms(run: Run, name: str) -> np.ndarray:
    """All values; of very many, as many quantiles as a figure can show."""
    table = run.tokens if name == "itl" else run.requests
    values_ms = np.maximum(table[f"{name}_s"].dropna().to_numpy() * 1e3, FLOOR_MS)
    if len(values_ms) > MANY:
        return np.quantile(values_ms, np.linspace(0, 1, MANY), method="inverted_cdf")
    return values_ms


def _panels(runs: Runs, height: float, sharey: bool) -> tuple[Figure, np.ndarray]:
    """One panel per placement, up to three beside each other, over the same seconds."""
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(WIDTH, height * rows))
    axes = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).ravel()
    for ax in axes[len(runs) :]:
        ax.set_visible(False)
    for ax, (name, colour) in zip(axes, placement_colours(runs).items(), strict=False):
        ax.set_title(name, color=colour, fontweight="bold")
    return figure, axes[: len(runs)]


def _timeline(runs: Runs, began_s: float, ended_s: float, merge: bool) -> Figure:
    ended_s = max(ended_s, began_s + 1e-3)  # a log may end as it begins
    rows = {name: _rows(run) for name, run in runs.items()}
    heights = [len(r) for r in rows.values()]
    figure = Figure(figsize=(WIDTH, 0.9 + 0.34 * sum(heights) + 0.35 * len(runs)))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights).ravel()
    gap_s = (ended_s - began_s) / 1000 if merge else -1.0
    marked: set[str] = set()
    for ax, (name, colour) in zip(axes, placement_colours(runs).items(), strict=True):
        for y, bars in enumerate(rows[name].values()):
            visible = bars[(bars["ended_s"] > began_s) & (bars["began_s"] < ended_s)]
            for kind, spans in visible.groupby("kind"):
                merged = _merge(spans[["began_s", "ended_s"]].to_numpy(), gap_s)
                widths = list(zip(merged[:, 0], merged[:, 1] - merged[:, 0], strict=True))
                lines = np.where((merged[:, 1] - merged[:, 0]) * 200 > ended_s - began_s, 0.5, 0)
                ax.broken_barh(
                    widths,
                    (y - 0.4, 0.8),
                    facecolor=WORK_COLOURS[str(kind)],
                    edgecolor="white",
                    linewidth=0 if merge else lines,  # white edges tell steps apart
                )
            if not merge:
                _label_prefills(ax, visible, y, began_s, ended_s)
        found = runs[name].incidents
        found = found[found["t_s"].between(began_s, ended_s)]
        marked |= _mark_incidents(ax, found, list(rows[name]))
        labels = [row.replace("->", "→") for row in rows[name]]
        ax.set(yticks=range(len(rows[name])), yticklabels=labels, xlim=(began_s, ended_s))
        ax.set_ylim(len(rows[name]) - 0.5, -0.5)
        ax.set_title(name, color=colour, fontweight="bold")
        ax.grid(visible=False, axis="y")
    axes[-1].set_xlabel("time of the run (s)")
    patch_legend(figure, WORK_COLOURS, marked)
    return figure


def _mark_incidents(ax: Axes, incidents: pd.DataFrame, rows: list[str]) -> set[str]:
    """Marks what has a mark on its row, or along the top where it has none; returns which."""
    found = incidents[incidents["what"].isin(INCIDENT_MARKS)]
    for what, some in found.groupby("what"):
        marker, colour = INCIDENT_MARKS[str(what)]
        y = [rows.index(where) if where in rows else -0.45 for where in some["where"]]
        ax.plot(some["t_s"], y, marker, color=colour, ms=5, mec="white", mew=0.5, clip_on=False)
    return set(found["what"])


def _rows(run: Run) -> dict[str, pd.DataFrame]:
    """What each instance, then each pair of instances, did, and when."""
    rows = {name: run.steps[run.steps["instance"] == name] for name in run.instances}
    pieces = run.transfers.rename(columns={"landed_s": "ended_s"}).assign(
        kind="transfer", rids=None
    )
    for (source, target), crossing in pieces.groupby(["source", "target"]):
        rows[f"{source} -> {target}"] = crossing
    return rows


def _merge(spans: np.ndarray, gap_s: float) -> np.ndarray:
    """Joins [began, ended] spans that are at most `gap_s` apart (none where it is negative)."""
    if gap_s < 0:
        return spans
    spans = spans[np.argsort(spans[:, 0])]
    until = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.append(True, spans[1:, 0] - until[:-1] > gap_s))
    return np.stack([spans[first, 0], until[np.append(first[1:], len(spans)) - 1]], axis=1)


def _label_prefills(ax: Axes, bars: pd.DataFrame, y: int, began_s: float, ended_s: float) -> None:
    for bar in bars[bars["kind"] == "prefill"].itertuples():
        left, right = max(bar.began_s, began_s), min(bar.ended_s, ended_s)
        if right - left > 0.02 * (ended_s - began_s):
            text = ",".join(str(rid) for rid in bar.rids)
            ax.text((left + right) / 2, y, text, ha="center", va="center", fontsize=7, clip_on=True)
