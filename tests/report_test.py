"""A run's folder, its pages, and its timeline."""

import json
import re
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from metrics_test import COLLOCATED_LOG, LOSSY_LOG
from record_builders import (
    COLLOCATED,
    KV_BYTES,
    arrived,
    at,
    decode,
    done,
    hold,
    landed,
    placements,
    prefill,
    requests,
    served,
)

from pdjax.core.config import SLO, Clock, Config, Pool, Role
from pdjax.core.events import (
    Down,
    Finish,
    Preempt,
    Release,
    Retry,
    Reuse,
    Send,
    SendFailed,
    Up,
    read_jsonl,
)
from pdjax.metrics import analyse, summary
from pdjax.report import caveats, comparison_table, findings, redraw, write_comparison, write_run
from pdjax.report_figures import zoom_window
from pdjax.report_tables import memory_cells
from pdjax.timeline import chrome_trace, lanes

SWAPPING = {
    "both": Role(pool=Pool(tokens=64, page_size=4), chunk=64, preempt="swap", swap_tokens=32)
}
_SWAP = {"rid": 0, "start": 0, "length": 9, "group": 0, "groups": 1}
TROUBLED_LOG = [  # swapped out, lost on its way back, computed again, lost with its instance
    arrived(0, 0, prompt_len=8, max_tokens=5),
    at(0, Reuse(0, "both/0", 4, "local")),
    hold(0, 0, "both/0", (0, 1, 2)),
    prefill(0, 0, 0, "both/0", start=4, length=4),
    done(10, 0, 0, "both/0", {0: 1}),
    decode(10, 1, {0: 8}, "both/0"),
    done(20, 1, 10, "both/0", {0: 1}),
    hold(20, 0, "both/0.host", (0, 1, 2)),
    at(20, Preempt(0, "both/0", "swap")),
    at(20, Send(0, source="both/0", target="both/0.host", purpose="swap_out", **_SWAP)),
    landed(25, 0, 0, 20),
    at(25, Release(0, "both/0")),
    at(30, Send(1, source="both/0.host", target="both/0", purpose="swap_in", **_SWAP)),
    at(30, Send(2, source="both/0.host", target="both/0", purpose="swap_in", **_SWAP)),
    landed(31, 1, 0, 30),
    at(32, SendFailed(0, 2, "the wire is cut")),
    at(32, Retry(0, "the wire is cut")),
    at(32, Release(0, "both/0.host")),
    prefill(33, 2, 0, "both/0", start=0, length=10),
    done(40, 2, 33, "both/0", {0: 1}),
    at(45, Down("both/0", returns=True)),
    at(45, Finish(0, "failed", 3, "KV lost twice")),
    at(50, Up("both/0")),
]

ENVIRONMENT = {"python": "3.11", "devices": ["cpu"] * 8, "seed": 0}
CONFIG = Config(
    placements={name: p for name, p in placements().items() if name != "chunked"},
    name="synthetic",
    slo=SLO(1.0, 0.05),
)
TINY = Config(placements={"collocated": COLLOCATED}, name="tiny")


@pytest.fixture(scope="module")
def logs() -> dict:
    return {name: served(p, requests(20, rate=2.5)) for name, p in CONFIG.placements.items()}


@pytest.fixture(scope="module")
def folder(logs, tmp_path_factory):
    """A comparison of two placements, written once."""
    folder = tmp_path_factory.mktemp("comparison")
    runs = {
        name: write_run(folder / name, CONFIG, name, ENVIRONMENT, log) for name, log in logs.items()
    }
    write_comparison(folder, CONFIG, ENVIRONMENT, runs)
    return folder


def runs_of(logs: dict) -> dict:
    return {name: analyse(log, CONFIG.placements[name], CONFIG.slo) for name, log in logs.items()}


# --- folders -------------------------------------------------------------------------------


def test_run_folder_has_every_file(folder):
    names = {path.name for path in (folder / "disaggregated").iterdir()}
    assert names == {
        "config.json", "environment.json", "events.jsonl", "requests.csv", "summary.json",
        "timeline.json", "report.html", "figures",
    }  # fmt: skip
    assert len((folder / "disaggregated" / "requests.csv").read_text().splitlines()) == 1 + 20
    assert json.loads((folder / "environment.json").read_text()) == ENVIRONMENT


def test_summary_and_log_on_disk_are_those_of_the_run(folder, logs):
    for name, log in logs.items():
        assert list(read_jsonl(folder / name / "events.jsonl")) == log
        on_disk = json.loads((folder / name / "summary.json").read_text())
        assert on_disk == summary(analyse(log, CONFIG.placements[name], CONFIG.slo))


def test_log_that_is_there_already_is_kept(tmp_path):
    (tmp_path / "events.jsonl").write_text("written while serving\n")
    write_run(tmp_path, TINY, "collocated", {}, COLLOCATED_LOG)
    assert (tmp_path / "events.jsonl").read_text() == "written while serving\n"


def test_pages_can_be_redrawn_from_log_and_config_alone(folder, tmp_path):
    run = folder / "disaggregated"
    for name in ("config.json", "events.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    assert redraw(tmp_path) == tmp_path / "report.html"
    for figure in sorted(run.glob("figures/*.svg")):
        again = tmp_path / "figures" / figure.name
        assert again.read_bytes() == figure.read_bytes(), figure.name


def test_comparison_is_redrawn_from_the_runs_it_has(tmp_path):
    config = Config(placements={"collocated": COLLOCATED, "not yet run": COLLOCATED})
    run = write_run(tmp_path / "collocated", config, "collocated", {}, COLLOCATED_LOG)
    page = write_comparison(tmp_path, config, ENVIRONMENT, {"collocated": run})
    before = page.read_text()
    page.unlink()
    assert redraw(tmp_path) == page
    results = page.read_text().partition('id="appendix"')[0]
    assert results == before.partition('id="appendix"')[0]


def test_redraw_without_a_log_says_where_it_looked(tmp_path, folder):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"disaggregated.events\.jsonl"):
        redraw(tmp_path)


# --- pages ---------------------------------------------------------------------------------

SECTIONS = (
    "findings", "comparison", "latencies", "stages", "timeline_zoom", "timeline", "token_gaps",
    "load", "occupancy",
)  # fmt: skip


@pytest.mark.parametrize(
    ("page", "tables"),
    [("comparison.html", ["transfers", "instances"]), ("collocated/report.html", ["instances"])],
)
def test_page_has_every_section_and_nothing_from_outside(folder, page, tables):
    text = (folder / page).read_text()
    assert re.findall(r'<section id="(\w+)">', text) == [*SECTIONS, *tables, "appendix"]
    assert text.count("<svg") == text.count("<figcaption") == 7
    assert not re.search(r"<(script|link|img|iframe)\b|@import|<!DOCTYPE svg", text)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert (folder / page).parent.joinpath("figures", "latencies.svg").exists()


def test_page_of_a_run_in_which_nothing_completes(tmp_path):
    for name, log in {"lossy": LOSSY_LOG, "only arrivals": [arrived(0, 0)]}.items():
        write_run(tmp_path / name, TINY, "collocated", {}, log)
        assert "unfinished" in (tmp_path / name / "report.html").read_text()


def test_names_in_a_page_are_escaped(tmp_path):
    config = Config(placements={"<b>": COLLOCATED}, name="a & b")
    write_run(tmp_path, config, "<b>", {}, COLLOCATED_LOG)
    text = (tmp_path / "report.html").read_text()
    assert "a &amp; b" in text
    assert "<b>" not in text


def test_zoom_shows_the_longest_gap_between_tokens(logs):
    runs = runs_of(logs)
    began, ended = zoom_window(runs)
    tokens = runs["collocated"].tokens
    worst = tokens.loc[tokens["itl_s"].idxmax()]
    assert began <= worst["t_s"] - worst["itl_s"]
    assert worst["t_s"] <= ended


def test_page_says_what_went_wrong_and_why(tmp_path):
    config = Config(placements={"swapping": SWAPPING}, name="trouble")
    write_run(tmp_path, config, "swapping", {}, TROUBLED_LOG)
    text = (tmp_path / "report.html").read_text()
    assert re.findall(r'<section id="(\w+)">', text)[-5:] == [
        "transfers", "reuse", "interruptions", "instances", "appendix",
    ]  # fmt: skip
    table = text.partition('id="interruptions"')[2].partition("</section>")[0]
    columns = re.findall(r'<th scope="col">([^<]+)</th>', table)
    assert columns[:5] == ["placement", "preempted", "swapped", "retried", "failed"]
    cells = re.findall(r"<td>([^<]*(?:<span[^>]*></span>)?[^<]*)</td>", table)
    assert "the wire is cut" in cells
    assert "KV lost twice" in cells
    assert "swapping: swap in" in text
    assert "both/0.host" in text


def test_bytes_held_are_told_by_any_placement_that_moved_kv(logs):
    runs = runs_of(logs)
    cells = memory_cells(runs, {name: summary(run) for name, run in runs.items()})
    for name in runs:
        row = next(row for row in cells.rows if row[0].startswith(name))
        held, megabytes = (float(row[i].replace(",", "")) for i in (2, 4))
        assert megabytes == pytest.approx(held * KV_BYTES / 1e6, rel=0.01)


# --- words and tables ----------------------------------------------------------------------


def test_comparison_table_has_a_row_per_placement_with_its_numbers(logs):
    runs = runs_of(logs)
    table = comparison_table(runs)
    assert max(map(len, table.splitlines())) <= 120
    for name, run in runs.items():
        row = next(line.split() for line in table.splitlines() if line.startswith(f" {name}"))
        numbers = summary(run)
        assert row[1] == str(numbers["devices"])
        ttft_ms = float(row[2].replace(",", ""))
        assert ttft_ms == pytest.approx(numbers["ttft_p50_s"] * 1e3, rel=5e-3)
        assert f"{numbers['slo_attainment']:.0%}" in row


def _numbers(**changes) -> dict:
    same = dict.fromkeys(("ttft_p50_s", "tpot_p50_s", "itl_p99_s", "output_tokens_per_s"), 0.1)
    return {
        **same, "devices": 1, "slo_attainment": 0.5, "slo_attainment_low95": 0.4,
        "slo_attainment_high95": 0.6, "transfer_bytes": 0, "transfer_exposed_mean_s": 0.0,
        "refused": 0, "aborted": 0, "failed": 0, "unfinished": 0, "requests": 500,
        "queue_growing": False,
        **changes,
    }  # fmt: skip


def test_findings_state_ratios_costs_and_whether_intervals_are_apart():
    runs = {name: analyse([arrived(0, 0)], p, SLO()) for name, p in placements().items()}
    numbers = {
        "collocated": _numbers(),
        "chunked": _numbers(ttft_p50_s=0.104),
        "disaggregated": _numbers(
            devices=2, itl_p99_s=0.025, ttft_p50_s=0.2, slo_attainment=0.8,
            slo_attainment_low95=0.7, slo_attainment_high95=0.9, transfer_bytes=3_000_000,
            transfer_exposed_mean_s=0.0021,
        ),
    }  # fmt: skip
    separated, chunked = findings(runs, numbers)
    assert separated.startswith("disaggregated against collocated, on 2 devices against 1")
    assert "p99 ITL 4.0x lower" in separated
    assert "median TTFT 2.0x higher" in separated
    assert "80% of requests against 50% (the 95% intervals are apart)" in separated
    assert "3.00 MB of KV moved, hidden but for 2.10 ms per request" in separated
    assert "median TTFT about the same (1.04x)" in chunked
    assert "overlap" in chunked


def test_caveats_name_what_limits_the_numbers():
    modelled = CONFIG.replace(clock=Clock(kind="modelled"))
    growing = {"queue_growth_requests_per_s": 0.5, "arrival_requests_per_s": 2.0}
    numbers = {
        "a": _numbers(refused=3, queue_growing=True, **growing),
        "b": _numbers(devices=2, requests=20),
    }
    text = "\n".join(caveats(modelled, numbers))
    for part in ("cost model", "different numbers of devices", "a: 3 refused of 500", "growing"):
        assert part in text
    assert "With 20 requests" in text
    assert caveats(CONFIG, {"a": _numbers()}) == []


# --- timeline ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(logs) -> list[dict]:
    trace = chrome_trace(runs_of(logs)["disaggregated"])
    return json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]


def test_timeline_is_valid_chrome_trace_format(trace):
    for event in trace:
        assert event["ph"] in "XbeniCM"
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "ben":
            assert "id" in event
            assert event["cat"] == "request"


def test_timeline_spans_of_one_track_do_not_overlap(trace):
    tracks = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for spans in tracks.values():
        spans.sort()
        for (ts, dur), (following, _) in pairwise(spans):
            assert ts + dur <= following + 0.002  # rounded to nanoseconds


def test_timeline_has_all_steps_pieces_and_closed_requests(trace, logs):
    run = runs_of(logs)["disaggregated"]
    assert sum(e["ph"] == "X" for e in trace) == len(run.steps) + len(run.transfers)
    opened = Counter((e["id"], e["name"]) for e in trace if e["ph"] == "b")
    assert opened == Counter((e["id"], e["name"]) for e in trace if e["ph"] == "e")
    names = {e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"requests", "prefill/0", "decode/0", "transfers"}
    threads = {e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name"}
    assert threads == {"prefill", "decode", "prefill/0 -> decode/0"}


def test_timeline_marks_unfinished_requests_as_instants():
    events = chrome_trace(analyse(LOSSY_LOG, COLLOCATED, SLO()))["traceEvents"]
    assert [e["id"] for e in events if e["ph"] == "n"] == [3]


def test_timeline_marks_what_went_wrong_where_it_did():
    run = analyse(TROUBLED_LOG, SWAPPING, SLO())
    trace = chrome_trace(run)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    marks = [(names[e["pid"]], e["name"], e["ts"]) for e in trace if e["ph"] == "i"]
    assert marks == [
        ("both/0", "preempt request 0", 20_000),
        ("transfers", "piece failed request 0", 32_000),
        ("requests", "retry request 0", 32_000),
        ("both/0", "down", 45_000),
        ("requests", "failed request 0", 45_000),
        ("both/0", "up", 50_000),
    ]


def test_timeline_shows_the_stages_of_every_pass_in_order():
    run = analyse(TROUBLED_LOG[:-3], SWAPPING, SLO())
    spans = run.stages.itertuples()
    assert [(s.stage, round(s.began_s * 1e3), round(s.ended_s * 1e3)) for s in spans] == [
        ("prefill", 0, 10),
        ("decode", 10, 20),
        ("decode_queue", 20, 30),
        ("transfer_exposed", 30, 31),  # one piece came,
        ("transfer_exposed", 31, 32),  # the other did not
        ("prefill_queue", 32, 33),
        ("prefill", 33, 40),
    ]


def test_lanes_reuse_a_lane_once_it_is_free():
    #             0..4  1..2  2..3  3..5
    assert lanes([0, 1, 2, 3], [4, 2, 3, 5]) == [0, 1, 1, 1]
