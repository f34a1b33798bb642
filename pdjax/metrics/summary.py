"""A Run -> its numbers. Percentiles interpolate linearly (numpy's default)."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from pdjax.core.config import Placement
from pdjax.metrics.lives import STAGES
from pdjax.metrics.moves import kv_token_bytes
from pdjax.metrics.pools import HOST, pool_config
from pdjax.metrics.tables import REUSES, Run

GROWTH = 0.1
"""A queue grows when it gains more than this share of the arriving requests."""


class Attainment(NamedTuple):
    """Share of requests within both SLOs, and its 95 % Wilson score interval."""

    attained: int
    requests: int
    share: float
    low: float
    high: float


class Growth(NamedTuple):
    """Requests per second by which the number in the system grew; NaN and None: cannot tell."""

    per_s: float
    growing: bool | None


def attainment(run: Run) -> Attainment:
    """Joint SLO attainment. Every request counts: refused, aborted and unfinished ones missed.

    The interval is Wilson's (1927), which stays within [0, 1] and holds for few requests; it takes
    requests as independent, which those that queue behind each other are not.
    """
    return attainment_of(int(run.requests["attained"].sum()), len(run.requests))


def attainment_of(attained: int, n: int) -> Attainment:
    """The same of `n` requests of which so many were within both SLOs."""
    from scipy.stats import binomtest  # half a second to import, and only needed here

    interval = binomtest(attained, n).proportion_ci(method="wilson")
    return Attainment(attained, n, attained / n, float(interval.low), float(interval.high))


def in_system(run: Run) -> pd.Series:
    """Requests that arrived and have not ended, after each change; indexed by time (s)."""
    arrived = pd.Series(1, index=run.requests["arrival_s"])
    ended = pd.Series(-1, index=run.requests["ended_s"].dropna())
    return pd.concat([arrived, ended]).groupby(level=0).sum().sort_index().cumsum()


def queue_growth(run: Run) -> Growth:
    """Was the queue still growing when arrivals stopped?

    Rule: over the second half of the arrival window (the first half fills the empty system),
    the least-squares slope of the requests in the system at each arrival is above a tenth of the
    arrival rate. Needs ten arrivals there; a burst has no window.
    """
    return growth_of(run.requests["arrival_s"].to_numpy(), run.requests["ended_s"].to_numpy())


def growth_of(arrival_s: np.ndarray, ended_s: np.ndarray) -> Growth:
    """The same of requests in any order; NaN: it has not ended."""
    arrivals, ends = np.sort(arrival_s), np.sort(ended_s)  # NaN is the last
    late = arrivals[arrivals >= (arrivals[0] + arrivals[-1]) / 2]
    if len(late) < 10 or late[-1] == late[0]:
        return Growth(float("nan"), None)
    waiting = arrivals.searchsorted(late, side="right") - ends.searchsorted(late, side="right")
    slope = float(np.polyfit(late - late[0], waiting, 1)[0])
    rate = (len(late) - 1) / (late[-1] - late[0])
    return Growth(slope, bool(slope > GROWTH * rate))


def devices(placement: Placement) -> int:
    """Devices that a placement occupies; a role beside another adds none."""
    return sum(role.instances * role.tp for role in placement.values() if not role.beside)


def busy_s(steps: pd.DataFrame) -> float:
    """Seconds in which at least one of the steps ran (with a lag, steps overlap)."""
    intervals = steps.sort_values("began_s")[["began_s", "ended_s"]].to_numpy()
    until, busy = -np.inf, 0.0
    for began, ended in intervals:
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return busy


def time_mean(t_s: np.ndarray, values: np.ndarray, began_s: float, ended_s: float) -> float:
    """Mean over [began_s, ended_s] of a value that is `values[i]` from `t_s[i]` on, 0 before.

    Times in which it is NaN are left out.
    """
    lengths = np.diff(np.array([began_s, *t_s, ended_s]))
    values = np.array([0.0, *values])
    defined = ~np.isnan(values) & (lengths > 0)
    if not defined.any():
        return float("nan")
    return float(np.average(values[defined], weights=lengths[defined]))


def summary(run: Run) -> dict[str, float | int | bool | None]:
    """All numbers of a run, flat and JSON-able; a key ends with its unit, None is undefined."""
    numbers = {
        **_counts(run),
        **_spread("ttft", run.requests["ttft_s"]),
        **_spread("tpot", run.requests["tpot_s"]),
        **_spread("itl", run.tokens["itl_s"]),
        **_spread("e2e", run.requests["e2e_s"]),
        **{f"{stage}_mean_s": run.requests[f"{stage}_s"].mean() for stage in STAGES},
        **_rates(run),
        **_attainment(run),
        **_transfers(run),
        **_reuse(run),
        **_queue(run),
        **_memory(run),
    }
    for instance in run.instances:
        numbers |= _instance(run, instance)
    for pool in run.pools["pool"].unique():
        numbers |= _pool(run, pool)
    return {key: _plain(value) for key, value in numbers.items()}


def _plain(value) -> float | int | bool | None:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _spread(name: str, seconds: pd.Series) -> dict:
    seconds = seconds.dropna()
    return {
        f"{name}_n": len(seconds),
        f"{name}_mean_s": seconds.mean(),
        **{f"{name}_p{p}_s": seconds.quantile(p / 100) for p in (50, 90, 99)},
        f"{name}_max_s": seconds.max(),
    }


def _counts(run: Run) -> dict:
    outcomes = run.requests["outcome"]
    return {
        "requests": len(outcomes),
        "completed": run.requests["completed"].sum(),
        "refused": (outcomes == "refused").sum(),
        "aborted": (outcomes == "abort").sum(),
        "failed": (outcomes == "failed").sum(),
        "unfinished": (outcomes == "unfinished").sum(),
        "devices": devices(run.placement),
        **_interruptions(run),
    }


def _interruptions(run: Run) -> dict:
    what, how = run.incidents["what"], run.incidents["how"]
    return {
        "preemptions": (what == "preempt").sum(),
        **{
            f"preemptions_{way}": ((what == "preempt") & (how == way)).sum()
            for way in ("recompute", "return", "swap")
        },
        "retries": (what == "retry").sum(),
        "pieces_failed": (what == "piece failed").sum(),
        "pieces_cancelled": (what == "piece cancelled").sum(),
        "instances_down": (what == "down").sum(),
        "interrupted_s": run.requests["interrupted_s"].sum(),
    }


def _rates(run: Run) -> dict:
    """Output tokens are those that reached clients; prompt tokens those that were prefilled,
    whatever was computed again included."""
    requests, makespan_s = run.requests, run.makespan_s or float("nan")
    window_s = np.ptp(requests["arrival_s"]) or float("nan")
    output_tokens, prompt_tokens = requests["tokens"].sum(), run.steps["prompt_tokens"].sum()
    return {
        "makespan_s": makespan_s,
        "arrival_requests_per_s": (len(requests) - 1) / window_s,
        "requests_per_s": requests["completed"].sum() / makespan_s,
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "output_tokens_per_s": output_tokens / makespan_s,
        "total_tokens_per_s": (output_tokens + prompt_tokens) / makespan_s,
        "goodput_requests_per_s": requests["attained"].sum() / makespan_s,
    }


def _attainment(run: Run) -> dict:
    reached = attainment(run)
    return {
        "slo_ttft_s": run.slo.ttft_s,
        "slo_tpot_s": run.slo.tpot_s,
        "slo_target": run.slo.target,
        "slo_attained": reached.attained,
        "slo_attainment": reached.share,
        "slo_attainment_low95": reached.low,
        "slo_attainment_high95": reached.high,
    }


def _transfers(run: Run) -> dict:
    """Of everything that landed, then of each purpose for which something did.

    Wire time is that in which at least one of a request's pieces crossed, summed over requests;
    those that share a link each count in full. Exposed means are per request that waited.
    """
    exposed = run.requests["transfer_exposed_s"]
    numbers = {
        "transfer_bytes": run.transfers["bytes"].sum(),
        "transfer_pieces": len(run.transfers),
        "transfer_wire_s": run.moves["wire_s"].sum(),
        "transfer_exposed_s": exposed.sum(),
        "transfer_exposed_p99_s": exposed.quantile(0.99),
        "step_waited_s": run.steps["waited_s"].sum(),
    }
    for purpose, moves in run.moves.groupby("purpose"):
        numbers |= {
            f"{purpose}_bytes": moves["bytes"].sum(),
            f"{purpose}_pieces": moves["pieces"].sum(),
            f"{purpose}_wire_s": moves["wire_s"].sum(),
            f"{purpose}_exposed_mean_s": moves["exposed_s"].mean(),
            f"{purpose}_closed_form_mean_s": moves["closed_form_s"].mean(),
        }
    return numbers


def _reuse(run: Run) -> dict:
    """Tokens of prompts whose prefill began: found where they are needed, loaded, or computed.
    Hit rate: (local + remote) / prompt tokens, each prompt once, in its request's first pass."""
    begun = run.requests[run.requests["started"]]
    hits = begun["local"].sum() + begun["remote"].sum()
    return {
        **{f"reused_{how}_tokens": run.requests[how].sum() for how in REUSES},
        "computed_tokens": run.requests["computed"].sum(),
        "redone_tokens": run.requests["redone"].sum(),
        "prefix_hit_rate": hits / (begun["prompt_len"].sum() or float("nan")),
    }


def _memory(run: Run) -> dict:
    """Tokens of KV memory held on devices, over all pools."""
    on_devices = run.pools[~run.pools["pool"].str.endswith(HOST)]
    levels = on_devices.pivot_table(index=on_devices.index, columns="pool", values="held_tokens")
    total = levels.ffill().fillna(0).sum(axis=1).to_numpy()
    t_s = on_devices["t_s"].to_numpy()
    return {
        "kv_token_bytes": kv_token_bytes(run.transfers),
        "kv_held_tokens_mean": time_mean(t_s, total, run.began_s, run.ended_s),
        "kv_held_tokens_peak": total.max() if len(total) else 0,
    }


def _queue(run: Run) -> dict:
    counts, growth = in_system(run), queue_growth(run)
    t_s = counts.index.to_numpy(dtype=float)
    return {
        "in_system_mean": time_mean(t_s, counts.to_numpy(), run.began_s, run.ended_s),
        "in_system_max": counts.max(),
        "queue_growth_requests_per_s": growth.per_s,
        "queue_growing": growth.growing,
    }


def _instance(run: Run, name: str) -> dict:
    steps = run.steps[run.steps["instance"] == name]
    busy = busy_s(steps)
    decodes = steps["decodes"][steps["decodes"] > 0]
    return {
        f"{name}.steps": len(steps),
        f"{name}.busy_s": busy,
        f"{name}.utilisation": busy / (run.makespan_s or float("nan")),
        f"{name}.decode_batch_mean": decodes.mean(),
        f"{name}.prompt_tokens": steps["prompt_tokens"].sum(),
        f"{name}.output_tokens": steps["tokens"].sum(),
    }


def _pool(run: Run, name: str) -> dict:
    """Internal fragmentation: 1 - token-seconds stored / token-seconds held. External: its mean
    over the run."""
    changes = run.pools[run.pools["pool"] == name]
    pool = pool_config(name, run.placement)

    def mean(column: str) -> float:
        t_s, values = changes["t_s"].to_numpy(), changes[column].to_numpy()
        return time_mean(t_s, values, run.began_s, run.ended_s)

    held, stored = mean("held_tokens"), mean("stored_tokens")
    return {
        f"{name}.pool_pages": pool.pages,
        f"{name}.pool_pages_peak": changes["pages"].max(),
        f"{name}.pool_occupancy_mean": mean("pages") / pool.pages,
        f"{name}.pool_occupancy_peak": changes["pages"].max() / pool.pages,
        f"{name}.held_tokens_mean": held,
        f"{name}.held_tokens_peak": changes["held_tokens"].max(),
        f"{name}.stored_tokens_mean": stored,
        f"{name}.fragmentation_internal": 1 - stored / (held or float("nan")),
        f"{name}.fragmentation_external": mean("external") if pool.form == "slab" else None,
    }
