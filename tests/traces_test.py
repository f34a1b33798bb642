"""Readers of traces: every row as the file has it, and one line for what cannot be read."""

import numpy as np
import pytest

from pdjax.traces import TraceError, TraceRow, read_azure, read_mooncake

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def mooncake(timestamp, input_length, output_length, hash_ids):
    return (
        f'{{"timestamp": {timestamp}, "input_length": {input_length}, '
        f'"output_length": {output_length}, "hash_ids": {hash_ids}}}\n'
    )


def write(folder, text):
    path = folder / "trace"
    path.write_text(text, newline="")
    return path


def test_mooncake_rows_are_read_as_written(tmp_path):
    path = write(
        tmp_path,
        mooncake(0, 512, 7, [4])  # exactly one block
        + "\n"  # a blank line is no row
        + mooncake(1500, 513, 1, [4, 9])  # one token into the second block; no decode step
        + mooncake(1501, 3, 0, [11]),  # no output: the reader leaves it to its caller
    )
    assert read_mooncake(path) == [
        TraceRow(0.0, 512, 7, (4,)),
        TraceRow(1.5, 513, 1, (4, 9)),
        TraceRow(1.501, 3, 0, (11,)),
    ]


def test_azure_rows_keep_100_ns_and_start_at_zero(tmp_path):
    path = write(
        tmp_path,
        AZURE
        + "2023-11-16 23:59:59.9999999,374,44\r\n"
        + "2023-11-17 00:00:00.0000001,396,0\r\n"
        + "2023-11-17 00:00:01+00:00,5,1",  # no fraction, a zone, no final newline
    )
    rows = read_azure(path)
    assert [round(row.arrival_s * 1e9) for row in rows] == [0, 200, 1_000_000_100]
    assert [(row.prompt_len, row.output_len) for row in rows] == [(374, 44), (396, 0), (5, 1)]
    assert all(row.blocks == () for row in rows)


def test_rows_are_sorted_by_time_and_equal_times_keep_their_order(tmp_path):
    times = [9, 3, 3, 9, 3]
    path = write(tmp_path, "".join(mooncake(t, i + 1, 1, [i]) for i, t in enumerate(times)))
    rows = read_mooncake(path)
    assert [row.prompt_len for row in rows] == [2, 3, 5, 1, 4]
    assert [row.arrival_s for row in rows] == pytest.approx([0, 0, 0, 0.006, 0.006])

    lines = [f"2023-11-16 18:00:0{t},{i + 1},1\r\n" for i, t in enumerate(times)]
    assert [row.prompt_len for row in read_azure(write(tmp_path, AZURE + "".join(lines)))] == [
        2, 3, 5, 1, 4,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no requests"),
        (mooncake(0, 1, 1, [0]) + '{"timestamp": 3, "inp', ":2: not a row"),  # cut off
        (mooncake(0, 1, 1, [0]) * 2 + mooncake(0, 0, 1, []), r":3: .*input_length"),
        (mooncake(0, 1, -1, [0]), r":1: .*output_length"),
        (mooncake(0, 1, "null", [0]), r":1: .*output_length"),
        ('{"ts": 0, "il": 1, "ol": 2}\n', r":1: .*timestamp.*workload\.trace\.format"),
        (AZURE + "2023-11-16 18:15:46,1,1\n", r":1: .*workload\.trace\.format"),
        (mooncake(0, 513, 1, [0]), "1 `hash_ids` for `input_length` 513; .* make it 2"),
        (mooncake(0, 512, 1, [0, 1]), "2 `hash_ids` for `input_length` 512; .* make it 1"),
    ],
)
def test_broken_mooncake_traces_are_one_line_errors(tmp_path, text, says):
    check_error(read_mooncake, write(tmp_path, text), says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (AZURE, "holds no requests"),
        ("", ":1: the columns are ''"),
        (mooncake(0, 1, 1, [0]), r":1: the columns are .*workload\.trace\.format"),
        (AZURE.lower() + "2023-11-16 18:15:46,1,1\n", ":1: the columns are"),
        (AZURE + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47,1\n", ":3: .*2 values"),
        (AZURE + "yesterday,1,1\n", ":2: .*`TIMESTAMP` is 'yesterday'"),
        (AZURE + ",1,1\n", ":2: .*`TIMESTAMP` is ''"),
        (AZURE + "2023-13-16 18:15:46,1,1\n", ":2: not a row"),  # no such month
        (AZURE + "2023-11-16 18:15:46+02:00,1,1\n", ":2: .*`TIMESTAMP`"),
        (AZURE + "2023-11-16 18:15:46,1.5,1\n", ":2: .*'1.5'"),
        (AZURE + "2023-11-16 18:15:46,0,1\n", ":2: .*`ContextTokens` is 0"),
        (AZURE + "2023-11-16 18:15:46,1,-1\n", ":2: .*`GeneratedTokens` is -1"),
    ],
)
def test_broken_azure_traces_are_one_line_errors(tmp_path, text, says):
    check_error(read_azure, write(tmp_path, text), says)


@pytest.mark.parametrize("reader", [read_mooncake, read_azure])
def test_a_path_that_is_no_file_is_a_one_line_error(tmp_path, reader):
    check_error(reader, tmp_path / "absent", "No such file")
    check_error(reader, tmp_path, "directory")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    check_error(reader, tmp_path / "binary", ":1: ")


def check_error(reader, path, says):
    with pytest.raises(TraceError, match=says) as caught:
        reader(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_mooncake_conversation_trace_has_its_published_bursts(traces):
    rows = read_mooncake(traces / "mooncake" / "conversation_trace.jsonl")
    times = np.array([row.arrival_s for row in rows])
    gaps = np.diff(times)
    assert len(rows) == 12031
    assert round(times[-1]) == 3537
    assert len(np.unique(times)) == 1180
    assert gaps.std() / gaps.mean() == pytest.approx(3.03, abs=0.005)
    assert sum(row.output_len == 1 for row in rows) == 72
    assert rows[0] == TraceRow(0.0, 6758, 500, tuple(range(14)))
    # Chain-hashed: an id has one place and one predecessor.
    before = {}
    for row in rows:
        for place, block in enumerate(row.blocks):
            here = (place, row.blocks[place - 1] if place else None)
            assert before.setdefault(block, here) == here


@pytest.mark.parametrize(
    ("name", "requests", "span_s"), [("conv", 19366, 3502), ("code", 8819, 3436)]
)
def test_the_azure_traces_have_their_published_sizes(traces, name, requests, span_s):
    rows = read_azure(traces / "azure2023" / f"AzureLLMInferenceTrace_{name}.csv")
    assert len(rows) == requests
    assert rows[0].arrival_s == 0
    assert rows[-1].arrival_s == pytest.approx(span_s, abs=1)
    # Seconds as floats still hold the whole 100 ns of the file.
    assert all(round(row.arrival_s * 1e9) % 100 == 0 for row in rows)
