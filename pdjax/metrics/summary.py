"""A Run -> its numbers. Percentiles interpolate linearly (numpy's default)."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from pdjax.core.config import Placement
from pdjax.metrics.tables import STAGES, Run, pool_config

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
    from scipy.stats import binomtest  # half a second to import, and only needed here

    attained, n = int(run.requests["attained"].sum()), len(run.requests)
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
    arrivals = run.requests["arrival_s"].sort_values().to_numpy()
    late = arrivals[arrivals >= (arrivals[0] + arrivals[-1]) / 2]
    if len(late) < 10 or late[-1] == late[0]:
        return Growth(float("nan"), None)
    counts = in_system(run)
    waiting = counts.to_numpy()[counts.index.searchsorted(late, side="right") - 1]
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
        **_queue(run),
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
        "unfinished": (outcomes == "unfinished").sum(),
        "devices": devices(run.placement),
    }


def _rates(run: Run) -> dict:
    """Output tokens are those that reached clients; prompt tokens those that were prefilled."""
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
    """Wire time sums the pieces' own times, so pieces that share a link each count in full."""
    exposed = run.requests["transfer_exposed_s"]
    return {
        "transfer_bytes": run.transfers["bytes"].sum(),
        "transfer_pieces": len(run.transfers),
        "transfer_wire_s": (run.transfers["landed_s"] - run.transfers["began_s"]).sum(),
        "transfer_exposed_s": exposed.sum(),
        "transfer_exposed_p99_s": exposed.quantile(0.99),
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
    """Internal fragmentation: 1 - token-seconds written / token-seconds held. External: its mean
    over the run."""
    changes = run.pools[run.pools["pool"] == name]
    pool = pool_config(name, run.placement)

    def mean(column: str) -> float:
        t_s, values = changes["t_s"].to_numpy(), changes[column].to_numpy()
        return time_mean(t_s, values, run.began_s, run.ended_s)

    held = mean("held_tokens") or float("nan")
    return {
        f"{name}.pool_pages": pool.pages,
        f"{name}.pool_pages_peak": changes["pages"].max(),
        f"{name}.pool_occupancy_mean": mean("pages") / pool.pages,
        f"{name}.pool_occupancy_peak": changes["pages"].max() / pool.pages,
        f"{name}.fragmentation_internal": 1 - mean("written_tokens") / held,
        f"{name}.fragmentation_external": mean("external") if pool.form == "slab" else None,
    }
