"""A Run -> a timeline in the Chrome trace event format, which ui.perfetto.dev opens.

Times are microseconds of the run. One process per instance, with a track per kind of step and
counters; one for transfers, with a track per pair of instances; one for requests, whose stages
are asynchronous spans. Preemptions, retries, instances going down and up or changing their jobs
and pieces that failed are instants. Spans of a track that overlap get lanes of their own, because
the format nests overlapping spans of one thread.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

import numpy as np
import pandas as pd

from pdjax.metrics import HOST, Run, in_system


def chrome_trace(run: Run) -> dict:
    """The trace as a JSON-able dict (`traceEvents`, `displayTimeUnit`)."""
    pids = {name: pid for pid, name in enumerate(("requests", *run.instances, "transfers"), 1)}
    events = [_named("process_name", pid, 0, name) for name, pid in pids.items()]
    events += [_sorted(pid) for pid in pids.values()]
    for instance in run.instances:
        events += _steps(run.steps[run.steps["instance"] == instance], pids[instance])
    events += _transfers(run.transfers, pids["transfers"])
    events += _requests(run, pids["requests"])
    events += _incidents(run.incidents, pids)
    events += _counter("requests in the system", pids["requests"], in_system(run).items())
    for pool, changes in run.pools.groupby("pool"):
        levels = zip(changes["t_s"], changes["pages"], strict=True)
        instance = str(pool).removesuffix(HOST)
        name = "pages held" if instance == pool else "pages held in host memory"
        events += _counter(name, pids[instance], levels)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lanes(began_s: Sequence[float], ended_s: Sequence[float]) -> list[int]:
    """Puts intervals, sorted by their beginning, on the lowest lane that is free by then."""
    free, busy, lane_of = [], [], []
    for began, ended in zip(began_s, ended_s, strict=True):
        while busy and busy[0][0] <= began:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ended, lane))
        lane_of.append(lane)
    return lane_of


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _steps(steps: pd.DataFrame, pid: int) -> list[dict]:
    events, tids = [], count(1)
    for kind in ("prefill", "decode", "mixed"):
        spans = [
            (
                row.began_s,
                row.ended_s,
                f"{kind} {row.prompt_tokens}+{row.decodes}",
                {
                    "step": row.step,
                    "prompt tokens": row.prompt_tokens,
                    "decodes": row.decodes,
                    "requests": list(row.rids),
                },
            )
            for row in steps[steps["kind"] == kind].itertuples()
        ]
        events += _track(kind, spans, pid, tids)
    return events


def _transfers(transfers: pd.DataFrame, pid: int) -> list[dict]:
    events, tids = [], count(1)
    for (source, target), pieces in transfers.groupby(["source", "target"]):
        spans = [
            (
                row.began_s,
                row.landed_s,
                f"request {row.rid} group {row.group}",
                {"send": row.send, "bytes": row.bytes},
            )
            for row in pieces.itertuples()
        ]
        events += _track(f"{source} -> {target}", spans, pid, tids)
    return events


def _track(name: str, spans: list[tuple], pid: int, tids: Iterator[int]) -> list[dict]:
    """Complete events on as many threads as it takes for none to overlap."""
    spans = sorted(spans, key=lambda span: span[:2])
    lane_of = lanes([span[0] for span in spans], [span[1] for span in spans])
    tid_of = {lane: next(tids) for lane in sorted(set(lane_of))}
    events = [_named("thread_name", pid, tid, name) for tid in tid_of.values()]
    for (began_s, ended_s, label, args), lane in zip(spans, lane_of, strict=True):
        ts, dur = _us(began_s), _us(ended_s - began_s)
        where = {"pid": pid, "tid": tid_of[lane], "ts": ts, "dur": dur}
        events.append({"ph": "X", "name": label, "cat": name, "args": args, **where})
    return events


def _requests(run: Run, pid: int) -> list[dict]:
    """A span per request that ended, its stages within; whatever never ended is an instant."""
    events = []
    stages = dict(iter(run.stages.groupby("rid")))
    for rid, row in run.requests.iterrows():
        common = {"cat": "request", "id": int(str(rid)), "pid": pid, "tid": 0}
        label = f"request {rid}"
        args = {"outcome": row["outcome"], "prompt": row["prompt_len"], "tokens": row["tokens"]}
        start = {"ph": "b", "name": label, "ts": _us(row["arrival_s"]), "args": args, **common}
        if np.isnan(row["ended_s"]):
            events.append({**start, "ph": "n"})
            continue
        events.append(start)
        for span in stages[rid].itertuples() if rid in stages else ():
            for ph, t_s in (("b", span.began_s), ("e", span.ended_s)):
                events.append({"ph": ph, "name": span.stage, "ts": _us(t_s), **common})
        events.append({"ph": "e", "name": label, "ts": _us(row["ended_s"]), **common})
    return events


def _incidents(incidents: pd.DataFrame, pids: Mapping[str, int]) -> list[dict]:
    """On the process of the instance or of the transfers, else on that of the requests."""
    events = []
    for row in incidents.itertuples():
        process = "transfers" if " -> " in row.where else row.where or "requests"
        who = f" request {row.rid}" if row.rid >= 0 else ""
        where = {"s": "p", "pid": pids[process], "tid": 0, "ts": _us(row.t_s)}
        args = {"where": row.where, "how": row.how}
        name = f"{row.what} to {row.how}" if row.what in ("drain", "switch") else f"{row.what}{who}"
        events.append({"ph": "i", "name": name, "cat": row.what, "args": args, **where})
    return events


def _counter(name: str, pid: int, levels: Iterable[tuple]) -> list[dict]:
    return [
        {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(t_s), "args": {name: int(level)}}
        for t_s, level in levels
    ]


def _named(what: str, pid: int, tid: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _sorted(pid: int) -> dict:
    args = {"sort_index": pid}
    return {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": args}
