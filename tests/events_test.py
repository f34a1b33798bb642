"""The log: one JSON object per line, which reads back as it was written."""

import json

import pytest

from pdjax.core.events import (
    AbortAsked,
    Arrived,
    Chunk,
    Decode,
    Emitted,
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
    read_jsonl,
    write_jsonl,
    write_line,
)
from pdjax.core.request import Request, SamplingParams

SAMPLING = SamplingParams(5, 0.7, 40, 0.9, seed=3, stop_tokens=(2,), stop=("\n\n", "Ende. „“"))
SEND = Send(4, 1, "prefill/0", "decode/0", start=0, length=6, group=1, groups=2)
ONE_OF_EACH = [
    Record(0, Arrived(Request(1, 0, 8, SAMPLING, client_id="c1"))),
    Record(1, Refuse(1, "the prompt is empty: send at least one token")),
    Record(2, Hold(KVHandle(1, "decode/0", (4, 0), (0, 7), 6, "llama:4x4x16:float32:3:tp1"))),
    Record(3, Step(0, "prefill/0", chunks=(Chunk(1, 0, 6, False),), sends=(SEND,))),
    Record(4, Step(1, "server/0", decodes=(Decode(0, 1, 8), Decode(1, 2, 5, 3)), steps=3)),
    Record(5, SEND),
    Record(6, Landed(1, 4, began_ns=5, nbytes=1 << 40)),
    Record(7, StepDone(1, "server/0", 4, (Emitted(1, (17,)), Emitted(2, (3, 4), True)))),
    Record(8, AbortAsked(2)),
    Record(9, Finish(1, "length", 5)),
    Record(1 << 60, Release(1, "decode/0")),
]


def test_every_message_reads_back_as_it_was_written(tmp_path):
    write_jsonl(tmp_path / "events.jsonl", ONE_OF_EACH)
    assert list(read_jsonl(tmp_path / "events.jsonl")) == ONE_OF_EACH


def test_a_line_is_one_json_object_that_names_its_class():
    for record in ONE_OF_EACH:
        line = write_line(record)
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        plain = json.loads(line)
        assert plain["t_ns"] == record.t_ns
        assert plain["body"]["type"] == type(record.body).__name__


def test_events_and_actions_are_told_apart():
    events = {type(record.body).__name__ for record in ONE_OF_EACH if record.is_event}
    assert events == {"Arrived", "AbortAsked", "StepDone", "Landed"}


def test_prompts_stay_out_of_the_log(tmp_path):
    request = Request(0, 0, 3, SAMPLING, client_id="c0", prompt=(71077, 71078, 71079))
    line = write_line(Record(0, Arrived(request)))
    assert b"7107" not in line
    (tmp_path / "log").write_bytes(line)
    (record,) = read_jsonl(tmp_path / "log")
    assert record.body.request == Request(0, 0, 3, SAMPLING, client_id="c0")
    assert request.prompt == (71077, 71078, 71079)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (b'{"t_ns":3,"body":{"type":"Fin', "Input data was truncated"),  # a cut log
        (b"", "Input data was truncated"),
        (b"rid,ttft\n", "JSON is malformed"),  # another file
        (b'{"t_ns":3}', "missing required field `body`"),
        (b'{"t_ns":3,"body":{"type":"Later"}}', "Invalid value 'Later'"),
        (b'{"t_ns":3.5,"body":{"type":"AbortAsked","rid":1}}', "Expected `int`"),
        (b'{"t_ns":3,"body":{"type":"AbortAsked","rid":"1"}}', r"\$.body.rid"),
        (b'{"t_ns":3,"body":{"type":"Finish","rid":1,"reason":"bored","tokens":1}}', "'bored'"),
    ],
)
def test_a_line_that_is_no_record_is_told_with_its_number(tmp_path, broken, said):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(map(write_line, ONE_OF_EACH[:2])) + (broken or b"\n"))
    with pytest.raises(ValueError, match=rf"events\.jsonl:3: not a record.*{said}"):
        list(read_jsonl(path))


def test_bytes_that_are_no_text_are_told_with_their_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t_ns":3,"body":{"type":"Refuse","rid":1,"why":"\xff\xfe"}}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl:1: not a record"):
        list(read_jsonl(path))


def test_what_came_before_a_broken_line_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(map(write_line, ONE_OF_EACH)) + b"{")
    records = read_jsonl(path)
    assert [next(records) for _ in ONE_OF_EACH] == ONE_OF_EACH
