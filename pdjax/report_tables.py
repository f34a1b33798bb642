"""The tables of a report: text in cells, from Runs and their summaries alone."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from pdjax.metrics import STAGES, Run, pool_config
from pdjax.report_figures import stage_means

Runs = Mapping[str, Run]
Numbers = Mapping[str, Mapping]  # placement -> its summary
UNDEFINED = "n/a"


class Cells(NamedTuple):
    """A table to print: a caption, column headings, and rows that begin with their name."""

    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def comparison_cells(runs: Runs, numbers: Numbers) -> Cells:
    columns = (
        "placement", "devices", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms",
        "ITL p99 ms", "output tok/s", "tok/s per device", "SLO met [95%]", "KV moved MB",
        "exposed ms/req",
    )  # fmt: skip
    rows = []
    for name, s in numbers.items():
        latencies = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "itl_p99_s")
        low, high = s["slo_attainment_low95"], s["slo_attainment_high95"]
        rows.append(
            (
                name,
                str(s["devices"]),
                *(in_ms(s[key]) for key in latencies),
                number(s["output_tokens_per_s"]),
                number((s["output_tokens_per_s"] or math.nan) / s["devices"]),
                f"{s['slo_attainment']:.0%} [{low:.0%},{high:.0%}]",
                number(s["transfer_bytes"] / 1e6),
                in_ms(s["transfer_exposed_mean_s"]),
            )
        )
    return Cells(_objectives(runs), columns, rows)


def _objectives(runs: Runs) -> str:
    run = next(iter(runs.values()))
    counts = sorted({len(run.requests) for run in runs.values()})
    return (
        f"n = {', '.join(map(str, counts))} requests per placement; SLO: TTFT <= "
        f"{run.slo.ttft_s:g} s and TPOT <= {run.slo.tpot_s * 1e3:g} ms together, 95% Wilson "
        "interval; refused, aborted, failed and unfinished requests missed it. MB are 10^6 bytes."
    )


def stage_cells(runs: Runs) -> Cells:
    columns = ("placement", *(f"{stage.replace('_', ' ')} ms" for stage in STAGES), "E2E ms")
    rows = []
    for name, run in runs.items():
        means = stage_means(run)
        rows.append((name, *(in_ms(seconds) for seconds in means), in_ms(means.sum())))
    return Cells("Mean over completed requests.", columns, rows)


def transfer_cells(runs: Runs) -> Cells | None:
    """What crossed between pools, by purpose; nothing where nothing did."""
    columns = (
        "transfer", "requests", "pieces", "MB", "MB/s on the wire", "wire ms/req",
        "exposed ms/req", "closed form ms/req",
    )  # fmt: skip
    rows = []
    for name, run in runs.items():
        for purpose, moves in run.moves.groupby("purpose"):
            wire_s = moves["wire_s"].sum()
            means = (moves[key].mean() for key in ("wire_s", "exposed_s", "closed_form_s"))
            rows.append(
                (
                    f"{name}: {str(purpose).replace('_', ' ')}",
                    number(len(moves)),
                    number(int(moves["pieces"].sum())),
                    number(moves["bytes"].sum() / 1e6),
                    number(moves["bytes"].sum() / wire_s / 1e6 if wire_s else None),
                    *map(in_ms, means),
                )
            )
    caption = (
        "Means per request. Wire: at least one of its pieces was crossing. Exposed: what it waited "
        "for KV and nothing of it was computed. Closed form, of a hand-off: max(Tx/n, Tx - Tp "
        "(n-1)/n) with Tx its wire time, Tp its prefill time and n the moments at which pieces "
        "were ready (layer groups x chunks; 1 for whole requests); of the others: Tx. Streaming "
        "can be below it, for decode hides some too."
    )
    return Cells(caption, columns, rows) if rows else None


def memory_cells(runs: Runs, numbers: Numbers) -> Cells:
    """KV memory of every pool, and of all pools of a placement together."""
    columns = (
        "pool", "pool tokens", "mean held", "peak held", "mean MB", "peak MB", "stored, mean",
        "internal frag.", "external frag.",
    )  # fmt: skip
    # All placements run the same model, and where nothing moves the log does not tell bytes.
    known = (s["kv_token_bytes"] for s in numbers.values() if s["kv_token_bytes"])
    token_mb = next(known, math.nan) / 1e6
    rows = []
    for name, run in runs.items():
        s = numbers[name]
        pools = [str(pool) for pool in run.pools["pool"].unique()]
        for pool in pools:
            tokens = pool_config(pool, run.placement).tokens
            mean, peak = (s[f"{pool}.held_tokens_{which}"] for which in ("mean", "peak"))
            rows.append(
                (
                    f"{name} {pool}",
                    number(tokens),
                    *_held(mean, peak, token_mb),
                    number(s[f"{pool}.stored_tokens_mean"]),
                    percent(s[f"{pool}.fragmentation_internal"]),
                    percent(s[f"{pool}.fragmentation_external"]),
                )
            )
        if len(pools) > 1:
            held = _held(s["kv_held_tokens_mean"], s["kv_held_tokens_peak"], token_mb)
            rows.append((f"{name}, devices", "", *held, "", "", ""))
    caption = (
        "Tokens; held: room in pages that a request holds, a shared page once; stored: tokens in "
        "it. Internal fragmentation: room held but not stored in, over time. External: 1 - longest "
        "free run / free pages of a slab, mean over time. Devices: all pools but host memory."
    )
    return Cells(caption, columns, rows)


def _held(mean: float, peak: float, token_mb: float) -> tuple[str, ...]:
    return number(mean), number(peak), number(mean * token_mb), number(peak * token_mb)


def reuse_cells(numbers: Numbers) -> Cells | None:
    """Where prompts' KV came from; nothing where no prefix was reused."""
    keys = (
        "reused_local_tokens", "reused_remote_tokens", "computed_tokens", "prefix_hit_rate",
        "reused_target_tokens",
    )  # fmt: skip
    if not any(s[key] for s in numbers.values() for key in keys if key.startswith("reused")):
        return None
    columns = ("placement", "local hit", "remote load", "computed", "hit rate", "not sent")
    rows = [
        (name, *(percent(s[k]) if k == "prefix_hit_rate" else number(s[k]) for k in keys))
        for name, s in numbers.items()
    ]
    caption = (
        "Prompt tokens of each request's first pass: found in the pool that prefills, loaded from "
        "another pool, or computed; hit rate: (local + remote) / prompt tokens. Not sent: tokens "
        "that the decode pool had already, which the hand-off left out."
    )
    return Cells(caption, columns, rows)


def interruption_cells(numbers: Numbers) -> Cells | None:
    """Preemptions, retries and losses; nothing where a log has none."""
    counted = {
        "preempted": "preemptions",
        "to recompute": "preemptions_recompute",
        "to prefill": "preemptions_return",
        "swapped": "preemptions_swap",
        "retried": "retries",
        "failed": "failed",
        "pieces failed": "pieces_failed",
        "pieces cancelled": "pieces_cancelled",
        "instances down": "instances_down",
        "tokens computed again": "redone_tokens",
    }
    found = {
        column: key for column, key in counted.items() if any(s[key] for s in numbers.values())
    }
    if not found:
        return None
    rows = [
        (name, *(number(s[key]) for key in found.values()), number(s["interrupted_s"]))
        for name, s in numbers.items()
    ]
    caption = (
        "Preempted: gave its pages to an older request, in one of three ways. Retried: its KV was "
        "lost and is computed again. Interrupted: from either until the request's next token, "
        "summed; it is part of the stages above. What never happened has no column."
    )
    return Cells(caption, ("placement", *found, "interrupted s"), rows)


def reason_cells(runs: Runs) -> Cells | None:
    """Why requests were retried or failed, and pieces lost, most often first."""
    rows = []
    for name, run in runs.items():
        why = run.incidents[run.incidents["what"].isin(("retry", "failed", "piece failed"))]
        counts = why.groupby(["what", "how"]).agg(
            times=("rid", "size"), requests=("rid", "nunique")
        )
        for (what, how), row in counts.sort_values("times", ascending=False).iterrows():
            rows.append((f"{name}: {what}", how, number(row["times"]), number(row["requests"])))
    columns = ("what", "why", "times", "requests")
    return Cells("Every reason that the log gives.", columns, rows) if rows else None


def instance_cells(runs: Runs, numbers: Numbers) -> Cells:
    columns = (
        "instance", "steps", "busy", "mean decode batch", "prompt tokens", "output tokens",
    )  # fmt: skip
    keys = ("steps", "utilisation", "decode_batch_mean", "prompt_tokens", "output_tokens")
    rows = []
    for name, run in runs.items():
        for instance in run.instances:
            values = [(key, numbers[name].get(f"{instance}.{key}")) for key in keys]
            texts = (percent(v) if key == "utilisation" else number(v) for key, v in values)
            rows.append((f"{name} {instance}", *texts))
    caption = "Busy: share of the makespan with a step running."
    return Cells(caption, columns, rows)


def number(value: float | None) -> str:
    """Three significant digits, or all of a whole number."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value else "0"


def in_ms(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e3)


def percent(share: float | None) -> str:
    return UNDEFINED if share is None else f"{share:.0%}"
