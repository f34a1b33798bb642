"""What crossed between pools, for what, and what of its time was not hidden."""

from collections import defaultdict
from typing import NamedTuple

import pandas as pd

from pdjax.core.events import Purpose, Send
from pdjax.metrics.lives import Landing, Life, Log, Pass, closed_form_ns, union_ns

NS = 1e-9


def transfer_table(log: Log) -> pd.DataFrame:
    """A row per piece that landed; see Run.transfers."""
    rows = []
    for number, landing in log.landings.items():
        send = log.sends[number]
        row = (send.id, send.rid, send.purpose, send.source, send.target, send.length)
        row = (*row, send.group, send.groups)
        rows.append((*row, landing.began * NS, landing.landed * NS, landing.nbytes))
    columns = "send rid purpose source target length group groups began_s landed_s bytes"
    return pd.DataFrame(rows, columns=columns.split()).astype(
        {"began_s": float, "landed_s": float, "bytes": "int64"}
    )


def move_table(log: Log) -> pd.DataFrame:
    """A row per request and purpose of which something landed; see Run.moves."""
    pieces: dict[tuple[int, Purpose], list[tuple[Send, Landing]]] = defaultdict(list)
    for number, landing in log.landings.items():
        send = log.sends[number]
        pieces[send.rid, send.purpose].append((send, landing))
    rows = []
    for (rid, purpose), landed in sorted(pieces.items()):
        times = _times(log, purpose, landed)
        exposed = float("nan")
        if purpose != "swap_out":  # whoever waits for that is another request
            exposed = _exposed_s(log.lives[rid], purpose)
        nbytes = sum(landing.nbytes for _, landing in landed)
        rows.append((rid, purpose, len(landed), nbytes, *times, exposed))
    columns = "rid purpose pieces bytes wire_s closed_form_s exposed_s"
    return pd.DataFrame(rows, columns=columns.split())


class _Times(NamedTuple):
    wire_s: float
    closed_form_s: float


def _times(log: Log, purpose: Purpose, landed: list[tuple[Send, Landing]]) -> _Times:
    """Summed over a request's passes, in each of which the pieces of one purpose cross once."""
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    passes: dict[int, Pass] = {}
    for send, landing in landed:
        one = log.pass_of(send)
        passes[one.begin] = one
        spans[one.begin].append((landing.began, landing.landed))
    wire = {begin: union_ns(of_pass) for begin, of_pass in spans.items()}
    if purpose == "swap_out":
        return _Times(sum(wire.values()) * NS, float("nan"))
    bounds = [_bound_ns(passes[begin], purpose, ns) for begin, ns in wire.items()]
    return _Times(sum(wire.values()) * NS, sum(bounds) * NS)


def _bound_ns(one: Pass, purpose: Purpose, wire_ns: int) -> float:
    if purpose != "hand_off" or one.first_chunk is None:  # nothing is computed meanwhile
        return wire_ns
    if one.prefilled is None or one.prefill_began is None:
        return float("nan")
    return closed_form_ns(wire_ns, one.prefilled - one.prefill_began, len(one.ready))


def _exposed_s(life: Life, purpose: Purpose) -> float:
    if life.outcome not in ("stop", "length"):
        return float("nan")
    waits = (s for s in life.spans() if s.stage == "transfer_exposed" and s.purpose == purpose)
    return sum(span.ended - span.began for span in waits) * NS


def kv_token_bytes(transfers: pd.DataFrame) -> float:
    """Bytes of one token's K and V in all layers, as far as pieces say: NaN when not every layer
    group has landed once."""
    for groups, pieces in transfers.groupby("groups"):
        one = pieces.drop_duplicates("group")
        if len(one) == groups:
            return float((one["bytes"] / one["length"]).sum())
    return float("nan")
