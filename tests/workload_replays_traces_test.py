"""Requests of a trace: its order, lengths and shared prefixes, at any scale."""

import logging
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from scipy import stats

from pdjax.core.config import Arrivals, ConfigError, Trace, Workload
from pdjax.traces import TraceError, read_mooncake
from pdjax.workload import make_source


def encode(text):
    """One token per byte: results can be read off by eye."""
    return list(text.encode())


def source(workload, seed=0, *, encode=encode, context=4096, chat=None):
    return make_source(workload, seed, encode=encode, vocab=256, context=context, eos=(), chat=chat)


def requests(workload, seed=0, **options):
    return source(workload, seed, **options).requests


def trace_file(folder, rows):
    """Rows are (ms, prompt tokens, output tokens, block ids)."""
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path = folder / "trace.jsonl"
    path.write_bytes(
        b"".join(msgspec.json.encode(dict(zip(keys, row, strict=True))) + b"\n" for row in rows)
    )
    return str(path)


SHARED = [
    (0, 1000, 5, (0, 1)),  # 488 tokens of its second block
    (0, 1300, 0, (0, 2, 3)),  # no output: left out
    (40, 1024, 1, (0, 1)),  # all of the same second block; no decode step
    (40, 1300, 7, (0, 1, 4)),
    (90, 700, 3, (0, 5)),
]


def replayed(path, **changes):
    options = {"length_scale": 1.0, "rate_scale": 1.0} | changes
    return Workload(requests=99, arrivals=Arrivals("trace"), trace=Trace(path, **options))


def shared_tokens(one, other):
    """Length of the prefix that two prompts share."""
    differ = [a != b for a, b in zip(one.prompt, other.prompt, strict=False)] + [True]
    return differ.index(True)


def test_a_replayed_trace_has_the_rows_in_order_and_counts_what_it_drops(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="absl")
    given = source(replayed(trace_file(tmp_path, SHARED)))
    assert [(r.arrival_ns, r.prompt_len, r.max_tokens) for r in given.requests] == [
        (0, 1000, 5),
        (40_000_000, 1024, 1),
        (40_000_000, 1300, 7),
        (90_000_000, 700, 3),
    ]
    assert given.dropped == 1
    assert "1 of 5 rows have no output" in caplog.text


def test_a_limit_takes_the_first_rows(tmp_path):
    workload = replayed(trace_file(tmp_path, SHARED))
    assert (
        requests(replace(workload, requests=2), encode=None)
        == (requests(workload, encode=None)[:2])
    )


def test_scales_multiply_lengths_and_rate(tmp_path):
    path = trace_file(tmp_path, [(0, 4, 3, [0]), (300, 513, 200, [1, 2])])
    given = requests(replayed(path, length_scale=0.1, rate_scale=3.0))
    # 0.4 and 0.3 tokens become 1, never 0.
    assert [(r.arrival_ns, r.prompt_len, r.max_tokens) for r in given] == [
        (0, 1, 1),
        (100_000_000, 51, 20),
    ]


@pytest.mark.parametrize("text", ["stdlib", "random"])
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 16, 0.037, 1.7])
def test_prompts_share_exactly_the_blocks_that_their_rows_share(tmp_path, scale, text):
    workload = replace(replayed(trace_file(tmp_path, SHARED), length_scale=scale), text=text)
    a, b, c, d = requests(workload)
    assert [len(r.prompt) for r in (a, b, c, d)] == [r.prompt_len for r in (a, b, c, d)]
    assert shared_tokens(a, b) == round(1000 * scale)  # cut at the end of the shorter
    assert shared_tokens(b, c) == round(1024 * scale)  # two whole blocks
    # One whole block. Pieces of text begin with their number: [1] and [5] share the bracket.
    extra = len("[") if text == "stdlib" else 0
    assert shared_tokens(a, d) == shared_tokens(c, d) == round(512 * scale) + extra


def test_blocks_are_the_same_whatever_row_comes_first(tmp_path):
    path = trace_file(tmp_path, SHARED)
    whole = requests(replayed(path))
    alone = requests(replayed(trace_file(tmp_path, SHARED[-1:])))
    assert alone[0].prompt == whole[-1].prompt
    assert requests(replayed(path), seed=1)[-1].prompt != whole[-1].prompt


def test_a_chat_of_shared_blocks_shares_them_behind_the_template(tmp_path):
    workload = replace(replayed(trace_file(tmp_path, SHARED)), chat=True)
    _, b, c, d = requests(workload, chat=lambda text: f"<user>{text}</user>")
    assert shared_tokens(c, d) == len("<user>") + 512 + len("[")
    # The end of b's blocks gives way to the template's end.
    assert shared_tokens(b, c) == b.prompt_len - len("</user>")
    assert bytes(b.prompt).endswith(b"</user>")


def test_synthetic_arrivals_draw_prompt_and_output_together_but_no_blocks(tmp_path):
    # Output = 3 * prompt in every row: an independent draw would break it at once.
    path = trace_file(tmp_path, [(i, i + 1, 3 * (i + 1), [i]) for i in range(50)])
    workload = replace(replayed(path), requests=400, arrivals=Arrivals("poisson", rate=9))
    given = requests(workload)
    assert all(r.max_tokens == 3 * r.prompt_len for r in given)
    assert len({r.prompt_len for r in given}) > 45  # of 50, drawn 400 times
    longest = [r.prompt for r in given if r.prompt_len > 40]
    assert len(longest) > 20
    assert len(set(longest)) == len(longest)  # a row drawn twice is not one prompt twice


def test_the_conversation_trace_keeps_its_correlation_when_drawn(traces):
    path = traces / "mooncake" / "conversation_trace.jsonl"
    rows = read_mooncake(path)
    workload = Workload(requests=8000, trace=Trace(str(path)))
    given = requests(workload, encode=None, context=1 << 20)
    of_rows = stats.spearmanr([(r.prompt_len, r.output_len) for r in rows]).statistic
    drawn = stats.spearmanr([(r.prompt_len, r.max_tokens) for r in given]).statistic
    assert abs(of_rows) > 5 / np.sqrt(8000)  # there is something to keep
    assert drawn == pytest.approx(of_rows, abs=5 / np.sqrt(8000))


def test_the_conversation_trace_replays_with_its_own_bursts(traces):
    path = traces / "mooncake" / "conversation_trace.jsonl"
    workload = Workload(20_000, arrivals=Arrivals("trace"), trace=Trace(str(path), rate_scale=2.0))
    given = requests(workload, encode=None, context=1 << 20)
    gaps = np.diff([r.arrival_ns for r in given])
    assert len(given) == 12031
    assert gaps.std() / gaps.mean() == pytest.approx(3.03, abs=0.005)
    assert given[-1].arrival_ns / 1e9 == pytest.approx(3537 / 2, abs=0.5)


def test_the_azure_trace_gives_requests(traces):
    path = traces / "azure2023" / "AzureLLMInferenceTrace_code.csv"
    workload = Workload(5, arrivals=Arrivals("trace"), trace=Trace(str(path), format="azure"))
    given = source(workload, context=8192)
    # The file's first two rows, 52 ms apart.
    assert [(r.arrival_ns, r.prompt_len, r.max_tokens) for r in given.requests[:2]] == [
        (0, 4808, 10),
        (52_000_000, 3180, 8),
    ]
    assert given.dropped == 0


def test_a_trace_that_is_missing_or_all_empty_is_a_one_line_error(tmp_path):
    with pytest.raises(TraceError, match="cannot read the trace"):
        requests(replayed(str(tmp_path / "absent")))
    with pytest.raises(ConfigError, match=r"all 2 rows of .* have no output"):
        requests(replayed(trace_file(tmp_path, [(0, 1, 0, [0]), (1, 1, 0, [0])])))
