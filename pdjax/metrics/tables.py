"""Records -> a Run: the log as tables, from which every number and figure follows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from pdjax.core.config import SLO, Placement, Pool, instances_of, pool_owner, role_of
from pdjax.core.events import (
    Arrived,
    Finish,
    Hold,
    KVHandle,
    Landed,
    Record,
    Refuse,
    Release,
    Send,
    Step,
    StepDone,
)
from pdjax.core.request import Request

STAGES = ("prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode")
NS = 1e-9


class LogError(ValueError):
    """A log that cannot be analysed: empty, without its beginning, or of another placement."""


@dataclass(frozen=True)
class Run:
    """A run's log as tables; all times are seconds since the run began.

    requests: a row per request, by id: `client_id`, `arrival_s`, `prompt_len`, `max_tokens`,
        `outcome` (`stop`, `length`, `abort`, `refused`, `unfinished`), `completed`, `tokens`,
        `first_token_s`, `last_token_s`, `ended_s`, `ttft_s`, `tpot_s`, `e2e_s`, one column per
        stage (`prefill_queue_s`, ...), `bytes` moved, `attained` (both SLOs met).
    tokens: a row per token that reached a client: `rid`, `t_s`, `itl_s` (NaN for the first).
    steps: a row per finished step: `step`, `instance`, `kind` (`prefill`, `decode`, `mixed`),
        `began_s`, `ended_s`, `prompt_tokens`, `decodes`, `tokens`, `rids`.
    transfers: a row per landed piece: `send`, `rid`, `source`, `target`, `group`, `began_s`,
        `landed_s`, `bytes`.
    pools: a row per change of a pool: `pool`, `t_s`, `pages` held (a shared page counts once),
        `held_tokens` and `written_tokens` (of all handles), `external` (fragmentation: 1 -
        longest free run / free pages; NaN unless the pool is a slab with free pages).
    began_s, ended_s: the first arrival and the last record; rates are over this makespan.
    """

    placement: Placement
    slo: SLO
    requests: pd.DataFrame
    tokens: pd.DataFrame
    steps: pd.DataFrame
    transfers: pd.DataFrame
    pools: pd.DataFrame
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
    if not any(isinstance(record.body, Arrived) for record in records):
        raise LogError(f"a log of {len(records)} records in which no request arrives")
    plans = {r.body.id: r.body for r in records if isinstance(r.body, Step)}
    sends = {r.body.id: r.body for r in records if isinstance(r.body, Send)}
    sends |= {send.id: send for plan in plans.values() for send in plan.sends}
    lives = _follow_requests(records, plans)
    transfers = _transfer_table(records, sends)
    return Run(
        placement=placement,
        slo=slo,
        requests=_request_table(lives, transfers, slo),
        tokens=_token_table(lives),
        steps=_step_table(records, plans),
        transfers=transfers,
        pools=_pool_table(records, plans, sends, placement),
        began_s=min(life.request.arrival_ns for life in lives.values()) * NS,
        ended_s=max(record.t_ns for record in records) * NS,
    )


# --- requests and tokens -------------------------------------------------------------------


@dataclass
class _Life:
    """What the log says about one request; times in ns, None where it never came to that."""

    request: Request
    first_chunk: int | None = None
    prefilled: int | None = None
    landed: int | None = None
    first_decode: int | None = None
    tokens: list[int] = field(default_factory=list)
    outcome: str = "unfinished"
    ended: int | None = None


def _follow_requests(records: Sequence[Record], plans: Mapping[int, Step]) -> dict[int, _Life]:
    lives = {
        r.body.request.id: _Life(r.body.request) for r in records if isinstance(r.body, Arrived)
    }
    for number, record in enumerate(records, 1):
        try:
            _take_in(record, lives, plans)
        except KeyError as error:
            raise LogError(
                f"record {number} ({type(record.body).__name__}) names request or step {error}, "
                "which the log does not introduce; it lacks its beginning"
            ) from None
    return lives


def _take_in(record: Record, lives: dict[int, _Life], plans: Mapping[int, Step]) -> None:
    t_ns = record.t_ns
    match record.body:
        case Step(chunks=chunks, decodes=decodes):
            for chunk in chunks:
                if lives[chunk.rid].first_chunk is None:
                    lives[chunk.rid].first_chunk = t_ns
            for decode in decodes:
                if lives[decode.rid].first_decode is None:
                    lives[decode.rid].first_decode = t_ns
        case StepDone(step=step, emitted=emitted):
            for chunk in plans[step].chunks:
                if chunk.last and lives[chunk.rid].prefilled is None:
                    lives[chunk.rid].prefilled = t_ns
            for e in emitted:
                if lives[e.rid].ended is None:
                    lives[e.rid].tokens += [t_ns] * len(e.tokens)
        case Landed(rid=rid):
            lives[rid].landed = t_ns
        case Finish(rid=rid, reason=outcome, tokens=count):
            life = lives[rid]
            life.outcome, life.ended, life.tokens = outcome, t_ns, life.tokens[:count]
        case Refuse(rid=rid):
            lives[rid].outcome, lives[rid].ended = "refused", t_ns


def _request_table(lives: dict[int, _Life], transfers: pd.DataFrame, slo: SLO) -> pd.DataFrame:
    table = pd.DataFrame(
        {
            "rid": rid,
            "client_id": life.request.client_id,
            "arrival_s": life.request.arrival_ns * NS,
            "prompt_len": life.request.prompt_len,
            "max_tokens": life.request.max_tokens,
            "outcome": life.outcome,
            "completed": life.outcome in ("stop", "length"),
            "tokens": len(life.tokens),
            "first_token_s": _seconds(life.tokens[0] if life.tokens else None),
            "last_token_s": _seconds(life.tokens[-1] if life.tokens else None),
            "ended_s": _seconds(life.ended),
        }
        for rid, life in sorted(lives.items())
    ).set_index("rid")
    completed = table["completed"]
    table["ttft_s"] = table["first_token_s"] - table["arrival_s"]
    gaps = (table["tokens"] - 1).where(completed & (table["tokens"] > 1))
    table["tpot_s"] = (table["last_token_s"] - table["first_token_s"]) / gaps
    table["e2e_s"] = (table["last_token_s"] - table["arrival_s"]).where(completed)
    table = table.join(_stages(lives).where(completed))
    table["bytes"] = transfers.groupby("rid")["bytes"].sum().reindex(table.index, fill_value=0)
    in_time = (table["ttft_s"] <= slo.ttft_s) & ~(table["tpot_s"] > slo.tpot_s)
    table["attained"] = completed & in_time  # a one-token request has no TPOT to miss
    return table


def _seconds(t_ns: int | None) -> float:
    return float("nan") if t_ns is None else t_ns * NS


def _stages(lives: dict[int, _Life]) -> pd.DataFrame:
    """Stage durations: a boundary the log lacks, or that came early, is where the last one was."""
    bounds = pd.DataFrame(
        {
            rid: (
                life.request.arrival_ns,
                life.first_chunk,
                life.prefilled,
                life.landed,
                life.first_decode,
                life.tokens[-1] if life.tokens else None,
            )
            for rid, life in lives.items()
        },
        index=["arrival", *STAGES],
        dtype=float,
    ).T
    end = bounds["decode"]
    bounds = bounds.cummax(axis=1).ffill(axis=1).clip(upper=end, axis=0)
    return (bounds.diff(axis=1)[list(STAGES)] * NS).add_suffix("_s")


def _token_table(lives: dict[int, _Life]) -> pd.DataFrame:
    pairs = [(rid, t_ns) for rid, life in sorted(lives.items()) for t_ns in life.tokens]
    table = pd.DataFrame(pairs, columns=["rid", "t_ns"]).astype("int64")
    table["itl_s"] = table.groupby("rid")["t_ns"].diff() * NS
    table.insert(1, "t_s", table.pop("t_ns") * NS)
    return table


# --- steps, transfers, pools ---------------------------------------------------------------


def _step_table(records: Sequence[Record], plans: Mapping[int, Step]) -> pd.DataFrame:
    rows = []
    for record in records:
        if isinstance(done := record.body, StepDone):
            plan = plans[done.step]
            kind = "decode" if not plan.chunks else "mixed" if plan.decodes else "prefill"
            rows.append(
                {
                    "step": done.step,
                    "instance": done.instance,
                    "kind": kind,
                    "began_s": done.began_ns * NS,
                    "ended_s": record.t_ns * NS,
                    "prompt_tokens": sum(chunk.length for chunk in plan.chunks),
                    "decodes": len(plan.decodes),
                    "tokens": sum(len(e.tokens) for e in done.emitted),
                    "rids": tuple(work.rid for work in (*plan.chunks, *plan.decodes)),
                }
            )
    columns = "step instance kind began_s ended_s prompt_tokens decodes tokens rids"
    return pd.DataFrame(rows, columns=columns.split())


def _transfer_table(records: Sequence[Record], sends: Mapping[int, Send]) -> pd.DataFrame:
    rows = []
    for record in records:
        if isinstance(landed := record.body, Landed):
            if landed.send not in sends:
                raise LogError(f"piece {landed.send} of request {landed.rid} landed but never left")
            send = sends[landed.send]
            began_s, landed_s = landed.began_ns * NS, record.t_ns * NS
            row = (send.id, send.rid, send.source, send.target, send.group, began_s, landed_s)
            rows.append((*row, landed.nbytes))
    columns = "send rid source target group began_s landed_s bytes"
    return pd.DataFrame(rows, columns=columns.split()).astype(
        {"began_s": float, "landed_s": float, "bytes": "int64"}
    )


def pool_of(instance: str, placement: Placement) -> str:
    """The pool an instance works on: its own, or that of the instance `pool_of` names."""
    role, _, index = instance.rpartition("/")
    if role not in placement or not index.isdigit():
        raise LogError(
            f"the log names instance `{instance}`, the placement has roles {sorted(placement)}; "
            "analyse it with the placement that it ran on"
        )
    return pool_owner(instance, placement)


def pool_config(pool: str, placement: Placement) -> Pool:
    """Size and form of the pool that `pool` (an instance's name) owns."""
    return placement[role_of(pool_of(pool, placement))].pool


class _PoolBooks:
    """Who holds which pages of one pool, and how many tokens of them are written."""

    def __init__(self, config: Pool):
        self.config = config
        self.handles: dict[int, KVHandle] = {}
        self.written: dict[int, float] = {}
        self.holders = Counter[int]()  # of each page
        self.external = self._external()

    def hold(self, handle: KVHandle) -> None:
        """A second Hold of a request replaces its first: a handle names all its pages."""
        self._drop(handle.rid)
        self.handles[handle.rid] = handle
        self.holders.update(handle.pages)
        self.external = self._external()

    def release(self, rid: int) -> None:
        self._drop(rid)
        self.written.pop(rid, None)
        self.external = self._external()

    def write(self, rid: int, *, upto: float = 0, more: float = 0) -> None:
        if rid in self.handles:
            tokens = max(self.written.get(rid, 0) + more, upto)
            self.written[rid] = min(tokens, self.handles[rid].capacity)

    def row(self) -> tuple[int, int, float, float]:
        held = sum(handle.capacity for handle in self.handles.values())
        return len(self.holders), held, sum(self.written.values()), self.external

    def _drop(self, rid: int) -> None:
        for page in self.handles.pop(rid).pages if rid in self.handles else ():
            self.holders[page] -= 1
            if not self.holders[page]:
                del self.holders[page]

    def _external(self) -> float:
        if self.config.form != "slab":
            return float("nan")
        return external_fragmentation(self.config.pages, sorted(self.holders))


def external_fragmentation(pages: int, taken: Sequence[int]) -> float:
    """1 - longest free run / free pages, of `pages` with the sorted `taken` ones; NaN when full."""
    edges = np.array([-1, *taken, pages])
    runs = np.diff(edges) - 1
    return 1 - runs.max() / runs.sum() if runs.sum() else float("nan")


def _pool_table(
    records: Sequence[Record],
    plans: Mapping[int, Step],
    sends: Mapping[int, Send],
    placement: Placement,
) -> pd.DataFrame:
    """A prompt's KV is written in the prefill pool when its chunk is done and in the decode pool
    when it lands; a decode step writes the tokens it was fed, one per token it emits."""
    names = {pool_owner(name, placement) for name in instances_of(placement)}
    books = {name: _PoolBooks(pool_config(name, placement)) for name in sorted(names)}
    rows = []
    for record in records:
        match record.body:
            case Hold(handle=handle):
                pool = pool_of(handle.pool, placement)
                books[pool].hold(handle)
            case Release(rid=rid):
                pool = pool_of(record.body.pool, placement)
                books[pool].release(rid)
            case StepDone(step=step, emitted=emitted):
                pool = pool_of(record.body.instance, placement)
                for chunk in plans[step].chunks:
                    books[pool].write(chunk.rid, upto=chunk.start + chunk.length)
                counts = {e.rid: len(e.tokens) for e in emitted}
                for decode in plans[step].decodes:
                    upto = decode.position + counts.get(decode.rid, 0)
                    books[pool].write(decode.rid, upto=upto)
            case Landed(rid=rid, send=send):
                pool = pool_of(sends[send].target, placement)
                books[pool].write(rid, more=sends[send].length / sends[send].groups)
            case _:
                continue
        rows.append((pool, record.t_ns * NS, *books[pool].row()))
    columns = "pool t_s pages held_tokens written_tokens external"
    return pd.DataFrame(rows, columns=columns.split())
