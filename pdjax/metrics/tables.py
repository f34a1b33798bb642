"""Records -> a Run: the log as tables, from which every number and figure follows."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from pdjax.core.config import SLO, Placement, instances_of
from pdjax.core.events import (
    Down,
    Drain,
    Finish,
    Preempt,
    Record,
    Retry,
    SendFailed,
    Switch,
    Up,
)
from pdjax.metrics.lives import STAGES, Life, Log
from pdjax.metrics.moves import NS, move_table, transfer_table
from pdjax.metrics.outcomes import in_time
from pdjax.metrics.pools import pool_table

REUSES = ("local", "remote", "target")


@dataclass(frozen=True)
class Run:
    """A run's log as tables; all times are seconds since the run began.

    requests: a row per request, by id: `client_id`, `arrival_s`, `prompt_len`, `max_tokens`,
        `outcome` (`stop`, `length`, `abort`, `failed`, `refused`, `unfinished`), `why`,
        `completed`, `tokens`, `first_token_s`, `last_token_s`, `ended_s`, `ttft_s`, `tpot_s`,
        `e2e_s`, one column per stage (`prefill_queue_s`, ...), `bytes` moved, `attained` (both
        SLOs met); `started` (prefill began), `preempted` and `retried` (times), `interrupted_s`
        (from each of these until the next token); tokens `local`, `remote`, `target` (reused) and
        `computed` in its first pass, and `redone`, computed in later ones.
    stages: a row per time that a request with a token spent in a stage, up to its last token, in
        order: `rid`, `stage`, `began_s`, `ended_s`.
    tokens: a row per token that reached a client: `rid`, `t_s`, `itl_s` (NaN for the first).
    steps: a row per finished step: `step`, `instance`, `kind` (`prefill`, `decode`, `mixed`),
        `began_s`, `ended_s`, `prompt_tokens`, `decodes`, `tokens`, `waited_s` (for pieces on
        their way), `rids`.
    transfers: a row per landed piece: `send`, `rid`, `purpose`, `source`, `target`, `length`,
        `group`, `groups`, `began_s`, `landed_s`, `bytes`.
    moves: a row per request and purpose of which a piece landed: `rid`, `purpose`, `pieces`,
        `bytes`, `wire_s` (a piece of it was on a wire), `closed_form_s` (what of that prefill
        could not hide at best), `exposed_s` (what the request waited for; NaN unless it
        completed, and for `swap_out`).
    pools: a row per change of a pool: `pool`, `t_s`, `pages` and `held_tokens` (a page counts
        once, while any request holds it), `stored_tokens` in them, `external` (fragmentation: 1 -
        longest free run / free pages; NaN unless the pool is a slab with free pages).
    incidents: a row per preemption, retry, lost piece, ...: `t_s`, `what` (`preempt`, `retry`,
        `piece failed`, `piece cancelled`, `down`, `up`, `drain`, `switch`, `failed`), `rid` (-1:
        none), `where` (an instance, SOURCE -> TARGET, or nothing), `how` (of a preemption; the job
        that an instance goes over to) or why.
    began_s, ended_s: the first arrival and the last record; rates are over this makespan.
    """

    placement: Placement
    slo: SLO
    requests: pd.DataFrame
    stages: pd.DataFrame
    tokens: pd.DataFrame
    steps: pd.DataFrame
    transfers: pd.DataFrame
    moves: pd.DataFrame
    pools: pd.DataFrame
    incidents: pd.DataFrame
    began_s: float
    ended_s: float

    @property
    def makespan_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def instances(self) -> tuple[str, ...]:
        """All instances of the placement, `role/i`, whether they worked or not."""
        return instances_of(self.placement)


def analyse(records: Sequence[Record], placement: Placement, slo: SLO) -> Run:
    """The tables of a log. A log that was cut short is fine: its open requests are `unfinished`.

    Raises LogError where the log is empty, lacks its beginning, or names other instances.
    """
    log = Log(records)
    transfers, stages = transfer_table(log), _stage_table(log.lives)
    return Run(
        placement=placement,
        slo=slo,
        requests=_request_table(log.lives, stages, transfers, slo),
        stages=stages,
        tokens=_token_table(log.lives),
        steps=_step_table(log),
        transfers=transfers,
        moves=move_table(log),
        pools=pool_table(records, log, placement),
        incidents=_incident_table(records, log),
        began_s=min(life.request.arrival_ns for life in log.lives.values()) * NS,
        ended_s=max(record.t_ns for record in records) * NS,
    )


# --- requests and tokens -------------------------------------------------------------------


def _request_table(
    lives: dict[int, Life], stages: pd.DataFrame, transfers: pd.DataFrame, slo: SLO
) -> pd.DataFrame:
    table = pd.DataFrame(
        {
            "rid": rid,
            "client_id": life.request.client_id,
            "arrival_s": life.request.arrival_ns * NS,
            "prompt_len": life.request.prompt_len,
            "max_tokens": life.request.max_tokens,
            "outcome": life.outcome,
            "why": life.why,
            "completed": life.outcome in ("stop", "length"),
            "tokens": len(life.tokens),
            "first_token_s": _seconds(life.tokens[0] if life.tokens else None),
            "last_token_s": _seconds(life.tokens[-1] if life.tokens else None),
            "ended_s": _seconds(life.ended),
            **_work(life),
        }
        for rid, life in sorted(lives.items())
    ).set_index("rid")
    completed = table["completed"]
    table["ttft_s"] = table["first_token_s"] - table["arrival_s"]
    gaps = (table["tokens"] - 1).where(completed & (table["tokens"] > 1))
    table["tpot_s"] = (table["last_token_s"] - table["first_token_s"]) / gaps
    table["e2e_s"] = (table["last_token_s"] - table["arrival_s"]).where(completed)
    for stage in STAGES:
        spans = stages[stages["stage"] == stage]
        lengths = (spans["ended_s"] - spans["began_s"]).groupby(spans["rid"]).sum()
        table[f"{stage}_s"] = lengths.reindex(table.index, fill_value=0.0).where(completed)
    table["bytes"] = transfers.groupby("rid")["bytes"].sum().reindex(table.index, fill_value=0)
    table["attained"] = completed & in_time(table["ttft_s"], table["tpot_s"], slo)
    return table


def _work(life: Life) -> dict[str, bool | int | float]:
    first, *later = life.passes
    return {
        "started": life.started,
        "preempted": life.interruptions["preempt"],
        "retried": life.interruptions["retry"],
        "interrupted_s": life.interrupted_ns() * NS,
        **{how: first.reused[how] for how in REUSES},
        "computed": first.computed,
        "redone": sum(again.computed for again in later),
    }


def _seconds(t_ns: int | None) -> float:
    return float("nan") if t_ns is None else t_ns * NS


def _stage_table(lives: dict[int, Life]) -> pd.DataFrame:
    rows = [
        (rid, span.stage, span.began * NS, span.ended * NS)
        for rid, life in sorted(lives.items())
        for span in life.spans()
        if span.ended > span.began
    ]
    columns = ["rid", "stage", "began_s", "ended_s"]
    return pd.DataFrame(rows, columns=columns).astype({"began_s": float, "ended_s": float})


def _token_table(lives: dict[int, Life]) -> pd.DataFrame:
    pairs = [(rid, t_ns) for rid, life in sorted(lives.items()) for t_ns in life.tokens]
    table = pd.DataFrame(pairs, columns=["rid", "t_ns"]).astype("int64")
    table["itl_s"] = table.groupby("rid")["t_ns"].diff() * NS
    table.insert(1, "t_s", table.pop("t_ns") * NS)
    return table


# --- steps and incidents -------------------------------------------------------------------


def _step_table(log: Log) -> pd.DataFrame:
    rows = []
    for ended_ns, done in log.done:
        plan = log.plans[done.step]
        rows.append(
            {
                "step": done.step,
                "instance": done.instance,
                "kind": "decode" if not plan.chunks else "mixed" if plan.decodes else "prefill",
                "began_s": done.began_ns * NS,
                "ended_s": ended_ns * NS,
                "prompt_tokens": sum(chunk.length for chunk in plan.chunks),
                "decodes": len(plan.decodes),
                "tokens": sum(len(e.tokens) for e in done.emitted),
                "waited_s": log.waits[done.step] * NS,
                "rids": tuple(work.rid for work in (*plan.chunks, *plan.decodes)),
            }
        )
    columns = "step instance kind began_s ended_s prompt_tokens decodes tokens waited_s rids"
    return pd.DataFrame(rows, columns=columns.split())


def _incident_table(records: Sequence[Record], log: Log) -> pd.DataFrame:
    rows = []
    for record in records:
        match record.body:
            case Preempt(rid=rid, instance=instance, how=how):
                row = ("preempt", rid, instance, how)
            case Retry(rid=rid, why=why):
                row = ("retry", rid, "", why)
            case SendFailed(rid=rid, send=send, why=why):
                what = "piece cancelled" if why == "cancelled" else "piece failed"
                row = (what, rid, _way(log, send), why)
            case Down(instance=instance):
                row = ("down", -1, instance, "")
            case Up(instance=instance):
                row = ("up", -1, instance, "")
            case Drain(instance=instance, to=to):
                row = ("drain", -1, instance, to)
            case Switch(instance=instance, does=does):
                row = ("switch", -1, instance, does)
            case Finish(rid=rid, reason="failed", why=why):
                row = ("failed", rid, "", why)
            case _:
                continue
        rows.append((record.t_ns * NS, *row))
    return pd.DataFrame(rows, columns=["t_s", "what", "rid", "where", "how"])


def _way(log: Log, send: int) -> str:
    return f"{log.sends[send].source} -> {log.sends[send].target}" if send in log.sends else ""
