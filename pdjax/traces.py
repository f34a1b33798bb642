"""Readers of published request traces: when requests came and how long they were."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np

BLOCK = 512  # tokens that one Mooncake hash id stands for
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
# numpy reads the 100 ns digits that datetime would cut off; the pattern keeps out what numpy
# also takes for a time ("", "now", other zones).
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:\+00:00)?")


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file and, where it can, the line."""


class TraceRow(msgspec.Struct, frozen=True):
    """One request. `arrival_s` is in seconds, lengths are in tokens; `output_len` may be 0.

    `blocks` are the ids of the prompt's blocks of 512 tokens, the last of them partial. Ids are
    chain-hashed: equal ids mean that the whole prompts up to and with that block are equal.
    Empty where the trace does not say what prompts share.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeRow(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _Count
    hash_ids: tuple[_Count, ...]


def read_mooncake(path: str | Path) -> list[TraceRow]:
    """Rows of a Mooncake trace (FAST '25 release, JSONL), earliest first and starting at 0.

    Rows with equal timestamps keep the file's order. Raises TraceError for a file that is
    missing or empty, and for a row that is broken or of another format.
    """
    decoder = msgspec.json.Decoder(_MooncakeRow)
    rows = []
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise TraceError(
                    f"{path}:{number}: not a row of a Mooncake trace: {error}; "
                    "repair the file or set `workload.trace.format`"
                ) from None
            expected = -(-row.input_length // BLOCK)
            if len(row.hash_ids) != expected:
                raise TraceError(
                    f"{path}:{number}: {len(row.hash_ids)} `hash_ids` for `input_length` "
                    f"{row.input_length}; {BLOCK}-token blocks make it {expected}"
                )
            arrival_s = row.timestamp / 1e3
            rows.append(TraceRow(arrival_s, row.input_length, row.output_length, row.hash_ids))
    return _from_zero(path, rows)


def read_azure(path: str | Path) -> list[TraceRow]:
    """Rows of an Azure LLM inference trace (CSV), earliest first and starting at 0.

    Such a trace says nothing of shared prefixes: `blocks` are empty. Rows with equal timestamps
    keep the file's order. Raises TraceError for a file that is missing or empty, and for a row
    that is broken or of another format.
    """
    with _open(path) as file:
        text = file.read().decode("utf-8-sig", errors="replace")
    lines = csv.reader(text.splitlines())
    header = next(lines, [])
    if header != _AZURE_COLUMNS:
        raise TraceError(
            f"{path}:1: the columns are {','.join(header)[:80]!r}, those of an Azure trace are "
            f"{','.join(_AZURE_COLUMNS)!r}; set `workload.trace.format` or another path"
        )
    times_ns, lengths = [], []
    for values in filter(None, lines):
        try:
            time_ns, *pair = _azure_row(values)
        except ValueError as error:
            raise TraceError(
                f"{path}:{lines.line_num}: not a row of an Azure trace: {error}; repair the file"
            ) from None
        times_ns.append(time_ns)
        lengths.append(pair)
    start_ns = min(times_ns, default=0)  # seconds since 1970 would not keep 100 ns in a float
    rows = [
        TraceRow((time_ns - start_ns) / 1e9, *pair)
        for time_ns, pair in zip(times_ns, lengths, strict=True)
    ]
    return _from_zero(path, rows)


def _azure_row(values: list[str]) -> tuple[int, int, int]:
    """(nanoseconds since 1970, prompt tokens, output tokens)."""
    if len(values) != len(_AZURE_COLUMNS):
        raise ValueError(f"{len(values)} values instead of {len(_AZURE_COLUMNS)}")
    time = _AZURE_TIME.fullmatch(values[0])
    if time is None:
        raise ValueError(f"`TIMESTAMP` is {values[0]!r}")
    prompt_len, output_len = int(values[1]), int(values[2])
    if prompt_len < 1 or output_len < 0:
        raise ValueError(f"`ContextTokens` is {prompt_len} and `GeneratedTokens` is {output_len}")
    return int(np.datetime64(time[1], "ns").astype(np.int64)), prompt_len, output_len


def _open(path: str | Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise TraceError(
            f"cannot read the trace `{path}`: {error.strerror}; set `workload.trace.path`"
        ) from None


def _from_zero(path: str | Path, rows: Iterable[TraceRow]) -> list[TraceRow]:
    ordered = sorted(rows, key=lambda row: row.arrival_s)  # stable: bursts keep their order
    if not ordered:
        raise TraceError(
            f"the trace `{path}` holds no requests; set `workload.trace.path` to another file"
        )
    start_s = ordered[0].arrival_s
    return [msgspec.structs.replace(row, arrival_s=row.arrival_s - start_s) for row in ordered]
