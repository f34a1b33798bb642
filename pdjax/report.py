"""A run's folder and its pages; everything in them follows from the log and the config.

A run: config.json (with the placement's name), environment.json, events.jsonl, requests.csv,
summary.json, timeline.json (open it in ui.perfetto.dev), report.html, figures/*.svg.
A comparison: config.json, environment.json, comparison.csv, comparison.html, figures/*.svg, and a
run's folder per placement, by its name.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import msgspec
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from pdjax.core.config import Config
from pdjax.core.events import Record, read_jsonl, write_jsonl
from pdjax.metrics import Run, analyse, summary
from pdjax.report_figures import Drawn, draw_all
from pdjax.report_style import placement_colours
from pdjax.report_tables import (
    Cells,
    Numbers,
    Runs,
    comparison_cells,
    in_ms,
    instance_cells,
    interruption_cells,
    memory_cells,
    number,
    reason_cells,
    reuse_cells,
    stage_cells,
    transfer_cells,
)
from pdjax.timeline import chrome_trace

SAME = 0.05
"""Numbers whose ratio is within this of 1 are called about the same."""


def write_run(
    folder: Path,
    config: Config,
    placement_name: str,
    environment: Mapping[str, object],
    records: Sequence[Record],
) -> Run:
    """Writes a run's folder. A log that is there already (written while serving) is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    run = analyse(records, config.placements[placement_name], config.slo)
    if not (folder / "events.jsonl").exists():
        write_jsonl(folder / "events.jsonl", records)
    named = {"placement": placement_name, **msgspec.to_builtins(config)}
    _write_json(folder / "config.json", named)
    _write_json(folder / "environment.json", environment)
    _write_json(folder / "summary.json", summary(run))
    (folder / "timeline.json").write_bytes(msgspec.json.encode(chrome_trace(run)))
    run.requests.to_csv(folder / "requests.csv")
    title = f"{config.name}: {placement_name}"
    _write_page(folder / "report.html", title, config, environment, {placement_name: run})
    return run


def write_comparison(
    folder: Path, config: Config, environment: Mapping[str, object], runs: Runs
) -> Path:
    """Writes the comparison of several placements; returns the page to open."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "environment.json", environment)
    pd.DataFrame(_numbers(runs)).T.to_csv(folder / "comparison.csv", index_label="placement")
    return _write_page(folder / "comparison.html", config.name, config, environment, runs)


def redraw(folder: Path) -> Path:
    """Draws a run's or a comparison's page anew from events.jsonl and config.json alone.

    Raises FileNotFoundError where the folder has no config.json or no log.
    """
    text = (folder / "config.json").read_bytes()
    config = msgspec.json.decode(text, type=Config)
    environment = {}
    if (folder / "environment.json").exists():
        environment = msgspec.json.decode((folder / "environment.json").read_bytes())
    name = msgspec.json.decode(text).get("placement")
    if name is not None:
        records = list(read_jsonl(folder / "events.jsonl"))
        write_run(folder, config, name, environment, records)
        return folder / "report.html"
    logs = {name: folder / name / "events.jsonl" for name in config.placements}
    found = {name: list(read_jsonl(log)) for name, log in logs.items() if log.exists()}
    if not found:
        raise FileNotFoundError(f"no log to draw from: none of {sorted(map(str, logs.values()))}")
    runs = {
        name: write_run(folder / name, config, name, environment, records)
        for name, records in found.items()
    }
    return write_comparison(folder, config, environment, runs)


# --- the comparison for a terminal ---------------------------------------------------------


def _numbers(runs: Runs) -> Numbers:
    return {name: summary(run) for name, run in runs.items()}


def comparison_table(runs: Runs) -> str:
    """The comparison for a terminal: one row per placement."""
    caption, columns, rows = comparison_cells(runs, _numbers(runs))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column.replace(" ", "\n"), justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    console = Console(file=text, width=120, markup=False)
    console.print(table)
    console.print(caption, width=100)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


# --- what changed, in words ----------------------------------------------------------------


def findings(runs: Runs, numbers: Numbers) -> list[str]:
    """A sentence per placement on what it did, against the first collocated one; separate first."""
    base = next((n for n, run in runs.items() if _collocated(run)), next(iter(runs)))
    if len(runs) == 1:
        return [_alone(base, numbers[base])]
    others = sorted((name for name in runs if name != base), key=lambda n: _collocated(runs[n]))
    return [_against(base, numbers[base], name, numbers[name]) for name in others]


def _collocated(run: Run) -> bool:
    return all(role.does == "both" for role in run.placement.values())


def _alone(name: str, s: Mapping) -> str:
    return (
        f"{name} served {s['completed']} of {s['requests']} requests on {_devices(s)}: "
        f"median TTFT {in_ms(s['ttft_p50_s'])} ms, p99 ITL {in_ms(s['itl_p99_s'])} ms, "
        f"{number(s['output_tokens_per_s'])} output tokens/s; both SLOs met by "
        f"{s['slo_attainment']:.0%} of requests."
    )


def _against(base: str, old: Mapping, name: str, new: Mapping) -> str:
    changes = "; ".join(
        f"{label} {_change(old[key], new[key])}"
        for label, key in (
            ("median TTFT", "ttft_p50_s"),
            ("median TPOT", "tpot_p50_s"),
            ("p99 ITL", "itl_p99_s"),
            ("output tokens/s", "output_tokens_per_s"),
        )
    )
    overlap = min(old["slo_attainment_high95"], new["slo_attainment_high95"]) >= max(
        old["slo_attainment_low95"], new["slo_attainment_low95"]
    )
    met = (
        f"both SLOs met by {new['slo_attainment']:.0%} of requests against "
        f"{old['slo_attainment']:.0%} (the 95% intervals {'overlap' if overlap else 'are apart'})"
    )
    moved = "no KV moved"
    if new["transfer_bytes"]:
        moved = (
            f"{number(new['transfer_bytes'] / 1e6)} MB of KV moved, hidden but for "
            f"{in_ms(new['transfer_exposed_mean_s'])} ms per request"
        )
    devices = f"on {_devices(new)} against {old['devices']}"
    return f"{name} against {base}, {devices}: {changes}; {met}; {moved}."


def _devices(s: Mapping) -> str:
    return f"{s['devices']} device{'s' if s['devices'] > 1 else ''}"


def _change(old: float | None, new: float | None) -> str:
    if not old or not new:
        return "undefined"
    ratio = new / old
    if abs(ratio - 1) <= SAME:
        return f"about the same ({ratio:.2f}x)"
    return f"{ratio:.1f}x higher" if ratio > 1 else f"{1 / ratio:.1f}x lower"


def setting(config: Config) -> str:
    """What was served, in one line."""
    w = config.workload
    lengths = w.trace.path or f"mean prompt {w.prompt.mean:g}, mean output {w.output.mean:g} tokens"
    rates = {"closed": f" with {w.arrivals.concurrency} clients", "burst": "", "trace": ""}
    rate = rates.get(w.arrivals.process, f" at {w.arrivals.rate:g}/s")
    return (
        f"{config.model.source} in {config.model.dtype}; {w.requests} requests, "
        f"{w.arrivals.process}{rate}; {lengths}; seed {config.seed}; {_transfers(config)}; "
        f"{config.clock.kind} clock."
    )


def _transfers(config: Config) -> str:
    t = config.transfer
    link = t.link.preset or (f"{t.link.bytes_per_s / 1e9:g} GB/s" if t.link.bytes_per_s else "")
    parts = [f"transfer {t.schedule} by {t.transport}, groups {t.groups}"]
    parts += [f"link {link}"] * bool(link)
    parts += [f"nodes of {t.link.nodes.devices} devices"] * bool(t.link.nodes.devices)
    parts += [f"links {t.link.sharing}"] * (t.link.sharing != "max_min")
    parts += ["prefix cache"] * config.cache.prefix
    parts += [f"{len(config.faults)} faults on purpose"] * bool(config.faults)
    return "; ".join(parts)


def caveats(config: Config, numbers: Numbers) -> list[str]:
    """What a reader has to know before believing the numbers."""
    notes = []
    if config.clock.kind == "modelled":
        notes.append("Times come from a cost model of steps and links, not from a clock.")
    if len({s["devices"] for s in numbers.values()}) > 1:
        notes.append("The placements occupy different numbers of devices: compare per device too.")
    for name, s in numbers.items():
        lost = [f"{s[k]} {k}" for k in ("refused", "aborted", "failed", "unfinished") if s[k]]
        if lost:
            notes.append(f"{name}: {', '.join(lost)} of {s['requests']} requests.")
        if s["queue_growing"]:
            notes.append(
                f"{name}: the queue was still growing when arrivals stopped "
                f"({s['queue_growth_requests_per_s']:.2g} requests/s of "
                f"{s['arrival_requests_per_s']:.2g}/s arriving); it hardly sustains this rate."
            )
    fewest = min(s["requests"] for s in numbers.values())
    if fewest < 100:
        notes.append(f"With {fewest} requests a p99 over requests is nearly their maximum.")
    return notes


# --- pages ---------------------------------------------------------------------------------


def _write_page(
    path: Path, title: str, config: Config, environment: Mapping[str, object], runs: Runs
) -> Path:
    drawn, numbers = draw_all(runs), _numbers(runs)
    _write_figures(path.parent / "figures", drawn)
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("pdjax"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = templates.get_template("report.html.j2").render(
        title=title,
        setting=setting(config),
        findings=findings(runs, numbers),
        caveats=caveats(config, numbers),
        comparison=comparison_cells(runs, numbers),
        beside={"stages": stage_cells(runs), "occupancy": memory_cells(runs, numbers)},
        sections=_sections(runs, numbers),
        figures=drawn,
        colours=placement_colours(runs),
        config=_pretty(config),
        environment=_pretty(environment),
    )
    path.write_text(page, encoding="utf-8")
    return path


class Section(NamedTuple):
    """Tables under a heading."""

    name: str
    title: str
    tables: list[Cells]


def _sections(runs: Runs, numbers: Numbers) -> list[Section]:
    """Those that have something to say."""
    tables = {
        ("transfers", "KV on the way"): [transfer_cells(runs)],
        ("reuse", "Prefix reuse"): [reuse_cells(numbers)],
        ("interruptions", "Preemptions, retries and failures"): [
            interruption_cells(numbers),
            reason_cells(runs),
        ],
        ("instances", "Instances"): [instance_cells(runs, numbers)],
    }
    found = {key: [t for t in some if t is not None] for key, some in tables.items()}
    return [Section(*key, some) for key, some in found.items() if some]


def _write_figures(folder: Path, drawn: Sequence[Drawn]) -> None:
    folder.mkdir(exist_ok=True)
    for figure in drawn:
        (folder / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(_pretty(value) + "\n", encoding="utf-8")


def _pretty(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
